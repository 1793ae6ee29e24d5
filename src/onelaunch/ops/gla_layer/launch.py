"""Launch of the kernel that ``gla_layer`` has beside those of its parts; ``autograd.py`` calls :func:`low_rank_gradients`."""

from __future__ import annotations

import torch

from onelaunch.device.hardware import processors
from onelaunch.kernels.common.layout import cdiv, power_of_2
from onelaunch.launch.launch import Launch, Mma
from onelaunch.launch.workspace import counters
from onelaunch.ops.gla_layer.kernels.low_rank_gradients import low_rank_gradients_kernel

MOST_RANK = 64
"""Largest rank R that :func:`low_rank_gradients` takes."""

_ROWS, _COLUMNS = 64, 128
"""Rows and columns of a block of dz; with 4 warps registers spill on Blackwell. Not measured yet."""

_CTAS_PER_SM = 4
"""CTAs of a launch per SM if there are enough rows; not measured yet."""


def low_rank_gradients(
    dz: torch.Tensor,
    r: torch.Tensor,
    weight: torch.Tensor,
    into: torch.Tensor | None,
    *,
    want_weight: bool,
    want_bias: bool,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the gradients of the weight and the bias of z = r W^T + bias, and write that of r.

    Args:
        dz: Gradient of z, ``[M, N]`` float16 or bfloat16, its columns next to each other.
        r: ``[M, R]``, dtype of dz, its columns next to each other; R is at most :data:`MOST_RANK`.
        weight: W, ``[N, R]``, dtype of dz, contiguous.
        into: Memory for the gradient of r, ``[M, R]``; ``None`` where it is not wanted.
        want_weight: Flag that the first result is wanted.
        want_bias: Flag that the second result is wanted.

    Returns:
        The gradient of W ``[N, R]`` and that of the bias ``[N]``, dtype of dz; ``None`` where not wanted.
    """
    (rows, columns), rank = dz.shape, r.shape[1]
    tiles, blocks = cdiv(columns, _COLUMNS), cdiv(rows, _ROWS)
    steps = cdiv(blocks, cdiv(_CTAS_PER_SM * processors(dz.device), tiles))
    groups, padded = cdiv(blocks, steps), max(power_of_2(rank), 16)
    dweight = torch.empty_like(weight) if want_weight else None
    dbias = dz.new_empty(columns) if want_bias else None
    shapes = (
        None if into is None else (tiles, rows, padded),
        (groups, columns, padded) if want_weight else None,
        (groups, columns) if want_bias else None,
    )
    terms = (None if shape is None else torch.empty(shape, dtype=torch.float32, device=dz.device) for shape in shapes)
    Launch(
        low_rank_gradients_kernel, (groups * tiles,),
        dz, r, weight, into, dweight, dbias, *terms, counters(dz.device, groups + tiles), rows, columns, steps,
        dz.stride(0), r.stride(0), 0 if into is None else into.stride(0),
        mma=Mma.WARP, R=rank, BR=padded, BM=_ROWS, BN=_COLUMNS, STAGES=3, num_warps=8,
    ).run()  # fmt: skip
    return dweight, dbias
