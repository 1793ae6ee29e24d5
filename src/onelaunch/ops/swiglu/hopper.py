"""Variants of ``swiglu`` in one launch on Hopper GPUs: the same kernel, with tiles handed out in three ways."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from onelaunch import nvrtc
from onelaunch.hardware import is_hopper
from onelaunch.operation import CudaBuild, Query
from onelaunch.ops.autograd import Operator
from onelaunch.ops.formats import Fp8Tensor, NVFP4Tensor
from onelaunch.ops.swiglu.contract import Operand, SwigluCall, swiglu
from onelaunch.ops.swiglu.torch_variants import Results

ARCHITECTURES = ("sm_90a",)

FEW = 128
"""Rows of x up to which ``small_m`` is made for them."""

MOST_STEPS = 2**31 - 1
"""Of all tiles: they are counted in 32 bits."""


def run_dual_gemm(
    x: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    gate_blocks: torch.Tensor | None,
    up_blocks: torch.Tensor | None,
    x_scale: torch.Tensor | None,
    gate_scale: torch.Tensor | None,
    up_scale: torch.Tensor | None,
    result: torch.dtype,
    way: str,
) -> torch.Tensor:
    """``h [M, N]``; ``way`` is the name of a variant."""
    from onelaunch.ops.swiglu import hopper_launch

    blocks = None if gate_blocks is None or up_blocks is None else (gate_blocks, up_blocks)
    nvfp4 = blocks is not None
    tiles = (hopper_launch.narrow_tiles if way == "small_m" else hopper_launch.wide_tiles)(x.shape[0], nvfp4=nvfp4)
    scales = hopper_launch.Scales.of(x_scale, gate_scale, up_scale, gate.shape[0], x.device)
    schedule = "tiles" if way == "persistent" else "runs"
    return hopper_launch.dual_gemm(x, (gate, up), blocks, scales, result, schedule, tiles)[0]


def fake_dual_gemm(x: Any, gate: Any, *rest: Any) -> torch.Tensor:
    """Room for the result of :func:`run_dual_gemm`."""
    result = rest[-2]
    return x.new_empty((x.shape[0], gate.shape[0]), dtype=result)


dual_gemm = Operator("swiglu_dual_gemm", run_dual_gemm, fake=fake_dual_gemm)


def parts(operand: Operand) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """What is multiplied, its block scales, and the factor that comes after."""
    if isinstance(operand, Fp8Tensor):
        return operand.values, None, operand.scale
    if isinstance(operand, NVFP4Tensor):
        return operand.codes, operand.scales, operand.global_scale
    return operand, None, None


def launch(call: SwigluCall, way: str) -> Results:
    """One launch of the kernel."""
    (x, _, x_scale), (gate, gate_blocks, gate_scale), (up, up_blocks, up_scale) = map(parts, (call.x, call.w_gate, call.w_up))
    of_all = (x_scale, gate_scale, up_scale)
    return (dual_gemm(x, gate, up, gate_blocks, up_blocks, *of_all, call.dtype, way, grad=False),)


@swiglu.variant("persistent", launches=1, fuses=("products", "gate"), gemm="wgmma", architectures=ARCHITECTURES)
def persistent(call: SwigluCall) -> Results:
    """Programs that stay, and take one tile after the other from a counter."""
    return launch(call, "persistent")


@swiglu.variant("stream_k", launches=1, fuses=("products", "gate"), gemm="wgmma", architectures=ARCHITECTURES)
def stream_k(call: SwigluCall) -> Results:
    """Programs that stay, each with an equal run of all steps of K of all tiles: no processor idles in a last wave."""
    return launch(call, "stream_k")


@swiglu.variant("small_m", launches=1, fuses=("products", "gate"), gemm="wgmma", architectures=ARCHITECTURES)
def small_m(call: SwigluCall) -> Results:
    """For up to 128 rows of x: weights stream past them, in tiles so small that every processor reads its share."""
    return launch(call, "small_m")


@persistent.supports
@stream_k.supports
@small_m.supports
def needs_hopper(query: Query) -> str | None:
    """The kernel is made of that chip's instructions."""
    if query.device_type != "cuda" or not is_hopper(torch.device(query.device)):
        return "needs an NVIDIA GPU of compute capability 9.0"
    return nvrtc.missing()


@persistent.supports
@stream_k.supports
@small_m.supports
def sixteen_bits_or_fewer(query: Query) -> str | None:
    """What warpgroups multiply, and the copy engine moves."""
    rows, columns, inner = query.sizes
    if 0 in query.sizes:
        return "needs at least one element in every dimension"
    if query.grad:
        return "has no backward pass"
    if "nvfp4" in query.flags or "swizzled_scales" in query.flags:
        return "takes NVFP4 for weights alone, with plain scales"
    if "fp8" not in query.flags and query.dtype is torch.float32:
        return "needs float16 or bfloat16"
    wanted = 256 if "nvfp4_weights" in query.flags else 16 if "fp8" in query.flags else 8
    if columns % 8 or inner % wanted:
        return f"needs N in multiples of 8 and K in multiples of {wanted}, which the copy engine can address"
    if -(-rows // 8) * -(-columns // 32) * -(-inner // 64) > MOST_STEPS:
        return f"takes at most {MOST_STEPS} steps of all tiles"
    return None


@small_m.supports
def few_rows(query: Query) -> str | None:
    """A tile holds all rows of x."""
    return None if query.sizes[0] <= FEW else f"takes at most {FEW} rows of x"


@functools.cache
def build(name: str, way: str, rows: int, element: torch.dtype, result: torch.dtype, *, nvfp4: bool, scaled: bool) -> CudaBuild:
    """The kernel as a call of so many rows launches it."""
    from onelaunch.ops.swiglu import hopper_launch

    tiles = (hopper_launch.narrow_tiles if way == "small_m" else hopper_launch.wide_tiles)(rows, nvfp4=nvfp4)
    schedule = "tiles" if way == "persistent" else "runs"
    source = hopper_launch.source(tiles, element, result, schedule, scaled=scaled, keep=False)
    return CudaBuild(name, source, tiles.threads, tiles.shared_bytes(result), matrix=True)


def builds(way: str, counts: Sequence[int], architecture: str) -> list[CudaBuild]:
    """In each format, for so many rows of x."""
    if architecture not in ARCHITECTURES:
        return []
    bfloat16, float16, float8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
    found = []
    for rows in counts:
        found += [
            build(f"M = {rows}", way, rows, bfloat16, bfloat16, nvfp4=False, scaled=False),
            build(f"M = {rows}, float8", way, rows, float8, bfloat16, nvfp4=False, scaled=True),
            build(f"M = {rows}, NVFP4 weights", way, rows, bfloat16, bfloat16, nvfp4=True, scaled=True),
        ]
    found += [
        build("float16", way, counts[-1], float16, float16, nvfp4=False, scaled=False),
        build("float8 to float32", way, counts[-1], float8, torch.float32, nvfp4=False, scaled=True),
        build("NVFP4 weights, float16", way, counts[-1], float16, float16, nvfp4=True, scaled=True),
    ]
    return found


persistent.kernels(functools.partial(builds, "persistent", (8192,)))
stream_k.kernels(functools.partial(builds, "stream_k", (24, 512)))
small_m.kernels(functools.partial(builds, "small_m", (1, 16, 32, 64, 128)))
