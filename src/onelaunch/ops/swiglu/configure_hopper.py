"""Choice of the Hopper matrix product's configuration for ``swiglu``, and how the k-blocks of a call are cut into work units."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch

from onelaunch.kernels.common.layout import cdiv
from onelaunch.kernels.gemm_sm90.config import DRAM_BYTES, WIDEST, GemmConfig, Schedule

NARROW = 128
"""Most rows of x in a tile that holds all rows of x, beside few columns of h."""

WIDTHS = (8, 16, 24, 32, 48, 64, 96, 128, 192, WIDEST)
"""Rows of x in a tile. A kernel is compiled for each that is met."""


class Formats(NamedTuple):
    """Types of a call's operands and of its result."""

    element: torch.dtype
    """dtype of x, and of the weights unless they are NVFP4."""
    result: torch.dtype
    nvfp4: bool = False
    """Whether the weights are NVFP4."""

    def config(
        self, rows: int, columns: int = 64, split: int = 1, *, chunks: int = 1, schedule: Schedule = "stream_k"
    ) -> GemmConfig:
        """Return the configuration whose tiles have so many rows of x and columns of h.

        Operand A has both weights' rows of a tile, operand B its rows of x.
        """
        return GemmConfig(
            a_rows=2 * columns, b_rows=rows, store_bytes=cdiv(rows * columns * 2, 1024) * 1024, schedule=schedule,
            element=self.element, result=self.result, split=split, nvfp4=self.nvfp4, chunks=chunks,
        )  # fmt: skip


def tile_columns(config: GemmConfig) -> int:
    """Return the columns of h in a tile."""
    return config.a_rows // 2


def tile_count(config: GemmConfig, rows: int, columns: int) -> int:
    """Return the number of tiles of a result ``[rows, columns]``."""
    return cdiv(rows, config.b_rows) * cdiv(columns, tile_columns(config))


def k_block_microseconds(config: GemmConfig, rows: int) -> float:
    """Return the least time of a k-block for so many rows of x: that of reading weights from memory, of loads or of products."""
    read = config.a_rows * config.a_row_bytes / DRAM_BYTES / cdiv(rows, config.b_rows)  # one tile reads for all that need them
    return max(read, config.k_block_microseconds())


def sharing_microseconds(config: GemmConfig) -> float:
    """Return what it costs that two CTAs share a tile, by the bytes of its sums.

    Estimated from single runs of a prototype on an H200: 1 us with 8 rows and 64 columns, 10 with 256 rows.
    """
    return 1.2 + config.b_rows * tile_columns(config) / 1860


EARLY_ROWS = 64
"""Rows of x up to which reading weights early is faster. Single runs on an H200: 4.8 us instead of 5.9 at 1x3072x1024, 30.8
instead of 31.2 at 1x4096x7168, 32.2 instead of 32.7 at M=64; 25.1 instead of 24.4 at 256x3072x4096."""

ASTRIDE = 2.5
"""Microseconds that sharing costs more where units begin anywhere in a tile, estimated likewise: 2 at M=1, 3 at M=512."""


class Cut(NamedTuple):
    """How the k-blocks of all tiles are handed out."""

    units: int
    """Work units, one for each CTA."""
    each: int
    """Grains of a unit; the first ``more`` units have one more."""
    more: int
    grain: int
    """k-blocks of a grain."""
    shares: bool
    """Whether a tile may belong to several units."""
    microseconds: float
    """Time of the longest unit, and of sharing; 0 where there is no choice."""

    @property
    def longest(self) -> int:
        """k-blocks of the longest unit."""
        return (self.each + (self.more > 0)) * self.grain


@functools.lru_cache(maxsize=1024)
def cut_for(tiles: int, k_blocks: int, multiprocessors: int, k_block: float, sharing: float) -> Cut:
    """Choose between whole tiles, equal parts of each, and one equal unit for every SM: whichever is done first.

    ``k_block`` and ``sharing`` are the microseconds of :func:`k_block_microseconds` and :func:`sharing_microseconds`.
    """
    rounds = cdiv(tiles, multiprocessors)
    units = cdiv(tiles, rounds)
    found = [Cut(units, *divmod(tiles, units), k_blocks, shares=False, microseconds=rounds * k_blocks * k_block)]
    parts = max((part for part in range(1, max(multiprocessors // tiles, 1) + 1) if k_blocks % part == 0), default=1)
    if parts > 1:
        time = k_blocks // parts * k_block + sharing
        found.append(Cut(tiles * parts, k_blocks // parts, 0, 1, shares=True, microseconds=time))
    total = tiles * k_blocks
    units = min(multiprocessors, total)
    time = cdiv(total, units) * k_block + sharing + ASTRIDE
    found.append(Cut(units, *divmod(total, units), 1, shares=True, microseconds=time))
    return min(found, key=lambda cut: cut.microseconds)


def cut_of(config: GemmConfig, shape: tuple[int, int, int], multiprocessors: int) -> Cut:
    """Cut a call of ``shape`` (M, N, K) by the configuration's schedule; for stream-K, choose the best cut."""
    rows, columns, channels = shape
    count, k_blocks = tile_count(config, rows, columns), cdiv(channels, config.k_block)
    if config.schedule == "persistent":
        return Cut(min(count, multiprocessors), 0, 0, k_blocks, shares=False, microseconds=0.0)
    if config.schedule == "split_k_cluster":
        return Cut(2 * count, cdiv(k_blocks, 2), 0, 1, shares=False, microseconds=0.0)
    return cut_for(count, k_blocks, multiprocessors, k_block_microseconds(config, rows), sharing_microseconds(config))


def reads_early(config: GemmConfig, cut: Cut, rows: int) -> bool:
    """Return whether constant weights should be read beside the end of earlier launches.

    With NVFP4 only if all of a CTA's k-blocks are under way then: decoding takes the time, and began no earlier (14.9 us instead
    of 14.1 at 1x4096x7168, 3.8 instead of 4.5 at 1x3072x1024; single runs on an H200).
    """
    return rows <= EARLY_ROWS and (not config.nvfp4 or cut.longest <= config.stages)


def width_for(rows: int, most: int = WIDEST) -> int:
    """Return the rows of x in a tile: all of them if a tile may be so wide."""
    return next((width for width in WIDTHS if rows <= width <= most), most)


def chunks_for(channels: int, most: int) -> int:
    """Return the chunks of 64 channels of a k-block beside NVFP4 weights, where all k-blocks must be whole."""
    return next(chunks for chunks in (4, 2, 1) if chunks <= most and channels % (64 * chunks) == 0)


def narrow_config(rows: int, channels: int, formats: Formats) -> GemmConfig:
    """Return the configuration for few rows of x, where reading weights decides: many small tiles, so that no CTAs share one.

    Single runs on an H200, N=4096 K=7168, us: at M=1 31.0 with three warpgroups in turn and 31.5 with two, at M=64 32.9 and 32.5;
    with NVFP4 at M=1 14.0 with four, 14.5 with three, 15.7 with two. More rows leave no registers for four.
    """
    width = width_for(rows, NARROW)
    if not formats.nvfp4:
        return formats.config(width, 32, split=3 if width <= 16 else 2)
    split, most = (4, 4) if width <= 16 else (3, 2) if width <= 32 else (2, 2) if width <= 64 else (2, 1)
    return formats.config(width, 32, split, chunks=chunks_for(channels, most))


def wide_configs(rows: int, channels: int, formats: Formats) -> Iterator[GemmConfig]:
    """Yield configurations for much work, the one that loads the fewest bytes first."""
    # where codes are decoded once for every tile of rows, there should be few
    most_rows = (256, 128) if formats.nvfp4 else (256, 128, 64)
    widths = [width_for(rows)] if rows <= 64 else [width_for(rows, most) for most in most_rows]
    for width in dict.fromkeys(widths):
        chunks = chunks_for(channels, 4 if width <= 32 else 2 if width <= 128 else 1) if formats.nvfp4 else 1
        yield formats.config(width, 64, chunks=chunks)
        if width <= 128 and not formats.nvfp4:
            yield formats.config(width, 96)


def shared_config(rows: int, channels: int, formats: Formats) -> GemmConfig | None:
    """Return a configuration whose clusters split the k-blocks of a tile, so that less of x is loaded for every weight.

    Single runs on an H200, us: 128x4096x7168 35.2 instead of 35.8 with narrow tiles, 256x3072x4096 24.3 instead of 24.8 with 64
    rows and 96 columns; with NVFP4 29.9 at M=128 instead of 34.7, 49.5 at M=256 instead of 51.0. Slower elsewhere, and in float8.
    """
    if not 64 < rows <= WIDEST or formats.element.itemsize != 2:
        return None
    if formats.nvfp4:
        chunks = chunks_for(channels, 2 if rows <= NARROW else 1)
        return formats.config(width_for(rows), 64, chunks=chunks, schedule="split_k_cluster")
    return formats.config(NARROW, 64 if rows <= NARROW else 96, schedule="split_k_cluster")


FULL = 0.9
"""Part of the SMs that must have work where two CTAs share a tile."""

BETTER = 0.97
"""Configurations of less reuse must be estimated to take less than this part of the time."""


@functools.lru_cache(maxsize=4096)
def configuration(variant: str, shape: tuple[int, int, int], formats: Formats, multiprocessors: int) -> GemmConfig:
    """Return the configuration of the variant of this name for ``shape`` (M, N, K)."""
    rows, columns, channels = shape
    shared = shared_config(rows, channels, formats) if variant != "persistent" else None
    if shared and FULL * multiprocessors <= 2 * tile_count(shared, rows, columns) <= multiprocessors:
        return shared
    if variant == "small_m":
        return narrow_config(rows, channels, formats)

    def microseconds(config: GemmConfig) -> float:
        if variant == "persistent":
            rounds = cdiv(tile_count(config, rows, columns), multiprocessors)
            return rounds * cdiv(channels, config.k_block) * k_block_microseconds(config, rows)
        return cut_of(config, shape, multiprocessors).microseconds

    first, *others = wide_configs(rows, channels, formats)
    best = min(others, key=microseconds, default=first)
    chosen = best if microseconds(best) < BETTER * microseconds(first) else first
    return replace(chosen, schedule="persistent" if variant == "persistent" else "stream_k")
