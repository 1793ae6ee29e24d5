"""Variants of ``swiglu`` in one launch on Hopper GPUs: one matrix product with the gate in its epilogue, by three schedules."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from onelaunch.device.hardware import processors
from onelaunch.operation import Direction, Example, Query
from onelaunch.operation.requirements import needs_hopper
from onelaunch.ops.swiglu.autograd import Wanted, compute, launches
from onelaunch.ops.swiglu.contract import SwigluCall, swiglu
from onelaunch.ops.swiglu.operands import Matrix
from onelaunch.ops.swiglu.variants.torch import trains_plain_tensors

ARCHITECTURES = ("sm_90a",)

HOPPER: dict[str, Any] = {"gemm": "wgmma", "architectures": ARCHITECTURES}
"""Tags of all."""

FEW = 128
"""Rows of x up to which ``small_m`` is made for them."""

MOST_STEPS = 2**31 - 1
"""Of all tiles: they are counted in 32 bits."""

MOST_ROWS = MOST_STEPS - 256
"""Of x, and those of a tile beside them."""


def run_dual_gemm(schedule: str, x: Matrix, gate: Matrix, up: Matrix, wanted: Wanted) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute h, and both products if they are wanted, in one launch by the schedule of the variant of this name."""
    from onelaunch.ops.swiglu import configure_hopper, launch_hopper

    blocks = None if gate.blocks is None or up.blocks is None else (gate.blocks, up.blocks)
    (rows, channels), columns, device = x.values.shape, gate.values.shape[0], x.values.device
    formats = configure_hopper.Formats(x.values.dtype, wanted.dtype, nvfp4=blocks is not None)
    config = configure_hopper.configuration(schedule, (rows, columns, channels), formats, processors(device))
    scales = launch_hopper.Scales.of(x.scale, gate.scale, up.scale, device)
    weights = (gate.values, up.values)
    return launch_hopper.dual_gemm(
        config, x.values, weights, blocks, scales, keep=wanted.keep, constant_weights=wanted.constant_weights
    )


for name in ("persistent", "stream_k", "small_m"):
    launches(name)(functools.partial(run_dual_gemm, name))


@swiglu.variant("persistent", launches=1, backward_launches=4, fuses=("products", "gate"), **HOPPER)
def persistent(call: SwigluCall) -> tuple[torch.Tensor]:
    """Programs that stay, and take one tile after the other from a counter."""
    return compute(call, "persistent")


@swiglu.variant("stream_k", launches=1, backward_launches=4, fuses=("products", "gate"), **HOPPER)
def stream_k(call: SwigluCall) -> tuple[torch.Tensor]:
    """Programs that stay, each with an equal run of all steps of K of all tiles: no processor idles in a last wave.

    Where tiles shared by two programs each fill the chip, two of a cluster take half of the steps of one.
    """
    return compute(call, "stream_k")


@swiglu.variant("small_m", launches=1, backward_launches=4, fuses=("products", "gate"), **HOPPER)
def small_m(call: SwigluCall) -> tuple[torch.Tensor]:
    """For up to 128 rows of x: weights stream past them, in tiles so small that every processor reads its share.

    Beyond 64 rows two programs share larger tiles where these fill the chip, as :func:`stream_k` has it.
    """
    return compute(call, "small_m")


for variant in (persistent, stream_k, small_m):
    variant.supports(needs_hopper)


@persistent.supports
@stream_k.supports
@small_m.supports
def sixteen_bits_or_fewer(query: Query) -> str | None:
    """What warpgroups multiply, and the copy engine moves."""
    rows, columns, inner = query.sizes
    if 0 in query.sizes:
        return "needs at least one element in every dimension"
    if "nvfp4" in query.flags or "swizzled_scales" in query.flags:
        return "takes NVFP4 for weights alone, with plain scales"
    if query.dtype is torch.float32:
        return "needs a result in float16 or bfloat16: this chip adds up products of float8 in fewer bits than float32 has"
    wanted = 64 if "nvfp4_weights" in query.flags else 16 if "fp8" in query.flags else 8
    if columns % 8 or inner % wanted:
        return f"needs N in multiples of 8 and K in multiples of {wanted}, which the copy engine can address"
    if rows > MOST_ROWS or -(-rows // 8) * -(-columns // 32) * -(-inner // 64) > MOST_STEPS:
        return f"takes at most {MOST_ROWS} rows of x, and {MOST_STEPS} steps of all tiles"
    return None


for variant in (persistent, stream_k, small_m):
    variant.supports(trains_plain_tensors)


@small_m.supports
def few_rows(query: Query) -> str | None:
    """A tile holds all rows of x."""
    return None if query.sizes[0] <= FEW else f"takes at most {FEW} rows of x"


MANY = 512
"""Rows of x up to which runs of equal length are taken. Measured at 512 and at 8192 rows, where whole tiles are nearly twice as
fast: neighbouring programs share their weights."""


@swiglu.prefers
def by_rows(query: Query) -> tuple[str, ...]:
    """Where Hopper's kernel can run, one of its ways is the fastest forward at every shape of a first run of the study.

    Float8 elsewhere by PyTorch's units for it, which its plain form does not use.
    """
    rows = query.sizes[0]
    ours = ("small_m", "stream_k") if rows <= FEW else ("stream_k", "persistent") if rows <= MANY else ("persistent",)
    return (*ours, "wide", "three_node") if "fp8" in query.flags else ours


def examples(counts: Sequence[int]) -> list[Example]:
    """Return calls in each format for so many rows of x, and a training call."""

    def call(rows: int, dtype: str = "bfloat16", direction: Direction = "forward", **options: Any) -> Example:
        said = [f"M = {rows}", *([options["format"]] if options else []), *([dtype] if dtype != "bfloat16" else [])]
        case = swiglu.case(dtype, M=rows, N=4096, K=7168, **options)
        return Example(case, direction, name=", ".join([*said, "kept"] if direction == "forward_backward" else said))

    forms: tuple[dict[str, Any], ...] = ({}, {"format": "fp8", "row_scales": True}, {"format": "nvfp4_weights"})
    most = counts[-1]
    return [
        *(call(rows, **form) for rows in counts for form in forms),
        call(most, direction="forward_backward"),
        call(most, "float16"),
        call(most, "float16", format="nvfp4_weights"),
    ]


persistent.examples(functools.partial(examples, (8192,)))
stream_k.examples(functools.partial(examples, (24, 512)))
small_m.examples(functools.partial(examples, (1, 16, 32, 64, 128)))
