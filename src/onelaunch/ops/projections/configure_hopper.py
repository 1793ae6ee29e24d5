"""Choice of a configuration of the Hopper matrix product for ``projections``, and the cut of columns into tiles.

Columns are those of the product x W^T, and so rows of the packed weight W. Each segment is cut on its own. Its last tile may
have few columns. Such tiles use a second, narrower WGMMA instead of the one for ``columns`` columns. They are called narrow, the
others wide. A kernel has one width for each of the two, since the N dimension of WGMMA is fixed when it is compiled.
``launch_hopper.py`` calls it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch

from onelaunch.kernels.common.layout import cdiv
from onelaunch.kernels.gemm_sm90.config import WARPGROUP_ROWS, WIDEST, GemmConfig, Multicast
from onelaunch.kernels.tma import ROW_BYTES
from onelaunch.operation import remembered
from onelaunch.ops.projections.layout import ACTIVATIONS, Layout, SegmentSpan

TILE_ROWS: Final = 128
"""Number of rows of x in a tile: 64 per warpgroup."""

PANEL: Final = 64
"""Number of rows, and of columns, of a panel: the part of a tile's results that a warpgroup stores with one TMA store."""

_LARGEST = 3e38
"""Limit of an activation's factor 1 / normalizer, so that it is finite in float32."""

FEW = 64
"""Most columns of a segment's last tile for which a narrower WGMMA is compiled."""

STORE_BYTES = TILE_ROWS // WARPGROUP_ROWS * 2 * PANEL * ROW_BYTES
"""Bytes of shared memory for results that are being stored: two panels per warpgroup."""

_MAX_STAGES = 8
"""Largest number of pipeline stages: tiles are wide, and more stages were not measured."""

_END_MICROSECONDS = 2.0
"""Estimated time of a tile's epilogue with 256 columns, in microseconds, from that of the gate in ``swiglu``."""

_K_BLOCK_MICROSECONDS = 0.03
"""Overhead of a k-block on top of its products or loads, in microseconds: fitted to single runs on an H200.

The runs had tiles of 128 and of 256 columns.
"""


def config_for(layout: Layout, columns: int, element: torch.dtype, multicast: Multicast) -> GemmConfig:
    """Return the configuration whose tiles have ``columns`` columns, each tile within one segment.

    Operand A has rows of x, operand B rows of the weight.
    """
    narrow = _narrow_for(layout, columns)
    return GemmConfig(
        a_rows=TILE_ROWS, b_rows=columns, store_bytes=STORE_BYTES, schedule="static_persistent", element=element,
        result=element, narrow=narrow if narrow < columns else 0, multicast=multicast, max_stages=_MAX_STAGES,
    )  # fmt: skip


def cluster_tiles(config: GemmConfig, rows: int, column_tiles: int) -> int:
    """Return the number of cluster tiles of a result with ``rows`` rows and ``column_tiles`` tiles beside each other.

    A cluster tile is what a cluster computes at a time: one tile, or with multicast two that have one operand in common.
    """
    across, down = 2 if config.multicast == "a" else 1, 2 if config.multicast == "b" else 1
    return cdiv(rows, TILE_ROWS * down) * cdiv(column_tiles, across)


def k_block_microseconds(config: GemmConfig, columns: int) -> float:
    """Return the estimated time of a k-block with ``columns`` columns, in microseconds, with all SMs busy."""
    return config.k_block_microseconds(columns) + _K_BLOCK_MICROSECONDS


def tile_columns(span: SegmentSpan, most: int) -> int:
    """Return the columns of a segment's tiles, at most ``most``; whole heads if they are normalized."""
    segment = span.segment
    return most // segment.head_size * segment.head_size if segment.activation == "l2norm" else most


def counts(layout: Layout, most: int) -> Iterator[int]:
    """Yield the number of columns of each tile, in the order of the weight's rows; no tile has more than ``most``."""
    for span in layout.spans:
        step = tile_columns(span, most)
        yield from [min(step, span.segment.width - first) for first in range(0, span.segment.width, step)]


def _narrow_for(layout: Layout, most: int) -> int:
    """Return the columns of the narrower WGMMA for tiles of few columns; ``most`` if there are no such tiles.

    It is a multiple of 8, as the N dimension of WGMMA, and less than ``most``.
    """
    few = [count for count in counts(layout, most) if count <= min(FEW, most - 8)]
    return cdiv(max(few), 8) * 8 if few else most


@remembered
def configuration(
    layout: Layout, rows: int, channels: int, element: torch.dtype, multiprocessors: int, multicast: Multicast
) -> GemmConfig:
    """Return the configuration for ``rows`` rows of x with the least estimated time.

    The estimate: in a round, each cluster computes one cluster tile. Rounds of wide tiles are counted first, and the remaining
    rounds as narrow tiles. A tile takes the time of its k-blocks and that of its epilogue, which is proportional to its columns.
    """
    # A tile must hold the longest normalized head. Two more widths are tried: the most such heads that fit, and one such head.
    least = max((span.segment.head_size for span in layout.spans if span.segment.activation == "l2norm"), default=8)
    choices = {width for width in range(64, WIDEST + 1, 32) if width >= least}
    choices |= {WIDEST // least * least, cdiv(least, 8) * 8} if least > 8 else set()
    if multicast == "b":  # each half must begin where TMA's swizzle pattern repeats, every 8 rows
        choices = {width for width in choices if width % 16 == 0}

    def microseconds(columns: int) -> float:
        config = config_for(layout, columns, element, multicast)
        narrow = config.narrow or columns
        tile_counts = list(counts(layout, columns))
        wide_tiles = sum(not count <= narrow < columns for count in tile_counts)  # without narrower WGMMAs, all are wide
        k_blocks, clusters = cdiv(channels, config.k_block), multiprocessors // config.cluster
        wide_time = k_blocks * k_block_microseconds(config, columns) + _END_MICROSECONDS * columns / WIDEST
        narrow_time = k_blocks * k_block_microseconds(config, narrow) + _END_MICROSECONDS * narrow / WIDEST
        numbers = (wide_tiles, len(tile_counts))
        wide_rounds, all_rounds = (cdiv(cluster_tiles(config, rows, number), clusters) for number in numbers)
        return wide_rounds * wide_time + (all_rounds - wide_rounds) * narrow_time

    # Sorted, so that the widest tiles win if estimates are equal.
    return config_for(layout, min(sorted(choices, reverse=True), key=microseconds), element, multicast)


def header(layout: Layout, columns: int) -> str:
    """Return the source of ``layout.cuh``: the kinds of segments, and the offsets of each tile of ``columns`` columns.

    A kind is what the epilogue is compiled for, so that segments of the same kind share code. The file is included by
    ``operands/segments.cuh`` and used by ``epilogue/segments.cuh`` of :mod:`onelaunch.kernels.gemm_sm90`.
    """
    kinds: list[str] = []
    lines: list[str] = []
    begin = 0  # index of the segment's first tile
    for span in layout.spans:
        segment, step = span.segment, tile_columns(span, columns)
        activation = ACTIVATIONS.index(segment.activation)
        head = segment.head_size if segment.activation == "l2norm" else 1
        tile_counts = [min(step, segment.width - first) for first in range(0, segment.width, step)]
        ragged = any(count % PANEL for count in tile_counts)  # some tile does not consist of whole panels
        fields = (activation, head, str(segment.bias).lower(), str(ragged).lower(), f"{min(1 / segment.normalizer, _LARGEST)!r}f")
        kind = f"{{{', '.join(map(str, fields))}}}"
        if kind not in kinds:
            kinds.append(kind)
        heads = step // head if segment.activation == "l2norm" else 0
        offsets = (step, kinds.index(kind), span.row, segment.width, span.column, span.norm or 0, heads, span.kept or 0)
        numbers = ", ".join(map(str, (*offsets, span.bias or 0)))
        lines.append(f"  if (tile < {begin + len(tile_counts)}) return at(tile - {begin}, {numbers});")
        begin += len(tile_counts)
    names = ", ".join(activation.upper() for activation in ACTIVATIONS)
    body = "\n".join(lines)
    return f"""#pragma once

enum {{ {names} }};
// Properties of a segment that the epilogue is compiled for. head: columns of a normalized head, else 1. bias: it has one.
// ragged: some of its tiles do not consist of whole panels. by: the log-sigmoid is multiplied by it, 1 / normalizer.
struct Kind {{ int activation, head; bool bias, ragged; float by; }};
constexpr Kind KINDS_OF_SEGMENTS[] = {{{", ".join(kinds)}}};
constexpr int KIND_COUNT = {len(kinds)}, COLUMN_TILES = {begin};
constexpr int PITCH = {layout.pitch}, NORMS = {layout.norms}, KEPT = {layout.kept};  // columns of the results

// A tile of columns: its kind, its first row of the weight, its number of columns (0 behind the last tile), and its offsets:
// first column of y, of rstd and of the saved pre-activations, and first element of the bias.
struct Columns {{ int kind, row, count, column, norm, kept, bias; }};

// Return tile number `tile` of a segment, whose tiles have `step` columns and `heads` normalized heads.
__device__ __forceinline__ Columns at(
    int tile, int step, int kind, int row, int width, int column, int norm, int heads, int kept, int bias) {{
  const int first = tile * step;
  return {{kind, row + first, min(step, width - first), column + first, norm + tile * heads, kept + first, bias + first}};
}}

__device__ __forceinline__ Columns columns_of(int tile) {{
{body}
  return {{0, {layout.rows}, 0, 0, 0, 0, 0}};
}}
"""
