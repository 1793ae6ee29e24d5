"""All gradients of a linear map from few inputs, in one pass over the gradient of its results: portable Triton.

Computes   for z = r W^T + bias with r [M, R] of a small rank R and W [N, R], from dz [M, N]:
             dr = dz W [M, R],   dW = dz^T r [N, R],   dbias = sum of the rows of dz [N].
           In ``gla_layer`` z are the log-decays before their activation, and r is the low-rank factor that they are made from.
Grid       one CTA per group of ``steps`` blocks of BM rows and tile of BN columns. The tiles of a group are neighbours.
On chip    the rows of W of the tile [BN, BR] as an operand, and the CTA's sums for dW [BN, BR] and dbias [BN], float32, all in
           registers; BR is R rounded up to a power of 2 of at least 16, which matrix instructions need.
Memory     dz is read once. r is read once per tile and W once per group, mostly from L2. Each CTA writes its terms: of dr for its
           rows, one float32 per row, rank and tile, and of dW and dbias for its columns, one per column, rank and group.
Protocol   two counters per group and tile in ``counters``. When all warps of a CTA have stored its terms (bar.sync), one thread
           adds 1 to the counter of its group, and then to that of its tile, with release and acquire semantics at GPU scope. The
           CTA that finds all others of its group counted sees their terms of dr, adds them up and stores dr; the one that finds
           all others of its tile counted does so for dW and dbias. Each sets the counter back to 0. No CTA waits for another.
Order      terms are added in the order of tiles and of groups, so results do not depend on which CTA is last.
Numerics   products of 16-bit numbers, added up in float32 and rounded once.
Caller     ``low_rank_gradients`` in launch.py.
Source     docs/notebook/gla_layer.md.
"""

import triton
import triton.language as tl


@triton.jit
def add_terms(terms, offsets, valid, distance, count):
    """Return the sum of ``count`` terms, ``distance`` elements apart, read from L2, since other CTAs have just written them."""
    total = tl.zeros(offsets.shape, tl.float32)
    p_terms = terms + offsets
    for _ in range(count):
        total += tl.load(p_terms, mask=valid, other=0.0, cache_modifier=".cg")
        p_terms += distance
    return total


@triton.jit(do_not_specialize=["M", "steps"])
def low_rank_gradients_kernel(
    dz, r, weight, dr, dweight, dbias, dr_terms, weight_terms, bias_terms, counters, M, N, steps, dz_stride, r_stride, dr_stride,
    R: tl.constexpr, BR: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute dr [M, R], dweight [N, R] and dbias [N]; each may be None.

    dz, r and dr have rows ``dz_stride``, ``r_stride`` and ``dr_stride`` elements apart; weight, dweight and dbias are contiguous.
    ``dr_terms`` [tiles, M, BR], ``weight_terms`` [groups, N, BR] and ``bias_terms`` [groups, N] are float32 scratch.
    ``counters`` [groups + tiles], int64, are 0 before and after the launch.
    """
    tiles = tl.cdiv(N, BN)
    groups = tl.num_programs(0) // tiles
    tile, group = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    n, k = tile * BN + tl.arange(0, BN), tl.arange(0, BR)
    columns = (n < N)[:, None] & (k < R)[None, :]
    w = tl.load(weight + n[:, None] * R + k[None, :], mask=columns, other=0.0)
    sums, bias_sum = tl.zeros([BN, BR], tl.float32), tl.zeros([BN], tl.float32)
    for step in tl.range(0, steps, num_stages=STAGES):
        m = (group * steps + step).to(tl.int64) * BM + tl.arange(0, BM)
        rows = (m < M)[:, None]
        block = tl.load(dz + m[:, None] * dz_stride + n[None, :], mask=rows & (n < N)[None, :], other=0.0)
        if dweight is not None:
            b_r = tl.load(r + m[:, None] * r_stride + k[None, :], mask=rows & (k < R)[None, :], other=0.0)
            sums = tl.dot(tl.trans(block), b_r, sums)
        if dbias is not None:
            bias_sum += tl.sum(block.to(tl.float32), 0)
        if dr is not None:
            p_terms = dr_terms + (tile.to(tl.int64) * M + m)[:, None] * BR + k[None, :]
            tl.store(p_terms, tl.dot(block, w), mask=rows)
    if dweight is not None:
        p_terms = weight_terms + (group.to(tl.int64) * N + n)[:, None] * BR + k[None, :]
        tl.store(p_terms, sums, mask=(n < N)[:, None])
    if dbias is not None:
        tl.store(bias_terms + group.to(tl.int64) * N + n, bias_sum, mask=n < N)
    tl.debug_barrier()  # all warps have stored before one thread counts the CTA
    if dr is not None:
        if tl.atomic_add(counters + group, 1, sem="acq_rel", scope="gpu") == tiles - 1:
            for step in range(steps):
                m = (group * steps + step).to(tl.int64) * BM + tl.arange(0, BM)
                valid = (m < M)[:, None] & (k < R)[None, :]
                total = add_terms(dr_terms, m[:, None] * BR + k[None, :], valid, M.to(tl.int64) * BR, tiles)
                tl.store(dr + m[:, None] * dr_stride + k[None, :], total.to(dr.dtype.element_ty), mask=valid)
            tl.store(counters + group, 0)
    if dweight is not None or dbias is not None:
        if tl.atomic_add(counters + groups + tile, 1, sem="acq_rel", scope="gpu") == groups - 1:
            if dweight is not None:
                total = add_terms(weight_terms, n[:, None] * BR + k[None, :], columns, N * BR, groups)
                tl.store(dweight + n[:, None] * R + k[None, :], total.to(dweight.dtype.element_ty), mask=columns)
            if dbias is not None:
                total_bias = add_terms(bias_terms, n, n < N, N, groups)
                tl.store(dbias + n, total_bias.to(dbias.dtype.element_ty), mask=n < N)
            tl.store(counters + groups + tile, 0)
