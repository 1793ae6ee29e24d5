"""Gradients of gated linear attention on Hopper GPUs with respect to q, k and g, parallel over chunks.

Computes   what backward.py says, for 64 channels of a chunk, from the states and their gradients that walks left.
Grid       a program per chunk, head and panel of 64 channels; values in blocks inside.
On chip    q, k, g [64, 64]; v and do [64, BV], S and dS [BV, 64] block by block; two programs fit on a processor, so that one
           computes while the other's copies arrive. What has to wait takes the room of S and dS: registers are what is scarce.
Decay      products with 0 and 1 sum log-decays up to and with each step, over the first half of the chunk and over all of it;
           differences of them are decays from the middle and to the end. Where these exceed LIMIT, or the sums LONGEST, decays
           to the end are summed on their own and pairs of steps are computed by levels of halves (``by_levels``).
Rounding   decayed queries and keys, S and dS are 16-bit, dP a sum of two such numbers (so is S where a head has one decay, whose
           gradient is a sum over all of a state): products of three roundings would leave dg no more than its own. What is
           subtracted for dg is the product of what was rounded, and adds up over the chunk in two parts as well.
"""

from onelaunch.kernels.gluon.compat import (
    fence_async_shared,
    gl,
    gluon,
    keep_barriers,
    mbarrier,
    tma_load,
    tma_store,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from onelaunch.ops.gla.kernels.hopper_pairs import (
    LONGEST,
    logarithm,
    pairs_by_levels,
    pairs_from_middle,
    summed_in_parts,
)
from onelaunch.ops.gla.kernels.hopper_tiles import (
    LOG2E,
    PANEL,
    SHORTEST,
    C,
    cut,
    exp2_flushed,
    find_chunk,
    log_sigmoid_slope,
    plus,
    rows_of,
    store_in_parts,
    zero_of,
)


@gluon.jit
def through_states(descriptors, tiles, bar, rows, cells, channel, values, acc: gl.constexpr):
    """do S^T, v dS^T [C, PANEL] and do v^T [C, C], and S dS summed over V [PANEL]."""
    v, _, _, _, states_low = descriptors
    t_v, t_do, t_s, t_ds, t_low = tiles
    BV: gl.constexpr = v.block_type.shape[1]
    fine: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    of_states = gl.zeros([C, PANEL], gl.float32, layout=acc)
    of_dstates = gl.zeros([C, PANEL], gl.float32, layout=acc)
    dscores = gl.zeros([C, C], gl.float32, layout=acc)
    both = gl.zeros([32, PANEL], gl.float32, layout=fine)
    phase = 0
    for first in range(0, values, BV):
        if first > 0:
            mbarrier.expect(bar, (4 if states_low is None else 5) * v.block_type.nbytes)
            fetch_values(descriptors, tiles, bar, rows, cells, channel, values, first)
        mbarrier.wait(bar, phase)
        phase ^= 1
        of_states = warpgroup_mma(t_do, t_s, of_states, is_async=True)
        dscores = warpgroup_mma(t_do, t_v.permute((1, 0)), dscores, is_async=True)
        of_dstates = warpgroup_mma(t_v, t_ds, of_dstates, is_async=True)
        if states_low is not None:
            of_states = warpgroup_mma(t_do, t_low, of_states, is_async=True)
        for turn in gl.static_range(BV // 32):
            state = t_s.slice(turn * 32, 32, dim=0).load(fine).to(gl.float32)
            if states_low is not None:
                state += t_low.slice(turn * 32, 32, dim=0).load(fine).to(gl.float32)
            both += state * t_ds.slice(turn * 32, 32, dim=0).load(fine).to(gl.float32)
        of_states, dscores, of_dstates = warpgroup_mma_wait(num_outstanding=0, deps=(of_states, dscores, of_dstates))
    return of_states, of_dstates, dscores, gl.sum(both, 0)


@gluon.jit
def fetch_values(descriptors, tiles, bar, rows, cells, channel, values, first):
    """Copy a block of v, do, S and dS.

    Where one of states is two boxes, these lie in the rows of the chunk, side by side ``cells`` apart.
    """
    v, do, states, dstates, states_low = descriptors
    t_v, t_do, t_s, t_ds, t_low = tiles
    row, head = rows
    tma_load(v, [row, head * values + first], bar, t_v)
    tma_load(do, [row, head * values + first], bar, t_do)
    BOX: gl.constexpr = states.block_type.shape[0]
    if t_s.shape[0] > BOX:
        for turn in gl.static_range(2):
            tma_load(states, [row, channel + turn * cells], bar, t_s.slice(turn * BOX, BOX, dim=0))
            tma_load(dstates, [row, channel + turn * cells], bar, t_ds.slice(turn * BOX, BOX, dim=0))
    else:
        tma_load(states, [cells + first, channel], bar, t_s)
        tma_load(dstates, [cells + first, channel], bar, t_ds)
    if states_low is not None:
        tma_load(states_low, [cells + first, channel], bar, t_low)


@gluon.jit
def put(tile, values, out, out_tiles, row, column, pitch, left):
    """A gradient [C, PANEL] to where it belongs, in rows a pitch apart; the caller waits for the copy."""
    tile.store(values.to(tile.dtype))
    if left >= C:
        fence_async_shared()
        tma_store(out_tiles, [row, column], tile)
    else:
        rows: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
        t = rows_of(rows, left)
        u = column + gl.arange(0, PANEL, layout=gl.SliceLayout(0, rows))[None, :]
        gl.store(out + (row + t).to(gl.int64) * pitch + u, tile.load(rows), mask=t < left)


@gluon.jit
def channel_gradients(
    descriptors, tiles, blocks, both, results, bars, at, sizes, scale, LIMIT: gl.constexpr, NORMALIZER: gl.constexpr,
    acc: gl.constexpr,
):  # fmt: skip
    """dq, dk and dg of a panel of channels, each with its decay."""
    row, left, head, cells, channel = at
    values, pitch, width, column = sizes
    dq, dk, dg, dq_tiles, dk_tiles, dg_tiles = results
    t_v, t_do, _, _, _ = blocks
    E: gl.constexpr = tiles.dtype
    LOWEST: gl.constexpr = -1e30 if E == gl.bfloat16 else -65504.0  # noqa: SIM300
    vector: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    across: gl.constexpr = gl.SliceLayout(0, acc)
    square: gl.constexpr = tiles.type.layout
    t_q = tiles.index(0)
    t_k = tiles.index(1)
    t_g = tiles.index(4)
    numbers = gl.allocate_shared_memory(gl.int32, [5, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    flag = numbers.index(0)
    one = numbers.index(1)
    one.store(gl.full([1], 1, gl.int32, layout=vector))
    # where results go: wanted at the end, and registers are scarcer than shared memory
    numbers.index(2).store(gl.full([1], 0, gl.int32, layout=vector) + row)
    numbers.index(3).store(gl.full([1], 0, gl.int32, layout=vector) + column // PANEL)
    numbers.index(4).store(gl.full([1], 0, gl.int32, layout=vector) + left)
    mbarrier.wait(bars.index(0), 0)
    if left < C:
        rows: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
        cut(t_q, left, rows)
        cut(t_k, left, rows)
        cut(t_g, left, rows)
        fence_async_shared()

    from_states, from_dstates, dscores, whole = through_states(
        descriptors, blocks, bars.index(1), (row, head), cells, channel, values, acc
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
    if left < C:  # what follows may be NaN
        from_states = gl.where(t < left, from_states, 0.0)
        from_dstates = gl.where(t < left, from_dstates, 0.0)
        dscores = gl.where((t < left) & (left - s > 0), dscores, 0.0)
    alone = gl.sum(gl.where(t - s == 0, dscores, 0.0), 1)[:, None]
    t_p = t_do.slice(0, PANEL, dim=1)
    t_low = t_v.slice(0, PANEL, dim=1)
    store_in_parts(gl.where(t - s > 0, dscores, 0.0), t_p, t_low)
    fence_async_shared()

    before = logarithm(t_g, "before", zero_of(one, vector), acc)
    d = before - logarithm(t_g, "half", 0, acc)
    gentle = (gl.abs(d) <= LIMIT * LOG2E) & (before >= LONGEST)
    wild = gl.max(gl.max(gl.where(gentle, 0, 1), 1), 0)
    # what the compiler knows to be the same on both sides of a branch it computes on one of them alone: see docs/notebook/gla.md
    flag.store(gl.full([1], 0, gl.int32, layout=vector) + wild)
    if wild == 0:
        behind = logarithm(t_g, "all", 0, acc) - before
    else:
        b_g = t_g.load(acc).to(gl.float32)
        t_g.store(gl.where(b_g < LOWEST, LOWEST, b_g).to(E))
        fence_async_shared()
        same = zero_of(flag, vector)
        before = logarithm(tiles.index(4 + same), "before", same, acc)
        behind = logarithm(tiles.index(4 + same), "behind", same, acc)

    behind = exp2_flushed(behind)
    b_dk = from_dstates * behind
    of_k = t_k.load(acc).to(gl.float32) * b_dk
    stash.store(b_dk + alone * t_q.load(acc).to(gl.float32))
    before = exp2_flushed(before)
    all_of_it = t_whole.load(across)[None, :] * (before * behind)
    t_whole.store(gl.sum(of_k + gl.where(rows_of(acc, left) == 0, all_of_it, 0.0), 0))
    b_dq = from_states * (before * scale)
    onward = t_q.load(acc).to(gl.float32) * b_dq - of_k
    b_dq += alone * tiles.index(1 + zero_of(one, vector)).load(acc).to(gl.float32)
    if wild == 0:
        zero = zero_of(one, vector)
        d = logarithm(tiles.index(4 + zero), "before", zero, acc)
        decay = exp2_flushed(d - logarithm(tiles.index(4 + zero), "half", 0, acc))
        b_dq, b_dk, onward = pairs_from_middle(b_dq, onward, (t_p, t_low), tiles, decay, one, acc)
        from_levels = gl.zeros([C, PANEL], gl.float32, layout=acc)
    else:
        same = zero_of(flag, vector)
        high = tiles.index(2 + same)._reinterpret(gl.bfloat16, [C, PANEL], square)  # noqa: SLF001
        low = tiles.index(3 + same)._reinterpret(gl.bfloat16, [C, PANEL], square)  # noqa: SLF001
        nothing = gl.zeros([C, PANEL], gl.float32, layout=acc)
        from_levels = summed_in_parts(onward, high, low, nothing, "onward", 0, same, acc)
        onward = nothing
        b_dk = nothing
        b_dq, from_levels = pairs_by_levels(
            b_dq, stash, from_levels, t_p, t_low, tiles.index(same), tiles.index(1 + same), tiles.index(4 + same),
            tiles.index(2 + same), high, low, flag, acc,
        )  # fmt: skip
    b_dk += stash.load(acc)
    same = zero_of(one, vector)
    high = tiles.index(2 + same)._reinterpret(gl.bfloat16, [C, PANEL], square)  # noqa: SLF001
    low = tiles.index(3 + same)._reinterpret(gl.bfloat16, [C, PANEL], square)  # noqa: SLF001
    b_dg = summed_in_parts(onward, high, low, from_levels, "onward", 0, same, acc)
    b_dg += t_whole.load(across)[None, :]
    row = gl.max(numbers.index(2).load(vector), 0)
    column = gl.max(numbers.index(3).load(vector), 0) * PANEL
    left = gl.max(numbers.index(4).load(vector), 0)
    put(t_q, b_dq, dq, dq_tiles, row, column, pitch, left)
    put(t_k, b_dk, dk, dk_tiles, row, column, pitch, left)
    if NORMALIZER is not None:
        y = tiles.index(4 + zero_of(one, vector)).load(acc).to(gl.float32) * NORMALIZER
        b_dg *= log_sigmoid_slope(y) * (1.0 / NORMALIZER)
    put(t_g, b_dg, dg, dg_tiles, row, column, width, left)


@gluon.jit
def head_gradients(descriptors, tiles, blocks, results, bars, at, sizes, scale, log_decay, heads, to, acc: gl.constexpr):
    """The same where a head has one decay; what this panel adds to dg goes ``to`` [B, T, H]."""
    row, left, head, cells, channel = at
    values, pitch, _, column = sizes
    dq, dk, _, dq_tiles, dk_tiles, _ = results
    t_v, t_do, _, _, _ = blocks
    vector: gl.constexpr = gl.BlockedLayout([C // 32], [32], [gl.num_warps()], [0])  # all steps in each warp, as in prepare_heads
    down: gl.constexpr = gl.SliceLayout(1, acc)
    across: gl.constexpr = gl.SliceLayout(0, acc)
    t_q = tiles.index(0)
    t_k = tiles.index(1)
    step = gl.arange(0, C, layout=vector)
    place = (row + step).to(gl.int64) * heads + head
    b_g = gl.load(log_decay + place, mask=step < left, other=0.0).to(gl.float32)
    b_g = gl.where(b_g < SHORTEST, SHORTEST, b_g)
    sums = gl.associative_scan(b_g, 0, plus) * LOG2E
    total = gl.sum(b_g, 0) * LOG2E
    before = gl.convert_layout(sums, down)[:, None]
    mbarrier.wait(bars.index(0), 0)
    if left < C:
        rows: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
        cut(t_q, left, rows)
        cut(t_k, left, rows)
        fence_async_shared()

    from_states, from_dstates, dscores, whole = through_states(
        descriptors, blocks, bars.index(1), (row, head), cells, channel, values, acc
    )
    t = gl.arange(0, C, layout=down)[:, None]
    s = gl.arange(0, C, layout=across)[None, :]
    dscores *= scale
    if left < C:  # what follows may be NaN
        from_states = gl.where(t < left, from_states, 0.0)
        from_dstates = gl.where(t < left, from_dstates, 0.0)
        dscores = gl.where((t < left) & (s < left), dscores, 0.0)
    alone = gl.sum(gl.where(t == s, dscores, 0.0), 1)[:, None]
    t_p = t_do.slice(0, PANEL, dim=1)
    t_low = t_v.slice(0, PANEL, dim=1)
    between = before - gl.convert_layout(sums, across)[None, :]
    store_in_parts(gl.where(t > s, dscores * exp2_flushed(gl.where(t > s, between, 0.0)), 0.0), t_p, t_low)
    fence_async_shared()
    of_q = gl.zeros([C, PANEL], gl.float32, layout=acc)
    of_k = gl.zeros([C, PANEL], gl.float32, layout=acc)
    of_q = warpgroup_mma(t_p, t_k, of_q, use_acc=False, is_async=True)
    of_q = warpgroup_mma(t_low, t_k, of_q, is_async=True)
    of_k = warpgroup_mma(t_p.permute((1, 0)), t_q, of_k, use_acc=False, is_async=True)
    of_k = warpgroup_mma(t_low.permute((1, 0)), t_q, of_k, is_async=True)
    from_states = from_states * (exp2_flushed(before) * scale)
    from_dstates = from_dstates * exp2_flushed(total - before)
    b_q = t_q.load(acc).to(gl.float32)
    b_k = t_k.load(acc).to(gl.float32)
    of_q, of_k = warpgroup_mma_wait(num_outstanding=0, deps=(of_q, of_k))
    onward = gl.convert_layout(gl.sum(b_q * (of_q + from_states) - b_k * of_k, 1), vector)
    earlier = gl.convert_layout(gl.sum(b_k * from_dstates, 1), vector)
    put(t_q, from_states + of_q + alone * b_k, dq, dq_tiles, row, column, pitch, left)
    put(t_k, from_dstates + of_k + alone * b_q, dk, dk_tiles, row, column, pitch, left)
    found = gl.sum(onward, 0) - gl.associative_scan(onward, 0, plus) + onward
    found += gl.associative_scan(earlier, 0, plus) - earlier
    found += gl.sum(whole, 0) * gl.exp2(total)
    gl.store(to + place, found, mask=step < left)


@gluon.jit(do_not_specialize=["T", "heads", "sequences"])
def gradients_kernel(
    q, k, g, v, do, states, dstates, states_low, log_decay, dq, dk, dg, dq_tiles, dk_tiles, dg_tiles, offsets,
    T, heads, sequences, rows, scale, values, pitch,
    PANELS: gl.constexpr, STEPS: gl.constexpr, LIMIT: gl.constexpr, NORMALIZER: gl.constexpr, SPREAD: gl.constexpr,
    PACKED: gl.constexpr,
):  # fmt: skip
    """dq, dk and dg [B, T, H, K]; with a decay per head ``dg`` has float32 parts [PANELS, B, T, H] of it.

    ``rows``: B T. ``pitch``: elements from row to row of dq and of dk [B T, H K]. With a ``NORMALIZER`` log-decays, one for each
    channel, are logsigmoid(z) / NORMALIZER, and dg is the gradient of z. ``SPREAD``: states lie as the walks leave them so.
    """
    SCALAR: gl.constexpr = g is None
    E: gl.constexpr = q.dtype
    acc: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, gl.num_warps() // 4], [16, PANEL * 4 // gl.num_warps(), 16])
    item = gl.program_id(0)
    panel = item % PANELS
    head = (item // PANELS) % heads
    slot = item // PANELS // heads
    row, left = find_chunk(offsets, slot, T, sequences, STEPS, PACKED)
    if left <= 0:
        return
    square: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, PANEL], E)
    tiles = gl.allocate_shared_memory(E, [2 if SCALAR else 5, C, PANEL], square)  # q, k, two of scratch, g
    BV: gl.constexpr = v.block_type.shape[1]
    both = gl.allocate_shared_memory(E, [2, BV, PANEL], states.layout)
    blocks = (
        gl.allocate_shared_memory(E, v.block_type.shape, v.layout),
        gl.allocate_shared_memory(E, do.block_type.shape, do.layout),
        both.index(0),
        both.index(1),
        gl.allocate_shared_memory(E, states.block_type.shape, states.layout) if SCALAR else tiles,
    )
    bars = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(bars.index(0), count=1)
    mbarrier.init(bars.index(1), count=1)
    fence_async_shared()
    channel = panel * PANEL
    width = heads * PANELS * PANEL
    column = head * PANELS * PANEL + channel
    mbarrier.expect(bars.index(0), (2 if SCALAR else 3) * q.block_type.nbytes)
    if not SCALAR:
        tma_load(g, [row, column], bars.index(0), tiles.index(4))
    tma_load(q, [row, column], bars.index(0), tiles.index(0))
    tma_load(k, [row, column], bars.index(0), tiles.index(1))
    descriptors = (v, do, states, dstates, states_low)
    mbarrier.expect(bars.index(1), (5 if SCALAR else 4) * v.block_type.nbytes)  # blocks of states are as large
    if SPREAD:
        cells = heads * PANELS * PANEL
        channel = column
    else:
        cells = (slot * heads + head) * values
    fetch_values(descriptors, blocks, bars.index(1), (row, head), cells, channel, values, 0)
    results = (dq, dk, dg, dq_tiles, dk_tiles, dg_tiles)
    at = (row, left, head, cells, channel)
    sizes = (BV if SPREAD else values, pitch, width, column)  # known then: nothing more is fetched
    if SCALAR:
        to = dg + panel.to(gl.int64) * rows * heads
        head_gradients(descriptors, tiles, blocks, results, bars, at, sizes, scale, log_decay, heads, to, acc)
    else:
        channel_gradients(descriptors, tiles, blocks, both, results, bars, at, sizes, scale, LIMIT, NORMALIZER, acc)
    tma_store_wait(pendings=0)
    keep_barriers((bars,))
    tiles._keep_alive()  # noqa: SLF001 - else reductions that follow the stores may take the room that these still read
