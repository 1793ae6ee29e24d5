"""Gated linear attention on Hopper GPUs: what a part of T adds to the state, so that parts can be walked side by side.

Computes   the sum over the part of decay(step to the part's far end) adder^T value, and what the part leaves of a state; adders
           and ends as in hopper_prepare.py.
Order      from the far end of the part to its near end: then each step's decay is a sum of log-decays that only grows, its factor
           is at most 1 whatever the decays are, no state has to be decayed, and the walk may stop where every factor is 0.
Grid       a program per part of T, sequence, head and slice of values.
Warps      ``add``: a warpgroup per 64 values holds the sum [V, K] in registers; the first copies tiles in.
           ``fade_*``: a warpgroup decays adders where they lie.
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
from onelaunch.ops.gla.kernels.hopper_tiles import (
    LOG2E,
    PANEL,
    SHORTEST,
    C,
    chunk_of,
    cut,
    exp,
    exp2_flushed,
    ones_where,
    place,
    plus,
    raise_to,
    span,
    store_in_parts,
)
from onelaunch.ops.gla.kernels.hopper_walk import fetch, halves, store_state

NOTHING = gl.constexpr(-88.0)
"""Log-decay behind which factors are 0, as ``exp2_flushed`` has them."""


@gluon.jit
def chunks_of(steps, segment, segments, REVERSE: gl.constexpr):
    """Chunks of a part; none of the one that the walk meets last, since nobody starts from its sum."""
    last = segment == (0 if REVERSE else segments - 1)
    return gl.where(last, 0, gl.cdiv(steps, C))


@gluon.jit
def add(descriptors, part_states, tiles, bars, offsets, T, sizes, values, GROUP: gl.constexpr, GROUPS: gl.constexpr,
        SLICES: gl.constexpr, PACKED: gl.constexpr, REVERSE: gl.constexpr, SCALAR: gl.constexpr,
        EXACT: gl.constexpr):  # fmt: skip
    """The sum for PANEL values."""
    _, tiles_a, tiles_v, tiles_low, _, _ = tiles
    arrived, faded, free, stop = bars
    K: gl.constexpr = tiles_a.shape[2]
    STAGES: gl.constexpr = tiles_a.shape[0]
    held: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    rows: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    heads, segments, part_steps = sizes
    n, head, part, segment = place(sizes, SLICES)
    row, steps = span(offsets, n, T, segment, part_steps, PACKED)
    state = gl.zeros([PANEL, K], gl.float32, layout=held)
    panel = (head * SLICES + part) * GROUPS
    chunks = chunks_of(steps, segment, segments, REVERSE)
    limit = chunks
    issued = gl.minimum(chunks, STAGES)
    vector: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    if GROUP == 0:
        for i in gl.static_range(STAGES):
            at = row + chunk_of(i, chunks, not REVERSE) * C
            fetch(descriptors, tiles, arrived, at, head, panel, i, i < chunks, GROUPS, False, SCALAR)
    stage = 0
    phase = 0
    c = 0
    while c < limit:
        left = steps - chunk_of(c, chunks, not REVERSE) * C
        b_v = tiles_v.index(stage * GROUPS + GROUP)
        mbarrier.wait(arrived.index(stage), phase)
        if left < C:
            cut(b_v, left, rows)
            fence_async_shared()
        mbarrier.wait(faded.index(stage), phase)
        limit = gl.minimum(limit, gl.max(stop.index(stage).load(vector), 0))
        state = warpgroup_mma(b_v.permute((1, 0)), tiles_a.index(stage), state, is_async=True)
        if EXACT:
            state = warpgroup_mma(b_v.permute((1, 0)), tiles_low.index(stage), state, is_async=True)
        state = warpgroup_mma_wait(num_outstanding=0, deps=(state,))
        mbarrier.arrive(free.index(stage), count=1)
        if GROUP == 0:
            more = issued < limit  # which may be known before the walk gets there
            mbarrier.wait(free.index(stage), phase, pred=more)
            at = row + chunk_of(issued, chunks, not REVERSE) * C
            fetch(descriptors, tiles, arrived, at, head, panel, stage, more, GROUPS, False, SCALAR)
            issued += more.to(gl.int32)
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
        c += 1
    if GROUP == 0:  # what was on its way when the walk stopped has to arrive
        for i in gl.static_range(STAGES - 1):
            at = c + i
            mbarrier.wait(arrived.index(at % STAGES), (at // STAGES) & 1, pred=at < issued)
    first_value = (part * GROUPS + GROUP) * PANEL
    before = (n.to(gl.int64) * heads + head) * segments + segment
    store_state(part_states + (before * values + first_value) * K, state, steps, K)


@gluon.jit
def one_of_two(x):
    """Of x [C, columns], whose rows are alike, [C / 2, columns]: a thread holds rows t and t + 8, of which one is enough."""
    pairs = gl.permute(gl.reshape(x, [C // 16, 2, 8, x.shape[1]]), (0, 2, 3, 1))
    first, _ = gl.split(pairs)
    return gl.reshape(first, [C // 2, x.shape[1]])


@gluon.jit
def two_of_one(x, layout: gl.constexpr):
    """The inverse of one_of_two; nothing leaves its thread."""
    rows = gl.reshape(x, [C // 16, 8, x.shape[1]])
    return gl.convert_layout(gl.reshape(gl.permute(gl.join(rows, rows), (0, 3, 1, 2)), [C, x.shape[1]]), layout)


@gluon.jit
def fade_panels(adders, g, carry, weights, scale, FIRST: gl.constexpr, REVERSE: gl.constexpr):
    """Decay a tile's panels from FIRST on. Each row of ``carry`` [C / 2, channels] sums the log-decays of the tiles before."""
    held: gl.constexpr = carry.type.layout
    K: gl.constexpr = carry.shape[1]
    if K == PANEL:
        p_a = adders.slice(FIRST, PANEL, dim=1)
        p_g = g.slice(FIRST, PANEL, dim=1)
        square: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PANEL, 16])
        d = gl.zeros([C, PANEL], gl.float32, layout=square)
        total = gl.zeros([C, PANEL], gl.float32, layout=square)
        d = warpgroup_mma(weights.index(0), p_g, d, use_acc=False, is_async=True)
        total = warpgroup_mma(weights.index(1), p_g, total, use_acc=False, is_async=True)
        d, total = warpgroup_mma_wait(num_outstanding=0, deps=(d, total))
        b_a = p_a.load(square).to(gl.float32) * exp2_flushed((two_of_one(carry, square) + d) * LOG2E)
        carry += gl.convert_layout(one_of_two(total), held)
        if REVERSE:
            b_a *= scale
        store_in_parts(b_a, p_a, p_g)
    else:
        left, right = halves(carry)
        left = fade_panels(adders, g, left, weights, scale, FIRST, REVERSE)
        right = fade_panels(adders, g, right, weights, scale, FIRST + K // 2, REVERSE)
        carry = gl.convert_layout(gl.reshape(gl.permute(gl.join(left, right), (0, 2, 1)), [C // 2, K]), held)
    return carry


@gluon.jit
def fade_channels(tiles, part_decays, bars, offsets, T, sizes, scale, SLICES: gl.constexpr, PACKED: gl.constexpr,
                  REVERSE: gl.constexpr):  # fmt: skip
    """Tile after tile with a decay per channel."""
    _, tiles_a, _, tiles_g, weights, _ = tiles
    arrived, faded, _, stop = bars
    K: gl.constexpr = tiles_a.shape[2]
    E: gl.constexpr = tiles_a.dtype
    STAGES: gl.constexpr = tiles_a.shape[0]
    rows: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    heads, segments, part_steps = sizes
    n, head, part, segment = place(sizes, SLICES)
    _, steps = span(offsets, n, T, segment, part_steps, PACKED)
    chunks = chunks_of(steps, segment, segments, REVERSE)
    vector: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    # operands from shared memory: in registers they leave too few for two products at once, and ptxas then serializes them all;
    # what it made of that was wrong for parts of a single tile
    t = gl.arange(0, C, layout=gl.SliceLayout(1, rows))[:, None]
    s = gl.arange(0, C, layout=gl.SliceLayout(0, rows))[None, :]
    weights.index(0).store(ones_where(s <= t if REVERSE else s > t, E))
    weights.index(1).store(ones_where((s >= 0) & (t >= 0), E))
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    carry = one_of_two(gl.zeros([C, K], gl.float32, layout=wide))
    held: gl.constexpr = carry.type.layout
    limit = chunks
    c = 0
    while c < limit:
        stage = c % STAGES
        left = steps - chunk_of(c, chunks, not REVERSE) * C
        g = tiles_g.index(stage)
        mbarrier.wait(arrived.index(stage), (c // STAGES) & 1)
        if left < C:  # what follows belongs to somebody else
            cut(g, left, rows)
            cut(tiles_a.index(stage), left, rows)
        raise_to(g, rows)
        fence_async_shared()
        carry = fade_panels(tiles_a.index(stage), g, carry, weights, scale, 0, REVERSE)
        if c & 1 == 1:
            if gl.max(gl.max(carry, 1), 0) < NOTHING:
                limit = gl.minimum(limit, c + 1)
        stop.index(stage).store(gl.full([1], 0, gl.int32, layout=vector) + limit)
        fence_async_shared()
        mbarrier.arrive(faded.index(stage), count=1)
        c += 1
    if part == 0:
        before = (n.to(gl.int64) * heads + head) * segments + segment
        row = gl.arange(0, C // 2, layout=gl.SliceLayout(1, held))[:, None]
        channel = gl.arange(0, K, layout=gl.SliceLayout(0, held))[None, :]
        gl.store(part_decays + before * K + channel + 0 * row, exp(carry), mask=(row == 0) & (channel >= 0))


@gluon.jit
def fade_heads(tiles, part_decays, bars, offsets, log_decay, T, sizes, scale, SLICES: gl.constexpr,
               PACKED: gl.constexpr, REVERSE: gl.constexpr, EXACT: gl.constexpr):  # fmt: skip
    """Tile after tile with a decay per head."""
    _, tiles_a, _, tiles_low, _, _ = tiles
    arrived, faded, _, stop = bars
    K: gl.constexpr = tiles_a.shape[2]
    E: gl.constexpr = tiles_a.dtype
    STAGES: gl.constexpr = tiles_a.shape[0]
    rows: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    down: gl.constexpr = gl.SliceLayout(1, rows)
    heads, segments, part_steps = sizes
    n, head, part, segment = place(sizes, SLICES)
    row, steps = span(offsets, n, T, segment, part_steps, PACKED)
    chunks = chunks_of(steps, segment, segments, REVERSE)
    vector: gl.constexpr = gl.BlockedLayout([C // 32], [32], [4], [0])  # all steps in each warp, as in prepare_heads
    step = gl.arange(0, C, layout=vector)
    carry = 0.0
    limit = chunks
    c = 0
    while c < limit:
        stage = c % STAGES
        j = chunk_of(c, chunks, not REVERSE)
        left = steps - j * C
        at = (row + j * C + step).to(gl.int64) * heads + head
        g = gl.load(log_decay + at, mask=step < left, other=0.0).to(gl.float32)
        g = gl.where(g < SHORTEST, SHORTEST, g)
        before = gl.associative_scan(g, 0, plus)
        whole = gl.sum(g, 0)
        factor = exp(carry + before) * scale if REVERSE else exp(carry + whole - before)
        factor = gl.convert_layout(factor, down)[:, None]
        carry += whole
        adders = tiles_a.index(stage)
        mbarrier.wait(arrived.index(stage), (c // STAGES) & 1)
        if left < C:
            cut(adders, left, rows)
        for panel in gl.static_range(K // PANEL):
            p_a = adders.slice(panel * PANEL, PANEL, dim=1)
            b_a = p_a.load(rows).to(gl.float32) * factor
            if EXACT:
                store_in_parts(b_a, p_a, tiles_low.index(stage).slice(panel * PANEL, PANEL, dim=1))
            else:
                p_a.store(b_a.to(E))
        if carry < NOTHING:
            limit = gl.minimum(limit, c + 1)
        stop.index(stage).store(gl.full([1], 0, gl.int32, layout=vector) + limit)
        fence_async_shared()
        mbarrier.arrive(faded.index(stage), count=1)
        c += 1
    if part == 0:
        before = (n.to(gl.int64) * heads + head) * segments + segment
        left_over = gl.full([K], 1.0, gl.float32, layout=vector) * exp(carry)
        gl.store(part_decays + before * K + gl.arange(0, K, layout=vector), left_over)


@gluon.jit
def fade(tiles, part_decays, bars, offsets, log_decay, T, sizes, scale, SLICES: gl.constexpr,
         PACKED: gl.constexpr, REVERSE: gl.constexpr, SCALAR: gl.constexpr,
         EXACT: gl.constexpr):  # fmt: skip
    """Adders decayed to the far end of the part."""
    if SCALAR:
        fade_heads(tiles, part_decays, bars, offsets, log_decay, T, sizes, scale, SLICES, PACKED, REVERSE, EXACT)
    else:
        fade_channels(tiles, part_decays, bars, offsets, T, sizes, scale, SLICES, PACKED, REVERSE)


@gluon.jit(do_not_specialize=["T", "heads", "segments", "part_steps"])
def sum_kernel(
    adders, v, g, log_decay, part_states, part_decays, offsets, T, heads, segments, part_steps, scale, values,
    SLICES: gl.constexpr, PACKED: gl.constexpr, REVERSE: gl.constexpr, EXACT: gl.constexpr,
    GROUPS: gl.constexpr, STAGES: gl.constexpr, FADE_REGISTERS: gl.constexpr, ADD_REGISTERS: gl.constexpr,
):  # fmt: skip
    """part_states [N, H, parts, V, K] and part_decays [N, H, parts, K], float32."""
    SCALAR: gl.constexpr = g is None
    K: gl.constexpr = adders.block_type.shape[1]
    E: gl.constexpr = adders.dtype
    tiles_a = gl.allocate_shared_memory(E, [STAGES, C, K], adders.layout)
    tiles_v = gl.allocate_shared_memory(E, [STAGES * GROUPS, C, PANEL], v.layout)
    tiles_g = tiles_a
    if EXACT:
        tiles_g = gl.allocate_shared_memory(E, [STAGES, C, K], adders.layout)
    arrived = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    faded = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(arrived.index(i), count=1)
        mbarrier.init(faded.index(i), count=1)
        mbarrier.init(free.index(i), count=GROUPS)
    fence_async_shared()  # copies arrive at these barriers
    # a word for each stage: between faded and free it does not change, so that all threads read the same
    stop = gl.allocate_shared_memory(gl.int32, [STAGES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    sizes = (heads, segments, part_steps)
    descriptors = (adders, adders, v, g)
    weights = tiles_a
    if not SCALAR:
        weights = gl.allocate_shared_memory(E, [2, C, C], gl.NVMMASharedLayout.get_default_for([C, C], E))
    tiles = (tiles_a, tiles_a, tiles_v, tiles_g, weights, tiles_a)
    bars = (arrived, faded, free, stop)
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (add, (descriptors, part_states, tiles, bars, offsets, T, sizes, values, 0, GROUPS, SLICES,
                       PACKED, REVERSE, SCALAR, EXACT)),
                (add, (descriptors, part_states, tiles, bars, offsets, T, sizes, values, 1, GROUPS, SLICES,
                       PACKED, REVERSE, SCALAR, EXACT)),
                (fade, (tiles, part_decays, bars, offsets, log_decay, T, sizes, scale, SLICES, PACKED, REVERSE,
                        SCALAR, EXACT)),
            ],
            [4, 4],
            [ADD_REGISTERS, FADE_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (add, (descriptors, part_states, tiles, bars, offsets, T, sizes, values, 0, GROUPS, SLICES,
                       PACKED, REVERSE, SCALAR, EXACT)),
                (fade, (tiles, part_decays, bars, offsets, log_decay, T, sizes, scale, SLICES, PACKED, REVERSE,
                        SCALAR, EXACT)),
            ],
            [4],
            [FADE_REGISTERS],
        )  # fmt: skip
    keep_barriers((arrived, faded, free))
