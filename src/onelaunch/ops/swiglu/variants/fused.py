"""Variants of ``swiglu`` whose own product ends with the gate, portable. See ``autograd.py`` for how PyTorch sees them."""

from __future__ import annotations

from typing import Any

import torch

from onelaunch.operation import Direction, Example, Query
from onelaunch.operation.requirements import cannot_launch, interprets_bfloat16_wrongly
from onelaunch.ops.swiglu.autograd import Wanted, compute, launches
from onelaunch.ops.swiglu.contract import SwigluCall, swiglu
from onelaunch.ops.swiglu.operands import Matrix
from onelaunch.ops.swiglu.variants.torch import multiply, trains_plain_tensors
from onelaunch.ops.swiglu.variants.triton import plain_or_float8


@launches("two_node")
def run_two_node(x: Matrix, gate: Matrix, up: Matrix, wanted: Wanted) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Multiply by the gate's weights with PyTorch, then launch the kernel of up."""
    from onelaunch.ops.swiglu import launch

    if not wanted.keep:
        product = multiply(x.operand, gate.operand, wanted.dtype)
        return launch.up(x, up, product, wanted.dtype, None), None
    columns = gate.values.shape[0]
    kept = x.values.new_empty((x.values.shape[0], 2 * columns))
    product = torch.mm(x.values, gate.values.mT, out=kept[:, :columns])
    return launch.up(x, up, product, wanted.dtype, kept[:, columns:]), kept


@launches("fused")
def run_fused(x: Matrix, gate: Matrix, up: Matrix, wanted: Wanted) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Launch the kernel of both products."""
    from onelaunch.ops.swiglu import launch

    if gate.kind == "nvfp4":
        return launch.fused_nvfp4(x, gate, up, wanted.dtype, swizzled=wanted.swizzled), None
    kept = x.values.new_empty((x.values.shape[0], 2 * gate.values.shape[0])) if wanted.keep else None
    return launch.fused(x, gate, up, wanted.dtype, kept), kept


@swiglu.variant("two_node", launches=2, backward_launches=4, fuses=("gate",), hands=("gate",), gemm="cublas, triton")
def two_node(call: SwigluCall) -> tuple[torch.Tensor]:
    """The gate's product by PyTorch, and one kernel for that of up, which ends with the gate: the write-up's first step."""
    return compute(call, "two_node")


@swiglu.variant("fused", launches=1, backward_launches=4, fuses=("products", "gate"), hands=(), gemm="triton")
def fused(call: SwigluCall) -> tuple[torch.Tensor]:
    """One launch: both products of a tile in registers, then the gate. NVFP4 is decoded there.

    Scales that are swizzled in every NVFP4 operand are read as they lie; where only some are, those are copied into plain order
    before. The backward pass of stacked weights takes a launch less than that of separate ones, three.
    """
    return compute(call, "fused")


LARGEST = 2**30
"""Bound of sizes: below it there is room for a tile and for 2 N in 32 bits."""

two_node.supports(cannot_launch)
fused.supports(cannot_launch)


@two_node.supports
@fused.supports
def multiplies_and_counts(query: Query) -> str | None:
    """Return why the kernels cannot multiply the operands, or count positions in their rows."""
    if not {"fp8", "nvfp4"} & set(query.flags) and (reason := interprets_bfloat16_wrongly(query)) is not None:
        return reason
    if max(query.sizes) >= LARGEST:
        return f"takes M, N and K below {LARGEST}: positions in rows are of 32 bits"
    return None


two_node.supports(trains_plain_tensors)
fused.supports(trains_plain_tensors)
two_node.supports(plain_or_float8)


FEW, MANY = 16, 8192
"""Rows of examples."""

UNEVEN = 7184
"""Channels of examples that no tile divides."""

FLOAT8_BY_PYTORCH = ("sm_89", "sm_90a", "sm_100a", "sm_120a", "gfx942", "gfx950")
"""Architectures that PyTorch multiplies float8 on."""


def example(
    said: str,
    dtype: str,
    M: int,
    K: int = 7168,
    *,
    direction: Direction = "forward",
    on: tuple[str, ...] | None = None,
    **form: Any,
) -> Example:
    """Return a call of so many rows and channels; ``form`` are the case's options."""
    named = f"{said}, {'few' if M == FEW else 'many'} rows" + (", channels left over" if K == UNEVEN else "")
    return Example(swiglu.case(dtype, M=M, N=4096, K=K, **form), direction, on, named)


FLOAT8: dict[str, Any] = {"format": "fp8", "row_scales": True}

TRAINING = example("bfloat16, products kept", "bfloat16", MANY, UNEVEN, direction="forward_backward")


@two_node.examples
def behind_a_product() -> list[Example]:
    """Return calls of few and many rows in each format that PyTorch multiplies, and a training call."""
    return [
        example("bfloat16", "bfloat16", FEW),
        example("bfloat16", "bfloat16", MANY),
        TRAINING,
        example("float32", "float32", MANY),
        example("float8", "bfloat16", FEW, on=FLOAT8_BY_PYTORCH, **FLOAT8),
        example("float8", "bfloat16", MANY, UNEVEN, on=FLOAT8_BY_PYTORCH, **FLOAT8),
    ]


@fused.examples
def both_products() -> list[Example]:
    """Return calls of few and many rows in each format, channels left over, swizzled scales, and a training call."""
    return [
        *(example("bfloat16", "bfloat16", rows) for rows in (FEW, MANY)),
        *(example("float32", "float32", rows) for rows in (FEW, MANY)),
        *(example("float8", "bfloat16", rows, **FLOAT8) for rows in (FEW, MANY)),
        TRAINING,
        example("float8", "bfloat16", MANY, UNEVEN, **FLOAT8),
        *(example("NVFP4 weights", "bfloat16", rows, format="nvfp4_weights") for rows in (FEW, MANY)),
        *(example("NVFP4", "float16", rows, format="nvfp4") for rows in (FEW, MANY)),
        example("NVFP4, swizzled", "float16", MANY, format="nvfp4", swizzled_scales=True),
        example("NVFP4 to float32", "float32", MANY, format="nvfp4"),
    ]
