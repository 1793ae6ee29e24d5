"""Intra-chunk part of gated linear attention on Hopper GPUs: decays of queries and keys, and their products, the scores.

Computes   for a chunk of 64 steps, from q, k and log-decays g in shared memory, per head:
             q~_t = q_t e^(sum of g from the anchor to t),   k~_s = k_s e^(-(sum of g from the anchor to s)),
             scores[t, s] = scale * sum over channels of q_t k_s e^(g_s+1 + ... + g_t) for t >= s, 0 elsewhere,
           and two factors per channel by which the state has to decay before and after its product with the queries. With a
           decay per head queries and keys stay as they are, and factors per step are computed (``prepare_heads``).
Role       one warpgroup of hopper_chunk_state.py runs ``prepare_channels`` (a decay per channel) or ``prepare_heads`` (one per
           head) and works up to STAGES chunks ahead of the warpgroups that hold the state.
Reverse    the backward pass is the same recurrence from the last step to the first, with q and k exchanged: dv_s = sum over t
           >= s of (k_s q_t e^...) do_t, and the state becomes its gradient dS. So with REVERSE the tile called ``queries``
           holds k (it multiplies the state) and the one called ``keys`` holds q (it is added to the state). The pass enters a
           chunk at its near end, which is the last step with REVERSE, and leaves at its far end. ``scale`` belongs to q in both
           directions.
Decay      per channel, moderate: anchored at the middle of the chunk, so that one product gives all scores. Factors reach
           exp(+-LIMIT) at most, where LIMIT bounds the sum over either half. Per channel, strong (any sum, -inf included):
           secondary chunking, carried down to single steps: blocks of 1, 2, 4, ... 32 steps, in which every right block is
           multiplied with the left block next to it, anchored between the two, so that no factor exceeds 1
           (``scores_by_levels``). Per head: the decays between steps are a matrix [64, 64] that multiplies q k^T; those of
           queries and keys are applied to the state's product and to the values (hopper_chunk_state.py). LIMIT is 40 for
           bfloat16 and 6 for float16 (LIMITS in launch_hopper.py).
Given      three tuples of hopper_chunk_state.py. ``tiles``: queries, keys, values, log-decays, second terms of the keys (which
           overwrite log-decays), scores, and states on their way out. ``vectors``: scratch of this role (a mask for
           ``half_sums`` with a decay per channel, sums of log-decays with one per head); ``ends``, the factors of the state or,
           per head, of its product and of the values; and per chunk one number: ``strong``, 1 where its decay is strong, or,
           per head, the decay over all of it. ``bars``: full, decayed, scores_full, empty and scores_empty.
On chip    everything in shared memory, bytes for 16-bit numbers; per channel decayed queries and keys overwrite queries and
           keys (128 K each); the rounding errors of the keys, as second 16-bit terms, overwrite the log-decays (128 K); scores
           (8192); sums of steps come from products with matrices of 0 and 1. float32 log-decays (256 K) are first replaced by
           two bfloat16 terms in the same place (``split_log_decays``), both of which such products sum.
Barriers   waits for ``full`` (TMA has written the tile); arrives at ``decayed`` (all but the scores may be read) and at
           ``scores_full``. It waits for ``scores_empty`` only where there are fewer score buffers than stages. No wait for
           ``empty`` is needed: a stage is refilled after the state warpgroups have released it, which they do after both
           arrivals here. Writes to tiles are followed by ``fence_async_shared``, since WGMMA reads them through the async proxy.
Numerics   per channel decayed queries are rounded once to 16 bits, and decayed keys are a sum of two 16-bit numbers; per head
           neither are rounded, but scaled values are, to two such numbers where states are stored (SPLIT_KEYS) and else to one.
           Scores are rounded once. u is the norm-wise error of rounding the exact result to the inputs' dtype, and an error of
           2 u is allowed. Rounding errors add up as squares: with its own rounding and two more an output has 1.73 u. A state
           is rounded only when it becomes the operand of a product; with SPLIT_KEYS what was added to it is as good as exact.
           The gradient of g needs that, because it is a product of two states.
Source     Yang et al., Gated Linear Attention Transformers with Hardware-Efficient Training (2024), secondary chunking;
           docs/notebook/gla.md.
"""

from onelaunch.kernels.gluon.compat import fence_async_shared, gl, gluon, mbarrier, warpgroup_mma, warpgroup_mma_wait
from onelaunch.ops.gla.kernels.hopper_recompute import PREFETCHED, prefetch, recomputed_span
from onelaunch.ops.gla.kernels.hopper_tiles import (
    DECAY_HEADS,
    LOG2E,
    PANEL,
    C,
    chunk_of,
    decay_terms,
    exceeds_largest,
    exp,
    exp2_flushed,
    head_log_decays,
    head_of,
    ones_where,
    opaque_zero,
    plus,
    split_log_decays,
    store_split,
    work_item,
    zero_tail,
)


@gluon.jit
def visible(query, key, REVERSE: gl.constexpr):
    """Return whether a query, at step ``query``, sees a key, at step ``key``: the pass reaches the key no later than it."""
    return query <= key if REVERSE else query >= key


@gluon.jit
def score(queries, keys, square: gl.constexpr):
    """Return the products [C, C] of queries in registers with keys in shared memory, [C, PANEL] each. It waits for WGMMA."""
    operand: gl.constexpr = gl.DotOperandLayout(0, square, 2)
    p = gl.zeros([C, C], gl.float32, layout=square)
    p = warpgroup_mma(gl.convert_layout(queries, operand), keys.permute((1, 0)), p, use_acc=False, is_async=True)
    return warpgroup_mma_wait(num_outstanding=0, deps=(p,))


@gluon.jit
def weighted_sum(weights, g, panel: gl.constexpr, rows: gl.constexpr):
    """Return the product of weights [C, C] and a panel of log-decays in shared memory: sums over some steps, float32 [C, PANEL].

    ``weights`` are 0 and 1, or -1 for steps that are subtracted. ``g`` is a tile [C, K], or for float32 log-decays the tiles of
    ``decay_terms``, of which both terms are summed. The function waits for WGMMA.
    """
    zero = gl.zeros([C, PANEL], gl.float32, layout=rows)
    if g.rank == 3:
        d = warpgroup_mma(weights.to(g.dtype), g.index(2 * panel), zero, use_acc=False, is_async=True)
        d = warpgroup_mma(weights.to(g.dtype), g.index(2 * panel + 1), d, is_async=True)
    else:
        p_g = g.slice(panel * PANEL, PANEL, dim=1)
        d = warpgroup_mma(weights.to(g.dtype), p_g, zero, use_acc=False, is_async=True)
    return warpgroup_mma_wait(num_outstanding=0, deps=(d,))


@gluon.jit
def half_sums(g, ones, panel: gl.constexpr):
    """Return the sums of a panel's log-decays over the first and over the second half of the steps, each [PANEL].

    ``ones`` [8, C] comes from ``fill_half_masks``. The product is transposed, [PANEL, 8]: M is 64 channels, N is 8. ``g`` is
    that of ``weighted_sum``.
    """
    few: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16])
    total = gl.zeros([PANEL, 8], gl.float32, layout=few)
    if g.rank == 3:
        masks = ones.permute((1, 0))
        total = warpgroup_mma(g.index(2 * panel).permute((1, 0)), masks, total, use_acc=False, is_async=True)
        total = warpgroup_mma(g.index(2 * panel + 1).permute((1, 0)), masks, total, is_async=True)
    else:
        p_g = g.slice(panel * PANEL, PANEL, dim=1)
        total = warpgroup_mma(p_g.permute((1, 0)), ones.permute((1, 0)), total, use_acc=False, is_async=True)
    total = warpgroup_mma_wait(num_outstanding=0, deps=(total,))
    first, second = gl.split(gl.reshape(total, [PANEL, 4, 2]))
    return gl.sum(first, 1), gl.sum(second, 1)  # the other three of each four are 0


@gluon.jit
def fill_half_masks(ones):
    """Write the mask of ``half_sums``, [8, C]: ones in the first half of row 0 and the second half of row 1, else zeros.

    The function fences its writes.
    """
    E: gl.constexpr = ones.dtype
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    which = gl.arange(0, 8, layout=gl.SliceLayout(1, layout))[:, None]
    half = gl.arange(0, C, layout=gl.SliceLayout(0, layout))[None, :] // (C // 2)
    ones.store(ones_where(which == half, E))
    fence_async_shared()


@gluon.jit
def scores_from_middle(queries, keys, g, low, scores, decayed, scores_empty, turn, scale, square: gl.constexpr,
                       SINGLE_BUFFER: gl.constexpr, OUTPUT: gl.constexpr, REVERSE: gl.constexpr):  # fmt: skip
    """Decay queries and keys in place, anchored at the middle of the chunk, and compute the scores by one product.

    Given q, k and g of a full stage with moderate decays. Leaves decayed queries, keys in two 16-bit terms (``keys`` and
    ``low``, which overwrites panels of ``g`` that have been summed), and scores; arrives at ``decayed`` before the scores'
    product, which only reads. With SINGLE_BUFFER there is one score buffer: the function waits at ``scores_empty`` until the
    scores of the chunk before have been read. ``turn`` counts the chunks, and its parity is the phase of that barrier. The caller
    fences and arrives at ``scores_full``.
    """
    E: gl.constexpr = keys.dtype
    weights: gl.constexpr = gl.DotOperandLayout(0, square, 2)
    t = gl.arange(0, C, layout=gl.SliceLayout(1, weights))[:, None]
    s = gl.arange(0, C, layout=gl.SliceLayout(0, weights))[None, :]
    # Weights of the sum of log-decays from the middle to step t: 1 from the middle up to and with a later t, and -1 from after
    # an earlier t up to the middle.
    later = ones_where((s <= t) & (s >= C // 2), gl.float32)
    from_middle = later - ones_where((s > t) & (s < C // 2), gl.float32)
    for panel in gl.static_range(keys.shape[1] // PANEL):
        p_q = queries.slice(panel * PANEL, PANEL, dim=1)
        p_k = keys.slice(panel * PANEL, PANEL, dim=1)
        d = weighted_sum(from_middle, g, panel, square) * (-LOG2E if REVERSE else LOG2E)
        b_k = p_k.load(square).to(gl.float32) * exp2_flushed(-d)
        if REVERSE:
            b_k *= scale
        store_split(b_k, p_k, low.slice(panel * PANEL, PANEL, dim=1))
        if OUTPUT:
            b_q = p_q.load(square).to(gl.float32) * exp2_flushed(d)
            if not REVERSE:
                b_q *= scale
            p_q.store(b_q.to(E))
    fence_async_shared()
    mbarrier.arrive(decayed, count=1)
    if OUTPUT:
        p = gl.zeros([C, C], gl.float32, layout=square)
        p = warpgroup_mma(queries, keys.permute((1, 0)), p, use_acc=False, is_async=True)
        p = warpgroup_mma(queries, low.permute((1, 0)), p, is_async=True)
        p = warpgroup_mma_wait(num_outstanding=0, deps=(p,))
        t = gl.arange(0, C, layout=gl.SliceLayout(1, square))[:, None]
        s = gl.arange(0, C, layout=gl.SliceLayout(0, square))[None, :]
        if SINGLE_BUFFER:
            mbarrier.wait(scores_empty, (turn & 1) ^ 1)
        scores.store(gl.where(visible(t, s, REVERSE), p, 0.0).to(E))


@gluon.jit
def decay_over(g, panel: gl.constexpr, level, zero, PART: gl.constexpr, square: gl.constexpr):
    """Return e^(a sum of log-decays) for each element of a panel of g (``weighted_sum``), which must be finite.

    Each sum is added up from its own log-decays and is at most 0. It is never a difference of two longer sums, whose rounding
    errors would show where decays are strong. PART "before" sums from the start of the chunk up to and with each step; "behind"
    sums the steps after each one to the end of the chunk. "block" stays within a step's block of 2^level steps: where bit
    ``level`` of the step is 1 (a right block) it sums from the block's start up to and with the step, and elsewhere (a left
    block) the steps after it to the block's end. ``zero`` is an ``opaque_zero``, so that the weights are not held in registers.
    """
    weights: gl.constexpr = gl.DotOperandLayout(0, square, 2)
    t = gl.arange(0, C, layout=gl.SliceLayout(1, weights))[:, None] + zero
    s = gl.arange(0, C, layout=gl.SliceLayout(0, weights))[None, :]
    if PART == "before":
        within = s <= t
    elif PART == "behind":
        within = s > t
    else:
        later = (((t >> level) & 1) == 1) & (s <= t)
        earlier = (((t >> level) & 1) == 0) & (s > t)
        within = (later | earlier) & ((s >> level) == (t >> level))
    return exp(weighted_sum(ones_where(within, gl.float32), g, panel, square))


@gluon.jit
def scores_by_levels(queries, keys, g, low, scores, decayed, flag, scores_empty, turn, scale, square: gl.constexpr,
                     SINGLE_BUFFER: gl.constexpr, OUTPUT: gl.constexpr, REVERSE: gl.constexpr):  # fmt: skip
    """Decay queries and keys in place, and compute the scores, for log-decays of any size (secondary chunking).

    Works panel by panel. For each level the right blocks of 2^level steps are multiplied with the left blocks next to them,
    anchored between the two. Scores of a step's query with its own key come from an undecayed product. Then queries are decayed
    from the near end of the chunk and keys to its far end. There are seven products per panel, not one in all, but no
    factor exceeds 1. Log-decays must be finite. ``low`` is that of ``scores_from_middle``. ``flag`` is an int32 in shared memory
    that holds 1: it makes indices opaque to the compiler (``opaque_zero``). For SINGLE_BUFFER and ``turn`` see
    ``scores_from_middle``. The function arrives at ``decayed`` at the end, since ``keys`` is scratch until then; the caller
    arrives at ``scores_full``.
    """
    E: gl.constexpr = keys.dtype
    FROM_START: gl.constexpr = "behind" if REVERSE else "before"
    TO_END: gl.constexpr = "before" if REVERSE else "behind"
    vector: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    p = gl.zeros([C, C], gl.float32, layout=square)
    column = gl.arange(0, C, layout=gl.SliceLayout(0, square))[None, :]
    for panel in gl.static_range(keys.shape[1] // PANEL):
        p_q = queries.slice(panel * PANEL, PANEL, dim=1)
        p_k = keys.slice(panel * PANEL, PANEL, dim=1)
        row = gl.arange(0, C, layout=gl.SliceLayout(1, square))[:, None] + opaque_zero(flag, vector)
        b_k = p_k.load(square)
        if OUTPUT:
            p += gl.where(row == column, score(p_q.load(square), p_k, square), 0.0)
            for level in range(6):  # 2^6 = C
                zero = opaque_zero(flag, vector)
                d = decay_over(g, panel, level, zero, "block", square)
                row = gl.arange(0, C, layout=gl.SliceLayout(1, square))[:, None] + zero
                is_query = ((row >> level) & 1) == (0 if REVERSE else 1)
                p_k.store(gl.where(is_query, 0.0, b_k.to(gl.float32) * d).to(E))
                b_q = gl.where(is_query, p_q.load(square).to(gl.float32) * d, 0.0)
                fence_async_shared()
                crossing = score(b_q.to(E), p_k, square)
                p += gl.where((row >> (level + 1)) == (column >> (level + 1)), crossing, 0.0)
        if OUTPUT:
            d = decay_over(g, panel, 0, opaque_zero(flag, vector), FROM_START, square)
            if not REVERSE:
                d *= scale
            p_q.store((p_q.load(square).to(gl.float32) * d).to(E))
        d = decay_over(g, panel, 0, opaque_zero(flag, vector), TO_END, square)
        if REVERSE:
            d *= scale
        store_split(b_k.to(gl.float32) * d, p_k, low.slice(panel * PANEL, PANEL, dim=1))
    if OUTPUT:
        if SINGLE_BUFFER:
            mbarrier.wait(scores_empty, (turn & 1) ^ 1)
        scores.store((p * scale).to(E))
    fence_async_shared()
    mbarrier.arrive(decayed, count=1)


@gluon.jit
def prepare_channels(tiles, vectors, bars, offsets, T, sizes, scale, LIMIT: gl.constexpr, SLICES: gl.constexpr,
                     PACKED: gl.constexpr, OUTPUT: gl.constexpr, REVERSE: gl.constexpr, RECOMPUTE: gl.constexpr):  # fmt: skip
    """Run the prepare role for a decay per channel: all chunks of this CTA, one after the other."""
    ones, _, _ = vectors
    _, _, scores_full, _, _ = bars
    STAGES: gl.constexpr = tiles[1].shape[0]
    n, _, _, segment = work_item(sizes, SLICES)
    _, steps, skipped = recomputed_span(offsets, n, T, segment, sizes, PACKED, RECOMPUTE)
    chunks = gl.cdiv(steps, C)
    fill_half_masks(ones)
    if RECOMPUTE > 0:  # a loop of its own: products on both sides of a branch are a trap (docs/notebook/gla.md)
        for c in range(skipped):
            prepare_chunk(tiles, vectors, bars, c, c, C, scale, LIMIT, False, REVERSE)
            mbarrier.arrive(scores_full.index(c % STAGES), count=1)  # without scores: its phase stays that of the stage
    for c in range(skipped, chunks):
        left = steps - chunk_of(c, chunks, REVERSE) * C  # steps from the chunk's start to the end of the segment
        prepare_chunk(tiles, vectors, bars, c, c - skipped, left, scale, LIMIT, OUTPUT, REVERSE)


@gluon.jit
def prepare_chunk(tiles, vectors, bars, c, turn, left, scale, LIMIT: gl.constexpr, OUTPUT: gl.constexpr,
                  REVERSE: gl.constexpr):  # fmt: skip
    """Prepare one chunk with a decay per channel, and with OUTPUT its queries and scores too.

    Wait for ``full``, clear the rows past the end of the sequence, from ``left`` on, sum the log-decays of both halves, write
    the factors of the state to ``ends`` [2, K] and the kind of decay to ``strong`` (1 for strong, 0 for moderate). Then call
    ``scores_by_levels`` or ``scores_from_middle``. ``ends``: with moderate decay the factors of the near and of the far half;
    with strong decay those of the whole chunk, and 1. ``c`` counts the chunks that the CTA goes over, and ``turn`` those with
    outputs.
    """
    tiles_q, tiles_k, _, tiles_g, tiles_low, tiles_s, _ = tiles
    ones, ends, strong = vectors
    full, decayed, scores_full, _, scores_empty = bars
    K: gl.constexpr = tiles_k.shape[2]
    E: gl.constexpr = tiles_k.dtype
    STAGES: gl.constexpr = tiles_k.shape[0]
    SCORES: gl.constexpr = tiles_s.shape[0]
    ENDS: gl.constexpr = ends.shape[0]
    square: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    vector: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    rows: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    every: gl.constexpr = gl.BlockedLayout([PANEL // 32], [32], [4], [0])
    WIDE: gl.constexpr = tiles_g.dtype == gl.float32
    LOW: gl.constexpr = 2 if WIDE else 1  # tiles of second terms in the place of log-decays, of which the first is used
    # Finite stand-in for -inf, which times a 0 of a mask would be NaN. It decays to 0, and sums of 64 stay finite in float32.
    LOWEST: gl.constexpr = -1e30 if E == gl.bfloat16 else -65504.0  # noqa: SIM300
    NEAR: gl.constexpr = 1 if REVERSE else 0
    ends_flat = ends._reinterpret(gl.float32, [2 * ENDS, K], gl.SwizzledSharedLayout(1, 1, 1, [0]))  # noqa: SLF001
    stage = c % STAGES
    row = 2 * (stage if ENDS == STAGES else c % ENDS)  # first row of the chunk in ``ends_flat``
    g = decay_terms(tiles_g.index(stage)) if WIDE else tiles_g.index(stage)
    mbarrier.wait(full.index(stage), (c // STAGES) & 1)
    if WIDE:
        split_log_decays(tiles_g.index(stage), left, rows)
    if left < C:  # the rows from ``left`` on belong to the next sequence, or lie past the end of the tensor
        if not WIDE:
            zero_tail(g, left, rows)
        zero_tail(tiles_k.index(stage), left, rows)
        if not WIDE:
            fence_async_shared()
    if WIDE:
        fence_async_shared()
    within = True
    for panel in gl.static_range(K // PANEL):
        first, second = half_sums(g, ones, panel)
        ends_flat.index(row + NEAR).slice(panel * PANEL, PANEL, dim=0).store(exp(first))
        ends_flat.index(row + 1 - NEAR).slice(panel * PANEL, PANEL, dim=0).store(exp(second))
        within = (gl.abs(first) <= LIMIT) & (gl.abs(second) <= LIMIT) & within
    # Each warp takes the maximum over all channels for itself. A maximum across warps would cost a round trip through
    # shared memory, and a register throughout the loop.
    is_strong = gl.max(gl.convert_layout(gl.where(within, 0, 1), every), 0)
    if gl.float16 == E:  # inputs beyond LARGEST would overflow when they are multiplied by exp(LIMIT)
        is_strong += exceeds_largest(tiles_k.index(stage), scale if REVERSE else 1.0, rows)
        if OUTPUT:
            is_strong += exceeds_largest(tiles_q.index(stage), 1.0 if REVERSE else scale, rows)
    if is_strong == 0:
        strong.index(stage).store(gl.full([1], 0, gl.int32, layout=vector))
        scores_from_middle(
            tiles_q.index(stage), tiles_k.index(stage), g, tiles_low.index(stage * LOW), tiles_s.index(stage % SCORES),
            decayed.index(stage), scores_empty, turn, scale, square, SCORES < STAGES, OUTPUT, REVERSE,
        )  # fmt: skip
    else:
        strong.index(stage).store(gl.full([1], 1, gl.int32, layout=vector))
        # The stage is hidden from the compiler. ptxas computes descriptors that both sides of the branch share on one
        # side alone, and the other side reads garbage: see the traps in docs/notebook/gla.md.
        opaque_stage = stage + opaque_zero(strong.index(stage), vector)
        opaque_g = decay_terms(tiles_g.index(opaque_stage)) if WIDE else tiles_g.index(opaque_stage)
        if not WIDE:  # float32 ones are finite already
            for panel in gl.static_range(K // PANEL):
                p_g = opaque_g.slice(panel * PANEL, PANEL, dim=1)
                b_g = p_g.load(rows).to(gl.float32)
                p_g.store(gl.where(b_g < LOWEST, LOWEST, b_g).to(E))
            fence_async_shared()
        for panel in gl.static_range(K // PANEL):
            first, second = half_sums(opaque_g, ones, panel)
            near = ends_flat.index(row).slice(panel * PANEL, PANEL, dim=0)
            far = ends_flat.index(row + 1).slice(panel * PANEL, PANEL, dim=0)
            near.store(exp(first + second))
            far.store(first * 0.0 + 1.0)  # 1, but NaN where a log-decay is NaN
        scores_by_levels(
            tiles_q.index(opaque_stage), tiles_k.index(opaque_stage), opaque_g, tiles_low.index(opaque_stage * LOW),
            tiles_s.index(opaque_stage % SCORES), decayed.index(stage), strong.index(opaque_stage), scores_empty, turn, scale,
            square, SCORES < STAGES, OUTPUT, REVERSE,
        )  # fmt: skip
    if OUTPUT:
        fence_async_shared()
        mbarrier.arrive(scores_full.index(stage), count=1)


@gluon.jit
def prepare_heads(tiles, vectors, bars, offsets, log_decay, T, sizes, scale, SLICES: gl.constexpr,
                  PACKED: gl.constexpr, OUTPUT: gl.constexpr, REVERSE: gl.constexpr, SHARED: gl.constexpr,
                  TURNS: gl.constexpr, RECOMPUTE: gl.constexpr):  # fmt: skip
    """Run the prepare role for one decay per head: all chunks of this CTA, one after the other.

    Queries and keys stay as they are. The warpgroups that hold the state multiply by the factors written here: ``ends`` has two
    rows [C] per stage, a factor per step for the product of queries and state and one for the values, and ``whole_decay`` has
    the factor of the state. The function arrives at ``decayed`` as soon as they are written, before it computes the scores. The
    log-decays of the next chunk are loaded from global memory one chunk ahead; with TURNS those of a chunk are loaded when all
    groups have finished the chunk before. Log-decays below MIN_LOG_DECAY, -inf included, are raised to it: its exponential is 0
    too, and differences of their sums are still exact enough. ``sums`` [C] is scratch through which sums of log-decays change
    their layout.
    """
    tiles_q, tiles_k, _, _, _, tiles_s, _ = tiles
    sums, ends, whole_decay = vectors
    full, decayed, scores_full, empty, scores_empty = bars
    STAGES: gl.constexpr = tiles_k.shape[0]
    SCORES: gl.constexpr = tiles_s.shape[0]
    square: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    rows: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    vector: gl.constexpr = gl.BlockedLayout([C // 32], [32], [4], [0])  # all 64 steps in each warp: scans need no shared memory
    single: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    decay_heads = head_of(sizes[0], SHARED, DECAY_HEADS)
    n, head, _, segment = work_item(sizes, SLICES)
    head = head_of(head, SHARED, DECAY_HEADS)
    row, steps, skipped = recomputed_span(offsets, n, T, segment, sizes, PACKED, RECOMPUTE)
    chunks = gl.cdiv(steps, C)
    step = gl.arange(0, C, layout=vector)
    t = gl.arange(0, C, layout=gl.SliceLayout(1, square))
    s = gl.arange(0, C, layout=gl.SliceLayout(0, square))
    j = chunk_of(0, chunks, REVERSE)
    p_g = log_decay + (row + j * C + step).to(gl.int64) * decay_heads + head
    next_g = gl.load(p_g, mask=(step < steps - j * C) & (chunks > 0), other=0.0)
    for c in range(chunks):
        stage = c % STAGES
        j = chunk_of(c, chunks, REVERSE)
        left = steps - j * C
        queries = tiles_q.index(stage)
        keys = tiles_k.index(stage)
        g = head_log_decays(p_g, next_g, step, left, c, full, empty, TURNS)
        p_g += -C * decay_heads if REVERSE else C * decay_heads
        if not TURNS:
            next_left = steps - chunk_of(c + 1, chunks, REVERSE) * C
            next_g = gl.load(p_g, mask=(step < next_left) & (c + 1 < chunks), other=0.0)
            if RECOMPUTE > 0:  # a chunk without outputs takes less time than a load from beyond L2
                prefetch(p_g + (PREFETCHED - 1) * C * decay_heads, step + PREFETCHED * C < left)
        before = gl.associative_scan(g, 0, plus)
        whole = gl.sum(g, 0)
        behind = whole - before
        of_start, of_end = exp(before) * scale, exp(behind)
        mbarrier.wait(full.index(stage), (c // STAGES) & 1)
        ends.index(2 * stage).store(of_end if REVERSE else of_start)
        ends.index(2 * stage + 1).store(of_start if REVERSE else of_end)
        whole_decay.index(stage).store(gl.full([1], 1.0, gl.float32, layout=single) * exp(whole))
        sums.store(before)
        if left < C:
            zero_tail(keys, left, rows)
            fence_async_shared()
        mbarrier.arrive(decayed.index(stage), count=1)
        if OUTPUT:
            scores = tiles_s.index(stage % SCORES)
            if RECOMPUTE == 0:
                write_head_scores(queries, keys, scores, sums, scores_empty, c, t, s, scale, square, SCORES < STAGES, REVERSE)
            elif c >= skipped:
                write_head_scores(queries, keys, scores, sums, scores_empty, c - skipped, t, s, scale, square, SCORES < STAGES,
                                  REVERSE)  # fmt: skip
            mbarrier.arrive(scores_full.index(stage), count=1)


@gluon.jit
def write_head_scores(queries, keys, scores, sums, scores_empty, turn, t, s, scale, square: gl.constexpr,
                      SINGLE_BUFFER: gl.constexpr, REVERSE: gl.constexpr):  # fmt: skip
    """Write the scores of a chunk with a decay per head, from the sums of its log-decays, and fence them.

    ``t`` and ``s`` are the steps of queries and keys. For SINGLE_BUFFER and ``turn`` see ``scores_from_middle``.
    """
    p = gl.zeros([C, C], gl.float32, layout=square)
    p = warpgroup_mma(queries, keys.permute((1, 0)), p, use_acc=False, is_async=True)
    p = warpgroup_mma_wait(num_outstanding=0, deps=(p,))
    query_sum = sums.load(gl.SliceLayout(1, square))[:, None]
    key_sum = sums.load(gl.SliceLayout(0, square))[None, :]
    d = key_sum - query_sum if REVERSE else query_sum - key_sum
    if SINGLE_BUFFER:
        mbarrier.wait(scores_empty, (turn & 1) ^ 1)
    p = p * exp2_flushed(d * LOG2E) * scale  # of keys that queries do not see d may be positive, and these inf
    scores.store(gl.where(visible(t[:, None], s[None, :], REVERSE), p, 0.0).to(keys.dtype))
    fence_async_shared()


@gluon.jit
def prepare(tiles, vectors, bars, offsets, log_decay, T, sizes, scale, LIMIT: gl.constexpr, SLICES: gl.constexpr,
            PACKED: gl.constexpr, OUTPUT: gl.constexpr, REVERSE: gl.constexpr,
            SCALAR: gl.constexpr, SHARED: gl.constexpr, TURNS: gl.constexpr, RECOMPUTE: gl.constexpr):  # fmt: skip
    """Run the role of the warpgroup that decays queries and keys and computes scores, for every chunk of the CTA.

    hopper_recompute.py explains RECOMPUTE: queries and scores of the first chunks may be left out.
    """
    if SCALAR:
        prepare_heads(tiles, vectors, bars, offsets, log_decay, T, sizes, scale, SLICES, PACKED, OUTPUT, REVERSE, SHARED, TURNS,
                      RECOMPUTE)  # fmt: skip
    else:
        prepare_channels(tiles, vectors, bars, offsets, T, sizes, scale, LIMIT, SLICES, PACKED, OUTPUT, REVERSE, RECOMPUTE)
