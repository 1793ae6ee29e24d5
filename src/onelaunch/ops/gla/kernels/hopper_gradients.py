"""Gradients of gated linear attention with respect to q, k and g on Hopper GPUs, parallel over chunks.

Computes   for one chunk of 64 steps, one head and one panel of 64 channels of K, with S the state that enters the chunk and dS
           the gradient of the state that leaves it (hopper_chunk_state.py stored both), and dP = scale do v^T for t >= s:
             dq_t = scale e^before (do S^T)_t + sum over s <= t of dP[t, s] k_s e^(g_s+1 + ... + g_t)
             dk_s = e^behind (v dS^T)_s + sum over t >= s of dP[t, s] q_t e^(g_s+1 + ... + g_t)
             dg_t = sum over the steps u >= t of q_u dq_u - k_u dk_u, with the pairs' terms and the state's in dq_u but only the
                    pairs' in dk_u, plus the sum over the steps u < t of k_u times the state's term of dk_u, plus
                    e^(g of the whole chunk) times the sum over V of S dS;
           before and behind are sums of log-decays in the chunk up to and with a step, and after it. The pairs with t = s have
           no decay: they are added to dq and dk through ``diagonal`` and left out of dg.
Grid       one CTA of 4 warps (one warpgroup) per chunk, head and panel; values in blocks of BV inside. Two CTAs fit on an SM,
           so that one computes while the loads of the other are in flight: no warp specialization is needed.
On chip    shared memory for 16-bit numbers, BV = 128: five tiles [64, 64] (q, k, two of scratch, g; two without a decay per
           channel), 8192 bytes each; v and do [64, BV], S and dS [BV, 64], 16384 bytes each: 104 KiB. float32 log-decays have a
           tile of 16384 bytes, in which two bfloat16 terms replace them (``split_log_decays``). S and dS have two terms then
           and BV is 64, so that v, do and these take 48 KiB. After their products, dk so far (``stash``, float32) lies where S
           and dS were, and dP (two 16-bit terms) where do and v were. In registers: the three accumulators of the products with
           S, dS and v, then dq, dk and dg, [64, 64] float32, 32 registers each. Registers are what is scarce.
Barriers   two mbarriers: ``bars[0]`` for the loads of q, k, g, waited for once; ``bars[1]`` for a block of v, do, S, dS, with
           one phase per block. All loads of the first block are issued before anything is waited for. The next block is loaded
           after the products with this one have finished. Stores leave from the tiles of q, k and g; they are waited for at the
           end of the kernel.
Decay      products with matrices of 0 and 1 sum log-decays up to and with each step, over the first half of the chunk and over
           all of it. Differences of them are decays from the middle and to the end. Where these exceed LIMIT, a sum is below
           MIN_LOG2_SUM, or a float16 query or key is beyond LARGEST, decays to the end are summed on their own, and pairs of
           steps are computed by levels (hopper_pairs.py). ``logarithm`` returns sums times log2(e), exponents of 2.
Registers  indices, masks and decays are computed again where they are used. ``opaque_zero`` returns a 0 that the compiler does
           not know; adding it to an index or a mask keeps the compiler from computing them once and holding them in registers.
Numerics   u is the norm-wise error of rounding the exact result to 16 bits, and 2 u is allowed. Decayed queries and keys, S and
           dS are 16-bit. dP is a sum of two such numbers. So is S with one decay per head, whose gradient is a sum over all of
           a state, in which the rounding of S would show (2.07 u). So are S and dS with float32 log-decays: with strong decay
           few elements of a float32 dg are large, at a chunk's first and last steps, and an element may be off by at most 0.024
           of the root mean square. With three rounded factors in every product the error of dg was 2.06 u; with dP in two terms
           it is 1.6 u. The subtraction for dg uses the same rounded queries and keys that were operands of dq and dk, so that
           pairs on one side of a step cancel. Its result is summed over the chunk as two 16-bit terms. With float32 log-decays
           dg is float32, and decayed queries and keys are two terms too: their rounding was all but 0.006 of the error of dg,
           and in sums over a chunk single elements failed the gate. In float16 rescale.py scales do.
Memory     q, k and g are read and dq, dk and dg written once; v and do are read once per panel, S and dS once in all.
Sharing    gradients are linear in do and dS, which differ between heads that share q, k, v, g or S. So a CTA of each head of the
           output stores its part of dq, dk or dg of a shared head in float32, from registers; sum_heads.py adds up the parts.
Caller     ``backward`` in launch_hopper.py launches ``gradients_kernel``.
Source     docs/notebook/gla.md.
"""

from onelaunch.kernels.gluon.compat import (
    fence_async_shared,
    gl,
    gluon,
    keep_barriers,
    mbarrier,
    tma_load,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from onelaunch.ops.gla.kernels.hopper_pairs import (
    MIN_LOG2_SUM,
    logarithm,
    pairs_by_levels,
    pairs_from_middle,
    pairs_from_middle_in_terms,
    sum_split,
)
from onelaunch.ops.gla.kernels.hopper_states import scaled_back, store_gradient
from onelaunch.ops.gla.kernels.hopper_tiles import (
    DECAY_HEADS,
    KEY_HEADS,
    LOG2E,
    MIN_LOG_DECAY,
    PANEL,
    QUERY_HEADS,
    STATE_HEADS,
    VALUE_HEADS,
    C,
    decay_terms,
    exceeds_largest,
    exp2_flushed,
    find_chunk,
    head_of,
    load_box,
    log_sigmoid_slope,
    opaque_zero,
    plus,
    row_index,
    split_log_decays,
    store_split,
    zero_tail,
)


@gluon.jit
def state_products(descriptors, tiles, bar, rows, cells, channel, values, acc: gl.constexpr, SHARED: gl.constexpr):
    """Return do S^T and v dS^T [C, PANEL], do v^T [C, C], and S dS summed over V [PANEL], all float32 and without decay.

    The function works block by block of BV values; the first block must be on its way to ``bar``. Afterwards the tiles of v,
    do, S and dS are free. With ``states_low`` S is the sum of two terms, and with ``dstates_low`` so is dS. ``rows``: first row
    of the chunk, and head; ``cells`` and ``channel``: see ``load_value_block``.
    """
    v, _, _, _, states_low, dstates_low = descriptors
    t_v, t_do, t_s, t_ds, t_low, t_dlow = tiles
    BV: gl.constexpr = t_v.shape[1]
    fine: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    of_states = gl.zeros([C, PANEL], gl.float32, layout=acc)
    of_dstates = gl.zeros([C, PANEL], gl.float32, layout=acc)
    dscores = gl.zeros([C, C], gl.float32, layout=acc)
    both = gl.zeros([32, PANEL], gl.float32, layout=fine)
    phase = 0
    for first in range(0, values, BV):
        if first > 0:
            mbarrier.expect(bar, (4 if states_low is None else (5 if dstates_low is None else 6)) * v.block_type.nbytes)
            load_value_block(descriptors, tiles, bar, rows, cells, channel, values, first, SHARED)
        mbarrier.wait(bar, phase)
        phase ^= 1
        of_states = warpgroup_mma(t_do, t_s, of_states, is_async=True)
        dscores = warpgroup_mma(t_do, t_v.permute((1, 0)), dscores, is_async=True)
        of_dstates = warpgroup_mma(t_v, t_ds, of_dstates, is_async=True)
        if states_low is not None:
            of_states = warpgroup_mma(t_do, t_low, of_states, is_async=True)
        if dstates_low is not None:
            of_dstates = warpgroup_mma(t_v, t_dlow, of_dstates, is_async=True)
        for turn in gl.static_range(BV // 32):
            state = t_s.slice(turn * 32, 32, dim=0).load(fine).to(gl.float32)
            if states_low is not None:
                state += t_low.slice(turn * 32, 32, dim=0).load(fine).to(gl.float32)
            dstate = t_ds.slice(turn * 32, 32, dim=0).load(fine).to(gl.float32)
            if dstates_low is not None:
                dstate += t_dlow.slice(turn * 32, 32, dim=0).load(fine).to(gl.float32)
            both += state * dstate
        of_states, dscores, of_dstates = warpgroup_mma_wait(num_outstanding=0, deps=(of_states, dscores, of_dstates))
    return of_states, of_dstates, dscores, gl.sum(both, 0)


@gluon.jit
def load_value_block(descriptors, tiles, bar, rows, cells, channel, values, first, SHARED: gl.constexpr):
    """Load a block of v, do, S and dS by TMA, which arrives at ``bar``; the caller has announced the bytes.

    ``cells`` are the first rows of the chunk's S and dS in tensors of states [rows, K], which differ where heads share a state.
    ``channel`` is the panel's first column there. With ALIASED a state is two boxes of 64 values in the rows of its chunk, a box
    is half as high as ``t_s``, both ``cells`` are the number of columns from one box to the other, and ``channel`` is the column
    in the first one. SHARED: see ``head_of``.
    """
    v, do, states, dstates, states_low, dstates_low = descriptors
    t_v, t_do, t_s, t_ds, t_low, t_dlow = tiles
    row, head = rows
    of_state, of_dstate = cells
    load_box(v, row, head_of(head, SHARED, VALUE_HEADS), first, values, bar, t_v)
    load_box(do, row, head, first, values, bar, t_do)
    BOX: gl.constexpr = states.block_type.shape[0]
    if t_s.shape[0] > BOX:
        for turn in gl.static_range(2):
            tma_load(states, [row, channel + turn * of_dstate], bar, t_s.slice(turn * BOX, BOX, dim=0))
            tma_load(dstates, [row, channel + turn * of_dstate], bar, t_ds.slice(turn * BOX, BOX, dim=0))
    else:
        tma_load(states, [of_state + first, channel], bar, t_s)
        tma_load(dstates, [of_dstate + first, channel], bar, t_ds)
        if states_low is not None:
            tma_load(states_low, [of_state + first, channel], bar, t_low)
        if dstates_low is not None:
            tma_load(dstates_low, [of_dstate + first, channel], bar, t_dlow)


@gluon.jit
def log_decays(tiles, wide, zero):
    """Return the log-decays of a panel: the tile at 4 + ``zero``, or two terms [2, C, PANEL] of float32 ones (``wide``)."""
    return tiles.index(4 + zero) if wide is None else decay_terms(wide)


@gluon.jit
def channel_gradients(
    descriptors, tiles, wide, blocks, both, results, bars, at, sizes, scale, LIMIT: gl.constexpr, NORMALIZER: gl.constexpr,
    KEYS: gl.constexpr, acc: gl.constexpr, SHARED: gl.constexpr, FACTORS: gl.constexpr,
):  # fmt: skip
    """Compute and store dq, dk and dg of one panel with a decay per channel.

    The loads of all tiles must be in flight (``bars``). The function leaves TMA stores in flight from tiles 0, 1 and 4.

    Args:
        descriptors: TMA descriptors of v, do, S, dS, and the second terms of S and dS, or None in their places.
        tiles: Five tiles [C, PANEL]: q, k, two of scratch, g; only q and k where there is ``wide``.
        wide: Tile [C, PANEL] of float32 log-decays, or None.
        blocks: Tiles of v, do, S and dS, and of second terms; the last two are not used where there are none.
        both: Shared memory of S and dS together, which is used for dk so far after their products.
        results: Pointers of dq, dk and dg, then their descriptors, None for those of shared heads, then ``factors`` of
            ``gradients_kernel``.
        bars: mbarriers of q, k and g, and of a block of v, do, S and dS.
        at: First row of the chunk; steps from there to the end of the sequence; head; ``cells`` and ``channel``, see
            ``load_value_block``; the head's number among those of all sequences.
        sizes: Values V; elements from row to row of dq and dk, and of dg and of parts of gradients; the panel among all heads'.
        scale: Factor of the scores.
        LIMIT: Largest sum of log-decays from the chunk's middle, in magnitude, that counts as moderate.
        NORMALIZER: Divisor of the log-decays, or None, see ``gradients_kernel``.
        KEYS: Channels K of a head.
        acc: Layout of the accumulators.
        SHARED: See ``head_of``.
        FACTORS: See ``scaled_back``.
    """
    row, left, head, cells, channel, pair = at
    values, pitch, width, place = sizes
    dq, dk, dg, dq_tiles, dk_tiles, dg_tiles, factors = results
    t_v, t_do, _, _, _, _ = blocks
    E: gl.constexpr = tiles.dtype
    LOWEST: gl.constexpr = -1e30 if E == gl.bfloat16 else -65504.0  # noqa: SIM300
    vector: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    across: gl.constexpr = gl.SliceLayout(0, acc)
    square: gl.constexpr = tiles.type.layout
    t_q = tiles.index(0)
    t_k = tiles.index(1)
    t_g = tiles.index(4) if wide is None else wide
    saved_ints = gl.allocate_shared_memory(gl.int32, [6 if FACTORS > 0 else 5, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    flag = saved_ints.index(0)  # 1 if decays are strong; only that branch passes it to opaque_zero, which expects a 1
    one = saved_ints.index(1)
    one.store(gl.full([1], 1, gl.int32, layout=vector))
    # Coordinates of the results wait in shared memory until the end: registers are scarcer.
    saved_ints.index(2).store(gl.full([1], 0, gl.int32, layout=vector) + row)
    saved_ints.index(3).store(gl.full([1], 0, gl.int32, layout=vector) + place)
    saved_ints.index(4).store(gl.full([1], 0, gl.int32, layout=vector) + left)
    if FACTORS > 0:
        saved_ints.index(5).store(gl.full([1], 0, gl.int32, layout=vector) + pair)
    mbarrier.wait(bars.index(0), 0)
    if left < C:
        rows: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
        zero_tail(t_q, left, rows)
        zero_tail(t_k, left, rows)
        if wide is None:
            zero_tail(t_g, left, rows)
        fence_async_shared()
    if wide is not None:
        gl.static_assert(NORMALIZER is None)
        split_log_decays(wide, left, gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0]))
        fence_async_shared()

    from_states, from_dstates, dscores, whole = state_products(
        descriptors, blocks, bars.index(1), (row, head), cells, channel, values, acc, SHARED
    )
    plain: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    if both.shape[1] == C:
        stash = both._reinterpret(gl.float32, [C, PANEL], plain)  # noqa: SLF001
    else:
        stash = both.index(1)._reinterpret(gl.float32, [C, PANEL], plain)  # noqa: SLF001
    t_whole = gl.allocate_shared_memory(gl.float32, [PANEL], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    t_whole.store(whole)
    t = gl.arange(0, C, layout=gl.SliceLayout(1, acc))[:, None]
    s = gl.arange(0, C, layout=across)[None, :]
    dscores *= scale
    if left < C:  # rows behind the sequence may be NaN
        from_states = gl.where(t < left, from_states, 0.0)
        from_dstates = gl.where(t < left, from_dstates, 0.0)
        dscores = gl.where((t < left) & (left - s > 0), dscores, 0.0)
    diagonal = gl.sum(gl.where(t - s == 0, dscores, 0.0), 1)[:, None]
    t_p = t_do.slice(0, PANEL, dim=1)
    t_low = t_v.slice(0, PANEL, dim=1)
    store_split(gl.where(t - s > 0, dscores, 0.0), t_p, t_low)
    fence_async_shared()

    before = logarithm(log_decays(tiles, wide, 0), "before", opaque_zero(one, vector), acc)
    from_middle = before - logarithm(log_decays(tiles, wide, 0), "half", 0, acc)
    moderate = (gl.abs(from_middle) <= LIMIT * LOG2E) & (before >= MIN_LOG2_SUM)  # False for NaN
    is_strong = gl.max(gl.max(gl.where(moderate, 0, 1), 1), 0)
    if gl.float16 == E:  # larger inputs would overflow when they are multiplied by exp(LIMIT)
        is_strong += exceeds_largest(t_q, 1.0, acc) + exceeds_largest(t_k, 1.0, acc)
    # From here on indices are hidden from the compiler. ptxas computes descriptors that both sides of a branch share on one
    # side alone, and the other side reads garbage: see the traps in docs/notebook/gla.md.
    flag.store(gl.full([1], 0, gl.int32, layout=vector) + is_strong)
    if is_strong == 0:
        behind = logarithm(log_decays(tiles, wide, 0), "all", 0, acc) - before
    else:
        if wide is None:  # -inf becomes finite: times the 0 of a matrix it would be NaN
            b_g = t_g.load(acc).to(gl.float32)
            t_g.store(gl.where(b_g < LOWEST, LOWEST, b_g).to(E))
            fence_async_shared()
        opaque = opaque_zero(flag, vector)
        before = logarithm(log_decays(tiles, wide, opaque), "before", opaque, acc)
        behind = logarithm(log_decays(tiles, wide, opaque), "behind", opaque, acc)

    behind = exp2_flushed(behind)
    b_dk = from_dstates * behind
    k_dk = t_k.load(acc).to(gl.float32) * b_dk
    stash.store(b_dk + diagonal * t_q.load(acc).to(gl.float32))
    before = exp2_flushed(before)
    # Terms from steps before t to dS: their sum over all steps, in t_whole, minus their sum from t on, in ``onward``. Terms from
    # S to dS: before * behind is the decay over the whole chunk, which is the same in every row; the first one is taken.
    state_terms = t_whole.load(across)[None, :] * (before * behind)
    t_whole.store(gl.sum(k_dk + gl.where(row_index(acc, left) == 0, state_terms, 0.0), 0))
    # Scratch tiles, at HIGH and LOW of these. With ``wide`` they are allocated here, so that the reductions before share their
    # memory. They are two buffers then: Triton places a barrier between stores to one.
    HIGH: gl.constexpr = 2 if wide is None else 0
    LOW: gl.constexpr = 3 if wide is None else 0
    spare_high = tiles if wide is None else gl.allocate_shared_memory(E, [1, C, PANEL], square)
    spare_low = tiles if wide is None else gl.allocate_shared_memory(E, [1, C, PANEL], square)
    b_dq = from_states * (before * scale)
    onward = t_q.load(acc).to(gl.float32) * b_dq - k_dk
    b_dq += diagonal * tiles.index(1 + opaque_zero(one, vector)).load(acc).to(gl.float32)
    if is_strong == 0:
        zero = opaque_zero(one, vector)
        spares = (spare_high.index(HIGH), spare_low.index(LOW))
        if wide is None:
            before_again = logarithm(log_decays(tiles, wide, zero), "before", zero, acc)
            decay = exp2_flushed(before_again - logarithm(log_decays(tiles, wide, zero), "half", zero, acc))
            b_dq, b_dk, onward = pairs_from_middle(b_dq, onward, (t_p, t_low), tiles, spares, decay, one, acc)
        else:
            decay = exp2_flushed(logarithm(log_decays(tiles, wide, zero), "middle", zero, acc))
            b_dq, b_dk, onward = pairs_from_middle_in_terms(b_dq, onward, (t_p, t_low), tiles, spares, decay, one, acc)
        from_levels = gl.zeros([C, PANEL], gl.float32, layout=acc)
    else:
        opaque = opaque_zero(flag, vector)
        high = spare_high.index(HIGH + opaque)._reinterpret(gl.bfloat16, [C, PANEL], square)  # noqa: SLF001
        low = spare_low.index(LOW + opaque)._reinterpret(gl.bfloat16, [C, PANEL], square)  # noqa: SLF001
        nothing = gl.zeros([C, PANEL], gl.float32, layout=acc)
        from_levels = sum_split(onward, high, low, nothing, "onward", 0, opaque, acc)
        onward = nothing
        b_dk = nothing
        b_dq, from_levels = pairs_by_levels(
            b_dq, stash, from_levels, t_p, t_low, tiles.index(opaque), tiles.index(1 + opaque), log_decays(tiles, wide, opaque),
            spare_high.index(HIGH + opaque), None if wide is None else spare_low.index(LOW + opaque), high, low, flag, acc,
        )  # fmt: skip
    b_dk += stash.load(acc)
    opaque = opaque_zero(one, vector)
    high = spare_high.index(HIGH + opaque)._reinterpret(gl.bfloat16, [C, PANEL], square)  # noqa: SLF001
    low = spare_low.index(LOW + opaque)._reinterpret(gl.bfloat16, [C, PANEL], square)  # noqa: SLF001
    b_dg = sum_split(onward, high, low, from_levels, "onward", 0, opaque, acc)
    b_dg += t_whole.load(across)[None, :]
    row = gl.max(saved_ints.index(2).load(vector), 0)
    place = gl.max(saved_ints.index(3).load(vector), 0)
    left = gl.max(saved_ints.index(4).load(vector), 0)
    pair = gl.max(saved_ints.index(5).load(vector), 0) if FACTORS > 0 else 0
    b_dq = scaled_back(b_dq, factors, pair, 3, FACTORS)
    b_dk = scaled_back(b_dk, factors, pair, 4, FACTORS)
    b_dg = scaled_back(b_dg, factors, pair, 5, FACTORS)
    store_gradient(t_q, b_dq, dq, dq_tiles, row, place, pitch, width, left, KEYS)
    store_gradient(t_k, b_dk, dk, dk_tiles, row, place, pitch, width, left, KEYS)
    if NORMALIZER is not None:
        y = tiles.index(4 + opaque_zero(one, vector)).load(acc).to(gl.float32) * NORMALIZER
        b_dg *= log_sigmoid_slope(y) * (1.0 / NORMALIZER)
    store_gradient(t_g, b_dg, dg, dg_tiles, row, place, width, width, left, KEYS)


@gluon.jit
def head_gradients(descriptors, tiles, blocks, results, bars, at, sizes, scale, log_decay, heads, to, KEYS: gl.constexpr,
                   acc: gl.constexpr, SHARED: gl.constexpr, FACTORS: gl.constexpr):  # fmt: skip
    """Compute and store dq and dk of one panel with one decay per head, and the panel's part of dg, at ``to`` [B, T, H].

    The arguments are those of ``channel_gradients``, with two tiles (q, k), a fifth descriptor and block for the second terms of
    S, and ``log_decay`` [B, T, H]. The function leaves TMA stores in flight from tiles 0 and 1. dg is float32, and the host adds
    up the panels. The decays between steps are a matrix [64, 64], so all pairs take one product whatever the decays are.
    """
    row, left, head, cells, channel, pair = at
    values, pitch, width, place = sizes
    dq, dk, _, dq_tiles, dk_tiles, _, factors = results
    t_v, t_do, _, _, _, _ = blocks
    vector: gl.constexpr = gl.BlockedLayout([C // 32], [32], [gl.num_warps()], [0])  # all 64 steps in each warp
    down: gl.constexpr = gl.SliceLayout(1, acc)
    across: gl.constexpr = gl.SliceLayout(0, acc)
    t_q = tiles.index(0)
    t_k = tiles.index(1)
    step = gl.arange(0, C, layout=vector)
    offset = (row + step).to(gl.int64) * heads + head
    g_offset = (row + step).to(gl.int64) * head_of(heads, SHARED, DECAY_HEADS) + head_of(head, SHARED, DECAY_HEADS)
    b_g = gl.load(log_decay + g_offset, mask=step < left, other=0.0).to(gl.float32)
    b_g = gl.where(b_g < MIN_LOG_DECAY, MIN_LOG_DECAY, b_g)
    sums = gl.associative_scan(b_g, 0, plus) * LOG2E
    total = gl.sum(b_g, 0) * LOG2E
    before = gl.convert_layout(sums, down)[:, None]
    mbarrier.wait(bars.index(0), 0)
    if left < C:
        rows: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
        zero_tail(t_q, left, rows)
        zero_tail(t_k, left, rows)
        fence_async_shared()

    from_states, from_dstates, dscores, whole = state_products(
        descriptors, blocks, bars.index(1), (row, head), cells, channel, values, acc, SHARED
    )
    t = gl.arange(0, C, layout=down)[:, None]
    s = gl.arange(0, C, layout=across)[None, :]
    dscores *= scale
    if left < C:  # rows behind the sequence may be NaN
        from_states = gl.where(t < left, from_states, 0.0)
        from_dstates = gl.where(t < left, from_dstates, 0.0)
        dscores = gl.where((t < left) & (s < left), dscores, 0.0)
    diagonal = gl.sum(gl.where(t == s, dscores, 0.0), 1)[:, None]
    t_p = t_do.slice(0, PANEL, dim=1)
    t_low = t_v.slice(0, PANEL, dim=1)
    between = before - gl.convert_layout(sums, across)[None, :]
    store_split(gl.where(t > s, dscores * exp2_flushed(gl.where(t > s, between, 0.0)), 0.0), t_p, t_low)
    fence_async_shared()
    pairs_dq = gl.zeros([C, PANEL], gl.float32, layout=acc)
    pairs_dk = gl.zeros([C, PANEL], gl.float32, layout=acc)
    pairs_dq = warpgroup_mma(t_p, t_k, pairs_dq, use_acc=False, is_async=True)
    pairs_dq = warpgroup_mma(t_low, t_k, pairs_dq, is_async=True)
    pairs_dk = warpgroup_mma(t_p.permute((1, 0)), t_q, pairs_dk, use_acc=False, is_async=True)
    pairs_dk = warpgroup_mma(t_low.permute((1, 0)), t_q, pairs_dk, is_async=True)
    from_states = from_states * (exp2_flushed(before) * scale)
    from_dstates = from_dstates * exp2_flushed(total - before)
    b_q = t_q.load(acc).to(gl.float32)
    b_k = t_k.load(acc).to(gl.float32)
    pairs_dq, pairs_dk = warpgroup_mma_wait(num_outstanding=0, deps=(pairs_dq, pairs_dk))
    onward = gl.convert_layout(gl.sum(b_q * (pairs_dq + from_states) - b_k * pairs_dk, 1), vector)
    earlier = gl.convert_layout(gl.sum(b_k * from_dstates, 1), vector)
    b_dq = from_states + pairs_dq + diagonal * b_k
    b_dk = from_dstates + pairs_dk + diagonal * b_q
    b_dq = scaled_back(b_dq, factors, pair, 3, FACTORS)
    b_dk = scaled_back(b_dk, factors, pair, 4, FACTORS)
    store_gradient(t_q, b_dq, dq, dq_tiles, row, place, pitch, width, left, KEYS)
    store_gradient(t_k, b_dk, dk, dk_tiles, row, place, pitch, width, left, KEYS)
    b_dg = gl.sum(onward, 0) - gl.associative_scan(onward, 0, plus) + onward  # sum from each step on
    b_dg += gl.associative_scan(earlier, 0, plus) - earlier  # sum over the steps before each step
    b_dg += gl.sum(whole, 0) * gl.exp2(total)
    b_dg = scaled_back(b_dg, factors, pair, 5, FACTORS)
    gl.store(to + offset, b_dg, mask=step < left)


@gluon.jit(do_not_specialize=["T", "heads", "sequences"])
def gradients_kernel(
    q, k, g, v, do, states, dstates, states_low, dstates_low, log_decay, dq, dk, dg, dq_tiles, dk_tiles, dg_tiles, factors,
    offsets, T, heads, sequences, rows, scale, values, pitch,
    KEYS: gl.constexpr, BV: gl.constexpr, HELD: gl.constexpr, BISECTION_STEPS: gl.constexpr, LIMIT: gl.constexpr,
    NORMALIZER: gl.constexpr, ALIASED: gl.constexpr, PACKED: gl.constexpr, SHARED: gl.constexpr, FACTORS: gl.constexpr,
):  # fmt: skip
    """Compute dq, dk and dg [B, T, H, K] of one chunk, head and panel; see the top of the file.

    ``q`` to ``dstates_low`` and the ``*_tiles`` are TMA descriptors, with a dimension of heads where the last panel or block of
    values reaches beyond a head (``load_box``); states are padded. dq, dk and dg are the same tensors as pointers, for chunks
    that are cut off; a tensor of shared heads has no descriptor of its gradient, and its pointer is that of float32 parts from
    every head [B, T, H, K]. SHARED: see ``head_of``. With one decay per head ``g`` is None, ``log_decay`` [B, T, H] is given,
    and ``dg`` has float32 parts [PANELS, B, T, H]. ``factors`` are powers of 2 by which dq, dk and dg are multiplied before they
    are rounded, or None; FACTORS: see ``scaled_back``. ``rows`` is B T. ``pitch``: elements from row to row of dq and of dk.
    With a NORMALIZER log-decays, one for each channel and 16-bit, are logsigmoid(z) / NORMALIZER, and dg is the gradient of z.
    ALIASED: states and their gradients lie in the rows of their chunk, see ``aliased_state_buffers`` in launch_hopper.py. BV:
    values of a block; a padded state has a multiple of HELD. BISECTION_STEPS, PACKED: see ``find_chunk``. KEYS, LIMIT: as above.
    """
    SCALAR: gl.constexpr = g is None
    PANELS: gl.constexpr = (KEYS + PANEL - 1) // PANEL
    E: gl.constexpr = q.dtype
    acc: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, gl.num_warps() // 4], [16, PANEL * 4 // gl.num_warps(), 16])
    item = gl.program_id(0)
    panel = item % PANELS
    head = (item // PANELS) % heads
    slot = item // PANELS // heads
    row, left, n = find_chunk(offsets, slot, T, sequences, BISECTION_STEPS, PACKED)
    if left <= 0:
        return
    square: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, PANEL], E)
    WIDE: gl.constexpr = False if SCALAR else g.dtype == gl.float32
    tiles = gl.allocate_shared_memory(E, [5 if not (SCALAR or WIDE) else 2, C, PANEL], square)  # q, k, two of scratch, g
    wide_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, PANEL], gl.float32)
    wide = gl.allocate_shared_memory(gl.float32, [C, PANEL], wide_layout) if WIDE else None
    values_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, BV], E)
    both = gl.allocate_shared_memory(E, [2, BV, PANEL], states.layout)
    blocks = (
        gl.allocate_shared_memory(E, [C, BV], values_layout),
        gl.allocate_shared_memory(E, [C, BV], values_layout),
        both.index(0),
        both.index(1),
        gl.allocate_shared_memory(E, states.block_type.shape, states.layout) if SCALAR or WIDE else tiles,
        gl.allocate_shared_memory(E, states.block_type.shape, states.layout) if WIDE else tiles,
    )
    bars = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(bars.index(0), count=1)
    mbarrier.init(bars.index(1), count=1)
    fence_async_shared()
    channel = panel * PANEL
    width = heads * KEYS
    place = head * PANELS + panel
    mbarrier.expect(bars.index(0), 2 * q.block_type.nbytes + (0 if SCALAR else g.block_type.nbytes))
    if not SCALAR:
        of_decays = head_of(head, SHARED, DECAY_HEADS)
        load_box(g, row, of_decays, channel, KEYS, bars.index(0), wide if WIDE else tiles.index(4))
    load_box(q, row, head_of(head, SHARED, QUERY_HEADS), channel, KEYS, bars.index(0), tiles.index(0))
    load_box(k, row, head_of(head, SHARED, KEY_HEADS), channel, KEYS, bars.index(0), tiles.index(1))
    descriptors = (v, do, states, dstates, states_low, dstates_low)
    mbarrier.expect(bars.index(1), (5 if SCALAR else (6 if WIDE else 4)) * v.block_type.nbytes)  # blocks of S are as large
    if ALIASED:
        columns = heads * PANELS * PANEL
        cells = (columns, columns)
        channel = place * PANEL
    else:
        height = values
        if v.layout.rank == 3:  # values are padded in the states
            height = gl.cdiv(values, HELD) * HELD
        pair = slot * heads + head
        cells = (head_of(pair, SHARED, STATE_HEADS) * height, pair * height)
    load_value_block(descriptors, blocks, bars.index(1), (row, head), cells, channel, values, 0, SHARED)
    results = (dq, dk, dg, dq_tiles, dk_tiles, dg_tiles, factors)
    at = (row, left, head, cells, channel, n * heads + head)
    sizes = (BV if ALIASED else values, pitch, width, place)  # ALIASED means V = BV, a constant: no further block is loaded
    if SCALAR:
        to = dg + panel.to(gl.int64) * rows * heads
        head_gradients(descriptors, tiles, blocks, results, bars, at, sizes, scale, log_decay, heads, to, KEYS, acc, SHARED,
                       FACTORS)  # fmt: skip
    else:
        channel_gradients(descriptors, tiles, wide, blocks, both, results, bars, at, sizes, scale, LIMIT, NORMALIZER, KEYS, acc,
                          SHARED, FACTORS)  # fmt: skip
    tma_store_wait(pendings=0)
    keep_barriers((bars,))
    tiles._keep_alive()  # noqa: SLF001 - Triton would place reductions over tiles that TMA still reads
    if WIDE:
        wide._keep_alive()  # noqa: SLF001  # pyrefly: ignore[missing-attribute]
