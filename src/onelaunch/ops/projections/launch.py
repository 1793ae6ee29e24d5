"""Launches of ``projections``'s portable kernels: how columns are cut, and what a kernel is handed."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from onelaunch.ops.gated_scan.launch import cdiv, inner_contiguous
from onelaunch.ops.projections import kernels
from onelaunch.ops.projections.layout import ACTIVATIONS, Layout

ELEMENTS = 4096
"""Of a program's tile: 32 a thread with four warps; not measured yet."""

COLUMNS = 128
"""Of a tile, where no normalized head is longer; not measured yet."""

WARPS = 4


def power_of_two(count: int) -> int:
    """At least ``count``."""
    return 1 << max(count - 1, 0).bit_length()


def _or_nothing(column: int | None) -> int:
    """As kernels know it."""
    return kernels.NOTHING.value if column is None else column


@functools.lru_cache(maxsize=256)
def constants(layout: Layout) -> dict[str, Any]:
    """What both kernels know of a layout, column by column: a segment's tiles are its heads where these are normalized."""
    segments = [place.segment for place in layout.places]
    normalized = [segment.activation == "l2norm" for segment in segments]
    longest = max([power_of_two(each.head_size) for each, norm in zip(segments, normalized, strict=True) if norm], default=1)
    widest = max(longest, COLUMNS)
    blocks, steps, firsts = [], [], [0]
    for segment, norm in zip(segments, normalized, strict=True):
        blocks.append(power_of_two(segment.head_size) if norm else min(power_of_two(segment.width), widest))
        steps.append(segment.head_size if norm else blocks[-1])
        firsts.append(firsts[-1] + cdiv(segment.width, steps[-1]))
    return {
        "FIRSTS": tuple(firsts),
        "BLOCKS": tuple(blocks),
        "STEPS": tuple(steps),
        "WIDTHS": layout.widths,
        "ROWS": tuple([place.row for place in layout.places]),
        "COLUMNS": tuple([place.column for place in layout.places]),
        "ACTIVATIONS": tuple([ACTIVATIONS.index(segment.activation) for segment in segments]),
        "NORMALIZERS": tuple([float(segment.normalizer) for segment in segments]),
        "NORMS": tuple([_or_nothing(place.norm) for place in layout.places]),
        "KEPTS": tuple([_or_nothing(place.kept) for place in layout.places]),
        "BIASES": tuple([_or_nothing(place.bias) for place in layout.places]),
        "PITCH": layout.pitch,
        "NORM_PITCH": layout.norms,
        "KEPT_PITCH": layout.kept,
        "BM": max(ELEMENTS // widest, 1),
    }


@functools.lru_cache(maxsize=256)
def forward_constants(layout: Layout, keep: bool) -> dict[str, Any]:
    """Of the kernel that activates."""
    known = constants(layout)
    nothing = (_or_nothing(None),) * len(layout.places)
    return known | {"Z_PITCH": layout.rows} | ({} if keep else {"NORMS": nothing, "KEPTS": nothing})


@functools.lru_cache(maxsize=256)
def gradient_constants(layout: Layout) -> dict[str, Any]:
    """Of the kernel that undoes it."""
    known = {name: value for name, value in constants(layout).items() if name != "BIASES"}
    return known | {"Z_PITCH": layout.gradient_pitch}


def programs(rows: int, layout: Layout) -> int:
    """Of a launch of either kernel."""
    known = constants(layout)
    return cdiv(rows, known["BM"]) * known["FIRSTS"][-1]


def activate(
    z: torch.Tensor, bias: torch.Tensor | None, layout: Layout, eps: float, *, keep: bool
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """The packed result ``[M, pitch]`` of products ``[M, N]``; for ``keep`` also rstd ``[M, norms]``, z of SiLU ``[M, kept]``."""
    z = z.contiguous()
    rows = z.shape[0]
    y = z.new_empty(rows, layout.pitch)
    rstd = z.new_empty(rows, layout.norms, dtype=torch.float32) if keep and layout.norms else None
    kept = z.new_empty(rows, layout.kept) if keep and layout.kept else None
    grid = (programs(rows, layout),)
    bias = None if bias is None else bias.contiguous()
    kernels.activate_kernel[grid](z, bias, y, rstd, kept, rows, eps, **forward_constants(layout, keep), num_warps=WARPS)
    return y, rstd, kept


def activation_gradients(
    dys: Sequence[torch.Tensor | None], y: torch.Tensor, rstd: torch.Tensor, kept: torch.Tensor, layout: Layout
) -> torch.Tensor:
    """dz ``[M, gradient_pitch]``, of which the first N columns are written."""
    rows = y.shape[0]
    dz = y.new_empty(rows, layout.gradient_pitch)
    flat = tuple(
        [None if dy is None else inner_contiguous(dy.reshape(rows, width)) for dy, width in zip(dys, layout.widths, strict=True)]
    )
    strides = tuple([0 if dy is None else dy.stride(0) for dy in flat])
    kernels.activation_gradients_kernel[(programs(rows, layout),)](
        flat, strides, y, rstd, kept, dz, rows, **gradient_constants(layout), num_warps=WARPS
    )
    return dz
