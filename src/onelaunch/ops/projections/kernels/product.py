"""One matrix product for all segments of a packed projection, with the activations applied to the sums in registers.

A segment is a block of rows of the packed weight, and so of columns of y, that has an activation of its own: a layer's queries,
keys, values, gate or decays (``Segment`` in ``layout.py``). ``launch.epilogue`` launches the kernel.

Computes   y [M, PITCH] = activation(x [M, D] weight [N, D]^T + bias). For a backward pass also rstd [M, NORM_PITCH], which is
           1 / sqrt(sum(z^2) + eps) of every normalized head, and kept [M, KEPT_PITCH], which is z = x weight^T + bias of the
           segments with SiLU.
Grid       one CTA per tile [BM, BN] of y, in groups of GROUP tiles of rows (as in Triton's matrix product tutorial): CTAs that
           run at the same time share weights and rows of x in the L2 cache. A tile of columns lies in one segment. If heads are
           normalized, a tile holds BN / head_size whole heads. If head_size is not a power of 2, a tile holds one head, and its
           other columns are idle. All warps do the same work.
On chip    [BM, BN] sums in float32 registers; Triton pipelines x [BM, BK] and the weight [BK, BN] through shared memory.
Memory     reads x once per BN columns and the weight once per BM rows, writes every result once.
Protocol   CTAs do not exchange anything.
Numerics   products of float32 use TF32 only if PRECISION is "tf32" (kernels/common/tf32.py). Activations are computed from the
           float32 sums. A variant of two launches rounds the sums to the dtype of y in between.
Edges      rows beyond the end repeat the last one and are not stored; channels beyond the end are zeros of x.
Source     experiment 058; docs/notebook/projections.md.
"""

import triton
import triton.language as tl

from onelaunch.kernels.common.tf32 import to_precision
from onelaunch.ops.projections.kernels.activation import finish_tile


@triton.jit
def epilogue_kernel(
    x, weight, bias, y, rstd, kept, M, D, x_stride, w_stride, eps,
    FIRSTS: tl.constexpr, STEPS: tl.constexpr, HEADS: tl.constexpr, WIDTHS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, ACTIVATIONS: tl.constexpr, NORMALIZERS: tl.constexpr, NORMS: tl.constexpr, KEPTS: tl.constexpr,
    BIASES: tl.constexpr, PITCH: tl.constexpr, NORM_PITCH: tl.constexpr, KEPT_PITCH: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute one tile of y: see the top of the file.

    The constants in the plural are tuples with an entry per segment: FIRSTS the index of its first tile of columns, and in an
    additional last entry the number of tiles; STEPS the number of columns that a tile of it computes, at most BN; HEADS the
    columns of a tile per normalized head (BN if nothing is normalized or the tile holds one head); WIDTHS its number of
    columns; ROWS its first row of the weight; COLUMNS its first column of y. NORMS, KEPTS and BIASES hold the first column in
    rstd, the first column in kept and the first element in bias, or NOTHING. NORMALIZERS hold the divisors of log-sigmoids.
    PITCH, NORM_PITCH and KEPT_PITCH are the elements from one row of y, rstd and kept to the next. EVEN: BK divides D.
    """
    pid = tl.program_id(0)
    tiles_m, tiles_n = tl.cdiv(M, BM), FIRSTS[len(WIDTHS)]
    first = (pid // (GROUP * tiles_n)) * GROUP
    high = min(tiles_m - first, GROUP)
    index = pid % (GROUP * tiles_n)
    m = ((first + index % high) * BM + tl.arange(0, BM)).to(tl.int64)
    tile = index // high
    row, count = 0, 0  # the tile's first row of the weight, and its number of rows
    for s in tl.static_range(len(WIDTHS)):
        inside = (tile >= FIRSTS[s]) & (tile < FIRSTS[s + 1])
        preceding = (tile - FIRSTS[s]) * STEPS[s]  # columns of the segment before this tile
        row = tl.where(inside, ROWS[s] + preceding, row)
        count = tl.where(inside, tl.minimum(STEPS[s], WIDTHS[s] - preceding), count)

    at, k = tl.arange(0, BN), tl.arange(0, BK)
    x_rows = x + tl.minimum(m, M - 1)[:, None] * x_stride
    w_rows = weight + (row + tl.minimum(at, count - 1)).to(tl.int64)[None, :] * w_stride
    v = tl.zeros((BM, BN), tl.float32)
    for start in range(0, D, BK):
        if EVEN:
            a = tl.load(x_rows + (start + k)[None, :])  # [BM, BK]
            b = tl.load(w_rows + (start + k)[:, None])  # [BK, BN]
        else:
            a = tl.load(x_rows + (start + k)[None, :], mask=(start + k < D)[None, :], other=0.0)
            b = tl.load(w_rows + tl.minimum(start + k, D - 1)[:, None])
        v = tl.dot(to_precision(a, PRECISION), to_precision(b, PRECISION), v, input_precision=PRECISION)
    v = tl.where((at < count)[None, :], v, 0.0)  # columns beyond `count` repeat a row of the weight; norms must not count them

    for s in tl.static_range(len(WIDTHS)):
        if (tile >= FIRSTS[s]) & (tile < FIRSTS[s + 1]):
            tile_in_segment = tile - FIRSTS[s]
            rows_valid, columns_valid = m < M, at < count
            # The conditional is the index of the tile's first head. Only a tile of one padded head has STEPS[s] < HEADS[s].
            finish_tile(
                v, m, tile_in_segment * STEPS[s] + at, rows_valid[:, None] & columns_valid[None, :], rows_valid, columns_valid,
                tile_in_segment * (STEPS[s] // HEADS[s]) if STEPS[s] >= HEADS[s] else tile_in_segment, bias, y, rstd, kept, eps,
                HEADS[s], COLUMNS[s], ACTIVATIONS[s], NORMALIZERS[s], NORMS[s], KEPTS[s], BIASES[s],
                PITCH, NORM_PITCH, KEPT_PITCH,
            )  # fmt: skip
