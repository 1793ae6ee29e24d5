"""Gated linear attention on Hopper GPUs: what each segment of T adds to the state, for a chunk-parallel scan.

Computes   for one segment, per head and 64 value channels: the sum over the segment's steps s of
           v_s^T (k_s e^(sum of g after s)), [V, K], and the segment's decay e^(sum of g), [K]; sums of g end with the segment.
           REVERSE computes the same for the state's gradient: q takes the place of k, do that of v, sums of g go from the
           segment's first step up to and with s, and q is multiplied by ``scale``. hopper_chunk_state.py adds these sums up in
           the order of the recurrence (with REVERSE from the last segment of T) and starts each segment from the result. It runs
           right after this kernel, with the same segments.
Words      *keys* are the rows that are added to the state: k, or q with REVERSE. *values* are v, or do. The *far end* of a
           segment is where the recurrence leaves it: its last step, or its first step with REVERSE. The *near end* is the other
           one. hopper_prepare.py has the same words for chunks.
Grid       one CTA per segment of T, sequence, head and slice of 64 GROUPS value channels (``work_item``). GROUPS is 1 or 2;
           SLICES = V / (64 GROUPS) slices per head.
Order      chunks go from the far end of the segment to its near end. Each step's decay is then a running sum of log-decays that
           only gets more negative: its factor is at most 1 whatever the decays are, no state has to be decayed, and the loop
           stops early once all factors are below e^-88, which is subnormal in float32 and counts as 0.
Roles      GROUPS warpgroups run ``accumulate``: each holds the sum [V = 64, K] in registers, K / 2 per thread; the first one
           also issues the TMA loads. One warpgroup runs ``decay_keys``: it decays keys in place in shared memory. With one
           decay per head it only computes a factor per step; ``accumulate`` scales its values by it in registers, from where
           they are the operand A of the product (``scaled_values``).
On chip    shared memory for 16-bit numbers, per stage: keys and log-decays [64, K], 128 K bytes each, values 8192 per group.
           With a decay per channel the second terms of the keys (their rounding errors) replace the log-decays, and two
           matrices of 0 and 1 are added, [2, 64, 64], 16384 bytes together, which sum steps by WGMMA. With one decay per head
           there are no log-decays in shared memory, but factors of the values [64], float32, per stage. float32 log-decays take
           twice the bytes, see ``split_log_decays``.
Barriers   per stage: full (TMA loads have landed; all wait), decayed (keys are decayed, or the factors of the values written,
           and so is ``stop``; ``accumulate`` waits), empty (all groups have finished their products; the first one waits and
           refills). ``stop`` holds, per stage, the number of chunks after which the loops end. It is written before ``decayed``
           and not changed before the stage is refilled, so all threads of all warps read the same number and leave in the same
           iteration. Loads that were issued beyond it are waited for at the end, so that none arrives in a CTA that is gone.
Memory     each CTA reads keys, values and log-decays once, up to where the loop stops and at most STAGES - 1 chunks
           beyond; the SLICES CTAs of one head and segment read the same keys and log-decays. The segment at which the
           recurrence ends reads nothing, since no segment starts from its sum, unless ALL: then the sums of all segments
           together are what the whole sequence adds, for a rank on which it goes on. One float32 state and K decays per segment
           are written.
Numerics   decayed keys, or with a decay per head and SPLIT_KEYS scaled values, are a sum of two 16-bit numbers; sums are
           float32.
Callers    launch_hopper.py launches ``segment_sum_kernel`` before ``chunk_state_kernel``, with ALL for slices of sequences on
           several ranks (launch_slices.py).
Source     the segmented form of a scan (reduce, then scan); docs/notebook/gla.md.
"""

from onelaunch.kernels.gluon.compat import (
    fence_async_shared,
    gl,
    gluon,
    keep_barriers,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from onelaunch.ops.gla.kernels.hopper_states import scaled_values, split_columns, store_state
from onelaunch.ops.gla.kernels.hopper_tiles import (
    DECAY_HEADS,
    LOG2E,
    PANEL,
    C,
    chunk_of,
    clamp_log_decays,
    decay_terms,
    exp,
    exp2_flushed,
    head_log_decays,
    head_of,
    load_stage,
    ones_where,
    plus,
    segment_span,
    split_log_decays,
    store_split,
    work_item,
    zero_tail,
)


@gluon.jit
def segment_chunks(steps, segment, segments, REVERSE: gl.constexpr, ALL: gl.constexpr):
    """Return the number of chunks of a segment; 0 for the segment at which the recurrence ends, unless ALL.

    That is the last segment of T, or the first with REVERSE. No other segment starts from its sum.
    """
    if ALL:
        chunks = gl.cdiv(steps, C)
    else:
        last = segment == (0 if REVERSE else segments - 1)
        chunks = gl.where(last, 0, gl.cdiv(steps, C))
    return chunks


@gluon.jit
def accumulate(descriptors, segment_states, tiles, bars, offsets, T, sizes, values, GROUP: gl.constexpr, GROUPS: gl.constexpr,
               SLICES: gl.constexpr, PACKED: gl.constexpr, REVERSE: gl.constexpr, SCALAR: gl.constexpr,
               SPLIT_KEYS: gl.constexpr, SHARED: gl.constexpr, TURNS: gl.constexpr, ALL: gl.constexpr):  # fmt: skip
    """Run the role of one warpgroup that sums v^T keys over the segment for PANEL value channels, and store the sum.

    Per chunk: wait for ``full`` and ``decayed``, multiply, wait for the product, arrive at ``empty``; GROUP 0 then refills the
    stage, or with TURNS loads the next chunk into the next stage. GROUP is the index of the warpgroup. The tuples are made in
    ``segment_sum_kernel``, which explains them; ``offsets`` and ``values`` (the number V of value channels) come from there as
    well.
    """
    _, tiles_k, tiles_v, _, tiles_low, factors, _ = tiles
    full, decayed, empty, stop = bars
    K: gl.constexpr = tiles_k.shape[2]
    STAGES: gl.constexpr = tiles_k.shape[0]
    LOW: gl.constexpr = tiles_low.shape[0] // STAGES  # tiles of second terms in a stage, of which the first is used
    state_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    rows: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    heads, segments, _ = sizes
    n, head, value_slice, segment = work_item(sizes, SLICES)
    row, steps = segment_span(offsets, n, T, segment, sizes, PACKED)
    state = gl.zeros([PANEL, K], gl.float32, layout=state_layout)
    chunks = segment_chunks(steps, segment, segments, REVERSE, ALL)
    limit = chunks
    issued = gl.minimum(chunks, 1 if TURNS else STAGES)
    vector: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    if GROUP == 0:
        for i in gl.static_range(1 if TURNS else STAGES):
            at = row + chunk_of(i, chunks, not REVERSE) * C
            load_stage(descriptors, tiles, full, at, head, value_slice, i, i < chunks, GROUPS, SLICES, False, SCALAR, SHARED)
    stage = 0
    phase = 0
    c = 0
    while c < limit:
        left = steps - chunk_of(c, chunks, not REVERSE) * C
        b_v = tiles_v.index(stage * GROUPS + GROUP)
        mbarrier.wait(full.index(stage), phase)
        if left < C:
            zero_tail(b_v, left, rows)
            fence_async_shared()
        mbarrier.wait(decayed.index(stage), phase)
        limit = gl.minimum(limit, gl.max(stop.index(stage).load(vector), 0))
        if SCALAR:
            scaled, scaled_low = scaled_values(b_v, factors.index(stage), state_layout, SPLIT_KEYS)
            state = warpgroup_mma(scaled, tiles_k.index(stage), state, is_async=True)
            if SPLIT_KEYS:
                state = warpgroup_mma(scaled_low, tiles_k.index(stage), state, is_async=True)
        else:
            state = warpgroup_mma(b_v.permute((1, 0)), tiles_k.index(stage), state, is_async=True)
            state = warpgroup_mma(b_v.permute((1, 0)), tiles_low.index(stage * LOW), state, is_async=True)
        state = warpgroup_mma_wait(num_outstanding=0, deps=(state,))
        mbarrier.arrive(empty.index(stage), count=1)
        if GROUP == 0:
            refill = issued < limit  # limit may already have been lowered by ``stop``
            mbarrier.wait(empty.index(stage), phase, pred=refill)
            at = row + chunk_of(issued, chunks, not REVERSE) * C
            free = stage
            if TURNS:  # the next chunk's stage, which has been empty for longer
                free = (stage + 1) % STAGES
            load_stage(descriptors, tiles, full, at, head, value_slice, free, refill, GROUPS, SLICES, False, SCALAR, SHARED)
            issued += refill.to(gl.int32)
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
        c += 1
    if GROUP == 0:  # loads in flight, at most STAGES - 1, must land before the CTA ends
        for i in gl.static_range(STAGES - 1):
            at = c + i
            mbarrier.wait(full.index(at % STAGES), (at // STAGES) & 1, pred=at < issued)
    first_value = (value_slice * GROUPS + GROUP) * PANEL
    index = (n.to(gl.int64) * heads + head) * segments + segment
    if descriptors[2].layout.rank == 3:  # values are padded
        values = SLICES * GROUPS * PANEL
    store_state(segment_states + (index * values + first_value) * K, state, steps, K)


@gluon.jit
def drop_duplicate_rows(x):
    """Return x [C, columns], all rows of which are alike, as [C / 2, columns].

    A thread holds rows t and t + 8; one of the two is enough, which halves the registers.
    """
    pairs = gl.permute(gl.reshape(x, [C // 16, 2, 8, x.shape[1]]), (0, 2, 3, 1))
    first, _ = gl.split(pairs)
    return gl.reshape(first, [C // 2, x.shape[1]])


@gluon.jit
def restore_duplicate_rows(x, layout: gl.constexpr):
    """Return [C, columns] from [C / 2, columns], the inverse of ``drop_duplicate_rows``; no data leaves its thread."""
    rows = gl.reshape(x, [C // 16, 8, x.shape[1]])
    return gl.convert_layout(gl.reshape(gl.permute(gl.join(rows, rows), (0, 3, 1, 2)), [C, x.shape[1]]), layout)


@gluon.jit
def decay_panels(keys, g, low, carry, weights, scale, FIRST: gl.constexpr, REVERSE: gl.constexpr):
    """Decay the keys of a chunk in place, from channel FIRST on, and return ``carry`` with the chunk's log-decays added.

    Each row of ``carry`` [C / 2, channels] is the sum of the log-decays of the chunks processed before. ``weights`` holds two
    matrices of 0 and 1. The first sums the log-decays on the far side of each step, with REVERSE that of the step too; the
    second sums those of all steps. A call with more than PANEL channels halves ``carry`` and calls itself for each half, since
    a product covers PANEL channels. The second terms of the keys, ``low``, overwrite the log-decays ``g``, which are a tile [C,
    K] or, if they are float32, the tiles of ``decay_terms``. ``full`` must have been waited for; the caller fences and arrives at
    ``decayed`` afterwards.
    """
    carry_layout: gl.constexpr = carry.type.layout
    K: gl.constexpr = carry.shape[1]
    if K == PANEL:
        p_k = keys.slice(FIRST, PANEL, dim=1)
        square: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PANEL, 16])
        d = gl.zeros([C, PANEL], gl.float32, layout=square)
        total = gl.zeros([C, PANEL], gl.float32, layout=square)
        if g.rank == 3:
            p_g = g.index(FIRST // PANEL * 2)
            d = warpgroup_mma(weights.index(0), p_g, d, use_acc=False, is_async=True)
            total = warpgroup_mma(weights.index(1), p_g, total, use_acc=False, is_async=True)
            p_low = g.index(FIRST // PANEL * 2 + 1)
            d = warpgroup_mma(weights.index(0), p_low, d, is_async=True)
            total = warpgroup_mma(weights.index(1), p_low, total, is_async=True)
        else:
            p_g = g.slice(FIRST, PANEL, dim=1)
            d = warpgroup_mma(weights.index(0), p_g, d, use_acc=False, is_async=True)
            total = warpgroup_mma(weights.index(1), p_g, total, use_acc=False, is_async=True)
        d, total = warpgroup_mma_wait(num_outstanding=0, deps=(d, total))
        b_k = p_k.load(square).to(gl.float32) * exp2_flushed((restore_duplicate_rows(carry, square) + d) * LOG2E)
        carry += gl.convert_layout(drop_duplicate_rows(total), carry_layout)
        if REVERSE:
            b_k *= scale
        store_split(b_k, p_k, low.slice(FIRST, PANEL, dim=1))
    else:
        left, right = split_columns(carry)
        left = decay_panels(keys, g, low, left, weights, scale, FIRST, REVERSE)
        right = decay_panels(keys, g, low, right, weights, scale, FIRST + K // 2, REVERSE)
        carry = gl.convert_layout(gl.reshape(gl.permute(gl.join(left, right), (0, 2, 1)), [C // 2, K]), carry_layout)
    return carry


@gluon.jit
def decay_key_channels(tiles, segment_decays, bars, offsets, T, sizes, scale, SLICES: gl.constexpr, PACKED: gl.constexpr,
                       REVERSE: gl.constexpr, KEYS: gl.constexpr, ALL: gl.constexpr, STOP: gl.constexpr):  # fmt: skip
    """Run the decay role for a decay per channel: all chunks of the segment, from its far end; store the segment's decay.

    Per chunk: wait for ``full``, decay the keys, write ``stop``, arrive at ``decayed``. No wait for ``empty`` is needed, since
    ``full`` only completes after a refill. ``segment_sum_kernel`` explains the arguments.
    """
    _, tiles_k, _, tiles_g, tiles_low, weights, _ = tiles
    full, decayed, _, stop = bars
    K: gl.constexpr = tiles_k.shape[2]
    STAGES: gl.constexpr = tiles_k.shape[0]
    WIDE: gl.constexpr = tiles_g.dtype == gl.float32
    LOW: gl.constexpr = tiles_low.shape[0] // STAGES
    rows: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    heads, segments, _ = sizes
    n, head, value_slice, segment = work_item(sizes, SLICES)
    _, steps = segment_span(offsets, n, T, segment, sizes, PACKED)
    chunks = segment_chunks(steps, segment, segments, REVERSE, ALL)
    vector: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    # The matrices are operands from shared memory. In registers they leave too few for two products at once; ptxas then
    # serialized all products, and segments of a single chunk came out wrong.
    t = gl.arange(0, C, layout=gl.SliceLayout(1, rows))[:, None]
    s = gl.arange(0, C, layout=gl.SliceLayout(0, rows))[None, :]
    weights.index(0).store(ones_where(s <= t if REVERSE else s > t, weights.dtype))
    weights.index(1).store(ones_where((s >= 0) & (t >= 0), weights.dtype))
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    carry = drop_duplicate_rows(gl.zeros([C, K], gl.float32, layout=wide))
    carry_layout: gl.constexpr = carry.type.layout
    limit = chunks
    c = 0
    while c < limit:
        stage = c % STAGES
        left = steps - chunk_of(c, chunks, not REVERSE) * C
        g = decay_terms(tiles_g.index(stage)) if WIDE else tiles_g.index(stage)
        mbarrier.wait(full.index(stage), (c // STAGES) & 1)
        if left < C:  # the rows from ``left`` on belong to the next sequence or lie beyond the tensor
            if not WIDE:
                zero_tail(g, left, rows)
            zero_tail(tiles_k.index(stage), left, rows)
        if WIDE:
            split_log_decays(tiles_g.index(stage), left, rows)
        else:
            clamp_log_decays(g, rows)
        fence_async_shared()
        carry = decay_panels(tiles_k.index(stage), g, tiles_low.index(stage * LOW), carry, weights, scale, 0, REVERSE)
        # The maximum is a reduction across all warps, so it is taken after every second chunk. After every fourth was slower:
        # loads decide the time, and more chunks were loaded in vain (docs/notebook/gla.md).
        if c & 1 == 1:
            decays = carry
            if KEYS < K:  # padding never decays
                decays = gl.where(gl.arange(0, K, layout=gl.SliceLayout(0, carry_layout))[None, :] < KEYS, carry, -1e30)
            if gl.max(gl.max(decays, 1), 0) < STOP:
                limit = gl.minimum(limit, c + 1)
        stop.index(stage).store(gl.full([1], 0, gl.int32, layout=vector) + limit)
        fence_async_shared()
        mbarrier.arrive(decayed.index(stage), count=1)
        c += 1
    if value_slice == 0:  # the CTAs of all slices compute the same decays; one stores them
        index = (n.to(gl.int64) * heads + head) * segments + segment
        row = gl.arange(0, C // 2, layout=gl.SliceLayout(1, carry_layout))[:, None]
        channel = gl.arange(0, K, layout=gl.SliceLayout(0, carry_layout))[None, :]
        decay = exp(carry)
        if STOP > -88.0:  # Otherwise exp is 0 or subnormal where the loop stopped.
            decay = gl.where(limit < chunks, 0.0, decay)
        gl.store(segment_decays + index * K + channel + 0 * row, decay, mask=(row == 0) & (channel >= 0))


@gluon.jit
def decay_key_heads(tiles, segment_decays, bars, offsets, log_decay, T, sizes, scale, SLICES: gl.constexpr,
                    PACKED: gl.constexpr, REVERSE: gl.constexpr, SHARED: gl.constexpr, TURNS: gl.constexpr,
                    ALL: gl.constexpr, STOP: gl.constexpr):  # fmt: skip
    """Run the decay role for one decay per head: all chunks of the segment, from its far end; store the segment's decay.

    Keys stay as they are: the factor of each step is left for ``accumulate``, which multiplies the values by it. The log-decays
    of the next chunk are loaded from global memory one chunk ahead; with TURNS those of a chunk are loaded when all groups have
    finished the chunk before. One number is their running sum, so every chunk can test it. The rest is as in
    :func:`decay_key_channels`.
    """
    _, tiles_k, _, _, _, factors, _ = tiles
    full, decayed, empty, stop = bars
    K: gl.constexpr = tiles_k.shape[2]
    STAGES: gl.constexpr = tiles_k.shape[0]
    rows: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    heads, segments, _ = sizes
    n, head, value_slice, segment = work_item(sizes, SLICES)
    row, steps = segment_span(offsets, n, T, segment, sizes, PACKED)
    chunks = segment_chunks(steps, segment, segments, REVERSE, ALL)
    # Every warp holds all 64 steps, so that sums over steps stay within a warp.
    vector: gl.constexpr = gl.BlockedLayout([C // 32], [32], [4], [0])
    step = gl.arange(0, C, layout=vector)
    decay_heads = head_of(heads, SHARED, DECAY_HEADS)
    j = chunk_of(0, chunks, not REVERSE)
    p_g = log_decay + (row + j * C + step).to(gl.int64) * decay_heads + head_of(head, SHARED, DECAY_HEADS)
    next_g = gl.load(p_g, mask=(step < steps - j * C) & (chunks > 0), other=0.0)
    carry = 0.0
    limit = chunks
    c = 0
    while c < limit:
        stage = c % STAGES
        left = steps - chunk_of(c, chunks, not REVERSE) * C
        g = head_log_decays(p_g, next_g, step, left, c, full, empty, TURNS)
        p_g += C * decay_heads if REVERSE else -C * decay_heads
        if not TURNS:
            next_left = steps - chunk_of(c + 1, chunks, not REVERSE) * C
            next_g = gl.load(p_g, mask=(step < next_left) & (c + 1 < chunks), other=0.0)
        before = gl.associative_scan(g, 0, plus)
        whole = gl.sum(g, 0)
        factor = exp(carry + before) * scale if REVERSE else exp(carry + whole - before)
        carry += whole
        mbarrier.wait(full.index(stage), (c // STAGES) & 1)
        if left < C:
            zero_tail(tiles_k.index(stage), left, rows)
            fence_async_shared()
        factors.index(stage).store(factor)
        if carry < STOP:
            limit = gl.minimum(limit, c + 1)
        stop.index(stage).store(gl.full([1], 0, gl.int32, layout=vector) + limit)
        mbarrier.arrive(decayed.index(stage), count=1)
        c += 1
    if value_slice == 0:  # the CTAs of all slices compute the same decays; one stores them
        index = (n.to(gl.int64) * heads + head) * segments + segment
        decay = exp(carry)
        if STOP > -88.0:
            decay = gl.where(limit < chunks, 0.0, decay)
        segment_decay = gl.full([K], 1.0, gl.float32, layout=vector) * decay
        gl.store(segment_decays + index * K + gl.arange(0, K, layout=vector), segment_decay)


@gluon.jit
def decay_keys(tiles, segment_decays, bars, offsets, log_decay, T, sizes, scale, SLICES: gl.constexpr,
               PACKED: gl.constexpr, REVERSE: gl.constexpr, SCALAR: gl.constexpr,
               KEYS: gl.constexpr, SHARED: gl.constexpr, TURNS: gl.constexpr, ALL: gl.constexpr,
               STOP: gl.constexpr):  # fmt: skip
    """Run the role of the warpgroup that decays keys or values to the far end of the segment, for every chunk."""
    if SCALAR:
        decay_key_heads(tiles, segment_decays, bars, offsets, log_decay, T, sizes, scale, SLICES, PACKED, REVERSE, SHARED, TURNS,
                        ALL, STOP)  # fmt: skip
    else:
        decay_key_channels(tiles, segment_decays, bars, offsets, T, sizes, scale, SLICES, PACKED, REVERSE, KEYS, ALL, STOP)


@gluon.jit(do_not_specialize=["T", "heads", "segments", "segment_steps"])
def segment_sum_kernel(
    keys, v, g, log_decay, segment_states, segment_decays, offsets, T, heads, segments, segment_steps, scale, values,
    SLICES: gl.constexpr, PACKED: gl.constexpr, REVERSE: gl.constexpr, SPLIT_KEYS: gl.constexpr,
    KEYS: gl.constexpr, K: gl.constexpr,
    GROUPS: gl.constexpr, STAGES: gl.constexpr, PREPARE_REGISTERS: gl.constexpr, MULTIPLY_REGISTERS: gl.constexpr,
    SHARED: gl.constexpr, TURNS: gl.constexpr, ALL: gl.constexpr, STOP: gl.constexpr,
):  # fmt: skip
    """Sum up what a segment adds to the state; see the top of the file.

    ``keys``, ``v`` and ``g`` are TMA descriptors as those of ``chunk_state_kernel``, with boxes of C rows by K channels (PANEL
    for ``v``). K and V of the results are padded sizes; KEYS of the K channels are no padding. SHARED: see ``head_of``.
    ``g`` describes log-decays per channel; if it is None, ``log_decay`` [B, T, H] has one per head. ``segment_states``
    [N, H, segments, V, K] and ``segment_decays`` [N, H, segments, K] are float32 results. ``offsets`` [N + 1] are the first
    rows of packed sequences, read with PACKED. ``segment_steps`` is the length of a segment, a multiple of C, unless PACKED
    (``segment_span``); ``values`` is V. ``scale`` is used with REVERSE only. PREPARE_REGISTERS and MULTIPLY_REGISTERS are the
    registers of a thread of the decaying warpgroup and of the second accumulating one. With TURNS a chunk is loaded when the one
    before it is finished, so that loads, ``decay_keys`` and ``accumulate`` take turns: see hopper_chunk_state.py. With ALL the
    segment at which the recurrence ends is summed up as well. STOP is the sum of natural log-decays below which factors count as
    0, if it is so in all channels: at least -88, where ``exp2_flushed`` returns 0.
    """
    SCALAR: gl.constexpr = g is None
    E: gl.constexpr = keys.dtype
    keys_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, K], E)
    values_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, PANEL], E)
    tiles_k = gl.allocate_shared_memory(E, [STAGES, C, K], keys_layout)
    tiles_v = gl.allocate_shared_memory(E, [STAGES * GROUPS, C, PANEL], values_layout)
    tiles_g = tiles_k
    tiles_low = tiles_k
    WIDE: gl.constexpr = False if SCALAR else g.dtype == gl.float32
    if WIDE:  # the second terms of the keys take the first half of the place of the log-decays
        wide_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, K], gl.float32)
        tiles_g = gl.allocate_shared_memory(gl.float32, [STAGES, C, K], wide_layout)
        tiles_low = tiles_g._reinterpret(E, [2 * STAGES, C, K], keys_layout)  # noqa: SLF001
    elif not SCALAR:
        tiles_g = gl.allocate_shared_memory(E, [STAGES, C, K], keys_layout)
        tiles_low = tiles_g
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    decayed = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(decayed.index(i), count=1)
        mbarrier.init(empty.index(i), count=GROUPS)
    fence_async_shared()  # TMA, which arrives at these barriers, sees them initialized
    # One number per stage: it does not change between decayed and empty, so all threads read the same one.
    stop = gl.allocate_shared_memory(gl.int32, [STAGES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    sizes = (heads, segments, segment_steps)
    # ``load_stage`` takes descriptors of queries, keys, values and log-decays, and tiles in the same order. There are no
    # queries here: it is called with OUTPUT = False and ignores their place, which the keys fill. Tiles go on with the second
    # terms of the keys, the matrices of 0 and 1 or the factors of the values, and a place for states that chunk_state_kernel
    # uses, also filled by the keys.
    descriptors = (keys, keys, v, g)
    if SCALAR:
        weights = gl.allocate_shared_memory(gl.float32, [STAGES, C], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    else:
        summed: gl.constexpr = gl.bfloat16 if WIDE else E
        weights = gl.allocate_shared_memory(summed, [2, C, C], gl.NVMMASharedLayout.get_default_for([C, C], summed))
    tiles = (tiles_k, tiles_k, tiles_v, tiles_g, tiles_low, weights, tiles_k)
    bars = (full, decayed, empty, stop)
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (accumulate, (descriptors, segment_states, tiles, bars, offsets, T, sizes, values, 0, GROUPS, SLICES,
                       PACKED, REVERSE, SCALAR, SPLIT_KEYS, SHARED, TURNS, ALL)),
                (accumulate, (descriptors, segment_states, tiles, bars, offsets, T, sizes, values, 1, GROUPS, SLICES,
                       PACKED, REVERSE, SCALAR, SPLIT_KEYS, SHARED, TURNS, ALL)),
                (decay_keys, (tiles, segment_decays, bars, offsets, log_decay, T, sizes, scale, SLICES, PACKED, REVERSE,
                        SCALAR, KEYS, SHARED, TURNS, ALL, STOP)),
            ],
            [4, 4],
            [MULTIPLY_REGISTERS, PREPARE_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (accumulate, (descriptors, segment_states, tiles, bars, offsets, T, sizes, values, 0, GROUPS, SLICES,
                       PACKED, REVERSE, SCALAR, SPLIT_KEYS, SHARED, TURNS, ALL)),
                (decay_keys, (tiles, segment_decays, bars, offsets, log_decay, T, sizes, scale, SLICES, PACKED, REVERSE,
                        SCALAR, KEYS, SHARED, TURNS, ALL, STOP)),
            ],
            [4],
            [PREPARE_REGISTERS],
        )  # fmt: skip
    keep_barriers((full, decayed, empty))  # Triton would otherwise place other data over the mbarriers
