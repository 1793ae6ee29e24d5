"""Choices that the portable matrix products of several operations share: tiles for few rows, and matrix instructions.

Weights are the left operand there, as in :mod:`onelaunch.kernels.gemm.tiles`: the columns of a tile are its rows of weights.
"""

from __future__ import annotations

from onelaunch.kernels.common.layout import cdiv
from onelaunch.launch.launch import Mma

WGMMA_ROWS = 64
"""Rows of the left operand that WGMMA needs; with fewer, products are those of single warps."""

FEW_ROWS = 32
"""Number of rows up to which loading the weights takes the time."""

LEAST_COLUMNS = 32
"""Fewest columns of a tile: fewer would leave warps without a part of a product."""


def mma_of(columns: int) -> Mma:
    """Return the matrix instructions that products of a tile with so many columns must become; not for float32."""
    return Mma.SMALL if columns < WGMMA_ROWS else Mma.WIDEST


def columns_for(rows: int, columns: int, tile_rows: int, tile_columns: int, count: int) -> int:
    """Return the columns of a tile: ``tile_columns``, or fewer where rows are few and SMs would have no tile.

    Args:
        rows: Rows of the result.
        columns: Columns of the result.
        tile_rows: Rows of a tile.
        tile_columns: Most columns of a tile.
        count: Number of SMs.
    """
    while tile_rows <= FEW_ROWS and tile_columns > LEAST_COLUMNS and cdiv(rows, tile_rows) * cdiv(columns, tile_columns) < count:
        tile_columns //= 2
    return tile_columns
