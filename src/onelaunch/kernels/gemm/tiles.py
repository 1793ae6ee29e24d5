"""Tiles of a matrix product: their order over the grid, and loads and stores at the edges of the matrices.

The weights are the left operand, so a tile of the result is ``[BN, BM]`` of out^T: few rows of the input are then the narrow side
of a matrix instruction, which may have 16 columns but needs 64 rows.
"""

import triton
import triton.language as tl


@triton.jit
def tile_of(M, N, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr):
    """Return the first row and the first column of this CTA's tile; GROUP tiles of rows come before the next columns."""
    pid = tl.program_id(0)
    tiles_m, tiles_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    first = (pid // (GROUP * tiles_n)) * GROUP
    high = min(tiles_m - first, GROUP)
    turn = pid % (GROUP * tiles_n)
    return (first + turn % high) * BM, (turn // high) * BN


@triton.jit
def rows_from(start, count, SIZE: tl.constexpr):
    """Return the indices of SIZE rows from ``start`` on, 64-bit; the last row again beyond the end."""
    return tl.minimum(start + tl.arange(0, SIZE), count - 1).to(tl.int64)


@triton.jit
def load_channels(pointers, left, k, EVEN: tl.constexpr):
    """Load channels ``k`` of which ``left`` are left; 0 beyond them. EVEN: no channel is beyond."""
    if EVEN:
        return tl.load(pointers)
    return tl.load(pointers, mask=k < left, other=0.0)


@triton.jit
def store(out, tile, m, n, stride, M, N):
    """Store a tile [BN, BM] of out^T, rounded to the dtype of ``out``, whose rows are ``stride`` apart."""
    inside = (m < M)[None, :] & (n < N)[:, None]
    tl.store(out + m.to(tl.int64)[None, :] * stride + n[:, None], tile.to(out.dtype.element_ty), mask=inside)
