"""The wide product of all segments, with each segment's activation applied to the sums in registers.

Computes   y = activation(x w^T + bias), and for a backward pass what ``autograd.py`` saves (rstd, kept)
Grid       one CTA per tile [BM, BN] of y, ordered in swaths of GROUP tiles of rows: CTAs that run at the same time share
           weights and rows of x in the L2 cache. A tile of columns lies in one segment. Where heads are normalized it holds as
           many whole heads as fit, or one. All warps do the same work.
On chip    [BM, BN] sums in float32 registers; Triton pipelines x [BM, BK] and the weight [BK, BN] through shared memory.
Memory     reads x once per BN columns and the weight once per BM rows, writes every result once.
Protocol   CTAs do not exchange anything.
Numerics   products of float32 do not use TF32; activations see sums in float32, which no variant of two launches gives them.
Edges      rows beyond the end repeat the last one and are not stored; channels beyond the end are zeros of x.
Source     experiment 058; docs/notebook/projections.md.
"""

import triton
import triton.language as tl

from onelaunch.ops.projections.kernels.activation import finish_tile


@triton.jit
def epilogue_kernel(
    x, weight, bias, y, rstd, kept, M, D, x_stride, w_stride, eps,
    FIRSTS: tl.constexpr, STEPS: tl.constexpr, HEADS: tl.constexpr, WIDTHS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, ACTIVATIONS: tl.constexpr, NORMALIZERS: tl.constexpr, NORMS: tl.constexpr, KEPTS: tl.constexpr,
    BIASES: tl.constexpr, PITCH: tl.constexpr, NORM_PITCH: tl.constexpr, KEPT_PITCH: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Compute one tile of y: see the top of the file.

    FIRSTS holds each segment's first tile of columns, and behind them the number of tiles. STEPS holds the columns of a
    segment's tiles, HEADS the columns that a normalized head takes of a tile.
    """
    pid = tl.program_id(0)
    tiles_m, tiles_n = tl.cdiv(M, BM), FIRSTS[len(WIDTHS)]
    first = (pid // (GROUP * tiles_n)) * GROUP
    high = min(tiles_m - first, GROUP)
    index = pid % (GROUP * tiles_n)
    m = ((first + index % high) * BM + tl.arange(0, BM)).to(tl.int64)
    tile = index // high
    row, count = 0, 0  # first row of the weight, and number of rows, of this tile
    for s in tl.static_range(len(WIDTHS)):
        inside = (tile >= FIRSTS[s]) & (tile < FIRSTS[s + 1])
        behind = (tile - FIRSTS[s]) * STEPS[s]
        row = tl.where(inside, ROWS[s] + behind, row)
        count = tl.where(inside, tl.minimum(STEPS[s], WIDTHS[s] - behind), count)

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
        v = tl.dot(a, b, v, input_precision="ieee")
    v = tl.where((at < count)[None, :], v, 0.0)

    for s in tl.static_range(len(WIDTHS)):
        if (tile >= FIRSTS[s]) & (tile < FIRSTS[s + 1]):
            tile_in_segment = tile - FIRSTS[s]
            rows_valid, columns_valid = m < M, at < count
            finish_tile(
                v, m, tile_in_segment * STEPS[s] + at, rows_valid[:, None] & columns_valid[None, :], rows_valid, columns_valid,
                tile_in_segment * (STEPS[s] // HEADS[s]) if STEPS[s] >= HEADS[s] else tile_in_segment, bias, y, rstd, kept, eps,
                HEADS[s], COLUMNS[s], ACTIVATIONS[s], NORMALIZERS[s], NORMS[s], KEPTS[s], BIASES[s],
                PITCH, NORM_PITCH, KEPT_PITCH,
            )  # fmt: skip
