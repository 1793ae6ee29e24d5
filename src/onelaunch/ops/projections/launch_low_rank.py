"""Launch of the kernel that computes all gradients of a projection of few inputs: :func:`low_rank_gradients`.

``autograd.py`` calls it in the backward pass of all own variants, and ``gla_layer`` for its log-decays, both where
:func:`~onelaunch.ops.projections.configure_low_rank.takes_low_rank` allows it.
"""

from __future__ import annotations

from typing import Any

import torch

from onelaunch.device.hardware import is_hip
from onelaunch.kernels.common.layout import inner_contiguous
from onelaunch.kernels.gemm.choice import mma_with, precision_of
from onelaunch.launch.launch import Launch, Mma
from onelaunch.launch.workspace import counters
from onelaunch.ops.projections.configure_low_rank import MOST_COLUMNS, LowRankTiles, low_rank_tiles
from onelaunch.ops.projections.kernels.low_rank_gradients import low_rank_gradients_kernel

_REGISTERS = 128
"""Limit on registers per thread, so that two CTAs of 256 threads fit on an SM.

Kernels whose rows are not aligned load single elements, and would spill under this limit. They have none.
"""


def low_rank_gradients(
    dz: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    wants: tuple[bool, bool, bool],
    into: torch.Tensor | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Return the gradients of x, the weight and a bias of every column, of z = x W^T + bias; ``None`` for those not wanted.

    Args:
        dz: Gradient of z, ``[M, N]`` float16, bfloat16 or float32, with any strides.
        x: ``[M, D]``, dtype of dz, with any strides.
        weight: W, ``[N, D]``, dtype of dz, with any strides.
        wants: Flags for the three gradients; at least one is set.
        into: Memory for the gradient of x, ``[M, D]``, dtype of dz, its columns next to each other; by default a new tensor.

    Returns:
        Gradients ``[M, D]``, ``[N, D]`` and ``[N]``, dtype of dz. All terms are added in float32, in an order that depends on the
        sizes and the dtype alone, and the sums are rounded once.
    """
    wants_x, wants_weight, wants_bias = wants
    (rows, columns), inputs = dz.shape, x.shape[1]
    dz, x, weight = _addressable(dz), _addressable(x), weight.contiguous()
    tiles = low_rank_tiles(rows, columns, inputs, dz.dtype)
    dx = (dz.new_empty(rows, inputs) if into is None else into) if wants_x else None
    dweight = dz.new_empty(columns, inputs) if wants_weight else None
    dbias = dz.new_empty(columns) if wants_bias else None
    shapes = (
        (tiles.tiles, rows, tiles.inputs) if wants_x else None,
        (tiles.groups, columns, tiles.inputs) if wants_weight else None,
        (tiles.groups, columns) if wants_bias else None,
    )
    terms = [None if shape is None else dz.new_empty(shape, dtype=torch.float32) for shape in shapes]
    mma = mma_with(dz, Mma.WARP) if wants_x or wants_weight else Mma.NONE
    Launch(
        low_rank_gradients_kernel, (tiles.groups * tiles.tiles,),
        dz, x, weight, dx, dweight, dbias, *terms, counters(dz.device, tiles.groups + tiles.tiles),
        rows, columns, tiles.steps, dz.stride(0), x.stride(0), 0 if dx is None else dx.stride(0),
        # On Hopper, WGMMA gives wrong numbers for a masked operand that is transposed (launch/warp_mma.py).
        mma=mma, PRECISION=precision_of(dz),
        D=inputs, BD=tiles.inputs, BM=tiles.rows, BN=tiles.columns, AT_ONCE=tiles.terms_at_once,
        **_options(tiles, dz, x, dx),
    ).run()  # fmt: skip
    return dx, dweight, dbias


def _addressable(matrix: torch.Tensor) -> torch.Tensor:
    """Return the matrix, copied only if its columns are not next to each other or its rows are too far apart for the kernel."""
    matrix = inner_contiguous(matrix)
    return matrix if 0 <= matrix.stride(0) <= MOST_COLUMNS else matrix.contiguous()


def _options(tiles: LowRankTiles, dz: torch.Tensor, x: torch.Tensor, dx: torch.Tensor | None) -> dict[str, Any]:
    """Return Triton's options; they change no result."""
    columns, inputs = dz.shape[1], x.shape[1]
    distances = [matrix.stride(0) for matrix in (dz, x, dx) if matrix is not None]
    even = inputs == tiles.inputs and not any(each % 16 for each in (columns, *distances))
    limited = even and not is_hip(dz.device)
    return {"num_warps": tiles.warps, **({"maxnreg": _REGISTERS} if limited else {})}
