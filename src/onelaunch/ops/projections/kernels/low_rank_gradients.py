"""All gradients of a projection of few inputs, in one pass over the gradient of its results: portable Triton.

Computes   for z = x W^T + bias with x [M, D] of few columns and W [N, D], from dz [M, N]:
             dx = dz W [M, D],   dW = dz^T x [N, D],   dbias = sum of the rows of dz [N].
Grid       one CTA per group of ``steps`` blocks of BM rows and tile of BN columns. The tiles of a group are neighbours.
On chip    the rows of W of the tile [BN, BD] as an operand, and the CTA's sums for dW [BN, BD] and dbias [BN], float32; BD is D
           rounded up to a power of 2 of at least 16, which matrix instructions need. A block of dz is loaded into registers
           while the one before it is multiplied: Triton keeps no block in shared memory that one product reads transposed.
Memory     dz is read once. x is read once per tile and W once per group, mostly from L2. Each CTA writes its terms: of dx for its
           rows, one float32 per row, input and tile, and of dW and dbias for its columns, one per column, input and group.
Protocol   one counter per group and one per tile, in ``counters``. When all warps of a CTA have stored its terms (bar.sync), one
           thread adds 1 to the counter of its group, and then to that of its tile, with release and acquire semantics at GPU
           scope. The CTA that finds all others of its group counted sees their terms of dx, adds them up and stores dx; the one
           that finds all others of its tile counted does so for dW and dbias. Each sets the counter back to 0. No CTA waits for
           another.
Order      terms are added in the order of tiles and of groups, so results do not depend on which CTA is last.
Numerics   products of 16-bit numbers, or of float32 without loss of precision or in TF32 (PRECISION, see kernels/common/tf32.py),
           added up in float32 and rounded once. The sum for dbias is not rounded to TF32.
Caller     ``low_rank_gradients`` in launch_low_rank.py.
Source     docs/notebook/projections.md and gla_layer.md.
"""

import triton
import triton.language as tl

from onelaunch.kernels.common.tf32 import to_precision


@triton.jit
def add_terms(terms, offsets, valid, distance, count, AT_ONCE: tl.constexpr):
    """Return the sum of ``count`` terms, ``distance`` elements apart, read from L2, since other CTAs have just written them.

    AT_ONCE of them are loaded before they are added: one after the other, each would take the latency of L2.
    """
    total = tl.zeros(offsets.shape, tl.float32)
    for first in range(0, count, AT_ONCE):
        for i in tl.static_range(AT_ONCE):
            p_terms = terms + (first + i) * tl.cast(distance, tl.int64) + offsets
            total += tl.load(p_terms, mask=valid & (first + i < count), other=0.0, cache_modifier=".cg")
    return total


@triton.jit(do_not_specialize=["M", "steps"])
def low_rank_gradients_kernel(
    dz, x, weight, dx, dweight, dbias, dx_terms, weight_terms, bias_terms, counters, M, N, steps, dz_stride, x_stride, dx_stride,
    D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, AT_ONCE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dx [M, D], dweight [N, D] and dbias [N]; each may be None.

    dz, x and dx have rows ``dz_stride``, ``x_stride`` and ``dx_stride`` elements apart, at most 2^31 / BM in dz and x. weight,
    dweight and dbias are contiguous. ``dx_terms`` [tiles, M, BD], ``weight_terms`` [groups, N, BD] and ``bias_terms`` [groups, N]
    are float32 scratch. ``counters`` [groups + tiles], int64, are 0 before and after the launch.
    """
    tiles = tl.cdiv(N, BN)
    groups = tl.num_programs(0) // tiles
    tile, group = tl.program_id(0) % tiles, (tl.program_id(0) // tiles).to(tl.int64)
    m, n, d = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BD)
    start, first = group * steps * BM, tile.to(tl.int64) * BN  # first row and column
    left = M - start  # rows from the present block on
    in_n, in_d = n < N - first, d < D
    of_weight = n[:, None] * D + d[None, :]  # [BN, BD]
    of_terms = n[:, None] * BD + d[None, :]  # [BN, BD]
    w = tl.load(weight + first * D + of_weight, mask=in_n[:, None] & in_d[None, :], other=0.0)
    w = to_precision(w, PRECISION)
    sums, bias_sum = tl.zeros([BN, BD], tl.float32), tl.zeros([BN], tl.float32)
    p_dz = dz + start * dz_stride + first + m[:, None] * dz_stride + n[None, :]  # [BM, BN]
    p_x = x + start * x_stride + m[:, None] * x_stride + d[None, :]  # [BM, BD]
    block = tl.load(p_dz, mask=(m < left)[:, None] & in_n[None, :], other=0.0)
    for step in range(steps):
        p_dz += BM * tl.cast(dz_stride, tl.int64)
        later = (m < tl.where(step + 1 < steps, left - BM, 0))[:, None] & in_n[None, :]
        next_block = tl.load(p_dz, mask=later, other=0.0)
        rows = (m < left)[:, None]
        b_dz = to_precision(block, PRECISION)
        if dweight is not None:
            b_x = tl.load(p_x, mask=rows & in_d[None, :], other=0.0)
            sums = tl.dot(tl.trans(b_dz), to_precision(b_x, PRECISION), sums, input_precision=PRECISION)
            p_x += BM * tl.cast(x_stride, tl.int64)
        if dbias is not None:
            bias_sum += tl.sum(block.to(tl.float32), 0)
        if dx is not None:
            p_terms = dx_terms + (tile.to(tl.int64) * M + start + step * BM) * BD + m[:, None] * BD + d[None, :]
            tl.store(p_terms, tl.dot(b_dz, w, input_precision=PRECISION), mask=rows)
        block = next_block
        left -= BM
    if dweight is not None:
        tl.store(weight_terms + (group * N + first) * BD + of_terms, sums, mask=in_n[:, None])
    if dbias is not None:
        tl.store(bias_terms + group * N + first + n, bias_sum, mask=in_n)
    tl.debug_barrier()  # all warps have stored before one thread counts the CTA
    if dx is not None:
        if tl.atomic_add(counters + group, 1, sem="acq_rel", scope="gpu") == tiles - 1:
            for step in range(steps):
                row = start + step * BM
                valid = (m < M - row)[:, None] & in_d[None, :]
                of_rows = m[:, None] * BD + d[None, :]
                total = add_terms(dx_terms + row * BD, of_rows, valid, tl.cast(M, tl.int64) * BD, tiles, AT_ONCE)
                p_dx = dx + (row + m)[:, None] * dx_stride + d[None, :]
                tl.store(p_dx, total.to(dx.dtype.element_ty), mask=valid)
            tl.store(counters + group, 0)
    if dweight is not None or dbias is not None:
        if tl.atomic_add(counters + groups + tile, 1, sem="acq_rel", scope="gpu") == groups - 1:
            if dweight is not None:
                valid = in_n[:, None] & in_d[None, :]
                total = add_terms(weight_terms + first * BD, of_terms, valid, tl.cast(N, tl.int64) * BD, groups, AT_ONCE)
                tl.store(dweight + first * D + of_weight, total.to(dweight.dtype.element_ty), mask=valid)
            if dbias is not None:
                total_bias = add_terms(bias_terms + first, n, in_n, N, groups, AT_ONCE)
                tl.store(dbias + first + n, total_bias.to(dbias.dtype.element_ty), mask=in_n)
            tl.store(counters + groups + tile, 0)
