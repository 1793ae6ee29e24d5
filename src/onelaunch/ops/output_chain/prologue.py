"""The variant of ``output_chain`` whose own product normalizes and gates what it loads. See ``forward.py``."""

from __future__ import annotations

import torch

from onelaunch.device.architectures import pretended
from onelaunch.device.hardware import processors, shared_bytes
from onelaunch.launch.build import KernelBuild
from onelaunch.operation import Query
from onelaunch.ops.output_chain.contract import OutputChainCall, output_chain
from onelaunch.ops.output_chain.forward import Made, Operands, compute, launches
from onelaunch.ops.output_chain.torch_variants import Results
from onelaunch.ops.output_chain.triton_variants import build, gradient_builds, needs_triton

FEW, MANY, WARPGROUP_ROWS = 1, 8192, 64

LARGEST_HEAD = 256
"""Channels of a head, of which a program holds those of at least 16 rows."""


@launches("prologue")
def run_prologue(given: Operands, w_out: torch.Tensor, bias: torch.Tensor | None, eps: float, keep: bool) -> Made:
    """One launch."""
    from onelaunch.ops.output_chain import prologue_launch

    return prologue_launch.prologue(given, w_out, bias, eps, keep=keep)


@output_chain.variant(
    "prologue", launches=1, backward_launches=4, fuses=("norm", "gate", "product"), hands=(), keeps=("rstd",), gemm="triton"
)
def prologue(call: OutputChainCall) -> Results:
    """One launch: a product that normalizes and gates every head as it loads it.

    Every tile of columns does so anew. The backward pass is that of ``norm_gate``.
    """
    return compute(call, "prologue")


prologue.supports(needs_triton)


@prologue.supports
def fits(query: Query) -> str | None:
    """What the product needs beside that."""
    if query.sizes[3] > LARGEST_HEAD:
        return f"takes heads of at most {LARGEST_HEAD} channels, not {query.sizes[3]}: they are held beside the sums of a product"
    if query.device_type != "cuda" and query.dtype is torch.bfloat16:
        return "needs a GPU for bfloat16: Triton's interpreter computes wrong bfloat16 products"
    return None


def product_build(architecture: str, values: int, rows: int, element: str, *, keep: bool = False, said: str = "") -> KernelBuild:
    """The kernel as a call of so many rows launches it."""
    from onelaunch.ops.output_chain import prologue_kernels, prologue_launch

    count, shared = processors(pretended(architecture)), shared_bytes(pretended(architecture))
    size = 4 if element == "*fp32" else 2
    tiles = prologue_launch.prologue_tiles(rows, 2048, values, size, count, shared)
    options = tiles.options()
    warps, stages = options.pop("num_warps"), options.pop("num_stages")
    absent = () if keep else ("rstd",)
    absent += {"": ("bias",), "bias": (), "activated": ("bias",), "bare": ("bias", "gate", "norm_weight")}[said]
    words = [
        f"heads of {values}",
        "few rows" if rows == FEW else "many rows",
        *(["keep"] if keep else []),
        *([said] if said else []),
    ]
    by_warps = tiles.n < WARPGROUP_ROWS
    return build(
        f"prologue, {', '.join(words)}", prologue_kernels.prologue_kernel,
        {**options, "V": values, "ACTIVATED": said == "activated"}, element, absent, num_warps=warps, num_stages=stages,
        matrix=size == 2 and not (by_warps and architecture == "sm_100a"), by_warps=by_warps,
    )  # fmt: skip


@prologue.kernels
def prologue_builds(architecture: str) -> list[KernelBuild]:
    """Few and many rows; heads of usual, uneven and the largest sizes; and the backward pass."""
    return [
        *(product_build(architecture, 128, rows, "*bf16") for rows in (FEW, MANY)),
        *(product_build(architecture, values, MANY, "*fp16", keep=True) for values in (100, LARGEST_HEAD)),
        *(product_build(architecture, 128, MANY, "*bf16", said=said) for said in ("bias", "activated", "bare")),
        product_build(architecture, 128, MANY, "*fp32"),
        *gradient_builds(128, "*bf16"),
    ]
