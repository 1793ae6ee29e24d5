"""Choice of a configuration of the Hopper matrix product for ``projections``, and the cut of columns into tiles."""

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
"""Number of rows, and of columns, of the panel of a result that a warpgroup stores at once."""

LARGEST = 3e38
"""Limit of an activation's factor 1 / normalizer, so that it is finite in float32."""

FEW = 64
"""Number of remaining columns of a segment up to which a narrower product is compiled."""

STORE_BYTES = TILE_ROWS // WARPGROUP_ROWS * 2 * PANEL * ROW_BYTES
"""Bytes of shared memory for results that are being stored: two panels per warpgroup."""

MAX_STAGES = 8
"""Largest number of pipeline stages: tiles are wide, and more stages were not measured."""

END_MICROSECONDS = 2.0
"""Estimated time of a tile's epilogue with 256 columns, in microseconds, from that of the gate in ``swiglu``."""

K_BLOCK_MICROSECONDS = 0.03
"""Overhead of a k-block on top of its products or loads, in microseconds: fitted to single runs on an H200.

The runs had tiles of 128 and of 256 columns.
"""


def config_for(layout: Layout, columns: int, element: torch.dtype, multicast: Multicast) -> GemmConfig:
    """Return the configuration whose tiles have ``columns`` columns, each tile within one segment.

    Operand A has rows of x, operand B rows of the weight.
    """
    narrow = narrow_for(layout, columns)
    return GemmConfig(
        a_rows=TILE_ROWS, b_rows=columns, store_bytes=STORE_BYTES, schedule="static_persistent", element=element,
        result=element, narrow=narrow if narrow < columns else 0, multicast=multicast, max_stages=MAX_STAGES,
    )  # fmt: skip


def cluster_tiles(config: GemmConfig, rows: int, column_tiles: int) -> int:
    """Return the number of cluster tiles: tiles of ``rows`` rows by ``column_tiles`` columns, grouped as clusters multicast."""
    across, down = 2 if config.multicast == "a" else 1, 2 if config.multicast == "b" else 1
    return cdiv(rows, TILE_ROWS * down) * cdiv(column_tiles, across)


def k_block_microseconds(config: GemmConfig, columns: int) -> float:
    """Return the estimated time of a k-block with ``columns`` columns, in microseconds, with all SMs busy."""
    return config.k_block_microseconds(columns) + K_BLOCK_MICROSECONDS


def tile_columns(span: SegmentSpan, most: int) -> int:
    """Return the columns of a segment's tiles, at most ``most``; whole heads if they are normalized."""
    segment = span.segment
    return most // segment.head_size * segment.head_size if segment.activation == "l2norm" else most


def counts(layout: Layout, most: int) -> Iterator[int]:
    """Yield the number of columns of each tile, in order."""
    for span in layout.spans:
        step = tile_columns(span, most)
        yield from [min(step, span.segment.width - first) for first in range(0, span.segment.width, step)]


def narrow_for(layout: Layout, most: int) -> int:
    """Return the width of the narrow product for tiles of few columns; ``most`` if there are no such tiles."""
    few = [count for count in counts(layout, most) if count <= min(FEW, most - 8)]
    return cdiv(max(few), 8) * 8 if few else most


@remembered
def configuration(
    layout: Layout, rows: int, channels: int, element: torch.dtype, multiprocessors: int, multicast: Multicast
) -> GemmConfig:
    """Return the configuration for ``rows`` rows of x with the least estimated time."""
    least = max((span.segment.head_size for span in layout.spans if span.segment.activation == "l2norm"), default=8)
    choices = {width for width in range(64, WIDEST + 1, 32) if width >= least}
    choices |= {WIDEST // least * least, cdiv(least, 8) * 8} if least > 8 else set()
    if multicast == "b":  # each half must begin where TMA's swizzle pattern repeats, every 8 rows
        choices = {width for width in choices if width % 16 == 0}

    def microseconds(columns: int) -> float:
        config = config_for(layout, columns, element, multicast)
        narrow = config.narrow or columns
        found = list(counts(layout, columns))
        wide = sum(not count <= narrow < columns for count in found)
        k_blocks, clusters = cdiv(channels, config.k_block), multiprocessors // config.cluster
        each = k_blocks * k_block_microseconds(config, columns) + END_MICROSECONDS * columns / WIDEST
        small = k_blocks * k_block_microseconds(config, narrow) + END_MICROSECONDS * narrow / WIDEST
        rounds, all_rounds = (cdiv(cluster_tiles(config, rows, count), clusters) for count in (wide, len(found)))
        return rounds * each + (all_rounds - rounds) * small

    return config_for(layout, min(sorted(choices, reverse=True), key=microseconds), element, multicast)


def header(layout: Layout, columns: int) -> str:
    """Return the source of ``layout.cuh``: the kinds of segments, and the offsets of each tile of ``columns`` columns."""
    kinds: list[str] = []
    lines: list[str] = []
    begin = 0
    for span in layout.spans:
        segment, step = span.segment, tile_columns(span, columns)
        activation = ACTIVATIONS.index(segment.activation)
        head = segment.head_size if segment.activation == "l2norm" else 1
        own = [min(step, segment.width - first) for first in range(0, segment.width, step)]
        ragged = any(count % PANEL for count in own)
        facts = (activation, head, str(segment.bias).lower(), str(ragged).lower(), f"{min(1 / segment.normalizer, LARGEST)!r}f")
        kind = f"{{{', '.join(map(str, facts))}}}"
        if kind not in kinds:
            kinds.append(kind)
        heads = step // head if segment.activation == "l2norm" else 0
        where = (step, kinds.index(kind), span.row, segment.width, span.column, span.norm or 0, heads, span.kept or 0)
        numbers = ", ".join(map(str, (*where, span.bias or 0)))
        lines.append(f"  if (tile < {begin + len(own)}) return at(tile - {begin}, {numbers});")
        begin += len(own)
    names = ", ".join(activation.upper() for activation in ACTIVATIONS)
    body = "\n".join(lines)
    return f"""#pragma once

enum {{ {names} }};
struct Kind {{ int activation, head; bool bias, ragged; float by; }};
constexpr Kind KINDS_OF_SEGMENTS[] = {{{", ".join(kinds)}}};
constexpr int KIND_COUNT = {len(kinds)}, COLUMN_TILES = {begin};
constexpr int PITCH = {layout.pitch}, NORMS = {layout.norms}, KEPT = {layout.kept};  // columns of the results

// A tile of columns: its rows of the weight, and its offsets in the results. ``count`` is 0 behind the last tile.
struct Columns {{ int kind, row, count, column, norm, kept, bias; }};

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
