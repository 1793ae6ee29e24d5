"""Variant of ``swiglu`` for Blackwell's block-scaled matrix instructions, with all operands in NVFP4.

It was compiled, and run by Triton's interpreter with an emulated matrix instruction, but not on hardware yet. So it is marked
experimental, and ``auto`` never takes it.

The dispatcher, studies and tests find registered variants by name. Tags: ``fuses`` names the steps that share a kernel, here both
``products`` and the ``gate``; ``cost.py`` reads it, and takes the missing ``hands`` (products that go through device memory) as
none. ``gemm`` says how products are made.
"""

from __future__ import annotations

import torch

from onelaunch.device.hardware import compute_capability
from onelaunch.operation import Example, Query
from onelaunch.operation.requirements import triton_here
from onelaunch.ops.swiglu.autograd import Wanted, compute, launches
from onelaunch.ops.swiglu.contract import SwigluCall, swiglu
from onelaunch.ops.swiglu.operands import Matrix
from onelaunch.ops.swiglu.variants.torch import trains_plain_tensors

ARCHITECTURES = ("sm_100a",)
"""Architectures that the variant is compiled for."""


@launches("block_scaled")
def run_block_scaled(x: Matrix, gate: Matrix, up: Matrix, wanted: Wanted) -> tuple[torch.Tensor, None]:
    """Launch the block-scaled kernel; return h, and None since no products are stored for a backward pass."""
    from onelaunch.ops.swiglu import launch

    return launch.block_scaled(x, gate, up, wanted.dtype, swizzled=wanted.swizzled), None


@swiglu.variant(
    "block_scaled", launches=1, fuses=("products", "gate"), gemm="tcgen05", architectures=ARCHITECTURES, experimental=True
)
def block_scaled(call: SwigluCall) -> tuple[torch.Tensor]:
    """Multiply NVFP4 operands by Blackwell's block-scaled matrix instructions. Compiled, but not run on hardware."""
    return compute(call, "block_scaled")


block_scaled.supports(trains_plain_tensors)


@block_scaled.supports
def needs_blackwell(query: Query) -> str | None:
    """Return why block-scaled instructions cannot run a call, or None."""
    if not triton_here():
        return "needs Triton, which is not installed"
    if compute_capability(torch.device(query.device)) != 10:
        return "needs an NVIDIA GPU of compute capability 10"
    if "nvfp4" not in query.flags:
        return "takes NVFP4 on both sides"
    if 0 in query.sizes:
        return "needs at least one element in every dimension"
    return None


@block_scaled.examples
def in_either_order() -> list[Example]:
    """Return the calls for which the kernel is compiled and inspected without a GPU.

    No tile divides their M and N, and their block scales are in plain or in swizzled order.
    """
    return [
        Example(swiglu.case("float16", M=1000, N=4100, K=7168, format="nvfp4", swizzled_scales=swizzled), name=said)
        for swizzled, said in ((False, "plain scales"), (True, "swizzled scales"))
    ]
