"""Gated linear attention on Hopper GPUs: a walk along time that holds the state in registers.

Computes   per head and 64 values, chunk after chunk: what readers see of the state and of the adders in their chunk, then the
           state behind it. Forward in time that is o from q, k and v; backwards (``REVERSE``) dv from k, q and do, with the
           gradient of the state in the state's place: see hopper_prepare.py for readers and adders.
Grid       a program per part of T, sequence, head and slice of values.
Warps      ``attend``: a warpgroup per 64 values holds states [V, K] in registers and multiplies; the first copies tiles in.
           ``prepare_*``: a warpgroup decays readers and adders where they lie, and multiplies them to scores.
On chip    STAGES tiles of readers, adders, values and log-decays; what rounding took of the adders replaces the log-decays, and
           outputs the values: they leave from there.
Order      arrived (copies), decayed (readers, adders), ready (scores), taken (scores), free (products done, the output before
           has left).
Memory     every tensor once; with ``KEEP`` the state that enters each chunk goes out as well, 16-bit, [V, K], and what rounding
           took of it where ``states_low`` is given.
Parts      hopper_sum.py leaves what each part of T adds to the state; a walk of parts starts from their sum.
Source     Yang et al., Gated Linear Attention Transformers with Hardware-Efficient Training (2024); experiment 039.
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
from onelaunch.ops.gla.kernels.hopper_prepare import prepare_channels, prepare_heads
from onelaunch.ops.gla.kernels.hopper_tiles import PANEL, C, bounds, chunk_of, place, rows_of, span, store_in_parts


@gluon.jit
def fetch(descriptors, tiles, arrived, at, head, panel, stage, wanted, GROUPS: gl.constexpr, READ: gl.constexpr,
          SCALAR: gl.constexpr):  # fmt: skip
    """Copy a tile of everything into a stage."""
    readers, adders, values, g = descriptors
    tiles_r, tiles_a, tiles_v, tiles_g, _, _ = tiles
    K: gl.constexpr = adders.block_type.shape[1]
    TILES: gl.constexpr = 1 + (1 if READ else 0) + (0 if SCALAR else 1)
    bar = arrived.index(stage)
    mbarrier.expect(bar, TILES * adders.block_type.nbytes + GROUPS * values.block_type.nbytes, pred=wanted)
    if not SCALAR:
        tma_load(g, [at, head * K], bar, tiles_g.index(stage), pred=wanted)
    tma_load(adders, [at, head * K], bar, tiles_a.index(stage), pred=wanted)
    if READ:
        tma_load(readers, [at, head * K], bar, tiles_r.index(stage), pred=wanted)
    for group in gl.static_range(GROUPS):
        tma_load(values, [at, (panel + group) * PANEL], bar, tiles_v.index(stage * GROUPS + group), pred=wanted)


@gluon.jit
def halves(x):
    """The left and the right half of columns."""
    return gl.split(gl.permute(gl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), (0, 2, 1)))


@gluon.jit
def read_panel(out, state, readers, operand: gl.constexpr, FIRST: gl.constexpr):
    """Add what readers see of a state [V, PANEL] to out [V, C]; waited for, since more in flight takes too many registers."""
    state = gl.convert_layout(state.to(readers.dtype), operand)
    out = warpgroup_mma(state, readers.slice(FIRST, PANEL, dim=1).permute((1, 0)), out, is_async=True)
    return warpgroup_mma_wait(num_outstanding=0, deps=(out,))


@gluon.jit
def read_state(out, state, readers, operand: gl.constexpr, FIRST: gl.constexpr):
    """The same of a state of any number of panels."""
    if state.shape[1] == PANEL:
        out = read_panel(out, state, readers, operand, FIRST)
    else:
        left, right = halves(state)
        out = read_state(out, left, readers, operand, FIRST)
        out = read_state(out, right, readers, operand, FIRST + state.shape[1] // 2)
    return out


@gluon.jit
def cell_of(first_value, turn, layout: gl.constexpr, K: gl.constexpr, COLUMNS: gl.constexpr):
    """Where each element of a state [V, K] lies, computed where it is wanted: turn >> 31 is 0, but the compiler cannot know."""
    channel = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))[None, :]
    value = first_value + (turn >> 31) + gl.arange(0, PANEL, layout=gl.SliceLayout(1, layout))[:, None]
    return value.to(gl.int64) * K + channel


@gluon.jit
def store_state(to, state, turn, K: gl.constexpr):
    """A state [V, panels] into rows of K channels; panel by panel, which takes fewer registers."""
    if state.shape[1] == PANEL:
        held: gl.constexpr = state.type.layout
        gl.store(to + cell_of(0, turn, held, K, PANEL), state.to(to.dtype.element_ty))
    else:
        left, right = halves(state)
        store_state(to, left, turn, K)
        store_state(to + state.shape[1] // 2, right, turn, K)


@gluon.jit
def attend(descriptors, outputs, memory, tiles, vectors, bars, offsets, T, sizes, values, GROUP: gl.constexpr,
           GROUPS: gl.constexpr, SLICES: gl.constexpr, PACKED: gl.constexpr, READ: gl.constexpr,
           REVERSE: gl.constexpr, KEEP: gl.constexpr, STAGED: gl.constexpr, SPREAD: gl.constexpr, SCALAR: gl.constexpr,
           INITIAL: gl.constexpr, PARTS: gl.constexpr, EXACT: gl.constexpr):  # fmt: skip
    """States [V, K] in registers, for PANEL values; what readers see of them, and of the values in their tile."""
    tiles_r, tiles_a, tiles_v, tiles_low, tiles_s, tiles_kept = tiles
    _, ends, strong = vectors
    arrived, decayed, ready, free, taken = bars
    out_values, out_tiles, out_pitch = outputs
    initial, states, states_low, part_states, part_decays = memory
    K: gl.constexpr = tiles_a.shape[2]
    E: gl.constexpr = tiles_a.dtype
    STAGES: gl.constexpr = tiles_a.shape[0]
    SCORES: gl.constexpr = tiles_s.shape[0]
    held: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    outs: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, outs, 2)
    across: gl.constexpr = gl.SliceLayout(0, held)
    rows: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    scalar: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    ends_flat = ends._reinterpret(gl.float32, [2 * STAGES, K], gl.SwizzledSharedLayout(1, 1, 1, [0]))  # noqa: SLF001
    heads, segments, part_steps = sizes
    n, head, part, segment = place(sizes, SLICES)
    # what follows counts rows of K in 32 bits: of 2^31 there is no memory for, and more kinds of numbers take more registers
    row, steps = span(offsets, n, T, segment, part_steps, PACKED)
    first, _, slot = bounds(offsets, n, T + (n >> 31), PACKED)  # as in cell_of: else computed before the warps part
    slot += (row - first) // C
    first_value = (part * GROUPS + GROUP) * PANEL
    state = gl.zeros([PANEL, K], gl.float32, layout=held)
    pair = n * heads + head
    if INITIAL:
        channel = gl.arange(0, K, layout=across)[None, :]
        value = first_value + gl.arange(0, PANEL, layout=gl.SliceLayout(1, held))[:, None]
        state = gl.load(initial + (pair * values).to(gl.int64) * K + (channel * values + value))
    if PARTS:
        earlier = segments - 1 - segment if REVERSE else segment
        nearest = pair * segments + (segment + 1 if REVERSE else segment - 1)
        decays_of_it = part_decays + nearest.to(gl.int64) * K + gl.arange(0, K, layout=across)
        left_of_all = gl.max(gl.load(decays_of_it, mask=earlier > 0, other=0.0), 0)
        # where nothing is left behind the nearest part, as with decays of models, that one is all there is to read
        for turn in range(gl.maximum(earlier - 1, 0) if left_of_all == 0.0 else 0, earlier):
            before = pair * segments + (segments - 1 - turn if REVERSE else turn)
            state = state * gl.load(part_decays + before.to(gl.int64) * K + gl.arange(0, K, layout=across))[None, :]
            state += gl.load(part_states + cell_of(before * values + first_value, turn, held, K, K))
    panel = (head * SLICES + part) * GROUPS
    chunks = gl.cdiv(steps, C)
    if GROUP == 0:
        for i in gl.static_range(STAGES):
            at = row + chunk_of(i, chunks, REVERSE) * C
            fetch(descriptors, tiles, arrived, at, head, panel, i, i < chunks, GROUPS, READ, SCALAR)
    stage = 0
    phase = 0
    for c in range(chunks):
        j = chunk_of(c, chunks, REVERSE)
        left = steps - j * C
        b_v = tiles_v.index(stage * GROUPS + GROUP)
        b_a = tiles_a.index(stage)
        if KEEP:
            cell = ((slot + j) * heads + head) * values + first_value  # rows of K: memory holds no 2^31
            if STAGED:
                kept = tiles_kept.index(GROUP)
                tma_store_wait(pendings=0)  # the state before has left
                if states_low is None:
                    kept.store(state.to(E))
                else:
                    store_in_parts(state, kept, tiles_kept.index(GROUPS + GROUP))
                fence_async_shared()
                if SPREAD:
                    tma_store(states, [(slot + j) * C, (first_value // PANEL * heads + head) * K], kept)
                else:
                    tma_store(states, [cell, 0], kept)
                if states_low is not None:
                    tma_store(states_low, [cell, 0], tiles_kept.index(GROUPS + GROUP))
            else:
                store_state(states + cell.to(gl.int64) * K, state, left, K)
        mbarrier.wait(arrived.index(stage), phase)
        if left < C:
            t = rows_of(rows, left)
            b_v.store(gl.where(t < left, b_v.load(rows), 0.0).to(E))
            fence_async_shared()
        mbarrier.wait(decayed.index(stage), phase)
        flag = gl.max(strong.index(stage).load(scalar), 0)
        if not SCALAR:
            if KEEP and not PARTS:
                # strong decay has 1 there; in a branch, what was kept would stay in registers until it is read
                state = state * ends_flat.index(2 * stage + flag).load(across)[None, :]
            elif flag == 0:
                state = state * ends_flat.index(2 * stage).load(across)[None, :]
        out = gl.zeros([PANEL, C], gl.float32, layout=outs)
        if READ:
            out = read_state(out, state, tiles_r.index(stage), operand, 0)
        if SCALAR:
            state = state * ends_flat.index(2 * stage + 1).load(across)[None, :]
            if READ:
                seen = ends_flat.index(2 * stage).slice(0, C, dim=0).load(gl.SliceLayout(0, outs))
                out = out * seen[None, :]
        else:
            if flag > 0:
                state = state * ends_flat.index(2 * stage).load(across)[None, :]
        state = warpgroup_mma(b_v.permute((1, 0)), b_a, state, is_async=True)
        if EXACT:
            state = warpgroup_mma(b_v.permute((1, 0)), tiles_low.index(stage), state, is_async=True)
        if READ:
            mbarrier.wait(ready.index(stage), phase)
            out = warpgroup_mma(b_v.permute((1, 0)), tiles_s.index(stage % SCORES).permute((1, 0)), out, is_async=True)
            out, state = warpgroup_mma_wait(num_outstanding=0, deps=(out, state))
            if SCORES < STAGES:
                mbarrier.arrive(taken, count=1)
        else:
            state = warpgroup_mma_wait(num_outstanding=0, deps=(state,))
            if not SCALAR:
                state = state * ends_flat.index(2 * stage + 1).load(across)[None, :]
        if READ:
            tma_store_wait(pendings=0)  # the output of the tile before has left
            done = (stage + STAGES - 1) % STAGES
            filled = c - 1
        else:
            done = stage
            filled = c
        mbarrier.arrive(free.index(done), count=1, pred=filled >= 0)
        if GROUP == 0:
            more = (filled >= 0) & (filled + STAGES < chunks)
            mbarrier.wait(free.index(done), (filled // STAGES) & 1, pred=more)
            at = row + chunk_of(filled + STAGES, chunks, REVERSE) * C
            fetch(descriptors, tiles, arrived, at, head, panel, done, more, GROUPS, READ, SCALAR)
        if READ:
            at = row + j * C
            b_v.permute((1, 0)).store(out.to(E))
            fence_async_shared()
            if left >= C:
                tma_store(out_tiles, [at, head * values + first_value], b_v)
            else:
                t = rows_of(rows, left)
                u = gl.arange(0, PANEL, layout=gl.SliceLayout(0, rows))[None, :]
                pitch = out_pitch + (left >> 31)  # as in rows_of
                tile = out_values + at.to(gl.int64) * pitch + (head * values + first_value)
                gl.store(tile + t * pitch + u, b_v.load(rows), mask=t < left)
            if not SCALAR:  # last, when out takes no registers any more
                state = state * ends_flat.index(2 * stage + 1).load(across)[None, :]
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
    if READ or STAGED:
        tma_store_wait(pendings=0)


@gluon.jit(do_not_specialize=["T", "heads", "segments", "part_steps"])
def walk_kernel(
    readers, adders, v, g, log_decay, o, out_tiles, initial, states, states_low, part_states, part_decays, offsets,
    T, heads, segments, part_steps, scale, values, out_pitch,
    SLICES: gl.constexpr, LIMIT: gl.constexpr, PACKED: gl.constexpr, READ: gl.constexpr,
    REVERSE: gl.constexpr, KEEP: gl.constexpr, STAGED: gl.constexpr, SPREAD: gl.constexpr, INITIAL: gl.constexpr,
    PARTS: gl.constexpr, EXACT: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr, SCORES: gl.constexpr,
    ATTEND_REGISTERS: gl.constexpr, PREPARE_REGISTERS: gl.constexpr,
):  # fmt: skip
    """``g`` describes log-decays per channel; without it, ``log_decay`` [B, T, H] has one per head.

    ``out_pitch``: elements from row to row of ``o`` [B T, H V], where it is written. ``EXACT``: adders in two 16-bit parts,
    always so where a channel has its decay. ``STAGED``: ``states`` are described and leave through shared memory; else they are
    a pointer. ``SPREAD``: so they lie where the chunk's rows of a matrix [B T, V / PANEL, H, K] do, see launch_hopper.py.
    """
    SCALAR: gl.constexpr = g is None
    K: gl.constexpr = adders.block_type.shape[1]
    E: gl.constexpr = adders.dtype
    scores_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, C], E)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    lines: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    tiles_a = gl.allocate_shared_memory(E, [STAGES, C, K], adders.layout)
    tiles_v = gl.allocate_shared_memory(E, [STAGES * GROUPS, C, PANEL], v.layout)
    tiles_g = tiles_a
    tiles_r = tiles_a
    tiles_s = tiles_v
    if EXACT:
        tiles_g = gl.allocate_shared_memory(E, [STAGES, C, K], adders.layout)
    if READ:
        tiles_r = gl.allocate_shared_memory(E, [STAGES, C, K], adders.layout)
        tiles_s = gl.allocate_shared_memory(E, [SCORES, C, C], scores_layout)
    tiles_kept = tiles_a
    if STAGED:
        PARTS_KEPT: gl.constexpr = 1 if states_low is None else 2
        tiles_kept = gl.allocate_shared_memory(E, [PARTS_KEPT * GROUPS, PANEL, K], adders.layout)
    if SCALAR:
        sums = gl.allocate_shared_memory(gl.float32, [2, C], lines)
    else:
        sums = gl.allocate_shared_memory(E, [8, C], gl.NVMMASharedLayout.get_default_for([8, C], E))
    ends = gl.allocate_shared_memory(gl.float32, [STAGES, 2, K], lines)
    strong = gl.allocate_shared_memory(gl.int32, [STAGES, 1], flat)
    arrived = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    decayed = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(arrived.index(i), count=1)
        mbarrier.init(decayed.index(i), count=1)
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(free.index(i), count=GROUPS)
        strong.index(i).store(gl.full([1], 0, gl.int32, layout=gl.BlockedLayout([1], [32], [4], [0])))
    mbarrier.init(taken, count=GROUPS)
    fence_async_shared()  # copies arrive at these barriers
    sizes = (heads, segments, part_steps)
    descriptors = (readers, adders, v, g)
    outputs = (o, out_tiles, out_pitch)
    memory = (initial, states, states_low, part_states, part_decays)
    tiles = (tiles_r, tiles_a, tiles_v, tiles_g, tiles_s, tiles_kept)
    vectors = (sums, ends, strong)
    bars = (arrived, decayed, ready, free, taken)
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (attend, (descriptors, outputs, memory, tiles, vectors, bars, offsets, T, sizes, values, 0, GROUPS, SLICES,
                          PACKED, READ, REVERSE, KEEP, STAGED, SPREAD, SCALAR, INITIAL, PARTS, EXACT)),
                (attend, (descriptors, outputs, memory, tiles, vectors, bars, offsets, T, sizes, values, 1, GROUPS, SLICES,
                          PACKED, READ, REVERSE, KEEP, STAGED, SPREAD, SCALAR, INITIAL, PARTS, EXACT)),
                (prepare, (tiles, vectors, bars, offsets, log_decay, T, sizes, scale, LIMIT, SLICES, PACKED,
                           READ, REVERSE, SCALAR, EXACT)),
            ],
            [4, 4],
            [ATTEND_REGISTERS, PREPARE_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (attend, (descriptors, outputs, memory, tiles, vectors, bars, offsets, T, sizes, values, 0, GROUPS, SLICES,
                          PACKED, READ, REVERSE, KEEP, STAGED, SPREAD, SCALAR, INITIAL, PARTS, EXACT)),
                (prepare, (tiles, vectors, bars, offsets, log_decay, T, sizes, scale, LIMIT, SLICES, PACKED,
                           READ, REVERSE, SCALAR, EXACT)),
            ],
            [4],
            [PREPARE_REGISTERS],
        )  # fmt: skip
    keep_barriers(bars)


@gluon.jit
def prepare(tiles, vectors, bars, offsets, log_decay, T, sizes, scale, LIMIT: gl.constexpr, SLICES: gl.constexpr,
            PACKED: gl.constexpr, READ: gl.constexpr, REVERSE: gl.constexpr,
            SCALAR: gl.constexpr, EXACT: gl.constexpr):  # fmt: skip
    """Decayed readers and adders and their scores, for every tile."""
    if SCALAR:
        prepare_heads(tiles, vectors, bars, offsets, log_decay, T, sizes, scale, SLICES, PACKED, READ, REVERSE, EXACT)
    else:
        prepare_channels(tiles, vectors, bars, offsets, T, sizes, scale, LIMIT, SLICES, PACKED, READ, REVERSE)
