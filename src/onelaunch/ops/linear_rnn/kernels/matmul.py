"""A plain matrix product of operands with any strides, the first of the unfused baseline's launches (product, scan, gate).

Computes   out [M, N] = a [M, K] b [K, N]
Grid       one CTA per tile [BM, BN] of out. Tiles are ordered so that GROUP_M tiles of rows come before the next tile of
           columns: CTAs that run at the same time share columns of b in the L2 cache. All warps do the same work.
On chip    [BM, BN] sums in float32 registers; Triton's pipeline holds the stages of a and b in shared memory.
Memory     reads a once per BN columns and b once per BM rows, writes out once.
Caller     ``matmul`` in launch.py launches it, for the variant ``three_launch`` and the gradients of that product.
Numerics   sums in float32; products of float32 operands use TF32 only if PRECISION is "tf32" (kernels/common/tf32.py). Their sum
           is split into parts of PART blocks of K, since one sum over 8,192 steps had four times the error of cuBLAS's on an
           H100, and the gate allows about three times.
"""

import triton
import triton.language as tl

from onelaunch.kernels.common.tf32 import to_precision


@triton.jit
def matmul_kernel(
    a, b, out, M, N, K, a_stride_m, a_stride_k, b_stride_k, b_stride_n,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr, PART: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute one tile of out = a b; out is contiguous, a and b have any strides.

    PART is the number of blocks of K whose float32 products are summed before they are added to the total.
    """
    pid = tl.program_id(0)
    tiles_m, tiles_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    tiles_per_group = GROUP_M * tiles_n
    first_m = (pid // tiles_per_group) * GROUP_M
    group_m = min(tiles_m - first_m, GROUP_M)  # tiles of rows in this group; the last group may have fewer
    m = (first_m + pid % tiles_per_group % group_m) * BM + tl.arange(0, BM)
    n = (pid % tiles_per_group // group_m) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    p_a = a + m.to(tl.int64)[:, None] * a_stride_m + k.to(tl.int64)[None, :] * a_stride_k  # [BM, BK]
    p_b = b + k.to(tl.int64)[:, None] * b_stride_k + n.to(tl.int64)[None, :] * b_stride_n  # [BK, BN]
    total = tl.zeros([BM, BN], tl.float32)
    part = tl.zeros([BM, BN], tl.float32)  # of float32 operands alone
    for start in range(0, K, BK):
        in_depth = start + k < K
        b_a = tl.load(p_a, mask=(m < M)[:, None] & in_depth[None, :], other=0.0)
        b_b = tl.load(p_b, mask=in_depth[:, None] & (n < N)[None, :], other=0.0)
        if a.dtype.element_ty == tl.float32:
            part = tl.dot(to_precision(b_a, PRECISION), to_precision(b_b, PRECISION), part, input_precision=PRECISION)
            full = (start // BK + 1) % PART == 0
            total = tl.where(full, total + part, total)
            part = tl.where(full, 0.0, part)
        else:
            total = tl.dot(b_a, b_b, total, input_precision="ieee")
        p_a += BK * a_stride_k
        p_b += BK * b_stride_k
    if a.dtype.element_ty == tl.float32:
        total += part
    p_out = out + m.to(tl.int64)[:, None] * N + n.to(tl.int64)[None, :]
    tl.store(p_out, total.to(out.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])
