"""Launches of ``projections``'s portable kernels: how columns are cut, and what a kernel is handed."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from onelaunch.kernels.common.layout import cdiv, inner_contiguous, power_of_2
from onelaunch.launch.launch import Launch, Mma
from onelaunch.operation import remembered
from onelaunch.ops.projections.kernels import activation as kernels
from onelaunch.ops.projections.kernels import product as product_kernels
from onelaunch.ops.projections.layout import ACTIVATIONS, Layout

ELEMENTS = 4096
"""Elements of a CTA's tile: 32 a thread with four warps; not measured yet."""

COLUMNS = 128
"""Columns of a tile, where no normalized head is longer; not measured yet."""

WARPS = 4


def _or_nothing(column: int | None) -> int:
    """Return a column as kernels know it."""
    return kernels.NOTHING.value if column is None else column


@functools.lru_cache(maxsize=256)
def constants(layout: Layout) -> dict[str, Any]:
    """Return the constants of a layout that both kernels share. Tiles of a segment with normalized heads are its heads."""
    segments = [place.segment for place in layout.places]
    normalized = [segment.activation == "l2norm" for segment in segments]
    longest = max([power_of_2(each.head_size) for each, norm in zip(segments, normalized, strict=True) if norm], default=1)
    widest = max(longest, COLUMNS)
    blocks, steps, firsts = [], [], [0]
    for segment, norm in zip(segments, normalized, strict=True):
        blocks.append(power_of_2(segment.head_size) if norm else min(power_of_2(segment.width), widest))
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
    """Return the constants of the kernel that activates."""
    known = constants(layout)
    nothing = (_or_nothing(None),) * len(layout.places)
    return known | {"Z_PITCH": layout.rows} | ({} if keep else {"NORMS": nothing, "KEPTS": nothing})


@functools.lru_cache(maxsize=256)
def gradient_constants(layout: Layout) -> dict[str, Any]:
    """Return the constants of the kernel that undoes activations."""
    known = {name: value for name, value in constants(layout).items() if name != "BIASES"}
    return known | {"Z_PITCH": layout.gradient_pitch}


@dataclass(frozen=True, slots=True)
class ProductTiles:
    """Tiles of the wide product: BM rows by BN columns of the results a CTA, BK channels at once."""

    m: int
    n: int
    k: int
    stages: int
    warps: int
    group: int = 8


@remembered
def product_tiles(layout: Layout, rows: int, element: torch.dtype) -> ProductTiles:
    """Return the tiles of the wide product. Not measured yet.

    128 columns, or as many as the longest normalized head takes. Products of float32 are made of single multiplications, whose
    operands lie in registers: larger tiles than these spill.
    """
    heads = [place.segment.head_size for place in layout.places if place.segment.activation == "l2norm"]
    n = max(COLUMNS, power_of_2(max(heads, default=1)))
    if element is torch.float32:
        return ProductTiles(16 if n > COLUMNS else 32, n, 32, stages=3, warps=8)
    if n > COLUMNS:
        return ProductTiles(64, n, 32, stages=3, warps=8)
    m = 64 if rows <= 64 else 128  # fewer rows are no less work for matrix instructions of 64
    return ProductTiles(m, n, 64, stages=3, warps=m // 16)


@functools.lru_cache(maxsize=256)
def product_constants(layout: Layout, tiles: ProductTiles, keep: bool) -> dict[str, Any]:
    """Return the constants of the kernel whose product ends with the activations."""
    known = {name: value for name, value in forward_constants(layout, keep).items() if name not in ("BLOCKS", "BM", "Z_PITCH")}
    steps, heads, firsts = [], [], [0]
    for place in layout.places:
        size = place.segment.head_size
        one = place.segment.activation == "l2norm" and power_of_2(size) != size  # a head lies in a block of its own
        steps.append(size if one else tiles.n)
        heads.append(size if place.segment.activation == "l2norm" and not one else tiles.n)
        firsts.append(firsts[-1] + cdiv(place.segment.width, steps[-1]))
    known |= {"FIRSTS": tuple(firsts), "STEPS": tuple(steps), "HEADS": tuple(heads)}
    return known | {"BM": tiles.m, "BN": tiles.n, "BK": tiles.k, "GROUP": tiles.group}


def epilogue(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, layout: Layout, eps: float, *, keep: bool
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return what :func:`activate` does, from x ``[M, D]`` and the weight ``[N, D]``."""
    x, weight = inner_contiguous(x), inner_contiguous(weight)
    rows, inner = x.shape
    y, rstd, kept = room_for_results(x, layout, keep=keep)
    tiles = product_tiles(layout, rows, x.dtype)
    constants = product_constants(layout, tiles, keep)
    grid = (cdiv(rows, tiles.m) * constants["FIRSTS"][-1],)
    bias = None if bias is None else bias.contiguous()
    if rows:
        Launch(
            product_kernels.epilogue_kernel, grid,
            x, weight, bias, y, rstd, kept, rows, inner, x.stride(0), weight.stride(0), eps,
            mma=Mma.NONE if x.dtype is torch.float32 else Mma.WIDEST,
            **constants, EVEN=inner % tiles.k == 0, num_warps=tiles.warps, num_stages=tiles.stages,
        ).run()  # fmt: skip
    return y, rstd, kept


def room_for_results(
    x: torch.Tensor, layout: Layout, *, keep: bool
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return memory for the packed result of the rows of ``x``; for ``keep`` also for rstd and z of SiLU, if there are any."""
    rows = x.shape[0]
    rstd = x.new_empty(rows, layout.norms, dtype=torch.float32) if keep and layout.norms else None
    return x.new_empty(rows, layout.pitch), rstd, x.new_empty(rows, layout.kept) if keep and layout.kept else None


def programs(rows: int, layout: Layout) -> int:
    """Return the number of CTAs of a launch of either kernel of activations."""
    known = constants(layout)
    return cdiv(rows, known["BM"]) * known["FIRSTS"][-1]


def activate(
    z: torch.Tensor, bias: torch.Tensor | None, layout: Layout, eps: float, *, keep: bool
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return the packed result ``[M, pitch]`` of products ``[M, N]``; for ``keep`` also rstd ``[M, norms]``, z ``[M, kept]``."""
    z = z.contiguous()
    rows = z.shape[0]
    y, rstd, kept = room_for_results(z, layout, keep=keep)
    grid = (programs(rows, layout),)
    bias = None if bias is None else bias.contiguous()
    Launch(
        kernels.activate_kernel, grid,
        z, bias, y, rstd, kept, rows, eps, **forward_constants(layout, keep), num_warps=WARPS,
    ).run()  # fmt: skip
    return y, rstd, kept


def activation_gradients(
    dys: Sequence[torch.Tensor | None], y: torch.Tensor, rstd: torch.Tensor, kept: torch.Tensor, layout: Layout
) -> torch.Tensor:
    """Return dz ``[M, gradient_pitch]``, of which the first N columns are written."""
    rows = y.shape[0]
    dz = y.new_empty(rows, layout.gradient_pitch)
    flat = tuple(
        [None if dy is None else inner_contiguous(dy.reshape(rows, width)) for dy, width in zip(dys, layout.widths, strict=True)]
    )
    strides = tuple([0 if dy is None else dy.stride(0) for dy in flat])
    Launch(
        kernels.activation_gradients_kernel, (programs(rows, layout),),
        flat, strides, y, rstd, kept, dz, rows, **gradient_constants(layout), num_warps=WARPS,
    ).run()  # fmt: skip
    return dz
