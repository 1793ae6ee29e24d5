"""Launches of ``projections``'s portable kernels: cut columns into tiles, allocate results, pass pointers and constants.

``launch_hopper.py`` takes :func:`empty_results` from here, and ``autograd.py`` the backward pass of all own variants.
``gla_layer`` calls :func:`activation_gradients` for its log-decays. The variants in ``variants/triton.py`` call :func:`epilogue`
and :func:`activate`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from onelaunch.kernels.common.layout import cdiv, inner_contiguous, power_of_2
from onelaunch.kernels.gemm.choice import mma_with, precision_of
from onelaunch.launch.launch import Launch, Mma
from onelaunch.operation import remembered
from onelaunch.ops.projections.kernels import activation as kernels
from onelaunch.ops.projections.kernels import product as product_kernels
from onelaunch.ops.projections.layout import ACTIVATIONS, ALIGNMENT, Layout

ELEMENTS = 4096
"""Number of elements of a CTA's tile: 32 per thread with four warps. Not tuned by measurement yet."""

_COLUMNS = 128
"""Most columns of a tile, unless a normalized head is longer. Not tuned by measurement yet."""

_WARPS = 4
"""Number of warps of a CTA of the kernels in ``kernels/activation.py``."""


def _column_or_nothing(column: int | None) -> int:
    """Return a column for the kernels, which take NOTHING (-1) instead of ``None``."""
    return kernels.NOTHING.value if column is None else column


@functools.lru_cache(maxsize=256)
def _constants(layout: Layout) -> dict[str, Any]:
    """Return the constants of a layout for the kernels of activations; the one of gradients takes all but BIASES.

    A tile of a normalized segment is one of its heads. The keys are names of the kernels' parameters, explained at the top of
    ``kernels/activation.py``. All segments have the same number of rows per tile, BM, so the widest tile decides it.
    """
    segments = [span.segment for span in layout.spans]
    normalized = [segment.activation == "l2norm" for segment in segments]
    longest_head = max([power_of_2(each.head_size) for each, norm in zip(segments, normalized, strict=True) if norm], default=1)
    widest = max(longest_head, _COLUMNS)
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
        "ROWS": tuple([span.row for span in layout.spans]),
        "COLUMNS": tuple([span.column for span in layout.spans]),
        "ACTIVATIONS": tuple([ACTIVATIONS.index(segment.activation) for segment in segments]),
        "NORMALIZERS": tuple([float(segment.normalizer) for segment in segments]),
        "NORMS": tuple([_column_or_nothing(span.norm) for span in layout.spans]),
        "KEPTS": tuple([_column_or_nothing(span.kept) for span in layout.spans]),
        "BIASES": tuple([_column_or_nothing(span.bias) for span in layout.spans]),
        "PITCH": layout.pitch,
        "NORM_PITCH": layout.norms,
        "KEPT_PITCH": layout.kept,
        "BM": max(ELEMENTS // widest, 1),
    }


@functools.lru_cache(maxsize=256)
def _forward_constants(layout: Layout, keep: bool) -> dict[str, Any]:
    """Return the constants of the kernel that applies activations; without ``keep`` nothing is saved."""
    known = _constants(layout)
    nothing = (_column_or_nothing(None),) * len(layout.spans)
    return known | {"Z_PITCH": layout.rows} | ({} if keep else {"NORMS": nothing, "KEPTS": nothing})


@functools.lru_cache(maxsize=256)
def _gradient_constants(layout: Layout) -> dict[str, Any]:
    """Return the constants of the kernel that computes gradients through activations."""
    known = _constants(layout) | {"Z_PITCH": layout.gradient_pitch, "SUM_PITCH": layout.biases}
    padding = layout.gradient_pitch - layout.rows
    if not padding:
        return known
    nothing, none = _column_or_nothing(None), ACTIVATIONS.index("none")
    behind = {  # a segment that no gradient reaches, so that zeros are written
        "FIRSTS": known["FIRSTS"][-1] + 1, "BLOCKS": ALIGNMENT, "STEPS": ALIGNMENT, "WIDTHS": padding, "ROWS": layout.rows,
        "COLUMNS": layout.pitch, "ACTIVATIONS": none, "NORMALIZERS": 1.0, "NORMS": nothing, "KEPTS": nothing,
        "BIASES": nothing,
    }  # fmt: skip
    return known | {name: (*known[name], value) for name, value in behind.items()}


@dataclass(frozen=True, slots=True)
class ProductTiles:
    """Tiles of the wide product: ``m`` (BM) rows by ``n`` (BN) columns of the results per CTA, ``k`` (BK) channels per step.

    ``stages`` is the number of steps in Triton's software pipeline, and ``warps`` the number of warps of a CTA. Consecutive CTAs
    go through ``group`` tiles of rows before the next columns, so that they share the weight in L2.
    """

    m: int
    n: int
    k: int
    stages: int
    warps: int
    group: int = 8


@remembered
def _product_tiles(layout: Layout, rows: int, element: torch.dtype) -> ProductTiles:
    """Return the tiles of the wide product. They are not tuned by measurement yet.

    Tiles have 128 columns, or as many as the longest normalized head, rounded up to a power of 2. Products of float32 use scalar
    multiplications, whose operands lie in registers: larger tiles than these spill.
    """
    heads = [span.segment.head_size for span in layout.spans if span.segment.activation == "l2norm"]
    n = max(_COLUMNS, power_of_2(max(heads, default=1)))
    if element is torch.float32:
        return ProductTiles(16 if n > _COLUMNS else 32, n, 32, stages=3, warps=8)
    if n > _COLUMNS:
        return ProductTiles(64, n, 32, stages=3, warps=8)
    m = 64 if rows <= 64 else 128  # a WGMMA takes 64 rows, so fewer save nothing on Hopper
    return ProductTiles(m, n, 64, stages=3, warps=m // 16)


@functools.lru_cache(maxsize=256)
def _product_constants(layout: Layout, tiles: ProductTiles, keep: bool) -> dict[str, Any]:
    """Return the constants of the kernel that multiplies and applies activations in its epilogue.

    The keys are explained at ``epilogue_kernel`` in ``kernels/product.py``. The kernel separates the heads of a tile by a
    reshape, which needs a power of 2. So a normalized head of another size has a tile of its own, whose other columns are zero.
    """
    known = {name: value for name, value in _forward_constants(layout, keep).items() if name not in ("BLOCKS", "BM", "Z_PITCH")}
    steps, heads, firsts = [], [], [0]
    for span in layout.spans:
        size = span.segment.head_size
        normalized = span.segment.activation == "l2norm"
        head_per_tile = normalized and power_of_2(size) != size
        steps.append(size if head_per_tile else tiles.n)
        heads.append(size if normalized and not head_per_tile else tiles.n)  # not read unless heads are normalized
        firsts.append(firsts[-1] + cdiv(span.segment.width, steps[-1]))
    known |= {"FIRSTS": tuple(firsts), "STEPS": tuple(steps), "HEADS": tuple(heads)}
    return known | {"BM": tiles.m, "BN": tiles.n, "BK": tiles.k, "GROUP": tiles.group}


def epilogue(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, layout: Layout, eps: float, *, keep: bool
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Compute all segments from x ``[M, D]`` and the weight ``[N, D]`` in one launch; return the tensors of :func:`activate`."""
    x, weight = inner_contiguous(x), inner_contiguous(weight)
    rows, inner = x.shape
    y, rstd, kept = empty_results(x, layout, keep=keep)
    tiles = _product_tiles(layout, rows, x.dtype)
    known = _product_constants(layout, tiles, keep)
    grid = (cdiv(rows, tiles.m) * known["FIRSTS"][-1],)
    bias = None if bias is None else bias.contiguous()
    Launch(
        product_kernels.epilogue_kernel, grid,
        x, weight, bias, y, rstd, kept, rows, inner, x.stride(0), weight.stride(0), eps,
        mma=mma_with(x, Mma.WIDEST), PRECISION=precision_of(x),
        **known, EVEN=inner % tiles.k == 0, num_warps=tiles.warps, num_stages=tiles.stages,
    ).run()  # fmt: skip
    return y, rstd, kept


def empty_results(
    x: torch.Tensor, layout: Layout, *, keep: bool
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return uninitialized tensors for the packed result of ``x``'s rows and, with ``keep``, for rstd and z of SiLU."""
    rows = x.shape[0]
    rstd = x.new_empty(rows, layout.norms, dtype=torch.float32) if keep and layout.norms else None
    return x.new_empty(rows, layout.pitch), rstd, x.new_empty(rows, layout.kept) if keep and layout.kept else None


def ctas_of_activations(rows: int, layout: Layout) -> int:
    """Return the most CTAs of a launch of a kernel of activations. Predicates of variants compare it with a grid's limit."""
    known = _gradient_constants(layout)
    return cdiv(rows, known["BM"]) * known["FIRSTS"][-1]


def activate(
    z: torch.Tensor, bias: torch.Tensor | None, layout: Layout, eps: float, *, keep: bool
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Add the bias to products ``[M, N]`` and activate them.

    Returns:
        The packed result ``[M, pitch]``; 1 / norm of normalized heads, ``[M, norms]``; and the inputs of SiLU, ``[M, kept]``. The
        last two are ``None`` unless ``keep`` is set and the layout has such segments.
    """
    z = z.contiguous()
    rows, known = z.shape[0], _forward_constants(layout, keep)
    y, rstd, kept = empty_results(z, layout, keep=keep)
    bias = None if bias is None else bias.contiguous()
    Launch(
        kernels.activate_kernel, (cdiv(rows, known["BM"]) * known["FIRSTS"][-1],),
        z, bias, y, rstd, kept, rows, eps, **known, num_warps=_WARPS,
    ).run()  # fmt: skip
    return y, rstd, kept


def activation_gradients(
    dys: Sequence[torch.Tensor | None],
    y: torch.Tensor,
    rstd: torch.Tensor,
    kept: torch.Tensor,
    layout: Layout,
    *,
    sums: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return dz ``[M, gradient_pitch]``, N columns and zeros behind them, and the sums for the biases if they are wanted.

    The ``sums`` ``[biases]``, float32, are of elements of dz before they are rounded. ``gradient_pitch`` is N rounded up to a
    multiple of 8. ``dys`` has the gradient of each segment's result, or ``None`` if no gradient reaches it. ``y``, ``rstd`` and
    ``kept`` are what the forward pass of any variant saved (``Packed`` in ``autograd.py``); the last two have no elements if no
    segment needs them.
    """
    rows = y.shape[0]
    dz = y.new_empty(rows, layout.gradient_pitch)
    flat = tuple(
        [None if dy is None else inner_contiguous(dy.reshape(rows, width)) for dy, width in zip(dys, layout.widths, strict=True)]
    )
    known = _gradient_constants(layout)
    if len(known["WIDTHS"]) > len(flat):
        flat = (*flat, None)
    strides, tiles = tuple([0 if dy is None else dy.stride(0) for dy in flat]), cdiv(rows, known["BM"])
    parts = y.new_empty(tiles, layout.biases, dtype=torch.float32) if sums and layout.biases else None
    Launch(
        kernels.activation_gradients_kernel, (tiles * known["FIRSTS"][-1],),
        flat, strides, y, rstd, kept, dz, parts, rows, **known, num_warps=_WARPS,
    ).run()  # fmt: skip
    return dz, None if parts is None else parts.sum(0)
