"""How the work of ``dual_gemm.cu`` is cut: tiles, who works on which of them, and what that is reckoned to take."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from onelaunch.kernels.common.layout import cdiv
from onelaunch.kernels.tma import COPIED_BYTES, FLOPS, ROW_BYTES, SHARED_BYTES

Schedule = Literal["runs", "tiles", "pairs"]
"""Whether programs take equal runs of all work, one whole tile after the other, or half of a tile's steps beside a neighbour."""

TABLE_BYTES = 256 * 256
"""Of what the codes in a byte stand for, in shared memory: see nvfp4.cuh."""

MOST_STAGES = 20

WIDEST = 256
"""Rows of x in a tile."""

NARROW = 128
"""The same where a tile holds all rows of x, and few weights."""

WIDTHS = (8, 16, 24, 32, 48, 64, 96, 128, 192, WIDEST)
"""Rows of x in a tile. A kernel is compiled for each that is met."""

READ_BYTES = 4.1e6 / 132
"""In a microsecond by a processor of an H200, all at work, from memory. Fitted to single runs of the kernel."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """A configuration of the kernel.

    Attributes:
        rows: of x.
        columns: of h, 32 for each warpgroup.
        split: warpgroups that share columns and take turns with steps of K.
        nvfp4: whether weights are codes of NVFP4, decoded on the way.
        chunks: times 128 bytes of each row of x are a step.
    """

    rows: int
    columns: int = 64
    split: int = 1
    nvfp4: bool = False
    chunks: int = 1

    @property
    def threads(self) -> int:
        """Of a program: the warpgroups that multiply, a warp that copies, and three that convert block scales."""
        return 128 * (1 + self.columns // 32 * self.split)

    @property
    def weight_bytes(self) -> Literal[32, 64, 128]:
        """Of a row of weights in a step."""
        if not self.nvfp4:
            return ROW_BYTES
        return 32 if self.chunks == 1 else 64 if self.chunks == 2 else 128

    @property
    def stage_bytes(self) -> int:
        """Shared memory of a step of K: weights and x. Block scales lie between the rows of the table."""
        return 2 * self.columns * self.weight_bytes + self.chunks * self.rows * ROW_BYTES

    @property
    def rest_bytes(self) -> int:
        """Shared memory beside the stages: the tile of h, sums that warpgroups hand over, barriers, and what codes stand for."""
        out = cdiv(self.rows * self.columns * 2, 1024) * 1024
        handed = (self.split - 1) * self.columns * 4 * self.rows // 2 * 4
        return out + handed + 32 * MOST_STAGES + 64 + (TABLE_BYTES if self.nvfp4 else 0)

    @property
    def stages(self) -> int:
        """Steps on their way at once: as many as there is room for, equally many for each warpgroup that takes turns."""
        most = MOST_STAGES
        if self.nvfp4:
            most = TABLE_BYTES // 2 // (2 * 2 * self.columns * 4 * self.chunks)  # room for 16-bit factors between its rows
        return min((SHARED_BYTES - self.rest_bytes) // self.stage_bytes, most, MOST_STAGES) // self.split * self.split

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a program."""
        return 1024 + self.stages * self.stage_bytes + self.rest_bytes

    def step(self, element: torch.dtype) -> int:
        """Channels of a step."""
        return self.chunks * ROW_BYTES // element.itemsize

    def step_microseconds(self, element: torch.dtype, rows: int) -> float:
        """What a step takes at least with so many rows of x: reading weights from memory, all that is copied, or products."""
        read = 2 * self.columns * self.weight_bytes / READ_BYTES / cdiv(rows, self.rows)  # one reads for all that need them
        products = 2 * 2 * self.columns * self.rows * self.step(element) / (FLOPS * (2 // element.itemsize))
        return max(read, self.stage_bytes / COPIED_BYTES, products)

    @property
    def sharing_microseconds(self) -> float:
        """What it costs that two programs share a tile, by the bytes of its sums.

        Reckoned from single runs of a prototype on an H200: 1 us with 8 rows and 64 columns, 10 with 256 rows.
        """
        return 1.2 + self.rows * self.columns / 1860

    def count(self, rows: int, columns: int) -> int:
        """Tiles of a result."""
        return cdiv(rows, self.rows) * cdiv(columns, self.columns)


EARLY_ROWS = 64
"""Of x, up to which reading weights early is faster: single runs on an H200, 4.8 us instead of 5.9 at 1x3072x1024, 30.8 instead
of 31.2 at 1x4096x7168, 32.2 instead of 32.7 at M=64; 25.1 instead of 24.4 at 256x3072x4096."""

ASTRIDE = 2.5
"""Microseconds that sharing costs more where runs begin anywhere in a tile, reckoned likewise: 2 at M=1, 3 at M=512."""


class Cut(NamedTuple):
    """How the steps of all tiles are handed out."""

    runs: int
    each: int
    """Grains of a run; one more in the first ``more`` of them."""
    more: int
    grain: int
    """Steps."""
    shares: bool
    """Whether a tile may belong to several runs."""
    microseconds: float
    """Of the longest run, and of sharing; 0 where there is no choice."""

    @property
    def longest(self) -> int:
        """Steps of the longest run."""
        return (self.each + (self.more > 0)) * self.grain


@functools.lru_cache(maxsize=1024)
def cut_for(tiles: int, steps: int, multiprocessors: int, step: float, sharing: float) -> Cut:
    """Whole tiles, equal parts of each, or one equal run for every processor: whichever is done first.

    ``step`` and ``sharing`` are microseconds of a :class:`Tiles`.
    """
    rounds = cdiv(tiles, multiprocessors)
    runs = cdiv(tiles, rounds)
    found = [Cut(runs, *divmod(tiles, runs), steps, shares=False, microseconds=rounds * steps * step)]
    parts = max((part for part in range(1, max(multiprocessors // tiles, 1) + 1) if steps % part == 0), default=1)
    if parts > 1:
        found.append(Cut(tiles * parts, steps // parts, 0, 1, shares=True, microseconds=steps // parts * step + sharing))
    units = tiles * steps
    runs = min(multiprocessors, units)
    found.append(Cut(runs, *divmod(units, runs), 1, shares=True, microseconds=cdiv(units, runs) * step + sharing + ASTRIDE))
    return min(found, key=lambda cut: cut.microseconds)


def cut_of(
    tiles: Tiles, shape: tuple[int, int, int], element: torch.dtype, multiprocessors: int, schedule: Schedule = "runs"
) -> Cut:
    """A call's work in tiles of this kind: the best cut into runs, or as the others hand it out. ``shape`` is (M, N, K)."""
    rows, columns, channels = shape
    count, steps = tiles.count(rows, columns), cdiv(channels, tiles.step(element))
    if schedule == "tiles":
        return Cut(min(count, multiprocessors), 0, 0, steps, shares=False, microseconds=0.0)
    if schedule == "pairs":
        return Cut(2 * count, cdiv(steps, 2), 0, 1, shares=False, microseconds=0.0)
    return cut_for(count, steps, multiprocessors, tiles.step_microseconds(element, rows), tiles.sharing_microseconds)


def reads_early(tiles: Tiles, cut: Cut, rows: int) -> bool:
    """Whether weights that may be read beside the end of earlier launches should be.

    With NVFP4 only if all of a program's steps are under way then: decoding takes the time, and began no earlier (14.9 us instead
    of 14.1 at 1x4096x7168, 3.8 instead of 4.5 at 1x3072x1024; single runs on an H200).
    """
    return rows <= EARLY_ROWS and (not tiles.nvfp4 or cut.longest <= tiles.stages)


def width_for(rows: int, most: int = WIDEST) -> int:
    """Rows of x in a tile: all of them if a tile may be so wide."""
    return next((width for width in WIDTHS if rows <= width <= most), most)


def chunks_for(channels: int, most: int) -> int:
    """Of a step beside NVFP4 weights, of which all steps are whole: 64 channels each."""
    return next(chunks for chunks in (4, 2, 1) if chunks <= most and channels % (64 * chunks) == 0)


def narrow_tiles(rows: int, channels: int, *, nvfp4: bool) -> Tiles:
    """For few rows of x, where the weights' way decides: many small tiles, so that programs need not share one.

    Single runs on an H200, N=4096 K=7168, us: at M=1 31.0 with three warpgroups in turn and 31.5 with two, at M=64 32.9 and 32.5;
    with NVFP4 at M=1 14.0 with four, 14.5 with three, 15.7 with two. More rows leave no registers for four.
    """
    width = width_for(rows, NARROW)
    if not nvfp4:
        return Tiles(width, 32, split=3 if width <= 16 else 2)
    split, most = (4, 4) if width <= 16 else (3, 2) if width <= 32 else (2, 2) if width <= 64 else (2, 1)
    return Tiles(width, 32, split, nvfp4=True, chunks=chunks_for(channels, most))


def wide_tiles(rows: int, channels: int, *, nvfp4: bool) -> Iterator[Tiles]:
    """For much work, the one that needs the fewest bytes first."""
    # where codes are decoded once for every tile of rows, there should be few
    widths = [width_for(rows)] if rows <= 64 else [width_for(rows, most) for most in ((256, 128) if nvfp4 else (256, 128, 64))]
    for width in dict.fromkeys(widths):
        chunks = chunks_for(channels, 4 if width <= 32 else 2 if width <= 128 else 1) if nvfp4 else 1
        yield Tiles(width, 64, nvfp4=nvfp4, chunks=chunks)
        if width <= 128 and not nvfp4:
            yield Tiles(width, 96)


def shared_tiles(rows: int, channels: int, *, nvfp4: bool) -> Tiles | None:
    """Of which two programs have half of the steps each, so that less of x is copied for every weight; by measurement.

    Single runs on an H200, us: 128x4096x7168 35.2 instead of 35.8 with narrow tiles, 256x3072x4096 24.3 instead of 24.8 with 64
    rows and 96 columns; with NVFP4 29.9 at M=128 instead of 34.7, 49.5 at M=256 instead of 51.0. Slower elsewhere, and in float8.
    """
    if not 64 < rows <= WIDEST:
        return None
    if nvfp4:
        return Tiles(width_for(rows), 64, nvfp4=True, chunks=chunks_for(channels, 2 if rows <= NARROW else 1))
    return Tiles(NARROW, 64 if rows <= NARROW else 96)


FULL = 0.9
"""Part of the processors that must have work where two share a tile."""

BETTER = 0.97
"""Tiles of less reuse must be reckoned to take less than this part of the time."""


@functools.lru_cache(maxsize=4096)
def configuration(
    variant: str, shape: tuple[int, int, int], element: torch.dtype, multiprocessors: int, *, nvfp4: bool
) -> tuple[Tiles, Schedule]:
    """Of the variant of this name, for ``shape`` (M, N, K)."""
    rows, columns, channels = shape
    shared = shared_tiles(rows, channels, nvfp4=nvfp4) if variant != "persistent" and element.itemsize == 2 else None
    if shared and FULL * multiprocessors <= 2 * shared.count(rows, columns) <= multiprocessors:
        return shared, "pairs"
    if variant == "small_m":
        return narrow_tiles(rows, channels, nvfp4=nvfp4), "runs"

    def microseconds(tiles: Tiles) -> float:
        if variant == "persistent":
            rounds = cdiv(tiles.count(rows, columns), multiprocessors)
            return rounds * cdiv(channels, tiles.step(element)) * tiles.step_microseconds(element, rows)
        return cut_of(tiles, shape, element, multiprocessors).microseconds

    first, *others = wide_tiles(rows, channels, nvfp4=nvfp4)
    best = min(others, key=microseconds, default=first)
    chosen = best if microseconds(best) < BETTER * microseconds(first) else first
    return chosen, "tiles" if variant == "persistent" else "runs"
