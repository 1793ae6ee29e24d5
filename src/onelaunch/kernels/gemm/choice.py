"""Choices that the portable matrix products of several operations share: tiles of few rows, matrix instructions, and TF32.

The weights are the left operand of these products, as in :mod:`onelaunch.kernels.gemm.tiles`. So the columns of a tile of the
result are rows of the weights, the M dimension of the matrix instruction. ``ops/swiglu/launch.py`` and
``ops/output_chain/launch_prologue.py`` call :func:`mma_of` and :func:`columns_for`. All portable products of float32 ask
:func:`uses_tf32` or :func:`precision_of`.
"""

from __future__ import annotations

import torch

from onelaunch.device.hardware import compute_capability
from onelaunch.kernels.common.layout import cdiv
from onelaunch.launch.launch import Mma
from onelaunch.launch.tf32 import allows_tf32
from onelaunch.operation.requirements import interpreting

_WGMMA_ROWS = 64
"""Rows of the left operand that WGMMA needs. With fewer, Triton uses ``mma.sync``."""

_FEW_ROWS = 32
"""Number of rows of a tile up to which its time is that of loading the weights."""

LEAST_COLUMNS = 32
"""Fewest columns of a tile. With fewer, some warps would have no part of a product."""

_TF32_GENERATION = 8
"""First major compute capability of NVIDIA GPUs whose matrix units take TF32."""


def uses_tf32(operand: torch.Tensor) -> bool:
    """Return whether an operand is float32 and is multiplied in TF32: PyTorch's settings allow it, and its device can."""
    if operand.dtype is not torch.float32 or not allows_tf32() or interpreting():
        return False
    generation = compute_capability(operand.device)
    return generation is not None and generation >= _TF32_GENERATION


def precision_of(operand: torch.Tensor) -> str:
    """Return the constant PRECISION of kernels that multiply this operand: ``"tf32"``, or ``"ieee"`` for no rounding."""
    return "tf32" if uses_tf32(operand) else "ieee"


def mma_with(operand: torch.Tensor, otherwise: Mma) -> Mma:
    """Return the requirement on the matrix instructions of a product whose operands have the dtype of ``operand``.

    Args:
        operand: Operand of the product. float32 uses no matrix instructions, or with TF32 warp-level ones: operands are rounded
            in registers, and on Hopper Triton miscompiles some products by WGMMA (``launch/warp_mma.py``).
        otherwise: Requirement of 16-bit operands.
    """
    if operand.dtype is not torch.float32:
        return otherwise
    return Mma.WARP if uses_tf32(operand) else Mma.NONE


def mma_of(columns: int) -> Mma:
    """Return the requirement on the matrix instructions of a tile with this number of columns; the inspector checks it.

    On Hopper these are ``mma.sync`` (``SMALL``) for fewer than 64 columns, and WGMMA (``WIDEST``) from 64 on. The function is
    not for float32 products: see :func:`mma_with`.
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
