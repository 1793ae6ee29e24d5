"""Output projection of heads that are normalized and gated as the product loads them: one launch.

Computes   out = a w_out^T + bias, a = h * rstd * norm_weight * act(gate), rstd = 1 / sqrt(mean(h^2) + eps) of every head
Grid       one CTA per tile [BM, BN] of out, ordered in swaths of GROUP tiles of rows: CTAs that run at the same time share
           weights and rows of h in the L2 cache. All warps do the same work.
On chip    [BN, BM] of out^T as float32 sums in registers, a head [BV, BM] of h, and a block [BK, BM] of the gate. The weights
           are the left operand, as in kernels/gemm/tiles.py: few rows of h are then the narrow side of a matrix instruction.
           Products in 16 bits: Triton pipelines the loads through shared memory where more than one stage fits.
Memory     reads h and the gate once per BN columns of out, the weights once per BM rows, writes out once. rstd is written by
           the CTAs of the first columns, if there is a buffer for it.
Protocol   CTAs do not exchange anything.
Numerics   a is rounded to the dtype of the weights for the product. Products of float32 use TF32 only if PRECISION is "tf32"
           (kernels/common/tf32.py). They take their operands from registers, so a head then goes through in blocks of BK
           channels, which are loaded once more (from a cache) when its rstd is known. Products in 16 bits take a whole head at
           once, BK = BV.
Edges      rows beyond the end repeat the last one and are not stored; channels beyond the end of a head are zeros.
Caller     ``prologue`` in launch_prologue.py launches it.
Source     experiment 058; docs/notebook/output_chain.md: this form is slower than norm_gate at all measured sizes. few_rows.cu
           takes its place where rows are few, on Hopper in bfloat16.
"""

import triton
import triton.language as tl

from onelaunch.kernels.common.tf32 import to_precision
from onelaunch.kernels.gemm.tiles import load_channels, rows_from, store, tile_of
from onelaunch.ops.output_chain.kernels.norm_gate import activate, reciprocal_rms


@triton.jit
def prologue_kernel(
    h, gate, norm_weight, w_out, bias, out, rstd, M, N, H, h_stride, gate_stride, w_stride, eps,
    V: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr,
    ACTIVATED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute one tile of out ``[M, N]``, and rstd ``[M, H]`` unless it is ``None``."""
    EVEN: tl.constexpr = V == BV
    m_start, n_start = tile_of(M, N, BM, BN, GROUP)
    m, n = rows_from(m_start, M, BM), rows_from(n_start, N, BN)
    m_out, n_out = m_start + tl.arange(0, BM), n_start + tl.arange(0, BN)
    all_k, k = tl.arange(0, BV), tl.arange(0, BK)
    rows_h, rows_w = h + m[None, :] * h_stride, w_out + n[:, None] * w_stride
    total = tl.zeros([BN, BM], tl.float32)
    for head in range(H):
        x = load_channels(rows_h + (head * V + all_k)[:, None], V, all_k[:, None], EVEN).to(tl.float32)  # [BV, BM]
        r = reciprocal_rms(x, eps, V, 0)  # [BM]
        if rstd is not None:
            tl.store(rstd + m_out.to(tl.int64) * H + head, r, mask=(m_out < M) & (n_start == 0))
        for block in tl.static_range(BV // BK):
            c = block * BK + k
            column = head * V + c
            if BK != BV:
                x = load_channels(rows_h + column[:, None], V, c[:, None], EVEN).to(tl.float32)  # [BK, BM]
            a = x * r[None, :]
            if norm_weight is not None:
                a *= load_channels(norm_weight + c, V, c, EVEN).to(tl.float32)[:, None]
            if gate is not None:
                g = load_channels(gate + m[None, :] * gate_stride + column[:, None], V, c[:, None], EVEN)
                a *= activate(g, ACTIVATED)
            b_w = load_channels(rows_w + column[None, :], V, c[None, :], EVEN)  # [BN, BK]
            a = to_precision(a.to(b_w.dtype), PRECISION)
            total = tl.dot(to_precision(b_w, PRECISION), a, total, input_precision=PRECISION)
    if bias is not None:
        total += tl.load(bias + n).to(tl.float32)[:, None]
    store(out, total, m_out, n_out, N, M, N)
