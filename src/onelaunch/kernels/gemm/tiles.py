"""Device functions of tiled matrix products: rasterization of the grid, and loads and stores at the edges of the matrices.

The portable Triton kernels of ``swiglu`` and of ``output_chain``'s prologue call them. These compute ``out [M, N] = x w^T`` from
x ``[M, K]`` and weights ``[N, K]``. The weights are the left operand, so a tile of the result is ``[BN, BM]`` of out^T. Few rows
of x are then the N dimension of a matrix instruction, where Triton allows tiles of 16, and not the M dimension, where WGMMA
needs 64.
"""

import triton
import triton.language as tl


@triton.jit
def tile_of(M, N, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr):
    """Return the first row and the first column of ``out [M, N]`` in this CTA's tile.

    Consecutive CTAs go down a group of GROUP tiles before the next tile to the right, so that they share operands in L2. The
    last group may have fewer than GROUP. The grid is one-dimensional, one CTA per tile.
    """
    pid = tl.program_id(0)
    tiles_m, tiles_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    first = (pid // (GROUP * tiles_n)) * GROUP
    group_tiles_m = min(tiles_m - first, GROUP)
    rank = pid % (GROUP * tiles_n)
    return (first + rank % group_tiles_m) * BM, (rank // group_tiles_m) * BN


@triton.jit
def rows_from(start, count, SIZE: tl.constexpr):
    """Return the indices of SIZE rows from ``start`` on, clamped to the last of ``count`` rows, so that loads need no mask.

    They have 64 bits, since an index times a stride may exceed 2^31. :func:`store` masks the rows beyond the end.
    """
    return tl.minimum(start + tl.arange(0, SIZE), count - 1).to(tl.int64)


@triton.jit
def load_channels(pointers, remaining, k, EVEN: tl.constexpr):
    """Load channels (elements along K), with 0 for those beyond the end of a row.

    Args:
        pointers: Pointers to the channels, of any shape.
        remaining: Number of channels from the beginning of this block to the end of the row.
        k: Indices of the channels in this block, of a shape that broadcasts to that of ``pointers``.
        EVEN: Promise that all indices are less than ``remaining``, so that no mask is needed.
    """
    if EVEN:
        return tl.load(pointers)
    return tl.load(pointers, mask=k < remaining, other=0.0)


@triton.jit
def store(out, tile, m, n, stride, M, N):
    """Store a tile [BN, BM] of out^T, rounded to the dtype of ``out [M, N]``, whose rows are ``stride`` elements apart.

    ``m [BM]`` and ``n [BN]`` are the tile's rows and columns of ``out``. They are not clamped; those beyond the end are masked.
    """
    inside = (m < M)[None, :] & (n < N)[:, None]
    tl.store(out + m.to(tl.int64)[None, :] * stride + n[:, None], tile.to(out.dtype.element_ty), mask=inside)
