"""Variants of ``swiglu`` in one launch on Hopper GPUs: the matrix product of ``kernels/gemm_sm90`` with the gate as its epilogue.

They differ in the tile scheduler: whole tiles from a counter, stream-K, or small tiles for few rows.

The dispatcher, studies and tests find registered variants by name. Tags: ``fuses`` names the steps that share a kernel, here both
``products`` and the ``gate``; ``cost.py`` reads it, and takes the missing ``hands`` (products that go through device memory) as
none. ``gemm`` says how products are made.
"""

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
"""Architectures that the variants are compiled for."""

_HOPPER: dict[str, Any] = {"gemm": "wgmma", "architectures": ARCHITECTURES}
"""Tags of all three variants."""

FEW = 128
"""Most rows of x for ``small_m``."""

_MOST_STEPS = 2**31 - 1
"""Most k-blocks of all tiles, which the kernel counts in 32 bits."""

_MOST_ROWS = _MOST_STEPS - 256
"""Most rows of x, so that the rows of the last tile fit into 32 bits as well."""


def run_dual_gemm(schedule: str, x: Matrix, gate: Matrix, up: Matrix, wanted: Wanted) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute h, and both products if ``wanted.keep`` (else None), in one launch. ``schedule`` is the name of a variant."""
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


@swiglu.variant("persistent", launches=1, backward_launches=4, fuses=("products", "gate"), **_HOPPER)
def persistent(call: SwigluCall) -> tuple[torch.Tensor]:
    """Use persistent CTAs that take whole tiles from a counter in global memory."""
    return compute(call, "persistent")


@swiglu.variant("stream_k", launches=1, backward_launches=4, fuses=("products", "gate"), **_HOPPER)
def stream_k(call: SwigluCall) -> tuple[torch.Tensor]:
    """Use persistent CTAs with stream-K: each has an equal share of the k-blocks of all tiles, so no SM idles in a last wave.

    Where it is estimated to be faster, each CTA has whole tiles or an equal part of one tile instead. For 65 to 256 rows of x in
    16 bits, if tiles shared by two CTAs each fill the GPU, a cluster of two CTAs splits the k-blocks of one tile (split-K).
    """
    return compute(call, "stream_k")


@swiglu.variant("small_m", launches=1, backward_launches=4, fuses=("products", "gate"), **_HOPPER)
def small_m(call: SwigluCall) -> tuple[torch.Tensor]:
    """Use tiles with all rows of x (up to 128) and few columns, so that every SM streams an equal share of the weights.

    Beyond 64 rows in 16 bits a cluster of two CTAs shares larger tiles if these fill the GPU, as in :func:`stream_k`.
    """
    return compute(call, "small_m")


for variant in (persistent, stream_k, small_m):
    variant.supports(needs_hopper)


@persistent.supports
@stream_k.supports
@small_m.supports
def sixteen_bits_or_fewer(query: Query) -> str | None:
    """Return which requirement of WGMMA, TMA or the kernel's 32-bit indices a call does not meet."""
    rows, columns, inner = query.sizes
    if 0 in query.sizes:
        return "needs at least one element in every dimension"
    if "nvfp4" in query.flags or "swizzled_scales" in query.flags:
        return "takes NVFP4 for weights alone, with plain scales"
    if query.dtype is torch.float32:
        return "needs a result in float16 or bfloat16: Hopper accumulates float8 products in fewer bits than float32 has"
    wanted = 64 if "nvfp4_weights" in query.flags else 16 if "fp8" in query.flags else 8
    if columns % 8 or inner % wanted:
        return f"needs N in multiples of 8 and K in multiples of {wanted}, which TMA can address"
    # The smallest tile has 8 rows of x and 32 columns, and the smallest k-block 64 channels.
    if rows > _MOST_ROWS or -(-rows // 8) * -(-columns // 32) * -(-inner // 64) > _MOST_STEPS:
        return f"takes at most {_MOST_ROWS} rows of x, and {_MOST_STEPS} k-blocks in all tiles"
    return None


for variant in (persistent, stream_k, small_m):
    variant.supports(trains_plain_tensors)


@small_m.supports
def few_rows(query: Query) -> str | None:
    """Return why ``small_m`` cannot run: a tile cannot hold all rows of x."""
    return None if query.sizes[0] <= FEW else f"takes at most {FEW} rows of x"


_MANY = 512
"""Most rows of x for which stream-K is preferred to whole tiles.

It was measured at 512 and at 8192 rows. At 8192, whole tiles are nearly twice as fast, because neighbouring CTAs share weights.
"""


@swiglu.prefers
def by_rows(query: Query) -> tuple[str, ...]:
    """Return the preferred variants, best first.

    In a first run of the study dual-gemm-swiglu, one of the Hopper variants was the fastest forward pass at every shape. They
    are passed over on other GPUs. There, float8 prefers variants with PyTorch's float8 products, which ``eager`` does not use.
    """
    rows = query.sizes[0]
    ours = ("small_m", "stream_k") if rows <= FEW else ("stream_k", "persistent") if rows <= _MANY else ("persistent",)
    return (*ours, "wide", "three_node") if "fp8" in query.flags else ours


def examples(counts: Sequence[int]) -> list[Example]:
    """Return calls in each format for these numbers of rows of x; for the last of them also a training call and float16 calls.

    The variants' kernels are compiled and inspected for them without a GPU.
    """

    def call(rows: int, dtype: str = "bfloat16", direction: Direction = "forward", **options: Any) -> Example:
        """Return an example of these rows; "kept" in its name tells that both products are stored for a backward pass."""
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
