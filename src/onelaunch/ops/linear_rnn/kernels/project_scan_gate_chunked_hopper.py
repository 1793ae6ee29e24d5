"""The whole linear-RNN layer in one launch on Hopper, for layers that do not keep the tensor cores busy.

Computes   v = x W,  s_t = exp(log_decay_t) * s_{t-1} + v_t,  y_t = s_t * silu(gate_t)   (or y = s where GATED is false)
Grid       (ceil(T / BT), B * ceil(V / BV)): a CTA owns one tile of BT = 64 steps by BV = 32 or 64 channels, as in
           project_scan_gate.py. One CTA has one warpgroup (BV = 32) or two (BV = 64, each half of the channels). There are no
           specialized warps: all of them load, multiply (WGMMA) and scan.
Order      all loads are issued at once: log_decay and gate into registers, x and W by TMA, all of D if it fits into STAGES
           stages. exp(log_decay) and silu(gate) are computed while x is in flight. Little is left behind the WGMMAs: one trip
           through shared memory to the layout [SEGS, ROWS, BV], a serial scan of ROWS steps, the carry, and per element a
           multiply-add and the product with the gate.
Registers  a warp holds whole segments, ROWS consecutive steps of all BV channels: one for BV = 64, two for BV = 32. A thread
           holds a segment of two neighbouring channels and scans it alone. Global loads and stores are whole rows.
Shared     STAGES stages of x [BT, BD] and W [BD, BV] in 16 bits (64 KiB for four stages, BV = BD = 64), one mbarrier per stage,
           and four buffers [SEGS, BV] of float32 (8 KiB for BV = 64), through which in_order exchanges maps
           between warps.
Memory     reads x once per BV channels, W once per tile of steps (from the L2 cache), log_decay and gate once; writes y once.
           For a backward pass also writes v and one row of states per tile (KEEP).
Protocol   full[stage] completes when the stage's x and W have arrived. If D needs more steps than stages, a stage is loaded
           again after the WGMMA that read it is complete in all warps (a barrier of the CTA). Tiles are joined by the decoupled
           look-back of kernels/scan/look_back_gluon.py: the CTA publishes its map, reads the final state of the group before
           and the maps of earlier tiles in its group, and the last tile of a group publishes the group's final state.
Constants  D, V and the strides along time are compile-time constants: a row's address is then an immediate of the access.
Numerics   v stays in float32 on its way into the scan; decays are multiplied, and nothing is divided by a decay.
Caller     ``chunked`` in launch_hopper.py launches it, for the variant ``fused_chunked``.
Source     docs/notebook/linear_rnn.md (2026-11-21).
"""

from onelaunch.kernels.gluon.compat import (
    block_barrier,
    gl,
    gluon,
    keep_barriers,
    mbarrier,
    tma_load,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from onelaunch.kernels.scan.look_back_gluon import (
    combine,
    in_order,
    launch_phase,
    publish,
    spin_until_published,
    unpack,
    wait_for_earlier_tiles,
)

LOG2E = gl.constexpr(1.4426950408889634)

ROWS = gl.constexpr(8)
"""Number of consecutive steps that form a segment, which one thread scans serially."""


@gluon.jit
def take_last(before, after):
    """Return the second operand, so that a reduction returns the last element."""
    return after


@gluon.jit
def silu(gate):
    """Return gate * sigmoid(gate) of float32. A squared reciprocal root takes two instructions, a division eight."""
    root = gl.rsqrt(1.0 + gl.exp2(gate * -LOG2E))
    return gate * (root * root)


@gluon.jit
def load_stage(x, weight, x_tiles, w_tiles, full, row, c, k):
    """Start the TMA loads of the k-th block of columns of x and rows of W into stage k % STAGES.

    full[stage] must already expect their bytes, and the stage must be free.
    """
    stage = k % x_tiles.shape[0]
    tma_load(x, [row, k * x.block_type.shape[1]], full.index(stage), x_tiles.index(stage))
    tma_load(weight, [k * x.block_type.shape[1], c], full.index(stage), w_tiles.index(stage))


@gluon.jit
def project_tile(x, weight, x_tiles, w_tiles, full, row, c, STEPS: gl.constexpr, wgmma_layout: gl.constexpr):
    """Return v = x W for one tile, float32 [BT, BV] in the layout of WGMMA.

    STEPS is the number of blocks of BD columns of x. The loads of the first STAGES blocks must be in flight.
    """
    STAGES: gl.constexpr = x_tiles.shape[0]
    BT: gl.constexpr = x_tiles.shape[1]
    BV: gl.constexpr = w_tiles.shape[2]
    nbytes: gl.constexpr = x.block_type.nbytes + weight.block_type.nbytes
    total = gl.zeros([BT, BV], gl.float32, layout=wgmma_layout)
    if STEPS == STAGES:
        for k in gl.static_range(STEPS):
            mbarrier.wait(full.index(k), 0)
            total = warpgroup_mma(x_tiles.index(k), w_tiles.index(k), total, use_acc=k > 0, is_async=True)
    else:
        for k in range(STEPS):
            stage = k % STAGES
            mbarrier.wait(full.index(stage), (k // STAGES) & 1)
            started = warpgroup_mma(x_tiles.index(stage), w_tiles.index(stage), total, use_acc=k > 0, is_async=True)
            total = warpgroup_mma_wait(num_outstanding=1, deps=(started,))
            block_barrier()  # The WGMMA of step k - 1 is complete in all warps, so its stage is free.
            refill = k + STAGES - 1  # the next block for the stage of step k - 1
            if (k > 0) & (refill < STEPS):
                mbarrier.expect(full.index(refill % STAGES), nbytes)
                load_stage(x, weight, x_tiles, w_tiles, full, row, c, refill)
    return warpgroup_mma_wait(num_outstanding=0, deps=(total,))


@gluon.jit(do_not_specialize=["T"])
def project_scan_gate_chunked_hopper_kernel(
    x, weight, log_decay, gate, initial, y, v, final, carries, words, T, decay_stride_b, gate_stride_b,
    WIDTH: gl.constexpr, CHANNELS: gl.constexpr, DECAY_STRIDE: gl.constexpr, GATE_STRIDE: gl.constexpr,
    STAGES: gl.constexpr, GROUP: gl.constexpr, EVEN: gl.constexpr, GATED: gl.constexpr, INITIAL: gl.constexpr,
    FINAL: gl.constexpr, KEEP: gl.constexpr,
):  # fmt: skip
    """Compute one tile of y: see the top of the file.

    x and weight are TMA descriptors of [rows, columns], whose boxes are [BT, BD] and [BD, BV]. STAGES is at most the number of
    blocks that D has. EVEN: all tiles lie inside the tensors, so no access needs a mask. GATED: multiply the states by
    silu(gate); otherwise gate is not read. INITIAL: the scan starts from initial, not from zero. KEEP: also write v and the
    carries, which the backward pass reads. FINAL: also write the final state. Without KEEP or FINAL, the tensors of that flag
    have no elements and must not be written.
    """
    BT: gl.constexpr = x.block_type.shape[0]
    BD: gl.constexpr = x.block_type.shape[1]
    BV: gl.constexpr = weight.block_type.shape[1]
    WARPS: gl.constexpr = gl.num_warps()
    SEGS: gl.constexpr = BT // ROWS
    STEPS: gl.constexpr = (WIDTH + BD - 1) // BD
    SLICES: gl.constexpr = (CHANNELS + BV - 1) // BV
    slab: gl.constexpr = gl.BlockedLayout([1, ROWS, 2], [64 // BV, 1, BV // 2], [WARPS, 1, 1], [2, 1, 0])
    maps: gl.constexpr = gl.SliceLayout(1, slab)
    # The 64 steps are the rows of one warpgroup's WGMMA. A second warpgroup takes the other half of the channels.
    wgmma_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, WARPS // 4], [16, BV * 4 // WARPS, 16])
    shared: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])

    tile, tiles = gl.program_id(0), gl.num_programs(0)
    b = gl.program_id(1) // SLICES
    c = (gl.program_id(1) % SLICES) * BV
    batches = gl.num_programs(1) // SLICES
    groups = (tiles + GROUP - 1) // GROUP
    start = tile * BT
    group = tile // GROUP
    first = group * GROUP
    b_long, tile_long = b.to(gl.int64), tile.to(gl.int64)
    sequence_words = words + b_long * tiles * CHANNELS + c
    group_words = words + (batches.to(gl.int64) * tiles + b_long * groups) * CHANNELS + c
    # Maps are tensors [SEGS, BV]. A row is a segment of this tile, or a part of the earlier tiles of the group.
    part = gl.arange(0, SEGS, layout=gl.SliceLayout(1, maps))
    map_channel = gl.arange(0, BV, layout=gl.SliceLayout(0, maps))[None, :]
    in_range = map_channel < CHANNELS - c
    # The words that the previous launch left are read long before `publish` overwrites them, with barriers between. Their phase
    # decides this launch's phase. The load also brings them into the cache.
    own_words = sequence_words + tile_long * CHANNELS + map_channel
    phase = launch_phase(gl.load(own_words, mask=in_range, other=0, volatile=True))
    segment = gl.arange(0, SEGS, layout=gl.SliceLayout(1, gl.SliceLayout(2, slab)))[:, None]
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(2, slab)))[None, :]
    t = gl.expand_dims(segment * ROWS + row, 2)
    channel = gl.expand_dims(gl.arange(0, BV, layout=gl.SliceLayout(0, gl.SliceLayout(1, slab)))[None, :], 1)
    in_time = t < T - start
    inside = None if EVEN else in_time & (channel < CHANNELS - c)
    p_decay = log_decay + (b_long * decay_stride_b + start.to(gl.int64) * DECAY_STRIDE + c)
    # Elements outside `inside` are undefined. Decays of steps past the end are replaced below. No other result of them is stored.
    log_decays = gl.load(p_decay + (t * DECAY_STRIDE + channel), mask=inside)
    gates = log_decays  # stands for the argument, which is not read if GATED is false
    if GATED:
        p_gate = gate + (b_long * gate_stride_b + start.to(gl.int64) * GATE_STRIDE + c)
        gates = gl.load(p_gate + (t * GATE_STRIDE + channel), mask=inside)
    x_tiles = gl.allocate_shared_memory(x.dtype, [STAGES, BT, BD], x.layout)
    w_tiles = gl.allocate_shared_memory(x.dtype, [STAGES, BD, BV], weight.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    segment_decays = gl.allocate_shared_memory(gl.float32, [SEGS, BV], shared)
    segment_states = gl.allocate_shared_memory(gl.float32, [SEGS, BV], shared)
    tile_decays = gl.allocate_shared_memory(gl.float32, [SEGS, BV], shared)
    tile_states = gl.allocate_shared_memory(gl.float32, [SEGS, BV], shared)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.expect(full.index(i), x.block_type.nbytes + weight.block_type.nbytes)
    for i in gl.static_range(STAGES):
        load_stage(x, weight, x_tiles, w_tiles, full, b * T + start, c, i)

    decays = gl.exp2(log_decays.to(gl.float32) * LOG2E)
    if GATED:
        gates = silu(gates.to(gl.float32))

    total = project_tile(x, weight, x_tiles, w_tiles, full, b * T + start, c, STEPS, wgmma_layout)
    values = gl.convert_layout(gl.reshape(total, [SEGS, ROWS, BV]), slab)
    if not EVEN:
        # Rows behind the end may belong to the next batch entry: with v = 0 and decay = 1 the state passes them unchanged.
        values = gl.where(in_time, values, 0.0)
        decays = gl.where(in_time, decays, 1.0)
    out = (b_long * T + start) * CHANNELS + c
    if KEEP:
        gl.store(v + out + (t * CHANNELS + channel), values.to(v.dtype.element_ty), mask=inside)

    # Every step gets the map from its segment's start, every segment the map from the tile's start, and the tile its carry.
    decays, states = gl.associative_scan((decays, values), 1, combine)
    decay_before, state_before, tile_decay, tile_state = in_order(
        segment_decays, segment_states, gl.reduce(decays, 1, take_last), gl.reduce(states, 1, take_last), part
    )
    publish(own_words, tile_decay, tile_state, in_range, phase)
    carry = gl.zeros([1, BV], gl.float32, layout=maps)
    if group > 0:
        pointers = group_words + (group - 1).to(gl.int64) * CHANNELS + map_channel
        # Channels out of range get this launch's phase, so that they are not waited for.
        found = gl.where(in_range, gl.load(pointers, mask=in_range, other=0, volatile=True), phase)
        carry = unpack(spin_until_published(found, pointers, phase))[1]
    elif INITIAL:
        carry = gl.load(initial + b_long * CHANNELS + c + map_channel, mask=in_range, other=0.0)
    decay, state = wait_for_earlier_tiles(
        sequence_words + first.to(gl.int64) * CHANNELS, CHANNELS, part, map_channel, tile - first, in_range, phase, GROUP // SEGS
    )
    _, _, decay, state = in_order(tile_decays, tile_states, decay, state, part)
    carry = decay * carry + state
    leaving = tile_decay * carry + tile_state
    if (tile == first + GROUP - 1) | (tile == tiles - 1):
        publish(group_words + group.to(gl.int64) * CHANNELS + map_channel, gl.zeros_like(leaving), leaving, in_range, phase)
    if KEEP:
        gl.store(carries + (b_long * tiles + tile) * CHANNELS + c + map_channel, carry, mask=in_range)
    if FINAL:
        gl.store(final + b_long * CHANNELS + c + map_channel, leaving, mask=in_range & (tile == tiles - 1))

    entering = gl.expand_dims(decay_before * carry + state_before, 1)
    states = decays * entering + states
    if GATED:
        states *= gates
    gl.store(y + out + (t * CHANNELS + channel), states.to(y.dtype.element_ty), mask=inside)
    keep_barriers((full,))
