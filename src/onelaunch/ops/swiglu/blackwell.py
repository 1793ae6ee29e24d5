"""The variant of ``swiglu`` for Blackwell's block-scaled matrix instructions: both sides in NVFP4. Not run on hardware yet."""

from __future__ import annotations

from typing import Any

import torch

from onelaunch.device.hardware import compute_capability
from onelaunch.formats import NVFP4Tensor
from onelaunch.kernels.common.layout import cdiv
from onelaunch.launch.build import KernelBuild
from onelaunch.launch.operator import Operator
from onelaunch.operation import Query
from onelaunch.operation.requirements import triton_here
from onelaunch.ops.swiglu.contract import SwigluCall, swiglu
from onelaunch.ops.swiglu.torch_variants import Results, trains_plain_tensors

ARCHITECTURES = ("sm_100a",)

TILE = {"BM": 128, "BN": 64, "BK": 256}
"""Rows and columns of h, channels at once; not measured."""

WARPS = 8
"""With four, addresses of a step's codes take more registers than there are."""


def run_block_scaled(
    x: torch.Tensor,
    x_scales: torch.Tensor,
    x_global: torch.Tensor | None,
    gate: torch.Tensor,
    gate_scales: torch.Tensor,
    gate_global: torch.Tensor | None,
    up: torch.Tensor,
    up_scales: torch.Tensor,
    up_global: torch.Tensor | None,
    result: torch.dtype,
    swizzled: bool,
) -> torch.Tensor:
    """``h [M, N]`` from codes ``[M, K / 2]`` and ``[N, K / 2]``."""
    from onelaunch.ops.swiglu.block_scaled_kernels import block_scaled_kernel

    (rows, half), columns = x.shape, gate.shape[0]
    x, gate, up = (each.contiguous() for each in (x, gate, up))
    scales = [each.contiguous() for each in (x_scales, gate_scales, up_scales)]
    one = torch.ones((), dtype=torch.float32, device=x.device)
    factors = [one if each is None else each for each in (x_global, gate_global, up_global)]
    h = torch.empty((rows, columns), dtype=result, device=x.device)
    grid = (cdiv(rows, TILE["BM"]) * cdiv(columns, TILE["BN"]),)
    block_scaled_kernel[grid](
        x, gate, up, *scales, *factors, h, rows, columns, 2 * half, half, half, half, SWIZZLED=swizzled, num_warps=WARPS, **TILE
    )
    return h


def fake_block_scaled(x: Any, x_scales: Any, x_global: Any, gate: Any, *rest: Any) -> torch.Tensor:
    """Room for the result of :func:`run_block_scaled`."""
    return x.new_empty((x.shape[0], gate.shape[0]), dtype=rest[-2])


operator = Operator("swiglu_block_scaled", run_block_scaled, fake=fake_block_scaled)


@swiglu.variant("block_scaled", launches=1, fuses=("products", "gate"), gemm="tcgen05", architectures=ARCHITECTURES)
def block_scaled(call: SwigluCall) -> Results:
    """Both sides in NVFP4 through matrix instructions that know block scales: Blackwell's. Compiled, not run on hardware."""
    operands = (call.x, call.w_gate, call.w_up)
    tensors: list[torch.Tensor | None] = []
    for operand in operands:
        assert isinstance(operand, NVFP4Tensor)  # noqa: S101 - see needs_blackwell
        tensors += [operand.codes, operand.scales, operand.global_scale]
    swizzled = "swizzled_scales" in call.query().flags
    return (operator(*tensors, call.dtype, swizzled, grad=False),)


block_scaled.supports(trains_plain_tensors)


@block_scaled.supports
def needs_blackwell(query: Query) -> str | None:
    """Where such instructions are."""
    if not triton_here():
        return "needs Triton, which is not installed"
    if compute_capability(torch.device(query.device)) != 10:
        return "needs an NVIDIA GPU of compute capability 10"
    if "nvfp4" not in query.flags:
        return "takes NVFP4 on both sides"
    if 0 in query.sizes:
        return "needs at least one element in every dimension"
    return None


@block_scaled.kernels
def _(architecture: str) -> list[KernelBuild]:
    if architecture not in ARCHITECTURES:
        return []
    from onelaunch.ops.swiglu.block_scaled_kernels import block_scaled_kernel

    special = {"h": "*fp16", "M": "i32", "N": "i32", "K": "i32:16"}
    special |= dict.fromkeys(("a", "b1", "b2"), "*u8") | dict.fromkeys(("sfa", "sfb1", "sfb2"), "*fp8e4nv")
    special |= dict.fromkeys(("a_stride", "b1_stride", "b2_stride"), "i32:16")
    builds = []
    for swizzled in (False, True):
        constants = {"SWIZZLED": swizzled, **TILE}
        signature = {
            name: "constexpr" if name in constants else special.get(name, "*fp32") for name in block_scaled_kernel.arg_names
        }
        name = f"block_scaled, {'swizzled' if swizzled else 'plain'} scales"
        builds.append(KernelBuild(name, block_scaled_kernel, signature, constants, num_warps=WARPS, matrix=True))
    return builds
