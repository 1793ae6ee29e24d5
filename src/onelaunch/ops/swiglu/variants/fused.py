"""Portable Triton variants of ``swiglu`` with the gate in the epilogue of a matrix product.

``autograd.py`` wraps their launches as PyTorch operators.

The dispatcher, studies and tests find registered variants by name. Tags: ``fuses`` names the steps that share a kernel: both
``products``, and the ``gate``. ``hands`` names the products that go through device memory before the gate is applied; ``cost.py``
reads both. ``gemm`` says who makes the products. Other keywords are capabilities, which the class ``Capabilities`` of
``onelaunch.operation`` explains.
"""

from __future__ import annotations

from typing import Any

import torch

from onelaunch.device.architectures import find_architecture
from onelaunch.launch.build import Build, builds_of
from onelaunch.launch.imitation import record
from onelaunch.operation import Direction, Example, Query
from onelaunch.operation.requirements import cannot_launch, interprets_bfloat16_wrongly
from onelaunch.ops.swiglu.autograd import Wanted, compute, launches
from onelaunch.ops.swiglu.contract import SwigluCall, swiglu
from onelaunch.ops.swiglu.operands import Matrix
from onelaunch.ops.swiglu.variants.torch import multiply, trains_plain_tensors
from onelaunch.ops.swiglu.variants.triton import plain_or_float8


@launches("two_node")
def run_two_node(x: Matrix, gate: Matrix, up: Matrix, wanted: Wanted) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Multiply by the gate's weight with PyTorch, then launch the kernel for up and the gate.

    It returns h, and with ``wanted.keep`` both products ``[M, 2 N]`` for the backward pass, else None.
    """
    # The module imports Triton, which is an optional dependency.
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
    """Launch the kernel that computes both products and the gate; return the results of :func:`run_two_node`."""
    from onelaunch.ops.swiglu import launch

    if gate.kind == "nvfp4":
        return launch.fused_nvfp4(x, gate, up, wanted.dtype, swizzled=wanted.swizzled), None
    kept = x.values.new_empty((x.values.shape[0], 2 * gate.values.shape[0])) if wanted.keep else None
    return launch.fused(x, gate, up, wanted.dtype, kept), kept


@swiglu.variant(
    "two_node", compiles=True, launches=2, backward_launches=4, fuses=("gate",), hands=("gate",), gemm="cublas, triton"
)
def two_node(call: SwigluCall) -> tuple[torch.Tensor]:
    """Compute the gate's product by PyTorch, and up with the gate as its epilogue in one kernel.

    It is the first step of the write-up "dual GEMM with a SiLU-mul epilogue", whose figures studies/dual-gemm-swiglu.toml quotes.
    """
    return compute(call, "two_node")


@swiglu.variant("fused", compiles=True, launches=1, backward_launches=4, fuses=("products", "gate"), hands=(), gemm="triton")
def fused(call: SwigluCall) -> tuple[torch.Tensor]:
    """Compute both products of a tile in registers and then the gate, in one launch. NVFP4 is dequantized in registers.

    Block scales are read in the swizzled order if all NVFP4 operands have them so; otherwise swizzled ones are first copied to
    plain order. The backward pass takes three launches with stacked weights and four with separate ones.
    """
    return compute(call, "fused")


@fused.kernels
def gradients_of_an_mlp(architecture: str) -> list[Build]:
    """Return the launch of a whole MLP's backward pass, which writes ``h`` as well (``mlp.py``), in 16 bits and float32."""
    from onelaunch.ops.swiglu import mlp

    with record(architecture) as (device, launches), torch.no_grad():
        for dtype in (torch.bfloat16, torch.float32):
            dh, products = (torch.empty(8192, columns, dtype=dtype, device=device) for columns in (2816, 2 * 2816))
            mlp.run_gradients(dh, products)
    return builds_of([("gradients of an MLP", each) for each in launches], find_architecture(architecture))


_LARGEST = 2**30
"""Bound of M, N and K. Below it, 2 N and positions in the last tile fit into 32 bits."""

two_node.supports(cannot_launch)
fused.supports(cannot_launch)


@two_node.supports
@fused.supports
def multiplies_and_counts(query: Query) -> str | None:
    """Return why the kernels cannot multiply the operands, or index their rows in 32 bits."""
    # Triton's interpreter computes wrong bfloat16 products. It multiplies a quantized x as float16, so that this may run.
    if not {"fp8", "nvfp4"} & set(query.flags) and (reason := interprets_bfloat16_wrongly(query)) is not None:
        return reason
    if max(query.sizes) >= _LARGEST:
        return f"takes M, N and K below {_LARGEST}: positions in rows are of 32 bits"
    return None


two_node.supports(trains_plain_tensors)
fused.supports(trains_plain_tensors)
two_node.supports(plain_or_float8)


_FEW, _MANY = 16, 8192
"""Numbers of rows in the examples, which are calls for compiling and inspecting the kernels without a GPU."""

_UNEVEN = 7184
"""Number of channels in examples that is no multiple of a tile's channels."""

_FLOAT8_BY_PYTORCH = ("sm_89", "sm_90a", "sm_100a", "sm_120a", "gfx942", "gfx950")
"""Architectures on which PyTorch multiplies float8."""


def _example(
    said: str,
    dtype: str,
    M: int,
    K: int = 7168,
    *,
    direction: Direction = "forward",
    on: tuple[str, ...] | None = None,
    **form: Any,
) -> Example:
    """Return an example of M rows and K channels, on the architectures ``on`` (all by default).

    ``said`` is the beginning of its name, and ``form`` holds the case's options.
    """
    named = f"{said}, {'few' if M == _FEW else 'many'} rows" + (", channels left over" if K == _UNEVEN else "")
    return Example(swiglu.case(dtype, M=M, N=4096, K=K, **form), direction, on, named)


_FLOAT8: dict[str, Any] = {"format": "fp8", "row_scales": True}
"""Case options of float8 with scales per row."""

_TRAINING = _example("bfloat16, products kept", "bfloat16", _MANY, _UNEVEN, direction="forward_backward")
"""Training call whose channels no tile divides; both products are stored for the backward pass."""


@two_node.examples
def behind_a_product() -> list[Example]:
    """Return calls in each format that PyTorch multiplies, with few or many rows, and a training call."""
    return [
        _example("bfloat16", "bfloat16", _FEW),
        _example("bfloat16", "bfloat16", _MANY),
        _TRAINING,
        _example("float32", "float32", _MANY),
        _example("float8", "bfloat16", _FEW, on=_FLOAT8_BY_PYTORCH, **_FLOAT8),
        _example("float8", "bfloat16", _MANY, _UNEVEN, on=_FLOAT8_BY_PYTORCH, **_FLOAT8),
    ]


@fused.examples
def both_products() -> list[Example]:
    """Return calls with few and many rows in each format, with leftover channels, swizzled scales, and a training call."""
    return [
        *(_example("bfloat16", "bfloat16", rows) for rows in (_FEW, _MANY)),
        *(_example("float32", "float32", rows) for rows in (_FEW, _MANY)),
        *(_example("float8", "bfloat16", rows, **_FLOAT8) for rows in (_FEW, _MANY)),
        _TRAINING,
        _example("float8", "bfloat16", _MANY, _UNEVEN, **_FLOAT8),
        *(_example("NVFP4 weights", "bfloat16", rows, format="nvfp4_weights") for rows in (_FEW, _MANY)),
        *(_example("NVFP4", "float16", rows, format="nvfp4") for rows in (_FEW, _MANY)),
        _example("NVFP4, swizzled", "float16", _MANY, format="nvfp4", swizzled_scales=True),
        _example("NVFP4 to float32", "float32", _MANY, format="nvfp4"),
    ]
