"""Choice of the Hopper matrix product's configuration for ``swiglu``, and the partition of its k-blocks into work units.

Times in the comments are single runs on an H200 unless they say otherwise; ``docs/notebook/swiglu.md`` has their context.
``variants/hopper.py`` makes :class:`Formats` and asks :func:`configuration`. ``launch_hopper.py`` asks :func:`partition_of`,
:func:`reads_early` and :func:`tile_columns`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch

from onelaunch.kernels.common.layout import cdiv
from onelaunch.kernels.gemm_sm90.config import DRAM_BYTES, WIDEST, GemmConfig, Schedule

_NARROW = 128
"""Most rows of x in a tile that holds all rows of x and only few columns of h."""

_TILE_ROWS = (8, 16, 24, 32, 48, 64, 96, 128, 192, WIDEST)
"""Possible numbers of rows of x in a tile. A kernel is compiled for each one that a call needs."""


class Formats(NamedTuple):
    """Dtypes of a call's operands and of its result."""

    element: torch.dtype
    """dtype of x, and of the weights unless they are NVFP4."""
    result: torch.dtype
    """dtype of h."""
    nvfp4: bool = False
    """Flag that the weights are NVFP4."""

    def config(
        self, rows: int, columns: int = 64, split: int = 1, *, chunks: int = 1, schedule: Schedule = "stream_k"
    ) -> GemmConfig:
        """Return the configuration with tiles of ``rows`` rows of x and ``columns`` columns of h.

        Operand A is the tile's rows of both weights, operand B its rows of x.
        """
        # The epilogue collects a tile of 16-bit results in store_bytes, rounded up to whole KiB.
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
    """Return the roofline time of a k-block in microseconds, for ``rows`` rows of x in the call.

    It is the largest of three: reading the weights from HBM, loading the operands into shared memory, and the products.
    """
    read = config.a_rows * config.a_row_bytes / DRAM_BYTES / cdiv(rows, config.b_rows)  # tiles of the same columns read once
    return max(read, config.k_block_microseconds())


def _fixup_microseconds(config: GemmConfig) -> float:
    """Return the estimated cost, in microseconds, of a stream-K fix-up between two CTAs; it grows with the bytes of the sums.

    The estimate is from single runs of a prototype on an H200: 1 us with 8 rows and 64 columns, 10 us with 256 rows.
    """
    return 1.2 + config.b_rows * tile_columns(config) / 1860


_EARLY_ROWS = 64
"""Most rows of x for which it is faster to load weights before earlier launches have ended.

Single runs on an H200, in us with and without: 4.8 and 5.9 at 1x3072x1024, 30.8 and 31.2 at 1x4096x7168, 32.2 and 32.7 at M=64;
but 25.1 and 24.4 at 256x3072x4096.
"""

_UNALIGNED_MICROSECONDS = 2.5
"""Additional microseconds of the fix-up if units can begin anywhere in a tile.

The estimate is from the same runs as :func:`_fixup_microseconds`: 2 us at M=1, 3 us at M=512.
"""


class Partition(NamedTuple):
    """Partition of the k-blocks of all tiles into work units; ``scheduler.cuh`` computes a unit's k-blocks from it."""

    units: int
    """Number of work units, one for each CTA."""
    unit_granules: int
    """Granules of a unit; the first ``longer_units`` units have one granule more.

    It is 0 with the schedule ``persistent``, whose CTAs take tiles from a counter.
    """
    longer_units: int
    """Number of units with one granule more."""
    granule: int
    """k-blocks of a granule, which belong to one unit: 1, or all k-blocks of a tile."""
    splits_tiles: bool
    """Flag that a tile may belong to several units, which add their sums through global memory (stream-K fix-up).

    It is False for clusters that share tiles, since they exchange sums through shared memory.
    """
    microseconds: float
    """Estimated time of the longest unit and of the fix-up; 0 if there is no choice to make."""

    @property
    def longest(self) -> int:
        """Number of k-blocks of the longest unit."""
        return (self.unit_granules + (self.longer_units > 0)) * self.granule


@functools.lru_cache(maxsize=1024)
def choose_partition(tiles: int, k_blocks: int, multiprocessors: int, k_block: float, fixup: float) -> Partition:
    """Return the stream-K partition with the least estimated time.

    There are three candidates: whole tiles (data-parallel), equal parts of every tile (split-K), and one unit of equal length for
    every SM, which may begin anywhere in a tile (stream-K).

    Args:
        tiles: Number of tiles.
        k_blocks: Number of k-blocks of a tile.
        multiprocessors: Number of SMs.
        k_block: Time of a k-block in microseconds, from :func:`k_block_microseconds`.
        fixup: Time of a fix-up in microseconds, from :func:`_fixup_microseconds`.
    """
    rounds = cdiv(tiles, multiprocessors)
    units = cdiv(tiles, rounds)
    candidates = [Partition(units, *divmod(tiles, units), k_blocks, splits_tiles=False, microseconds=rounds * k_blocks * k_block)]
    parts = max((part for part in range(1, max(multiprocessors // tiles, 1) + 1) if k_blocks % part == 0), default=1)
    if parts > 1:
        time = k_blocks // parts * k_block + fixup
        candidates.append(Partition(tiles * parts, k_blocks // parts, 0, 1, splits_tiles=True, microseconds=time))
    total = tiles * k_blocks
    units = min(multiprocessors, total)
    time = cdiv(total, units) * k_block + fixup + _UNALIGNED_MICROSECONDS
    candidates.append(Partition(units, *divmod(total, units), 1, splits_tiles=True, microseconds=time))
    return min(candidates, key=lambda partition: partition.microseconds)


def partition_of(config: GemmConfig, shape: tuple[int, int, int], multiprocessors: int) -> Partition:
    """Return the partition of a call of ``shape`` (M, N, K) for the configuration's schedule; for stream-K, the best one."""
    rows, columns, channels = shape
    count, k_blocks = tile_count(config, rows, columns), cdiv(channels, config.k_block)
    if config.schedule == "persistent":
        return Partition(min(count, multiprocessors), 0, 0, k_blocks, splits_tiles=False, microseconds=0.0)
    if config.schedule == "split_k_cluster":
        return Partition(2 * count, cdiv(k_blocks, 2), 0, 1, splits_tiles=False, microseconds=0.0)
    return choose_partition(count, k_blocks, multiprocessors, k_block_microseconds(config, rows), _fixup_microseconds(config))


def reads_early(config: GemmConfig, partition: Partition, rows: int) -> bool:
    """Return whether constant weights should be loaded before earlier launches have ended.

    With NVFP4, only if all k-blocks of a CTA fit into the ring: otherwise the time is that of decoding, which began no earlier.
    Single runs on an H200, in us with and without: 14.9 and 14.1 at 1x4096x7168, 3.8 and 4.5 at 1x3072x1024.
    """
    return rows <= _EARLY_ROWS and (not config.nvfp4 or partition.longest <= config.stages)


def _tile_rows_for(rows: int, most: int = WIDEST) -> int:
    """Return the rows of x in a tile: the least of :data:`_TILE_ROWS` that holds all ``rows``, but at most ``most``."""
    return next((width for width in _TILE_ROWS if rows <= width <= most), most)


def _chunks_for(channels: int, most: int) -> int:
    """Return the chunks of 64 channels of an NVFP4 k-block, at most ``most``; K must be a multiple of a k-block."""
    return next(chunks for chunks in (4, 2, 1) if chunks <= most and channels % (64 * chunks) == 0)


def narrow_config(rows: int, channels: int, formats: Formats) -> GemmConfig:
    """Return the configuration for few rows of x, where the time is that of reading weights.

    Tiles are small and many, so that CTAs seldom have to share one. ``split`` consumer warpgroups take turns with k-blocks.
    Single runs on an H200, N=4096 K=7168, in us: at M=1 31.0 with a split of three and 31.5 with two; at M=64 32.9 and 32.5.
    With NVFP4 at M=1, 14.0 with four, 14.5 with three, 15.7 with two. With more rows there are no registers for four. On an H100,
    with NVFP4: at M=32 26.0 with two and k-blocks of four chunks, 27.7 with three and two chunks; at M=64 32.5 with tiles of 32
    columns, and 31.1 with 64 columns, which load half as much of x.
    """
    width = _tile_rows_for(rows, _NARROW)
    if not formats.nvfp4:
        return formats.config(width, 32, split=3 if width <= 16 else 2)
    if 48 < width <= 64:
        return formats.config(width, 64, chunks=_chunks_for(channels, 2))
    # most: largest number of chunks (64 channels each) of a k-block
    split, most = (4, 4) if width <= 16 else (2, 4) if width <= 32 else (2, 2) if width <= 48 else (2, 1)
    return formats.config(width, 32, split, chunks=_chunks_for(channels, most))


def wide_configs(rows: int, channels: int, formats: Formats) -> Iterator[GemmConfig]:
    """Yield configurations for many rows of x; the first has the most rows of x in a tile, and 64 columns."""
    # NVFP4 codes are decoded once for every tile of rows, so there should be few tiles of rows.
    most_rows = (256, 128) if formats.nvfp4 else (256, 128, 64)
    widths = [_tile_rows_for(rows)] if rows <= 64 else [_tile_rows_for(rows, most) for most in most_rows]
    for width in dict.fromkeys(widths):
        chunks = _chunks_for(channels, 4 if width <= 32 else 2 if width <= 128 else 1) if formats.nvfp4 else 1
        yield formats.config(width, 64, chunks=chunks)
        # Tiles of 96 columns have three consumer warpgroups, whose registers hold the sums of 128 rows of x at most.
        if width <= 128 and not formats.nvfp4:
            yield formats.config(width, 96)


def cluster_config(rows: int, channels: int, formats: Formats) -> GemmConfig | None:
    """Return a configuration in which a cluster splits the k-blocks of a tile (split-K), or None if it would not be faster.

    Its tiles are larger, so less of x is loaded per weight. Single runs on an H200, in us, with a cluster and with the best other
    configuration: 128x4096x7168 35.2 and 35.8 (narrow tiles), 256x3072x4096 24.3 and 24.8 (64 rows, 96 columns); with NVFP4 29.9
    and 34.7 at M=128, 49.5 and 51.0 at M=256. It is slower at other shapes, and in float8.
    """
    if not 64 < rows <= WIDEST or formats.element.itemsize != 2:
        return None
    if formats.nvfp4:
        chunks = _chunks_for(channels, 2 if rows <= _NARROW else 1)
        return formats.config(_tile_rows_for(rows), 64, chunks=chunks, schedule="split_k_cluster")
    return formats.config(_NARROW, 64 if rows <= _NARROW else 96, schedule="split_k_cluster")


_MIN_BUSY_SMS = 0.9
"""Fraction of the SMs that must have work if a cluster of two CTAs shares a tile."""

_REQUIRED_GAIN = 0.97
"""Fraction of the time of the first of :func:`wide_configs`; another must be estimated to take less than that."""


@functools.lru_cache(maxsize=4096)
def configuration(variant: str, shape: tuple[int, int, int], formats: Formats, multiprocessors: int) -> GemmConfig:
    """Return the configuration of the named variant for ``shape`` (M, N, K)."""
    rows, columns, channels = shape
    clustered = cluster_config(rows, channels, formats) if variant != "persistent" else None
    if clustered and _MIN_BUSY_SMS * multiprocessors <= 2 * tile_count(clustered, rows, columns) <= multiprocessors:
        return clustered
    if variant == "small_m":
        return narrow_config(rows, channels, formats)

    def microseconds(config: GemmConfig) -> float:
        if variant == "persistent":
            rounds = cdiv(tile_count(config, rows, columns), multiprocessors)
            return rounds * cdiv(channels, config.k_block) * k_block_microseconds(config, rows)
        return partition_of(config, shape, multiprocessors).microseconds

    first, *others = wide_configs(rows, channels, formats)
    best = min(others, key=microseconds, default=first)
    chosen = best if microseconds(best) < _REQUIRED_GAIN * microseconds(first) else first
    return replace(chosen, schedule="persistent" if variant == "persistent" else "stream_k")
