"""Prototype: the forward pass of gated linear attention on Hopper in one launch, or in two where T is cut into parts.

Not part of the package. docs/notebook/gla.md has its story and its figures, and says what has run and what was only compiled.

Grid       a program per part of T, sequence, head and slice of values.
Warps      ``attend``: a warpgroup per 64 values holds states [V, K] in registers and multiplies; the first copies tiles in.
           ``prepare``: one or two warpgroups decay queries and keys where they lie, and multiply them to scores.
On chip    STAGES tiles of q, k, g and v. Decayed queries and keys replace q and k, what rounding took of the queries replaces
           g, and the outputs v: they leave from there.
Order      arrived (copies), decayed (queries, keys), ready (scores), free (products done, the output before has left).
Numbers    a tile's decays are anchored in its middle, exp(+-LIMIT) at most; a tile that exceeds LIMIT takes products by levels
           of halves, whose factors are all at most 1.
"""

from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from onelaunch.ops.gluon_compat import gl, gluon, mbarrier, tma_load, warpgroup_mma, warpgroup_mma_wait

LOG2E = gl.constexpr(1.4426950408889634)
C = gl.constexpr(64)
PANEL = gl.constexpr(64)


@gluon.jit
def exp(x):
    return gl.exp2(x * LOG2E)


@gluon.jit
def span(offsets, n, T, segment, SEGMENT_STEPS: gl.constexpr, PACKED: gl.constexpr):
    """First row and number of steps of a sequence's part."""
    if PACKED:
        first = gl.load(offsets + n).to(gl.int32)
        length = gl.load(offsets + n + 1).to(gl.int32) - first
    else:
        first = n * T
        length = T + 0 * n
    start = segment * SEGMENT_STEPS
    return first + start, gl.maximum(gl.minimum(length - start, SEGMENT_STEPS), 0)


@gluon.jit
def place(sizes, SLICES: gl.constexpr):
    """Sequence, head, slice of values and part of the sequence that a program works on."""
    heads, segments = sizes
    item = gl.program_id(0)
    part = item % SLICES
    item = item // SLICES
    head = item % heads
    item = item // heads
    segment = item % segments
    return item // segments, head, part, segment


@gluon.jit
def fetch(q, k, v, g, tiles_q, tiles_k, tiles_v, tiles_g, arrived, at, head, panel, stage, wanted,
          GROUPS: gl.constexpr, STATES: gl.constexpr):
    """Copy a tile of everything into a stage."""
    K: gl.constexpr = k.block_type.shape[1]
    bar = arrived.index(stage)
    mbarrier.expect(bar, (2 if STATES else 3) * k.block_type.nbytes + GROUPS * v.block_type.nbytes, pred=wanted)
    tma_load(g, [at, head * K], bar, tiles_g.index(stage), pred=wanted)
    tma_load(k, [at, head * K], bar, tiles_k.index(stage), pred=wanted)
    if not STATES:
        tma_load(q, [at, head * K], bar, tiles_q.index(stage), pred=wanted)
    for group in gl.static_range(GROUPS):
        tma_load(v, [at, (panel + group) * PANEL], bar, tiles_v.index(stage * GROUPS + group), pred=wanted)


@gluon.jit
def ones_where(condition, dtype: gl.constexpr):
    return gl.where(condition, 1.0, 0.0).to(dtype)


@gluon.jit
def plus(a, b):
    return a + b


@gluon.jit
def score(q, k, square: gl.constexpr):
    """Products [C, C] of queries in registers with keys in shared memory."""
    operand: gl.constexpr = gl.DotOperandLayout(0, square, 2)
    p = gl.zeros([C, C], gl.float32, layout=square)
    p = warpgroup_mma(gl.convert_layout(q, operand), k.permute((1, 0)), p, use_acc=False, is_async=True)
    return warpgroup_mma_wait(num_outstanding=0, deps=(p,))


@gluon.jit
def weighted(weights, g, rows: gl.constexpr):
    """weights [C, C] times log-decays [C, K]: sums over parts of a tile."""
    K: gl.constexpr = g.shape[1]
    zero = gl.zeros([C, K], gl.float32, layout=rows)
    d = warpgroup_mma(weights.to(g.dtype), g, zero, use_acc=False, is_async=True)
    return warpgroup_mma_wait(num_outstanding=0, deps=(d,))


@gluon.jit
def rows_of(layout: gl.constexpr, left):
    """The row of each element of a tile, computed where it is wanted: left >> 31 is 0, but the compiler cannot know."""
    return gl.arange(0, C, layout=gl.SliceLayout(1, layout))[:, None] + (left >> 31)


@gluon.jit
def quarter_sums(g, sums, left, walk: gl.constexpr):
    """Log-decay summed over each quarter of the tile's steps, into sums [4, K]."""
    for panel in gl.static_range(g.shape[1] // PANEL):
        p_g = g.slice(panel * PANEL, PANEL, dim=1).load(walk).to(gl.float32)
        if left < C:  # what follows belongs to somebody else
            p_g = gl.where(rows_of(walk, left) < left, p_g, 0.0)
        total = gl.sum(gl.reshape(p_g, [4, C // 4, PANEL]), 1)
        sums.slice(panel * PANEL, PANEL, dim=1).store(total)


@gluon.jit
def anchored(q, k, g, sums, scores, decayed, stage, left, walk: gl.constexpr, square: gl.constexpr, STATES: gl.constexpr):
    """Queries and keys decayed from and to the middle of the tile, in place, and their scores.

    ``sums`` holds what has decayed from the middle to the start of each quarter. What rounding takes of the queries goes in place
    of g.
    """
    E: gl.constexpr = k.dtype
    PANELS: gl.constexpr = k.shape[1] // PANEL
    for panel in gl.static_range(PANELS):
        p_q = q.slice(panel * PANEL, PANEL, dim=1)
        p_k = k.slice(panel * PANEL, PANEL, dim=1)
        p_g = g.slice(panel * PANEL, PANEL, dim=1)
        quarters = gl.reshape(p_g.load(walk).to(gl.float32), [4, C // 4, PANEL])
        if left < C:
            quarters = gl.reshape(gl.where(rows_of(walk, left) < left, p_g.load(walk).to(gl.float32), 0.0), [4, C // 4, PANEL])
        d = gl.associative_scan(quarters, 1, plus)
        start = sums.slice(panel * PANEL, PANEL, dim=1).load(gl.SliceLayout(1, d.type.layout))
        d = gl.convert_layout(gl.reshape((d + gl.expand_dims(start, 1)) * LOG2E, [C, PANEL]), walk)
        b_k = p_k.load(walk).to(gl.float32) * gl.exp2(-d)
        if left < C:
            b_k = gl.where(rows_of(walk, left) < left, b_k, 0.0)
        p_k.store(b_k.to(E))
        if not STATES:
            b_q = p_q.load(walk).to(gl.float32) * gl.exp2(d)
            high = b_q.to(E)
            p_q.store(high)
            p_g.store((b_q - high.to(gl.float32)).to(E))
    fence_async_shared()
    mbarrier.arrive(decayed.index(stage), count=1)
    if not STATES:
        p = gl.zeros([C, C], gl.float32, layout=square)
        p = warpgroup_mma(q, k.permute((1, 0)), p, use_acc=False, is_async=True)
        p = warpgroup_mma(g, k.permute((1, 0)), p, is_async=True)
        p = warpgroup_mma_wait(num_outstanding=0, deps=(p,))
        t = gl.arange(0, C, layout=gl.SliceLayout(1, square))[:, None]
        s = gl.arange(0, C, layout=gl.SliceLayout(0, square))[None, :]
        scores.store(gl.where(t >= s, p, 0.0).to(E))


@gluon.jit
def zero_of(flag, layout: gl.constexpr):
    """0, from a flag in shared memory that is 1: constants that depend on it are computed where they are used, not kept."""
    return gl.max(flag.load(layout), 0) - 1


@gluon.jit
def decay_over(g, level, zero, END: gl.constexpr, START: gl.constexpr, square: gl.constexpr):
    """What is left of each channel of g [C, PANEL].

    START: from the start of the tile up to each step; END: from behind each step to the end of the tile. Neither: where the
    level's bit of a step is 1, from the start of its block of 2^level steps up to it, elsewhere behind it to its block's end.
    """
    weights: gl.constexpr = gl.DotOperandLayout(0, square, 2)
    t = gl.arange(0, C, layout=gl.SliceLayout(1, weights))[:, None] + zero
    s = gl.arange(0, C, layout=gl.SliceLayout(0, weights))[None, :]
    if START:
        within = s <= t
    elif END:
        within = s > t
    else:
        later = (((t >> level) & 1) == 1) & (s <= t)
        earlier = (((t >> level) & 1) == 0) & (s > t)
        within = (later | earlier) & ((s >> level) == (t >> level))
    return exp(weighted(ones_where(within, gl.float32), g, square))


@gluon.jit
def by_levels(q, k, g, scores, decayed, flag, stage, left, square: gl.constexpr, STATES: gl.constexpr):
    """The same for decays of any size: queries decayed from the start of the tile, keys to its end, PANEL channels at a time."""
    E: gl.constexpr = k.dtype
    PANELS: gl.constexpr = k.shape[1] // PANEL
    vector: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    p = gl.zeros([C, C], gl.float32, layout=square)
    column = gl.arange(0, C, layout=gl.SliceLayout(0, square))[None, :]
    for panel in gl.static_range(PANELS):
        p_q = q.slice(panel * PANEL, PANEL, dim=1)
        p_k = k.slice(panel * PANEL, PANEL, dim=1)
        p_g = g.slice(panel * PANEL, PANEL, dim=1)
        row = gl.arange(0, C, layout=gl.SliceLayout(1, square))[:, None] + zero_of(flag, vector)
        b_k = gl.where(row < left, p_k.load(square).to(gl.float32), 0.0).to(E)
        if not STATES:
            p_k.store(b_k)
            fence_async_shared()
            p += gl.where(row == column, score(p_q.load(square), p_k, square), 0.0)
            for level in range(6):
                zero = zero_of(flag, vector)
                d = decay_over(p_g, level, zero, False, False, square)
                row = gl.arange(0, C, layout=gl.SliceLayout(1, square))[:, None] + zero
                later = ((row >> level) & 1) == 1
                p_k.store(gl.where(later, 0.0, b_k.to(gl.float32) * d).to(E))
                b_q = gl.where(later, p_q.load(square).to(gl.float32) * d, 0.0)
                fence_async_shared()
                crossing = score(b_q.to(E), p_k, square)
                p += gl.where((row >> (level + 1)) == (column >> (level + 1)), crossing, 0.0)
        d = decay_over(p_g, 0, zero_of(flag, vector), True, False, square)
        p_k.store((b_k.to(gl.float32) * d).to(E))
        if not STATES:
            d = decay_over(p_g, 0, zero_of(flag, vector), False, True, square)
            b_q = p_q.load(square).to(gl.float32) * d
            high = b_q.to(E)
            p_q.store(high)
            p_g.store((b_q - high.to(gl.float32)).to(E))
    if not STATES:
        scores.store(p.to(E))
    fence_async_shared()
    mbarrier.arrive(decayed.index(stage), count=1)


@gluon.jit
def prepare(tiles_q, tiles_k, tiles_g, tiles_s, sums, ends, middle, strong, arrived, decayed, ready, offsets, T, sizes,
            LIMIT: gl.constexpr, SLICES: gl.constexpr, SEGMENT_STEPS: gl.constexpr, PACKED: gl.constexpr, STATES: gl.constexpr,
            TURN: gl.constexpr, TURNS: gl.constexpr):
    """Decayed queries and keys and their scores, in place of what they are made of: every TURNS-th tile from the TURN-th."""
    K: gl.constexpr = tiles_k.shape[2]
    E: gl.constexpr = tiles_k.dtype
    STAGES: gl.constexpr = tiles_k.shape[0]
    square: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    walk: gl.constexpr = gl.BlockedLayout([C // 4, 2], [1, 32], [4, 1], [1, 0])
    vector: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    LOWEST: gl.constexpr = -1e30 if E == gl.bfloat16 else -65504.0  # noqa: SIM300
    own_sums = sums.index(TURN)
    flat = own_sums._reinterpret(gl.float32, [4, K], gl.SwizzledSharedLayout(1, 1, 1, [0]))  # noqa: SLF001
    ends_flat = ends._reinterpret(gl.float32, [2 * STAGES, K], gl.SwizzledSharedLayout(1, 1, 1, [0]))  # noqa: SLF001
    n, head, part, segment = place(sizes, SLICES)
    row, steps = span(offsets, n, T, segment, SEGMENT_STEPS, PACKED)
    for c in range(TURN, gl.cdiv(steps, C), TURNS):
        stage = c % STAGES
        left = steps - c * C
        q = tiles_q.index(stage)
        k = tiles_k.index(stage)
        g = tiles_g.index(stage)
        scores = tiles_s.index(stage)
        mbarrier.wait(arrived.index(stage), (c // STAGES) & 1)
        quarter_sums(g, own_sums, left, walk)
        first = flat.index(0).load(vector)
        second = flat.index(1).load(vector)
        third = flat.index(2).load(vector)
        fourth = flat.index(3).load(vector)
        wild = gl.where((gl.abs(first + second) <= LIMIT) & (gl.abs(third + fourth) <= LIMIT), 0, 1)
        if gl.max(wild, 0) == 0:
            ends_flat.index(2 * stage).store(exp(first + second))
            ends_flat.index(2 * stage + 1).store(exp(third + fourth))
            flat.index(0).store(-(first + second))
            flat.index(1).store(-second)
            flat.index(2).store(gl.zeros([K], gl.float32, layout=vector))
            flat.index(3).store(third)
            strong.index(stage).store(gl.full([1], 0, gl.int32, layout=vector))
            anchored(q, k, g, own_sums, scores, decayed, stage, left, walk, square, STATES)
        else:
            strong.index(stage).store(gl.full([1], 1, gl.int32, layout=vector))
            same = stage + zero_of(strong.index(stage), vector)
            for panel in gl.static_range(K // PANEL):
                p_g = tiles_g.index(same).slice(panel * PANEL, PANEL, dim=1)
                b_g = p_g.load(walk).to(gl.float32)
                b_g = gl.where(rows_of(walk, left) < left, b_g, 0.0)
                p_g.store(gl.where(b_g < LOWEST, LOWEST, b_g).to(E))
            one = gl.full([K], 1.0, gl.float32, layout=vector)
            ends_flat.index(2 * stage).store(one)
            ends_flat.index(2 * stage + 1).store(one)
            middle.index(stage).store(exp(first + second + third + fourth))
            fence_async_shared()
            by_levels(tiles_q.index(same), tiles_k.index(same), tiles_g.index(same), tiles_s.index(same), decayed,
                      strong.index(same), stage, left, square, STATES)
        if not STATES:
            fence_async_shared()
            mbarrier.arrive(ready.index(stage), count=1)


@gluon.jit
def read(out, state, q_high, q_low, first: gl.constexpr):
    """Add what queries read of a state [V, PANEL] to out [V, C]."""
    high = q_high.slice(first, PANEL, dim=1).permute((1, 0))
    low = q_low.slice(first, PANEL, dim=1).permute((1, 0))
    out = warpgroup_mma(state, high, out, is_async=True)
    out = warpgroup_mma(state, low, out, is_async=True)
    return warpgroup_mma_wait(num_outstanding=0, deps=(out,))


@gluon.jit
def attend(q_desc, k_desc, v_desc, g_desc, o, o_desc, initial, final, locals_, decays, tiles_q, tiles_k, tiles_v, tiles_g,
           tiles_s, ends, middle, strong,
           arrived, decayed, ready, free, offsets, T, sizes, scale, values, GROUP: gl.constexpr, GROUPS: gl.constexpr,
           SLICES: gl.constexpr, SEGMENT_STEPS: gl.constexpr, PACKED: gl.constexpr, STATES: gl.constexpr,
           INITIAL: gl.constexpr, FINAL: gl.constexpr):
    """States [V, K] in registers, for PANEL values; what queries read of them, and of the values in their tile."""
    K: gl.constexpr = tiles_k.shape[2]
    E: gl.constexpr = tiles_k.dtype
    STAGES: gl.constexpr = tiles_k.shape[0]
    states: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    outs: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, outs, 2)
    across: gl.constexpr = gl.SliceLayout(0, states)
    rows: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    scalar: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    ends_flat = ends._reinterpret(gl.float32, [2 * STAGES, K], gl.SwizzledSharedLayout(1, 1, 1, [0]))  # noqa: SLF001
    heads, segments = sizes
    n, head, part, segment = place(sizes, SLICES)
    row, steps = span(offsets, n, T, segment, SEGMENT_STEPS, PACKED)
    first_value = (part * GROUPS + GROUP) * PANEL
    channel = gl.arange(0, K, layout=across)[None, :]
    value = first_value + gl.arange(0, PANEL, layout=gl.SliceLayout(1, states))[:, None]
    state = gl.zeros([PANEL, K], gl.float32, layout=states)
    pair = n.to(gl.int64) * heads + head
    if not STATES:
        cell = channel * values + value
        if INITIAL:
            state = gl.load(initial + pair * K * values + cell)
        if locals_ is not None:
            for j in range(segment):
                before = pair * segments + j
                decay = gl.load(decays + before * K + channel)
                state = state * decay + gl.load(locals_ + before * K * values + cell)
    total = gl.full([K], 1.0, gl.float32, layout=across)
    panel = (head * SLICES + part) * GROUPS
    chunks = gl.cdiv(steps, C)
    if GROUP == 0:
        for i in gl.static_range(STAGES):
            fetch(q_desc, k_desc, v_desc, g_desc, tiles_q, tiles_k, tiles_v, tiles_g, arrived, row + i * C, head, panel, i,
                  i < chunks, GROUPS, STATES)
    stage = 0
    phase = 0
    for c in range(chunks):
        left = steps - c * C
        b_v = tiles_v.index(stage * GROUPS + GROUP)
        b_k = tiles_k.index(stage)
        mbarrier.wait(arrived.index(stage), phase)
        mbarrier.wait(decayed.index(stage), phase)
        flag = gl.max(strong.index(stage).load(scalar), 0)
        if left < C:
            t = rows_of(rows, left)
            b_v.store(gl.where(t < left, b_v.load(rows), 0.0).to(E))
            fence_async_shared()
        pre = ends_flat.index(2 * stage).load(across)
        state = state * pre[None, :]
        if STATES:
            total *= pre * ends_flat.index(2 * stage + 1).load(across)
        else:
            q = tiles_q.index(stage)
            low = tiles_g.index(stage)
            out = gl.zeros([PANEL, C], gl.float32, layout=outs)
            if K == PANEL:
                out = read(out, gl.convert_layout(state.to(E), operand), q, low, 0)
            else:
                lower, upper = gl.split(gl.permute(gl.reshape(state, [PANEL, 2, PANEL]), (0, 2, 1)))
                out = read(out, gl.convert_layout(lower.to(E), operand), q, low, 0)
                out = read(out, gl.convert_layout(upper.to(E), operand), q, low, PANEL)
        if flag > 0:
            within = middle.index(stage).load(across)
            state = state * within[None, :]
            if STATES:
                total *= within
        state = warpgroup_mma(b_v.permute((1, 0)), b_k, state, is_async=True)
        if STATES:
            state = warpgroup_mma_wait(num_outstanding=0, deps=(state,))
        else:
            mbarrier.wait(ready.index(stage), phase)
            out = warpgroup_mma(b_v.permute((1, 0)), tiles_s.index(stage).permute((1, 0)), out, is_async=True)
            out, state = warpgroup_mma_wait(num_outstanding=0, deps=(out, state))
        post = ends_flat.index(2 * stage + 1).load(across)
        state = state * post[None, :]
        if STATES:
            done = stage
            filled = c
        else:
            tma.store_wait(pendings=0)  # the output of the tile before has left
            done = (stage + STAGES - 1) % STAGES
            filled = c - 1
        mbarrier.arrive(free.index(done), count=1, pred=filled >= 0)
        if GROUP == 0:
            more = (filled >= 0) & (filled + STAGES < chunks)
            mbarrier.wait(free.index(done), (filled // STAGES) & 1, pred=more)
            at = row + (filled + STAGES) * C
            fetch(q_desc, k_desc, v_desc, g_desc, tiles_q, tiles_k, tiles_v, tiles_g, arrived, at, head, panel, done, more,
                  GROUPS, STATES)
        if not STATES:
            at = row + c * C
            b_v.permute((1, 0)).store((out * scale).to(E))
            if left >= C:
                fence_async_shared()
                tma.async_copy_shared_to_global(o_desc, [at, head * values + first_value], b_v)
            else:
                t = rows_of(rows, left)
                u = first_value + gl.arange(0, PANEL, layout=gl.SliceLayout(0, rows))[None, :]
                target = (at + t).to(gl.int64) * (heads * values) + head * values + u
                gl.store(o + target, b_v.load(rows), mask=t < left)
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
    # 0, which keeps the addresses out of the loop's registers
    channel = channel + (gl.max(strong.index(0).load(scalar), 0) >> 1)
    cell = channel * values + value
    if STATES:
        before = pair * segments + segment
        gl.store(locals_ + before * K * values + cell, state)
        if GROUP == 0:
            gl.store(decays + before * K + channel, total[None, :])
    else:
        if FINAL:
            if segment == segments - 1:
                gl.store(final + pair * K * values + cell, state)
        tma.store_wait(pendings=0)


@gluon.jit(do_not_specialize=["T", "heads", "segments"])
def gla_kernel(q, k, v, g, o, o_desc, initial, final, locals_, decays, offsets, T, heads, segments, scale, values,
               SLICES: gl.constexpr, SEGMENT_STEPS: gl.constexpr, LIMIT: gl.constexpr, PACKED: gl.constexpr, STATES: gl.constexpr,
               INITIAL: gl.constexpr, FINAL: gl.constexpr, PREPARE_REGISTERS: gl.constexpr, ATTEND_REGISTERS: gl.constexpr,
               GROUPS: gl.constexpr, STAGES: gl.constexpr, TURNS: gl.constexpr):
    K: gl.constexpr = k.block_type.shape[1]
    E: gl.constexpr = k.dtype
    scores_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, C], E)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    tiles_k = gl.allocate_shared_memory(E, [STAGES, C, K], k.layout)
    tiles_g = gl.allocate_shared_memory(E, [STAGES, C, K], k.layout)
    tiles_v = gl.allocate_shared_memory(E, [STAGES * GROUPS, C, PANEL], v.layout)
    if STATES:
        tiles_q = tiles_k
        tiles_s = tiles_v
    else:
        tiles_q = gl.allocate_shared_memory(E, [STAGES, C, K], k.layout)
        tiles_s = gl.allocate_shared_memory(E, [STAGES, C, C], scores_layout)
    sums = gl.allocate_shared_memory(gl.float32, [TURNS, 4, K], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    ends = gl.allocate_shared_memory(gl.float32, [STAGES, 2, K], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    middle = gl.allocate_shared_memory(gl.float32, [STAGES, K], flat)
    strong = gl.allocate_shared_memory(gl.int32, [STAGES, 1], flat)
    arrived = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    decayed = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(arrived.index(i), count=1)
        mbarrier.init(decayed.index(i), count=1)
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(free.index(i), count=GROUPS)
        strong.index(i).store(gl.full([1], 0, gl.int32, layout=gl.BlockedLayout([1], [32], [4], [0])))
    sizes = (heads, segments)
    if GROUPS == 2 and TURNS == 1:
        gl.warp_specialize(
            [
                (attend, (q, k, v, g, o, o_desc, initial, final, locals_, decays, tiles_q, tiles_k, tiles_v, tiles_g, tiles_s,
                          ends, middle, strong,
                          arrived, decayed, ready, free, offsets, T, sizes, scale, values, 0, 2, SLICES, SEGMENT_STEPS, PACKED,
                              STATES,
                          INITIAL, FINAL)),
                (attend, (q, k, v, g, o, o_desc, initial, final, locals_, decays, tiles_q, tiles_k, tiles_v, tiles_g, tiles_s,
                          ends, middle, strong,
                          arrived, decayed, ready, free, offsets, T, sizes, scale, values, 1, 2, SLICES, SEGMENT_STEPS, PACKED,
                              STATES,
                          INITIAL, FINAL)),
                (prepare, (tiles_q, tiles_k, tiles_g, tiles_s, sums, ends, middle, strong, arrived, decayed, ready, offsets, T,
                           sizes, LIMIT,
                           SLICES, SEGMENT_STEPS, PACKED, STATES, 0, TURNS)),
            ],
            [4, 4],
            [ATTEND_REGISTERS, PREPARE_REGISTERS],
        )
    elif GROUPS == 2 and TURNS == 2:
        gl.warp_specialize(
            [
                (attend, (q, k, v, g, o, o_desc, initial, final, locals_, decays, tiles_q, tiles_k, tiles_v, tiles_g, tiles_s,
                          ends, middle, strong,
                          arrived, decayed, ready, free, offsets, T, sizes, scale, values, 0, 2, SLICES, SEGMENT_STEPS, PACKED,
                              STATES,
                          INITIAL, FINAL)),
                (attend, (q, k, v, g, o, o_desc, initial, final, locals_, decays, tiles_q, tiles_k, tiles_v, tiles_g, tiles_s,
                          ends, middle, strong,
                          arrived, decayed, ready, free, offsets, T, sizes, scale, values, 1, 2, SLICES, SEGMENT_STEPS, PACKED,
                              STATES,
                          INITIAL, FINAL)),
                (prepare, (tiles_q, tiles_k, tiles_g, tiles_s, sums, ends, middle, strong, arrived, decayed, ready, offsets, T,
                           sizes, LIMIT,
                           SLICES, SEGMENT_STEPS, PACKED, STATES, 0, TURNS)),
                (prepare, (tiles_q, tiles_k, tiles_g, tiles_s, sums, ends, middle, strong, arrived, decayed, ready, offsets, T,
                           sizes, LIMIT,
                           SLICES, SEGMENT_STEPS, PACKED, STATES, 1, TURNS)),
            ],
            [4, 4, 4],
            [ATTEND_REGISTERS, PREPARE_REGISTERS, PREPARE_REGISTERS],
        )
    elif GROUPS == 1 and TURNS == 1:
        gl.warp_specialize(
            [
                (attend, (q, k, v, g, o, o_desc, initial, final, locals_, decays, tiles_q, tiles_k, tiles_v, tiles_g, tiles_s,
                          ends, middle, strong,
                          arrived, decayed, ready, free, offsets, T, sizes, scale, values, 0, 1, SLICES, SEGMENT_STEPS, PACKED,
                              STATES,
                          INITIAL, FINAL)),
                (prepare, (tiles_q, tiles_k, tiles_g, tiles_s, sums, ends, middle, strong, arrived, decayed, ready, offsets, T,
                           sizes, LIMIT,
                           SLICES, SEGMENT_STEPS, PACKED, STATES, 0, TURNS)),
            ],
            [4],
            [PREPARE_REGISTERS],
        )
    elif GROUPS == 1 and TURNS == 2:
        gl.warp_specialize(
            [
                (attend, (q, k, v, g, o, o_desc, initial, final, locals_, decays, tiles_q, tiles_k, tiles_v, tiles_g, tiles_s,
                          ends, middle, strong,
                          arrived, decayed, ready, free, offsets, T, sizes, scale, values, 0, 1, SLICES, SEGMENT_STEPS, PACKED,
                              STATES,
                          INITIAL, FINAL)),
                (prepare, (tiles_q, tiles_k, tiles_g, tiles_s, sums, ends, middle, strong, arrived, decayed, ready, offsets, T,
                           sizes, LIMIT,
                           SLICES, SEGMENT_STEPS, PACKED, STATES, 0, TURNS)),
                (prepare, (tiles_q, tiles_k, tiles_g, tiles_s, sums, ends, middle, strong, arrived, decayed, ready, offsets, T,
                           sizes, LIMIT,
                           SLICES, SEGMENT_STEPS, PACKED, STATES, 1, TURNS)),
            ],
            [4, 4],
            [PREPARE_REGISTERS, PREPARE_REGISTERS],
        )


def attend_on_hopper(q, k, v, g, scale, initial=None, offsets=None, parts=1, turns=1, registers=200, attend_registers=152):
    """``o [B, T, H, V]`` from contiguous 16-bit tensors, K and V of 64 or 128; ``g [B, T, H, K]`` in their dtype."""
    import torch

    from onelaunch.ops.gated_scan.launch import cdiv
    from onelaunch.ops.linear_rnn.hopper_launch import described

    B, T, H, K = q.shape
    V = v.shape[3]
    groups = 2 if V % 128 == 0 else 1
    o = torch.empty_like(v)
    count = B if offsets is None else offsets.numel() - 1
    steps = cdiv(cdiv(T, 64), parts) * 64 if parts > 1 else 1 << 30
    boxes = [described(x.view(B * T, -1), [64, width]) for x, width in ((q, K), (k, K), (v, 64), (g, K))]
    target = described(o.view(B * T, -1), [64, 64])
    slices = V // (64 * groups)
    flags = {
        "SLICES": slices, "SEGMENT_STEPS": steps, "LIMIT": 40.0 if q.dtype is torch.bfloat16 else 6.0,
        "PACKED": offsets is not None, "INITIAL": initial is not None, "FINAL": False, "PREPARE_REGISTERS": registers,
        "ATTEND_REGISTERS": attend_registers, "GROUPS": groups, "STAGES": 3, "TURNS": turns, "num_warps": 4,
    }  # fmt: skip
    sums = decays = None
    grid = (count * H * slices * parts,)
    if parts > 1:
        sums = torch.empty(count, H, parts, K, V, device=q.device)
        decays = torch.empty(count, H, parts, K, device=q.device)
        gla_kernel[grid](*boxes, o, target, initial, None, sums, decays, offsets, T, H, parts, scale, V, STATES=True, **flags)
    gla_kernel[grid](*boxes, o, target, initial, None, sums, decays, offsets, T, H, parts, scale, V, STATES=False, **flags)
    return o
