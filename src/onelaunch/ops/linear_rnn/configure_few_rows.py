"""Configuration of ``linear_rnn``'s kernel for few rows: tile sizes, and how a launch divides the weight.

``launch_few_rows.py`` asks for the configuration of a call, ``variants/few_rows.py`` for the most rows, and ``cost.py`` for the
partial sums that pass through memory. The kernel is ``kernels/few_rows.py``.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from onelaunch.kernels.common.layout import cdiv, power_of_2

MOST_ROWS = 64
"""Most rows B T of a call: a CTA has all of them in one tile."""

_VECTOR_ROWS = {2: 1, 4: 4}
"""Most rows that are multiplied on CUDA cores, by the bytes of an element.

Matrix units pad rows to 16. For float32 without TF32 this padding is work of CUDA cores, for 16 bits it costs nothing.
"""

_FEWEST_COLUMNS = 16
"""Least columns of a slice. 16 columns of 16 bits are 32 bytes of a row of the weight, a sector of L2: less would waste traffic."""

_TILE_ELEMENTS = 2048
"""Most elements of a tile of rows and columns. Each warp has sums of all of them, 64 registers per thread."""

_PART_BYTES = 64 << 10
"""Bytes of the weight from which a slice is divided into parts of D.

An SM takes 64 KiB from L2 in 0.7 us at 90 GB/s, and adding parts takes about 1.1 us: a store, a counter and a load, each a trip
to L2. Both are estimates; nothing has been measured.
"""

_IN_FLIGHT = 128 << 10
"""Most bytes of x and the weight in the buffers of a CTA."""

_RESERVED = 24 << 10
"""Bytes of shared memory left beside the buffers, for changes of layout and sums across warps."""

_MOST_STAGES = 9
"""Most stages of a loop, counting the one that is multiplied: the loads of the others are code before the loop."""


@dataclass(frozen=True, slots=True)
class FewRowsConfig:
    """Tiles of the kernel for few rows, and the division of the weight among CTAs."""

    rows: int
    """Rows of the tile, BM: a power of 2, at least 16 where matrix units multiply."""
    columns: int
    """Columns of a slice, BN."""
    inner: int
    """Rows of a block of the weight, BK."""
    blocks: int
    """Blocks of a part."""
    parts: int
    """Parts of D; the CTA of a slice that ends last adds their sums."""
    slices: int
    """Slices of V."""
    warps: int
    """Warps of a CTA. Where matrix units multiply, each warp multiplies its own rows of every block."""
    stages: int
    """Stages of the loop over blocks, of which all but one are buffers of loads in flight; 1 for a single block."""

    @property
    def vector(self) -> bool:
        """Flag that CUDA cores multiply."""
        return self.rows < 16

    @property
    def term_elements(self) -> int:
        """Number of partial sums that pass through memory; 0 for a single part."""
        return self.parts * self.slices * self.rows * self.columns if self.parts > 1 else 0


@functools.lru_cache(maxsize=4096)
def config_of(rows: int, width: int, channels: int, element_size: int, sms: int, shared_bytes: int) -> FewRowsConfig:
    """Return the configuration of a call.

    A slice has as many columns as the tile has rows, at least 16 and at most 32 at 64 rows, so that reading x again for every
    slice takes about as long as reading the weight, and more if there would be over 1.5 slices per SM. Slices that leave SMs idle and have more than
    :data:`_PART_BYTES` of weights are divided into parts. At D = V = 2048 in 16 bits on 132 SMs: 128 slices of 16 columns up to
    16 rows, 64 slices of 32 columns in 2 parts beyond. None of this has been measured.

    Args:
        rows: Rows of x, B T.
        width: Columns of x, D.
        channels: Columns of the weight, V.
        element_size: Bytes of an element of x and the weight.
        sms: Number of SMs.
        shared_bytes: Shared memory that a CTA may use.
    """
    vector = rows <= _VECTOR_ROWS[element_size]
    tile_rows = power_of_2(rows) if vector else max(16, power_of_2(rows))
    most_columns = min(64, _TILE_ELEMENTS // tile_rows)
    columns = min(max(_FEWEST_COLUMNS, tile_rows), most_columns)
    while columns < most_columns and 2 * cdiv(channels, columns) > 3 * sms:
        columns *= 2
    slices = cdiv(channels, columns)
    parts = max(1, min(sms // slices, width * columns * element_size // _PART_BYTES))
    length = cdiv(width, parts)
    if vector and power_of_2(length) * columns * element_size <= _PART_BYTES:  # registers hold all of a part
        inner = max(16, power_of_2(length))
        warps = min(16, max(4, inner * columns * element_size // (128 * 32)))  # 128 bytes per thread
        return FewRowsConfig(tile_rows, columns, inner, 1, cdiv(width, inner), slices, warps, 1)
    if vector:
        inner, stage_rows = (16 << 10) // (columns * element_size), 0  # blocks of 16 KiB; a block of x is small beside it
    else:
        inner, stage_rows = (64 if element_size == 4 else 128 if tile_rows == 64 else 256), tile_rows
    blocks = cdiv(cdiv(width, inner), parts)
    buffers = min(_IN_FLIGHT, shared_bytes - _RESERVED) // (inner * (columns + stage_rows) * element_size)
    stages = min(blocks, max(buffers, 1), _MOST_STAGES - 1) + 1
    warps = 8 if vector or (tile_rows <= 32 and element_size == 2) else 4
    return FewRowsConfig(tile_rows, columns, inner, blocks, cdiv(width, inner * blocks), slices, warps, stages)
