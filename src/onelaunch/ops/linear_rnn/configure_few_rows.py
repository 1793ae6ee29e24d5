"""Configuration of ``linear_rnn``'s kernel for few rows: tile sizes, and how a launch divides the weight.

``launch_few_rows.py`` asks for the configuration of a call, ``variants/few_rows.py`` for the most rows, and ``cost.py`` for the
partial sums that pass through memory. The kernel is ``kernels/few_rows.py``. All rates and times below are estimates for an H100,
made before the study ``040-decoding-step`` measured 1.4 to 1.7 times as long as they say (docs/notebook/linear_rnn.md).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from onelaunch.kernels.common.layout import cdiv, power_of_2

MOST_ROWS = 64
"""Most rows B T of a call: a CTA has all of them in one tile."""

MOST_COLUMNS = 1 << 24
"""Most columns D of x: offsets of :data:`MOST_ROWS` rows are 32-bit."""

_MOST_VECTOR_ROWS = 4
"""Most rows of float32 that are multiplied one by one, on CUDA cores.

Matrix units (tensor cores) pad rows to 16. This costs nothing in 16 bits, but float32 without TF32 has no matrix units, and pads
in vain.
"""

_FEWEST_COLUMNS = 16
"""Fewest columns of a slice. In 16 bits they are 32 bytes of each row of the weight: a sector, the least that L2 transfers."""

_WIDEST_SLICE = 64
"""Most columns of a slice."""

_TILE_ELEMENTS = 2048
"""Most elements of a tile of rows and columns. Each warp has sums of all of them: 64 registers per thread."""

_PART_BYTES = 64 << 10
"""Bytes of the weight that a slice must have for each part it is divided into.

An SM takes 64 KiB from L2 in 0.7 us at 90 GB/s. Adding parts takes about 1.1 us: a store, a counter and a load, each a trip to
L2.
"""

_BLOCK_BYTES = 16 << 10
"""Bytes of a block of the weight where rows are multiplied one by one."""

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
    """Blocks of the weight in a part."""
    parts: int
    """Parts of D (split-K); the CTA of a slice that ends last adds their sums."""
    slices: int
    """Slices of V."""
    warps: int
    """Warps of a CTA. Where matrix units multiply, each warp multiplies its own rows of every block."""
    stages: int
    """Stages of the loop over blocks, of which all but one are buffers of loads in flight; 1 for a single block."""

    @property
    def vector(self) -> bool:
        """Flag that rows are multiplied one by one, on CUDA cores."""
        return self.rows < 16

    @property
    def term_elements(self) -> int:
        """Number of partial sums that pass through memory; 0 for a single part."""
        return self.parts * self.slices * self.rows * self.columns if self.parts > 1 else 0


@functools.lru_cache(maxsize=4096)
def config_of(rows: int, width: int, channels: int, element_size: int, sms: int, shared_bytes: int) -> FewRowsConfig:
    """Return the configuration of a call.

    A slice has as many columns as the tile has rows, within 16 to 32, so that reading x again for every slice takes about as
    long as reading the weight, and more if there would be over 1.5 slices per SM. Slices that leave SMs idle and have at least
    twice :data:`_PART_BYTES` of weights are divided into parts. At D = V = 2048 in 16 bits on 132 SMs: 128 slices of 16 columns
    up to 16 rows, 64 slices of 32 columns in 2 parts beyond.

    Args:
        rows: Rows of x, B T.
        width: Columns of x, D.
        channels: Columns of the weight, V.
        element_size: Bytes of an element of x and the weight.
        sms: Number of SMs.
        shared_bytes: Shared memory that a CTA may use.
    """
    vector = element_size == 4 and rows <= _MOST_VECTOR_ROWS
    tile_rows = power_of_2(rows) if vector else max(16, power_of_2(rows))
    most_columns = min(_WIDEST_SLICE, _TILE_ELEMENTS // tile_rows)
    columns = min(max(_FEWEST_COLUMNS, tile_rows), most_columns)
    while columns < most_columns and 2 * cdiv(channels, columns) > 3 * sms:
        columns *= 2
    slices = cdiv(channels, columns)
    parts = max(1, min(sms // slices, width * columns * element_size // _PART_BYTES))
    warps = 8 if vector or (tile_rows <= 32 and element_size == 2) else 4
    if vector:
        inner, block_rows = _BLOCK_BYTES // (columns * element_size), 0  # a block of x is small beside one of the weight
    else:
        inner, block_rows = 64 if element_size == 4 else 128 if tile_rows == 64 else 256, tile_rows
    blocks = cdiv(cdiv(width, inner), parts)
    buffers = min(_IN_FLIGHT, shared_bytes - _RESERVED) // (inner * (columns + block_rows) * element_size)
    stages = 1 if blocks == 1 else 1 + min(blocks, max(buffers, 1), _MOST_STAGES - 1)
    return FewRowsConfig(tile_rows, columns, inner, blocks, cdiv(width, inner * blocks), slices, warps, stages)
