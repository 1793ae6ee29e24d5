"""Gated linear attention on Hopper GPUs: what one group of warps makes of a tile before others multiply with it.

Computes   from queries, keys and log-decays of a chunk of 64 steps: the decayed ones and the scores between its steps.
Mirrored   forward in time, queries read a state to which keys add; backwards (``REVERSE``), keys read its gradient, to which
           queries add. So there are *readers* and *adders*: readers are decayed from where the walk enters the chunk, adders to
           where it leaves it, and a reader sees the adders that the walk met before it, and its own.
On chip    decayed readers and adders lie where readers and adders lay, what rounding took of the adders where the log-decays did.
Decay      per channel: anchored in the middle of the chunk, exp(+-LIMIT) at most; where that does not hold, products by levels of
           halves, whose factors are at most 1 (``by_levels``). Per head: the scores' decays are a matrix [64, 64].
Rounding   readers as one 16-bit number, adders as a sum of two, scores as one. What is read has two roundings beside its own, a
           state only that of being an operand: the gradient of g hangs on products of two states.
"""

from onelaunch.kernels.gluon.compat import fence_async_shared, gl, gluon, mbarrier, warpgroup_mma, warpgroup_mma_wait
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
    rows_of,
    span,
    store_in_parts,
    zero_of,
)

LARGEST = gl.constexpr(128.0)
"""Of float16 inputs that may be decayed from and to the middle of a tile, as in launch.py."""


@gluon.jit
def seen(reader, adder, REVERSE: gl.constexpr):
    """Whether the walk meets the adder before the reader, or with it."""
    return reader <= adder if REVERSE else reader >= adder


@gluon.jit
def score(readers, adders, square: gl.constexpr):
    """Products [C, C] of readers in registers with adders in shared memory."""
    operand: gl.constexpr = gl.DotOperandLayout(0, square, 2)
    p = gl.zeros([C, C], gl.float32, layout=square)
    p = warpgroup_mma(gl.convert_layout(readers, operand), adders.permute((1, 0)), p, use_acc=False, is_async=True)
    return warpgroup_mma_wait(num_outstanding=0, deps=(p,))


@gluon.jit
def weighted(weights, g, rows: gl.constexpr):
    """weights [C, C] times log-decays [C, PANEL]: sums over parts of a tile."""
    zero = gl.zeros([C, PANEL], gl.float32, layout=rows)
    d = warpgroup_mma(weights.to(g.dtype), g, zero, use_acc=False, is_async=True)
    return warpgroup_mma_wait(num_outstanding=0, deps=(d,))


@gluon.jit
def halves_of(g, ones, panel: gl.constexpr):
    """Log-decay summed over the first and over the second half of the steps, for a panel of channels [PANEL]; ``ones`` [8, C]."""
    few: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16])
    total = gl.zeros([PANEL, 8], gl.float32, layout=few)
    part = g.slice(panel * PANEL, PANEL, dim=1)
    total = warpgroup_mma(part.permute((1, 0)), ones.permute((1, 0)), total, use_acc=False, is_async=True)
    total = warpgroup_mma_wait(num_outstanding=0, deps=(total,))
    first, second = gl.split(gl.reshape(total, [PANEL, 4, 2]))
    return gl.sum(first, 1), gl.sum(second, 1)  # all but the first of the four are 0


@gluon.jit
def too_large(tile, scale, layout: gl.constexpr):
    """Whether anything in a tile, times the scale, is beyond LARGEST: 0 or more."""
    found = 0
    for panel in gl.static_range(tile.shape[1] // PANEL):
        size = gl.abs(tile.slice(panel * PANEL, PANEL, dim=1).load(layout).to(gl.float32) * scale)
        found += gl.max(gl.max(gl.where(size <= LARGEST, 0, 1), 1), 0)
    return found


@gluon.jit
def fill_halves(ones):
    """[8, C] of ones over the first half of the steps, over the second half, and zeros."""
    E: gl.constexpr = ones.dtype
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    which = gl.arange(0, 8, layout=gl.SliceLayout(1, layout))[:, None]
    half = gl.arange(0, C, layout=gl.SliceLayout(0, layout))[None, :] // (C // 2)
    ones.store(ones_where(which == half, E))
    fence_async_shared()


@gluon.jit
def anchored(readers, adders, g, scores, decayed, taken, turn, scale, square: gl.constexpr,
             ALONE: gl.constexpr, READ: gl.constexpr, REVERSE: gl.constexpr):  # fmt: skip
    """Readers and adders decayed from and to the middle of the tile, in place, and their scores.

    Where there is a single place for scores (``ALONE``), those of the tile before must have been taken from it.
    """
    E: gl.constexpr = adders.dtype
    weights: gl.constexpr = gl.DotOperandLayout(0, square, 2)
    t = gl.arange(0, C, layout=gl.SliceLayout(1, weights))[:, None]
    s = gl.arange(0, C, layout=gl.SliceLayout(0, weights))[None, :]
    later = ones_where((s <= t) & (s >= C // 2), gl.float32)
    around = later - ones_where((s > t) & (s < C // 2), gl.float32)
    for panel in gl.static_range(adders.shape[1] // PANEL):
        p_r = readers.slice(panel * PANEL, PANEL, dim=1)
        p_a = adders.slice(panel * PANEL, PANEL, dim=1)
        p_g = g.slice(panel * PANEL, PANEL, dim=1)
        d = weighted(around, p_g, square) * (-LOG2E if REVERSE else LOG2E)
        b_a = p_a.load(square).to(gl.float32) * exp2_flushed(-d)
        if REVERSE:
            b_a *= scale
        store_in_parts(b_a, p_a, p_g)
        if READ:
            b_r = p_r.load(square).to(gl.float32) * exp2_flushed(d)
            if not REVERSE:
                b_r *= scale
            p_r.store(b_r.to(E))
    fence_async_shared()
    mbarrier.arrive(decayed, count=1)
    if READ:
        p = gl.zeros([C, C], gl.float32, layout=square)
        p = warpgroup_mma(readers, adders.permute((1, 0)), p, use_acc=False, is_async=True)
        p = warpgroup_mma(readers, g.permute((1, 0)), p, is_async=True)
        p = warpgroup_mma_wait(num_outstanding=0, deps=(p,))
        t = gl.arange(0, C, layout=gl.SliceLayout(1, square))[:, None]
        s = gl.arange(0, C, layout=gl.SliceLayout(0, square))[None, :]
        if ALONE:
            mbarrier.wait(taken, (turn & 1) ^ 1)
        scores.store(gl.where(seen(t, s, REVERSE), p, 0.0).to(E))


@gluon.jit
def decay_over(g, level, zero, PART: gl.constexpr, square: gl.constexpr):
    """What is left of each channel of g [C, PANEL].

    PART "before": from the start of the tile up to each step; "behind": from behind each step to the end of the tile; "block":
    where the level's bit of a step is 1, from the start of its block of 2^level steps up to it, elsewhere behind it to its
    block's end.
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
    return exp(weighted(ones_where(within, gl.float32), g, square))


@gluon.jit
def by_levels(readers, adders, g, scores, decayed, flag, taken, turn, scale, square: gl.constexpr,
              ALONE: gl.constexpr, READ: gl.constexpr, REVERSE: gl.constexpr):  # fmt: skip
    """The same for decays of any size: readers decayed from the tile's near end, adders to its far one, panel by panel."""
    E: gl.constexpr = adders.dtype
    FROM_START: gl.constexpr = "behind" if REVERSE else "before"
    TO_END: gl.constexpr = "before" if REVERSE else "behind"
    vector: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    p = gl.zeros([C, C], gl.float32, layout=square)
    column = gl.arange(0, C, layout=gl.SliceLayout(0, square))[None, :]
    for panel in gl.static_range(adders.shape[1] // PANEL):
        p_r = readers.slice(panel * PANEL, PANEL, dim=1)
        p_a = adders.slice(panel * PANEL, PANEL, dim=1)
        p_g = g.slice(panel * PANEL, PANEL, dim=1)
        row = gl.arange(0, C, layout=gl.SliceLayout(1, square))[:, None] + zero_of(flag, vector)
        b_a = p_a.load(square)
        if READ:
            p += gl.where(row == column, score(p_r.load(square), p_a, square), 0.0)
            for level in range(6):
                zero = zero_of(flag, vector)
                d = decay_over(p_g, level, zero, "block", square)
                row = gl.arange(0, C, layout=gl.SliceLayout(1, square))[:, None] + zero
                reads = ((row >> level) & 1) == (0 if REVERSE else 1)
                p_a.store(gl.where(reads, 0.0, b_a.to(gl.float32) * d).to(E))
                b_r = gl.where(reads, p_r.load(square).to(gl.float32) * d, 0.0)
                fence_async_shared()
                crossing = score(b_r.to(E), p_a, square)
                p += gl.where((row >> (level + 1)) == (column >> (level + 1)), crossing, 0.0)
        if READ:
            d = decay_over(p_g, 0, zero_of(flag, vector), FROM_START, square)
            if not REVERSE:
                d *= scale
            p_r.store((p_r.load(square).to(gl.float32) * d).to(E))
        d = decay_over(p_g, 0, zero_of(flag, vector), TO_END, square)
        if REVERSE:
            d *= scale
        store_in_parts(b_a.to(gl.float32) * d, p_a, p_g)
    if READ:
        if ALONE:
            mbarrier.wait(taken, (turn & 1) ^ 1)
        scores.store((p * scale).to(E))
    fence_async_shared()
    mbarrier.arrive(decayed, count=1)


@gluon.jit
def prepare_channels(tiles, vectors, bars, offsets, T, sizes, scale, LIMIT: gl.constexpr, SLICES: gl.constexpr,
                     PACKED: gl.constexpr, READ: gl.constexpr, REVERSE: gl.constexpr):  # fmt: skip
    """Tile after tile with a decay per channel."""
    tiles_r, tiles_a, _, tiles_g, tiles_s, _ = tiles
    ones, ends, strong = vectors
    arrived, decayed, ready, _, taken = bars
    K: gl.constexpr = tiles_a.shape[2]
    E: gl.constexpr = tiles_a.dtype
    STAGES: gl.constexpr = tiles_a.shape[0]
    SCORES: gl.constexpr = tiles_s.shape[0]
    square: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    vector: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    rows: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    every: gl.constexpr = gl.BlockedLayout([PANEL // 32], [32], [4], [0])
    LOWEST: gl.constexpr = -1e30 if E == gl.bfloat16 else -65504.0  # noqa: SIM300
    NEAR: gl.constexpr = 1 if REVERSE else 0
    ends_flat = ends._reinterpret(gl.float32, [2 * STAGES, K], gl.SwizzledSharedLayout(1, 1, 1, [0]))  # noqa: SLF001
    _, _, part_steps = sizes
    n, _, _, segment = place(sizes, SLICES)
    _, steps = span(offsets, n, T, segment, part_steps, PACKED)
    chunks = gl.cdiv(steps, C)
    fill_halves(ones)
    for c in range(chunks):
        stage = c % STAGES
        left = steps - chunk_of(c, chunks, REVERSE) * C
        g = tiles_g.index(stage)
        mbarrier.wait(arrived.index(stage), (c // STAGES) & 1)
        if left < C:  # what follows belongs to somebody else
            cut(g, left, rows)
            cut(tiles_a.index(stage), left, rows)
            fence_async_shared()
        within = True
        for panel in gl.static_range(K // PANEL):
            first, second = halves_of(g, ones, panel)
            ends_flat.index(2 * stage + NEAR).slice(panel * PANEL, PANEL, dim=0).store(exp(first))
            ends_flat.index(2 * stage + 1 - NEAR).slice(panel * PANEL, PANEL, dim=0).store(exp(second))
            within = (gl.abs(first) <= LIMIT) & (gl.abs(second) <= LIMIT) & within
        # a warp for all channels: a maximum across warps costs a round trip more, and a register throughout the loop
        wild = gl.max(gl.convert_layout(gl.where(within, 0, 1), every), 0)
        if gl.float16 == E:  # times exp(LIMIT) they would be beyond what it holds
            wild += too_large(tiles_a.index(stage), scale if REVERSE else 1.0, rows)
            if READ:
                wild += too_large(tiles_r.index(stage), 1.0 if REVERSE else scale, rows)
        if wild == 0:
            strong.index(stage).store(gl.full([1], 0, gl.int32, layout=vector))
            anchored(
                tiles_r.index(stage), tiles_a.index(stage), g, tiles_s.index(stage % SCORES), decayed.index(stage), taken, c,
                scale, square, SCORES < STAGES, READ, REVERSE,
            )  # fmt: skip
        else:
            strong.index(stage).store(gl.full([1], 1, gl.int32, layout=vector))
            # what the compiler knows to be the same on both sides it computes on one of them alone: see docs/notebook/gla.md
            same = stage + zero_of(strong.index(stage), vector)
            for panel in gl.static_range(K // PANEL):
                p_g = tiles_g.index(same).slice(panel * PANEL, PANEL, dim=1)
                b_g = p_g.load(rows).to(gl.float32)
                p_g.store(gl.where(b_g < LOWEST, LOWEST, b_g).to(E))
            fence_async_shared()
            for panel in gl.static_range(K // PANEL):
                first, second = halves_of(tiles_g.index(same), ones, panel)
                near = ends_flat.index(2 * stage).slice(panel * PANEL, PANEL, dim=0)
                far = ends_flat.index(2 * stage + 1).slice(panel * PANEL, PANEL, dim=0)
                near.store(exp(first + second))
                far.store(first * 0.0 + 1.0)
            by_levels(
                tiles_r.index(same), tiles_a.index(same), tiles_g.index(same), tiles_s.index(same % SCORES),
                decayed.index(stage), strong.index(same), taken, c, scale, square, SCORES < STAGES, READ, REVERSE,
            )  # fmt: skip
        if READ:
            fence_async_shared()
            mbarrier.arrive(ready.index(stage), count=1)


@gluon.jit
def prepare_heads(tiles, vectors, bars, offsets, log_decay, T, sizes, scale, SLICES: gl.constexpr,
                  PACKED: gl.constexpr, READ: gl.constexpr, REVERSE: gl.constexpr,
                  EXACT: gl.constexpr):  # fmt: skip
    """Tile after tile with a decay per head: adders decayed in place, and scores; what has decayed of readers is left to others.

    Of ends [2, K], the first row holds the readers' factors, the second what is left of the state.
    """
    tiles_r, tiles_a, _, tiles_low, tiles_s, _ = tiles
    sums, ends, _ = vectors
    arrived, decayed, ready, _, taken = bars
    K: gl.constexpr = tiles_a.shape[2]
    E: gl.constexpr = tiles_a.dtype
    STAGES: gl.constexpr = tiles_a.shape[0]
    SCORES: gl.constexpr = tiles_s.shape[0]
    square: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    rows: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    vector: gl.constexpr = gl.BlockedLayout([C // 32], [32], [4], [0])  # all steps in each warp: sums need no shared memory
    sums_flat = sums._reinterpret(gl.float32, [2, C], gl.SwizzledSharedLayout(1, 1, 1, [0]))  # noqa: SLF001
    ends_flat = ends._reinterpret(gl.float32, [2 * STAGES, K], gl.SwizzledSharedLayout(1, 1, 1, [0]))  # noqa: SLF001
    heads, _, part_steps = sizes
    n, head, _, segment = place(sizes, SLICES)
    row, steps = span(offsets, n, T, segment, part_steps, PACKED)
    chunks = gl.cdiv(steps, C)
    step = gl.arange(0, C, layout=vector)
    t = gl.arange(0, C, layout=gl.SliceLayout(1, square))
    s = gl.arange(0, C, layout=gl.SliceLayout(0, square))
    at = chunk_of(0, chunks, REVERSE) * C + step
    coming = gl.load(log_decay + (row + at).to(gl.int64) * heads + head, mask=(at < steps) & (at >= 0), other=0.0)
    for c in range(chunks):
        stage = c % STAGES
        j = chunk_of(c, chunks, REVERSE)
        left = steps - j * C
        readers = tiles_r.index(stage)
        adders = tiles_a.index(stage)
        g = coming.to(gl.float32)
        g = gl.where(g < SHORTEST, SHORTEST, g)
        at = chunk_of(c + 1, chunks, REVERSE) * C + step
        coming = gl.load(log_decay + (row + at).to(gl.int64) * heads + head, mask=(at < steps) & (at >= 0), other=0.0)
        before = gl.associative_scan(g, 0, plus)
        whole = gl.sum(g, 0)
        behind = whole - before
        mbarrier.wait(arrived.index(stage), (c // STAGES) & 1)
        ends_flat.index(2 * stage).slice(0, C, dim=0).store(exp(behind) if REVERSE else exp(before) * scale)
        ends_flat.index(2 * stage + 1).store(gl.full([K], 1.0, gl.float32, layout=vector) * exp(whole))
        sums_flat.index(0).store(before)
        sums_flat.index(1).store(exp(before) * scale if REVERSE else exp(behind))
        if READ:
            p = gl.zeros([C, C], gl.float32, layout=square)
            p = warpgroup_mma(readers, adders.permute((1, 0)), p, use_acc=False, is_async=True)
            p = warpgroup_mma_wait(num_outstanding=0, deps=(p,))
            of_reader = sums_flat.index(0).load(gl.SliceLayout(1, square))[:, None]
            of_adder = sums_flat.index(0).load(gl.SliceLayout(0, square))[None, :]
            d = of_adder - of_reader if REVERSE else of_reader - of_adder
            met = seen(t[:, None], s[None, :], REVERSE) & (s[None, :] < left)
            if SCORES < STAGES:
                mbarrier.wait(taken, (c & 1) ^ 1)
            tiles_s.index(stage % SCORES).store(gl.where(met, p * exp(gl.where(met, d, 0.0)) * scale, 0.0).to(E))
        factor = sums_flat.index(1).load(gl.SliceLayout(1, rows))[:, None]
        for panel in gl.static_range(K // PANEL):
            p_a = adders.slice(panel * PANEL, PANEL, dim=1)
            b_a = p_a.load(rows).to(gl.float32) * factor
            if left < C:
                b_a = gl.where(rows_of(rows, left) < left, b_a, 0.0)
            if EXACT:
                store_in_parts(b_a, p_a, tiles_low.index(stage).slice(panel * PANEL, PANEL, dim=1))
            else:
                p_a.store(b_a.to(E))
        fence_async_shared()
        mbarrier.arrive(decayed.index(stage), count=1)
        if READ:
            mbarrier.arrive(ready.index(stage), count=1)
