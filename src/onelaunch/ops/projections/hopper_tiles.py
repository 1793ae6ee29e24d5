"""How the columns of ``wide_gemm.cu`` are cut into tiles, and what the kernel is told of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from onelaunch.kernels.common.layout import cdiv
from onelaunch.kernels.tma import COPIED_BYTES, FLOPS, ROW_BYTES, SHARED_BYTES
from onelaunch.operation import remembered
from onelaunch.ops.projections.layout import ACTIVATIONS, Layout, Place

BLOCK_M: Final = 128
"""Rows of x in a tile: 64 of each warpgroup."""

STEP: Final = 64
"""Channels."""

PANEL: Final = 64
"""Rows, and columns, of a result that a warpgroup sends at once."""

LARGEST = 3e38
"""In float32."""

WIDEST: Final = 256
"""Columns of a product."""

FEW = 64
"""Columns left of a segment for which narrower products are compiled."""

OUT_BYTES = 2 * 2 * 64 * ROW_BYTES
"""For results on their way out: two pieces of 64 rows and 64 columns of each warpgroup."""

MOST_STAGES = 8

ENDS = 2.0
"""Microseconds of a tile's end, of 256 columns: reckoned by what a gate takes in swiglu."""

STEPS = 0.03
"""Microseconds of a step beside its products or copies: fitted to single runs on an H200, of 128 and 256 columns."""

Shared: TypeAlias = Literal["nothing", "x", "weight"]
"""What the two programs of a cluster copy half by half, to both."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """A configuration of the kernel.

    Attributes:
        columns: of a tile: as many as a product has.
        narrow: of a product where no more columns are left of a segment; ``columns`` if that is nowhere.
        shared: what two programs have in common; they are a cluster then.
    """

    columns: int
    narrow: int
    shared: Shared = "nothing"

    @property
    def cluster(self) -> int:
        """Programs that run side by side."""
        return 1 if self.shared == "nothing" else 2

    @property
    def unit_rows(self) -> int:
        """Tiles of rows of a program, or of a cluster."""
        return 2 if self.shared == "weight" else 1

    @property
    def unit_columns(self) -> int:
        """Tiles of columns of the same."""
        return 2 if self.shared == "x" else 1

    def units(self, rows: int, tiles: int) -> int:
        """Of so many rows of x and tiles of columns."""
        return cdiv(rows, BLOCK_M * self.unit_rows) * cdiv(tiles, self.unit_columns)

    @property
    def threads(self) -> int:
        """Of a program: two warpgroups that multiply, and a warp that copies."""
        return 3 * 128

    @property
    def stage_bytes(self) -> int:
        """Shared memory of a step: x and weights."""
        return (BLOCK_M + self.columns) * ROW_BYTES

    @property
    def stages(self) -> int:
        """Steps on their way at once."""
        return min((SHARED_BYTES - OUT_BYTES - 16 * MOST_STAGES) // self.stage_bytes, MOST_STAGES)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a program."""
        return 1024 + self.stages * self.stage_bytes + OUT_BYTES + 16 * self.stages

    def step_microseconds(self, columns: int) -> float:
        """What a step takes with products of so many columns, all processors at work."""
        products = 2 * BLOCK_M * columns * STEP / FLOPS
        return max(products, (BLOCK_M + columns) * ROW_BYTES / COPIED_BYTES) + STEPS


def taken(place: Place, most: int) -> int:
    """Columns of a segment's tiles where a product has ``most``: whole heads where these are normalized."""
    segment = place.segment
    return most // segment.head_size * segment.head_size if segment.activation == "l2norm" else most


def counts(layout: Layout, most: int) -> Iterator[int]:
    """Columns of each tile, in order."""
    for place in layout.places:
        step = taken(place, most)
        yield from [min(step, place.segment.width - first) for first in range(0, place.segment.width, step)]


def narrow_for(layout: Layout, most: int) -> int:
    """The width of products for the tiles of few columns, if there are such."""
    few = [count for count in counts(layout, most) if count <= min(FEW, most - 8)]
    return cdiv(max(few), 8) * 8 if few else most


@remembered
def tiles_for(layout: Layout, rows: int, channels: int, multiprocessors: int, shared: Shared) -> Tiles:
    """The tiles for ``rows`` rows of x: those that are reckoned to be done first."""
    least = max((place.segment.head_size for place in layout.places if place.segment.activation == "l2norm"), default=8)
    choices = {width for width in range(64, WIDEST + 1, 32) if width >= least}
    choices |= {WIDEST // least * least, cdiv(least, 8) * 8} if least > 8 else set()
    if shared == "weight":  # halves lie where the copy engine's pattern begins anew, every 8 rows
        choices = {width for width in choices if width % 16 == 0}

    def microseconds(columns: int) -> float:
        tiles = Tiles(columns, narrow_for(layout, columns), shared)
        found = list(counts(layout, columns))
        wide = sum(not count <= tiles.narrow < columns for count in found)
        steps, programs = cdiv(channels, STEP), multiprocessors // tiles.cluster
        each = steps * tiles.step_microseconds(columns) + ENDS * columns / WIDEST
        small = steps * tiles.step_microseconds(tiles.narrow) + ENDS * tiles.narrow / WIDEST
        rounds, all_rounds = (cdiv(tiles.units(rows, count), programs) for count in (wide, len(found)))
        return rounds * each + (all_rounds - rounds) * small

    best = min(sorted(choices, reverse=True), key=microseconds)
    return Tiles(best, narrow_for(layout, best), shared)


def header(layout: Layout, tiles: Tiles) -> str:
    """The text of ``segments.cuh``: the kinds of segments that there are, and where each tile of columns lies."""
    kinds: list[str] = []
    lines: list[str] = []
    begin = 0
    for place in layout.places:
        segment, step = place.segment, taken(place, tiles.columns)
        activation = ACTIVATIONS.index(segment.activation)
        head = segment.head_size if segment.activation == "l2norm" else 1
        own = [min(step, segment.width - first) for first in range(0, segment.width, step)]
        ragged = any(count % PANEL for count in own)
        facts = (activation, head, str(segment.bias).lower(), str(ragged).lower(), f"{min(1 / segment.normalizer, LARGEST)!r}f")
        kind = f"{{{', '.join(map(str, facts))}}}"
        if kind not in kinds:
            kinds.append(kind)
        heads = step // head if segment.activation == "l2norm" else 0
        where = (step, kinds.index(kind), place.row, segment.width, place.column, place.norm or 0, heads, place.kept or 0)
        numbers = ", ".join(map(str, (*where, place.bias or 0)))
        lines.append(f"  if (tile < {begin + len(own)}) return at(tile - {begin}, {numbers});")
        begin += len(own)
    names = ", ".join(activation.upper() for activation in ACTIVATIONS)
    body = "\n".join(lines)
    return f"""#pragma once

enum {{ {names} }};
struct Kind {{ int activation, head; bool bias, ragged; float by; }};
constexpr Kind KINDS_OF_SEGMENTS[] = {{{", ".join(kinds)}}};
constexpr int KIND_COUNT = {len(kinds)}, COLUMN_TILES = {begin};
constexpr int PITCH = {layout.pitch}, NORMS = {layout.norms}, KEPT = {layout.kept};  // columns of what is written

// A tile of columns: rows of the weight, and where they lie in what is written. ``count`` is 0 behind the last one.
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
