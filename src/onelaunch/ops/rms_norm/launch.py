"""Launches of ``rms_norm``'s kernels: flatten tensors to rows, cut rows into tiles, allocate results, pass pointers.

``autograd.py`` calls :func:`rms_norm` and :func:`gradients`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from onelaunch.device.hardware import compute_capability, is_hip, processors
from onelaunch.kernels.common.layout import cdiv, inner_contiguous, power_of_2
from onelaunch.launch.launch import Launch
from onelaunch.ops.rms_norm.kernels.norm import (
    add_partials_kernel,
    long_rows_gradients_kernel,
    rms_norm_gradients_kernel,
    rms_norm_kernel,
)

_FORWARD_ELEMENTS, _BACKWARD_BYTES = 4096, 8192
"""Elements of a tile of short rows forward, and bytes of its sum backward. Longer rows are a tile each. Not tuned yet.

Without a residual a tile has half as many elements: 24.8 us in place of 25.2 for 8192x2048 in bfloat16, and 13.7 in place of 14.2
for 8192x1024, on one H100.
"""

_LONGEST_BYTES = 16384
"""Bytes of a row of the sum up to which a CTA keeps the next tile and the weight in registers too. Longer rows have a kernel of
their own."""

_LONGEST_KEPT_BYTES = 32768
"""Bytes of a long row of the sum up to which a CTA keeps its own sum of the weight's gradient, and the next row, in registers."""

_MOST_ROWS_OF_A_TILE = 64
"""Limit on the rows of a tile: each takes registers for its addresses, however short rows are."""

_MOST_WARPS = 16
"""Limit on the warps of a CTA, but for long rows that it keeps in registers: there 32 warps of 64 registers leave none over."""

_CTAS_PER_SM = 4
"""Number of tiles per SM below which tiles are made smaller, to occupy more SMs; limit on the CTAs per SM backward."""

_LATENCY_BYTES, _FORWARD_BYTES_OF_A_THREAD, _BACKWARD_BYTES_OF_A_THREAD = 16, 64, 32
"""Bytes of a tensor that a thread loads of a tile: where CTAs are so few that latency decides, forward, and backward."""

_SUMMED_COLUMNS, _MOST_SUMMED_ROWS = 32, 512
"""Tile of the launch that adds up partial sums: a row of 128 bytes per warp's load, and rows that are loaded at once."""


class Tile(NamedTuple):
    """Tile of rows that a CTA computes at once."""

    BD: int
    """Channels of a row, rounded up to a power of 2."""
    BM: int
    """Rows of the tile."""
    warps: int
    """Warps of the CTA."""


def _tile_of(rows: int, block: int, sms: int, elements: int, held: int, latency: int) -> Tile:
    """Return the tile for rows of ``block`` channels on a device of so many SMs.

    Rows share a tile up to so many ``elements``, but only where that leaves every SM several tiles. A thread holds ``held``
    elements of a tile, or ``latency`` where even single rows are few, so that a row is spread over more warps.
    """
    most = min(max(elements // block, 1), _MOST_ROWS_OF_A_TILE)
    while most > 1 and rows < most * _CTAS_PER_SM * sms:
        most //= 2
    few = rows <= most * _CTAS_PER_SM * sms
    return Tile(block, most, min(max(block * most // (32 * (latency if few else held)), 1), _MOST_WARPS))


def forward_tile(rows: int, channels: int, itemsize: int, sms: int, *, residual: bool) -> Tile:
    """Return the tile of a forward launch. ``itemsize`` is the bytes of an element of x."""
    held, latency = _FORWARD_BYTES_OF_A_THREAD // 2, _LATENCY_BYTES // itemsize
    elements = _FORWARD_ELEMENTS if residual else _FORWARD_ELEMENTS // 2
    return _tile_of(rows, power_of_2(channels), sms, elements, held, latency)


def backward_tile(rows: int, channels: int, itemsize: int, sms: int) -> Tile:
    """Return the tile of a backward launch. ``itemsize`` is the bytes of an element of the sum."""
    held, latency = _BACKWARD_BYTES_OF_A_THREAD // itemsize, _LATENCY_BYTES // itemsize
    return _tile_of(rows, power_of_2(channels), sms, _BACKWARD_BYTES // itemsize, held, latency)


def is_long(tile: Tile, itemsize: int) -> bool:
    """Return whether a CTA cannot keep its sum of the weight's gradient in registers."""
    return tile.BD * itemsize > _LONGEST_BYTES


def keeps_long_rows(device: torch.device) -> bool:
    """Return whether a CTA can have 32 warps, and 64 registers suffice its threads: AMD's has 16, and for sm_100a they do not."""
    return not is_hip(device) and (compute_capability(device) or 0) < 10


def backward_ctas(rows: int, tile: Tile, itemsize: int, sms: int) -> int:
    """Return the number of CTAs of a backward launch: as many as fit on the device at once, by registers, or one per tile.

    It is also the number of rows of partial sums of the weight's gradient, so more CTAs would cost bytes.
    """
    per_sm = max(2 * _BACKWARD_BYTES // (tile.BD * tile.BM * itemsize), 1)
    return min(cdiv(rows, tile.BM), min(per_sm, _CTAS_PER_SM) * sms)


def _rows(tensor: torch.Tensor, channels: int) -> torch.Tensor:
    """Return a tensor as rows ``[M, D]`` of contiguous channels, copied only where its strides demand it."""
    return inner_contiguous(tensor.reshape(-1, channels))


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, residual: torch.Tensor | None, eps: float, *, keep: bool
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Launch addition and norm; return y, the sum if there is a residual, and with ``keep`` rstd ``[M]`` float32."""
    channels = x.shape[-1]
    given, added = _rows(x, channels), None if residual is None else _rows(residual, channels)
    rows = given.shape[0]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = None if residual is None else torch.empty(x.shape, dtype=residual.dtype, device=x.device)
    rstd = torch.empty(rows, dtype=torch.float32, device=x.device) if keep else None
    tile = forward_tile(rows, channels, x.element_size(), processors(x.device), residual=residual is not None)
    Launch(
        rms_norm_kernel, (cdiv(rows, tile.BM),),
        given, None if weight is None else weight.contiguous(), added, y, total, rstd, rows,
        given.stride(0), 0 if added is None else added.stride(0), eps,
        D=channels, BD=tile.BD, BM=tile.BM, num_warps=tile.warps,
    ).run()  # fmt: skip
    return y, total, rstd


def gradients(
    dy: torch.Tensor,
    dtotal: torch.Tensor | None,
    total: torch.Tensor,
    weight: torch.Tensor | None,
    rstd: torch.Tensor,
    *,
    want_x: bool,
    want_residual: bool,
    want_weight: bool,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Launch the gradients; return dx, dresidual and dweight, each ``None`` unless it is wanted.

    The gradient of the sum is dx in the dtype of ``dy`` and dresidual in that of ``total``.
    """
    shape, channels, device = total.shape, total.shape[-1], total.device
    total, dy = _rows(total, channels), _rows(dy, channels)
    passed = want_x or want_residual
    dtotal = _rows(dtotal, channels) if dtotal is not None and passed else None
    rows, sms = total.shape[0], processors(device)
    itemsize = total.element_size()
    tile = backward_tile(rows, channels, itemsize, sms)
    ctas, long = backward_ctas(rows, tile, itemsize, sms), is_long(tile, itemsize)
    kept = long and tile.BD * itemsize <= _LONGEST_KEPT_BYTES and keeps_long_rows(device)
    if kept:
        tile = tile._replace(warps=2 * _MOST_WARPS)

    def empty(wanted: bool, dtype: torch.dtype) -> Any:
        return torch.empty(shape, dtype=dtype, device=device) if wanted else None

    dx, dresidual = empty(want_x, dy.dtype), empty(want_residual, total.dtype)
    dweight = partials = None
    if weight is not None and want_weight:
        dweight = torch.empty(channels, dtype=weight.dtype, device=device)
        # A single CTA stores its sum as the gradient, unless it would add up rows there.
        alone = ctas == 1 and not (long and not kept and rows > 1)
        partials = dweight if alone else torch.empty(ctas, channels, dtype=torch.float32, device=device)
    constants: dict[str, Any] = {"KEEP": kept} if long else {"BM": tile.BM}
    Launch(
        long_rows_gradients_kernel if long else rms_norm_gradients_kernel, (ctas,),
        dy, dtotal, total, None if weight is None else weight.contiguous(), rstd, dx, dresidual, partials, rows,
        dy.stride(0), 0 if dtotal is None else dtotal.stride(0), total.stride(0),
        D=channels, BD=tile.BD, num_warps=tile.warps, **constants,
    ).run()  # fmt: skip
    if dweight is not None and partials is not dweight:
        block = min(power_of_2(ctas), _MOST_SUMMED_ROWS)
        Launch(
            add_partials_kernel, (cdiv(channels, _SUMMED_COLUMNS),),
            partials, dweight, ctas, D=channels, BR=block, BC=_SUMMED_COLUMNS,
            num_warps=min(max(block * _SUMMED_COLUMNS // 1024, 1), _MOST_WARPS),
        ).run()  # fmt: skip
    return dx, dresidual, dweight
