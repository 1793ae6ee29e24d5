"""Device functions of tiled matrix products: rasterization of the grid, and loads and stores at the edges of the matrices.

The weights are the left operand, so a tile of the result is ``[BN, BM]`` of out^T. Few rows of the input are then the N dimension
of a matrix instruction, which may be 16, and not its M dimension, which must be 64.
"""

import triton
import triton.language as tl


@triton.jit
def tile_of(M, N, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr):
    """Return the first row and the first column of this CTA's tile.

    Consecutive CTAs go through GROUP tiles of rows before the next tile of columns, so that they share operands in L2.
    """
    pid = tl.program_id(0)
    tiles_m, tiles_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    first = (pid // (GROUP * tiles_n)) * GROUP
    high = min(tiles_m - first, GROUP)
    turn = pid % (GROUP * tiles_n)
    return (first + turn % high) * BM, (turn // high) * BN


@triton.jit
def rows_from(start, count, SIZE: tl.constexpr):
    """Return the 64-bit indices of SIZE rows from ``start`` on, clamped to the last row."""
    return tl.minimum(start + tl.arange(0, SIZE), count - 1).to(tl.int64)


@triton.jit
def load_channels(pointers, left, k, EVEN: tl.constexpr):
    """Load the channels ``k``, 0 for those at or beyond ``left``. EVEN promises that there are none of those."""
    if EVEN:
        return tl.load(pointers)
    return tl.load(pointers, mask=k < left, other=0.0)


@triton.jit
def store(out, tile, m, n, stride, M, N):
    """Store a tile [BN, BM] of out^T, rounded to the dtype of ``out``. Rows of ``out`` are ``stride`` elements apart."""
    inside = (m < M)[None, :] & (n < N)[:, None]
    tl.store(out + m.to(tl.int64)[None, :] * stride + n[:, None], tile.to(out.dtype.element_ty), mask=inside)
