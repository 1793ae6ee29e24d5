"""Tile choices that the portable matrix products of several operations share: tiles of few rows, and matrix instructions.

The weights are the left operand of these products, as in :mod:`onelaunch.kernels.gemm.tiles`. So the columns of a tile of the
result are rows of the weights, the M dimension of the matrix instruction. ``ops/swiglu/launch.py`` and
``ops/output_chain/launch_prologue.py`` call these functions.
"""

from __future__ import annotations

from onelaunch.kernels.common.layout import cdiv
from onelaunch.launch.launch import Mma

_WGMMA_ROWS = 64
"""Rows of the left operand that WGMMA needs. With fewer, Triton uses ``mma.sync``."""

_FEW_ROWS = 32
"""Number of rows of a tile up to which its time is that of loading the weights."""

LEAST_COLUMNS = 32
"""Fewest columns of a tile. With fewer, some warps would have no part of a product."""


def mma_of(columns: int) -> Mma:
    """Return the requirement on the matrix instructions of a tile with this number of columns; the inspector checks it.

    On Hopper these are ``mma.sync`` (``SMALL``) for fewer than 64 columns, and WGMMA (``WIDEST``) from 64 on. The function is
    not for float32 products, for which no matrix instructions are required.
    """
    return Mma.SMALL if columns < _WGMMA_ROWS else Mma.WIDEST


def columns_for(rows: int, columns: int, tile_rows: int, tile_columns: int, count: int) -> int:
    """Return the columns of a tile: ``tile_columns``, or fewer if a tile has few rows and some SMs would have no tile.

    Args:
        rows: Rows of the result.
        columns: Columns of the result.
        tile_rows: Rows of a tile.
        tile_columns: Most columns of a tile.
        count: Number of SMs.
    """
    while tile_rows <= _FEW_ROWS and tile_columns > LEAST_COLUMNS and cdiv(rows, tile_rows) * cdiv(columns, tile_columns) < count:
        tile_columns //= 2
    return tile_columns
