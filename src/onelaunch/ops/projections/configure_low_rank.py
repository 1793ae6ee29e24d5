"""Choice of the projections of few inputs whose gradients one launch computes, and of its tiles.

Such a projection is z = x W^T + bias with few columns of x, as the log-decays of ``gla_layer`` are made from 16. The gradients of
x, W and the bias are two matrix products and a sum. Each of them reads dz, the gradient of z, which is the largest tensor by far.
The kernel in ``kernels/low_rank_gradients.py`` reads it once. ``autograd.py`` and ``cost.py`` of this operation ask
:func:`takes_low_rank`, and so does ``gla_layer``, whose gradients equal those of its parts to the last bit.
``launch_low_rank.py`` and ``cost.py`` ask :func:`low_rank_tiles`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from onelaunch.kernels.common.layout import cdiv, power_of_2
from onelaunch.operation import remembered

MOST_INPUTS: Final = 32
"""Largest number D of columns of x.

The gradient of x has a float32 term for each row, column of x and 128 columns of dz, which is written and read once. In 16 bits
these are half the bytes of dz with D = 16, and as many as dz with 32. With 64 they would be as many as the two passes over dz
that are saved.
"""

MOST_COLUMNS: Final = 2**24 - 1
"""Largest number of columns of dz, and of elements from one row of dz or x to the next: offsets within a block are 32-bit."""

_CTAS = 1024
"""CTAs of a launch if there are enough rows; not measured yet.

It does not follow the number of SMs, so that sums are the same on every GPU. More CTAs write more terms for the gradient of W.
Fewer leave more rows to the CTA that adds up the terms of a group.
"""


def takes_low_rank(device: torch.device, dtype: torch.dtype, inputs: int, columns: int) -> bool:
    """Return whether one launch computes the gradients of a projection from ``inputs`` columns of x to ``columns`` columns of z.

    It depends on nothing else, so that all callers decide alike. Triton's interpreter multiplies bfloat16 wrongly.
    """
    if device.type != "cuda" and dtype is torch.bfloat16:
        return False
    return 1 <= inputs <= MOST_INPUTS and columns <= MOST_COLUMNS


@dataclass(frozen=True, slots=True)
class LowRankTiles:
    """Tiles of a launch: CTAs of a group share rows, and there is one per tile of columns."""

    rows: int
    """Rows of a block (BM)."""
    columns: int
    """Columns of a tile (BN)."""
    inputs: int
    """Columns of x in registers (BD)."""
    steps: int
    """Blocks of rows of a CTA, one after the other."""
    groups: int
    """Number of groups."""
    tiles: int
    """Number of tiles of columns."""
    terms_at_once: int
    """Terms that are loaded before they are added."""
    warps: int = 8

    def term_elements(self, rows: int, columns: int, *, bias: bool) -> int:
        """Return the number of float32 terms that a launch writes for all gradients of z with these rows and columns."""
        return self.tiles * rows * self.inputs + self.groups * columns * (self.inputs + bias)


@remembered
def low_rank_tiles(rows: int, columns: int, inputs: int, dtype: torch.dtype) -> LowRankTiles:
    """Return the tiles for dz ``[rows, columns]`` and ``inputs`` columns of x.

    They depend on sizes and dtype alone, so that equal calls add in the same order wherever they run. Larger ones spill: blocks
    of 64 rows with 32 inputs, and in float32, whose products are scalar, blocks of more than 32 rows or 64 columns.
    """
    padded = max(power_of_2(inputs), 16)
    wide = dtype is torch.float32
    block = 32 if wide or padded > 16 else 64
    tile = min(64 if wide else 128, max(power_of_2(columns), 16))
    tiles, blocks = cdiv(columns, tile), max(cdiv(rows, block), 1)
    steps = cdiv(blocks, max(_CTAS // tiles, 1))
    return LowRankTiles(block, tile, padded, steps, cdiv(blocks, steps), tiles, terms_at_once=128 // padded)
