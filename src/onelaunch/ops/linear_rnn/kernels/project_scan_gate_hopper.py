"""The whole linear-RNN layer in one launch for wide layers on Hopper: its matrix product never stops for the scan.

Computes   v = x W,  s_t = exp(log_decay_t) * s_{t-1} + v_t,  y_t = s_t * silu(gate_t)   (or y = s where GATED is false)
Grid       persistent, one CTA per SM. A CTA takes tiles of 2 * HALF = 256 steps by BV = 128 channels from an atomic counter.
           All slices of channels and batch entries of one tile of time come before those of the next. So the tile before in
           time is long done when a tile's scan begins, and one serial pass over time is enough.
Warps      a producer warp loads tiles of x and W (TMA); two consumer warpgroups compute half the steps of a tile each (WGMMA);
           a third warpgroup scans and gates the tile before, meanwhile, with one thread per channel.
Shared     STAGES stages of x [256, BD] and W [BD, BV] (3 * 48 KiB for BD = 64); one tile of v in the dtype of x (64 KiB); two
           slots of ROWS steps of log_decay and gate (16 KiB for 16-bit decays); tile indices and mbarriers.
Memory     reads x once per tile of channels, W once per tile of time of each batch entry (mostly from the L2 cache), and
           log_decay and gate once; writes y once. For a backward pass also writes v, and a row of states every CARRY steps
           (KEEP).
Protocol   full[stage]: the stage's operands have arrived, and with a tile's first stage the tile's index. empty[stage]: both
           consumer warpgroups are done with the stage. v_ready[half], v_free[half]: a half of v is stored, or read by the scan.
           id_ready[slot]: the tile index for the scan is written. fetched[slot]: rows of log_decay and gate have arrived.
           An index of -1 ends each role.
Carry      the state that leaves a tile is one 64-bit flag-in-data word per channel: bits 0 to 31 hold the float32 state, bit 63
           the phase. A CTA spins on the word of the tile before in time until its phase differs from the one that the own word
           had at first. All words have one phase between launches; see kernels/scan/look_back.py. Flag and state are
           written by one access, so no fence is needed.
Progress   tiles are taken in order by CTAs that run, and wait only for tiles of a lower index. So the lowest unfinished tile
           always advances, whatever else runs on the device. The CTA that takes the last number sets the counter back to 0.
Numerics   v is rounded to the dtype of x, as a matrix product of its own would round it; the scan is in float32, and nothing is
           divided by a decay.
Caller     ``persistent`` in launch_hopper.py launches it, for the variant ``fused_hopper``.
Source     docs/notebook/linear_rnn.md (fused_hopper).
"""

from onelaunch.kernels.gluon.compat import gl, gluon, keep_barriers, mbarrier, tma_load, warpgroup_mma, warpgroup_mma_wait

LOG2E = gl.constexpr(1.4426950408889634)

CARRY = gl.constexpr(64)
"""Number of steps between the states that are stored for a backward pass."""


@gluon.jit
def combine(decay_1, state_1, decay_2, state_2):
    """Return the map that applies (decay_1, state_1) first and (decay_2, state_2) second."""
    return decay_1 * decay_2, decay_2 * state_1 + state_2


@gluon.jit
def take_last(first, last):
    """Return the second operand, so that a reduction returns the last element."""
    return last


@gluon.jit
def tile_coordinates(tile, pairs, slices):
    """Return the tile of time, the batch entry and the slice of channels of a tile's index; ``pairs`` is B times the slices."""
    pair = tile % pairs
    return tile // pairs, pair // slices, pair % slices


@gluon.jit
def read_scalar(memory, layout: gl.constexpr):
    """Return the one element of a [1] tensor in shared memory."""
    return gl.max(memory.load(layout), 0)


@gluon.jit
def write_scalar(memory, value, layout: gl.constexpr):
    """Set the one element of a [1] tensor in shared memory."""
    memory.store(gl.full([1], value, gl.int32, layout=layout))


@gluon.jit
def produce(x, weight, x_tiles, w_tiles, tile_ids, full, empty, counter, sizes):
    """Run the producer warp: take tile indices from the counter and load the tiles' operands into the stages.

    A tile's index is written to the first of its stages, -1 behind the last tile. A stage is filled after empty[stage]. The
    next index is taken while the loads of the current tile are issued, which hides the latency of the counter.
    """
    stages: gl.constexpr = w_tiles.shape[0]
    half: gl.constexpr = x.block_type.shape[0]
    BD: gl.constexpr = weight.block_type.shape[0]
    BV: gl.constexpr = weight.block_type.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    T, width, tiles, pairs, slices, ctas = sizes
    steps = gl.cdiv(width, BD)
    stage = 0
    phase = 1  # a new mbarrier passes a wait for phase 1 at once: all stages are free at first
    tile = gl.atomic_add(counter, 1, sem="relaxed").to(gl.int32)
    while tile < tiles:
        time, b, column = tile_coordinates(tile, pairs, slices)
        row = b * T + time * (2 * half)
        mbarrier.wait(empty.index(stage), phase)  # also frees tile_ids[stage]: the consumers read it before the stage
        write_scalar(tile_ids.index(stage), tile, layout)
        tile = gl.atomic_add(counter, 1, sem="relaxed").to(gl.int32)
        for k in range(steps):
            mbarrier.wait(empty.index(stage), phase)
            arrived = full.index(stage)
            mbarrier.expect(arrived, 2 * x.block_type.nbytes + weight.block_type.nbytes)
            tma_load(weight, [k * BD, column * BV], arrived, w_tiles.index(stage))
            tma_load(x, [row, k * BD], arrived, x_tiles.index(2 * stage))
            tma_load(x, [row + half, k * BD], arrived, x_tiles.index(2 * stage + 1))
            stage += 1
            if stage == stages:
                stage = 0
                phase ^= 1
    if tile == tiles + ctas - 1:
        gl.atomic_xchg(counter, 0, sem="relaxed")  # every CTA has taken its last index: reset for the next launch
    mbarrier.wait(empty.index(stage), phase)
    write_scalar(tile_ids.index(stage), -1, layout)
    mbarrier.arrive(full.index(stage), count=1)  # completes the phase without operands


@gluon.jit
def multiply(
    x_tiles, w_tiles, tile_ids, full, empty, v_tile, v_ids, id_ready, v_ready, v_free, width,
    BD: gl.constexpr, HALF_INDEX: gl.constexpr,
):  # fmt: skip
    """Run a consumer warpgroup: compute one half of the steps of each tile of v, and store it for the scan.

    HALF_INDEX is 0 for the earlier half of the steps and 1 for the later. The warpgroup waits for full[stage] before each WGMMA
    and for v_free[HALF_INDEX] before the store. It arrives at empty[stage] when the WGMMA that read the stage is complete, and
    at v_ready[HALF_INDEX] after the store. The warpgroup of half 0 also forwards tile indices to the scan.
    """
    stages: gl.constexpr = w_tiles.shape[0]
    half: gl.constexpr = x_tiles.shape[1]
    channels: gl.constexpr = w_tiles.shape[2]
    product: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, channels, 16])
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    steps = gl.cdiv(width, BD)
    stage = 0
    phase = 0
    parity = 0
    mbarrier.wait(full.index(0), 0)
    tile = read_scalar(tile_ids.index(0), layout)
    while tile >= 0:
        if HALF_INDEX == 0:
            # The slot held the index two tiles back. The scan read it before it freed that tile of v, which was waited for.
            write_scalar(v_ids.index(parity), tile, layout)
            mbarrier.arrive(id_ready.index(parity), count=1)
        total = gl.zeros([half, channels], gl.float32, layout=product)
        for k in range(steps):
            mbarrier.wait(full.index(stage), phase)
            started = warpgroup_mma(
                x_tiles.index(2 * stage + HALF_INDEX), w_tiles.index(stage), total, use_acc=k > 0, is_async=True
            )
            total = warpgroup_mma_wait(num_outstanding=1, deps=(started,))
            mbarrier.arrive(empty.index((stage + stages - 1) % stages), count=1, pred=k > 0)
            stage += 1
            if stage == stages:
                stage = 0
                phase ^= 1
        total = warpgroup_mma_wait(num_outstanding=0, deps=(total,))
        mbarrier.arrive(empty.index((stage + stages - 1) % stages), count=1)
        mbarrier.wait(v_free.index(HALF_INDEX), parity ^ 1)
        v_tile.index(HALF_INDEX).store(total.to(v_tile.dtype))
        mbarrier.arrive(v_ready.index(HALF_INDEX), count=1)
        parity ^= 1
        mbarrier.wait(full.index(stage), phase)
        tile = read_scalar(tile_ids.index(stage), layout)
    if HALF_INDEX == 0:
        write_scalar(v_ids.index(parity), -1, layout)
        mbarrier.arrive(id_ready.index(parity), count=1)


@gluon.jit
def fetch_rows(log_decay, gate, decay_rows, gate_rows, fetched, row, c, n, wanted, GATED: gl.constexpr):
    """Start the TMA loads of the n-th ROWS steps of a tile's log_decay and gate into slot n % 2; nothing unless ``wanted``.

    There is no load of the gate if GATED is false.

    Each thread's shared loads from that slot must come earlier in its program. Triton (3.7.1) puts a barrier of the warpgroup
    before the expect and before each TMA load, which one elected thread issues: in PTX ``bar.sync``. So no TMA load overwrites
    rows that a slow warp has yet to read, and the caller needs no barrier of its own.
    """
    slot = n % 2
    arrived = fetched.index(slot)
    gate_bytes: gl.constexpr = gate.block_type.nbytes if GATED else 0
    mbarrier.expect(arrived, log_decay.block_type.nbytes + gate_bytes, pred=wanted)
    at = row + n * log_decay.block_type.shape[0]
    tma_load(log_decay, [at, c], arrived, decay_rows.index(slot), pred=wanted)
    if GATED:
        tma_load(gate, [at, c], arrived, gate_rows.index(slot), pred=wanted)


@gluon.jit
def scan_gate(
    v_tile, v_ids, id_ready, v_ready, v_free, log_decay, gate, decay_rows, gate_rows, fetched,
    initial, y, v, final, carries, words, sizes,
    EVEN: gl.constexpr, GATED: gl.constexpr, INITIAL: gl.constexpr, FINAL: gl.constexpr, KEEP: gl.constexpr,
):  # fmt: skip
    """Run the scan warpgroup: scan and gate each tile of v serially, with a thread per channel.

    Starts from the state that left the tile before in time, spinning on its word. Waits for id_ready, v_ready and fetched;
    arrives at v_free[half] once a half of v is in registers. At the end of a tile it publishes the state.
    """
    ROWS: gl.constexpr = decay_rows.shape[1]
    BV: gl.constexpr = decay_rows.shape[2]
    BT: gl.constexpr = 2 * v_tile.shape[1]
    # A chunk is ROWS steps. The number of chunks is a multiple of 4, so fetched[slot] completes an even number of times per tile
    # and every tile starts with phase 0.
    chunks: gl.constexpr = BT // ROWS
    rows_layout: gl.constexpr = gl.BlockedLayout([ROWS, 1], [1, 32], [1, 4], [1, 0])
    row_layout: gl.constexpr = gl.SliceLayout(0, rows_layout)
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    T, channels, pairs, slices = sizes
    v_rows = v_tile._reinterpret(v_tile.dtype, [chunks, ROWS, BV], v_tile.layout)  # noqa: SLF001 - it has no public name
    r = gl.arange(0, ROWS, layout=gl.SliceLayout(1, rows_layout))
    channel = gl.arange(0, BV, layout=row_layout)
    tiles_t = gl.cdiv(T, BT)
    parity = 0
    scanned_tiles = 0
    mbarrier.wait(id_ready.index(0), 0)
    tile = read_scalar(v_ids.index(0), layout)
    while tile >= 0:
        time, b, column = tile_coordinates(tile, pairs, slices)
        start = time * BT
        left = T - start
        c = column * BV
        b_long = b.to(gl.int64)
        first_row = b * T + start
        fetch_rows(log_decay, gate, decay_rows, gate_rows, fetched, first_row, c, 0, True, GATED)
        fetch_rows(log_decay, gate, decay_rows, gate_rows, fetched, first_row, c, 1, True, GATED)
        in_range = channel < channels - c
        own = words + (b_long * tiles_t + time) * channels + c
        # The own word still has the previous launch's phase (bit 63). A word with the other phase is of this launch.
        old = gl.load(own + channel, mask=in_range, other=0)
        s = gl.zeros([BV], gl.float32, layout=row_layout)
        if time == 0:
            if INITIAL:
                s = gl.load(initial + b_long * channels + c + channel, mask=in_range, other=0.0)
        else:
            found = gl.load(own - channels + channel, mask=in_range, other=0, volatile=True)
            missing = ((found < 0) == (old < 0)) & in_range
            while gl.max(missing.to(gl.int32), 0) > 0:
                found = gl.load(own - channels + channel, mask=in_range, other=0, volatile=True)
                missing = ((found < 0) == (old < 0)) & in_range
            s = found.to(gl.int32).to(gl.float32, bitcast=True)
        out = (b_long * T + start) * channels + c
        mbarrier.wait(v_ready.index(0), parity)
        for n in range(chunks):
            mbarrier.wait(v_ready.index(1), parity, pred=n == chunks // 2)
            mbarrier.wait(fetched.index(n % 2), (n // 2) & 1)
            b_v = v_rows.index(n).load(rows_layout)
            b_decay = decay_rows.index(n % 2).load(rows_layout)
            b_gate = b_decay  # stands for the argument, which is not read if GATED is false
            if GATED:
                b_gate = gate_rows.index(n % 2).load(rows_layout)
            mbarrier.arrive(v_free.index(0), count=1, pred=n == chunks // 2 - 1)
            mbarrier.arrive(v_free.index(1), count=1, pred=n == chunks - 1)
            fetch_rows(log_decay, gate, decay_rows, gate_rows, fetched, first_row, c, n + 2, n + 2 < chunks, GATED)
            b_decay = gl.exp2(b_decay.to(gl.float32) * LOG2E)
            b_gate = b_gate.to(gl.float32)
            if EVEN:
                inside = gl.full([ROWS, BV], 1, gl.int1, layout=rows_layout)
            else:
                # TMA loads run into the next batch entry. With v = 0 and decay = 1 the state stays as it is past the end.
                in_time = (r < left - n * ROWS)[:, None]
                inside = in_time & in_range[None, :]
                b_v = gl.where(in_time, b_v, 0.0)
                b_decay = gl.where(in_time, b_decay, 1.0)
            target = ((n * ROWS + r) * channels)[:, None] + channel[None, :]
            if KEEP:
                gl.store(v + out + target, b_v, mask=inside)
                step = n * ROWS
                saved_row = carries + (b_long * gl.cdiv(T, CARRY) + (start + step) // CARRY) * channels + c
                gl.store(saved_row + channel, s, mask=in_range & (step % CARRY == 0) & (step < left))
            # The state enters with the first row, so what is left is a scan from zero. Its products of decays are dead code.
            b_v = b_v.to(gl.float32)
            b_v += gl.where((r == 0)[:, None], b_decay * s[None, :], 0.0)
            b_s = gl.associative_scan((b_decay, b_v), 0, combine)[1]  # [ROWS, BV]
            s = gl.reduce(b_s, 0, take_last)
            if GATED:
                # silu's sigmoid as a squared reciprocal root: two instructions, where a division takes eight
                root = gl.rsqrt(1.0 + gl.exp2(b_gate * -LOG2E))
                b_s = b_s * b_gate * root * root
            gl.store(y + out + target, b_s.to(y.dtype.element_ty), mask=inside)
        bits = s.to(gl.int32, bitcast=True).to(gl.int64) & 0xFFFFFFFF
        # -9223372036854775807 - 1 is bit 63 alone: the word gets the phase opposite to the old word's.
        word = gl.where(old < 0, bits, bits | (-9223372036854775807 - 1))
        gl.atomic_xchg(own + channel, word, mask=in_range, sem="relaxed")
        if FINAL:
            gl.store(final + b_long * channels + c + channel, s, mask=in_range & (time == tiles_t - 1))
        parity ^= 1
        scanned_tiles += 1
        mbarrier.wait(id_ready.index(parity), (scanned_tiles // 2) & 1)
        tile = read_scalar(v_ids.index(parity), layout)


@gluon.jit(do_not_specialize=["T", "tiles", "pairs"])
def project_scan_gate_hopper_kernel(
    x, weight, log_decay, gate, initial, y, v, final, carries, words, counter, T, width, channels, tiles, pairs,
    STAGES: gl.constexpr, MULTIPLY_REGISTERS: gl.constexpr, SCAN_REGISTERS: gl.constexpr,
    EVEN: gl.constexpr, GATED: gl.constexpr, INITIAL: gl.constexpr, FINAL: gl.constexpr, KEEP: gl.constexpr,
):  # fmt: skip
    """Set up shared memory and barriers, and start the four roles: see the top of the file.

    x, weight, log_decay and gate are TMA descriptors of [rows, columns]; their boxes are the tiles. GATED: multiply the states by
    the gate; otherwise the caller passes log_decay in its place, and it is not read. KEEP: also write v and the carries, which
    the backward pass reads.
    """
    HALF: gl.constexpr = x.block_type.shape[0]
    BD: gl.constexpr = x.block_type.shape[1]
    BV: gl.constexpr = weight.block_type.shape[1]
    ROWS: gl.constexpr = log_decay.block_type.shape[0]
    scalars: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    v_layout: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    x_tiles = gl.allocate_shared_memory(x.dtype, [2 * STAGES, HALF, BD], x.layout)
    w_tiles = gl.allocate_shared_memory(x.dtype, [STAGES, BD, BV], weight.layout)
    decay_rows = gl.allocate_shared_memory(log_decay.dtype, [2, ROWS, BV], log_decay.layout)
    gate_rows = decay_rows  # stands for the rows of the gate, which are not read if GATED is false
    if GATED:
        gate_rows = gl.allocate_shared_memory(gate.dtype, [2, ROWS, BV], gate.layout)
    v_tile = gl.allocate_shared_memory(x.dtype, [2, HALF, BV], v_layout)
    tile_ids = gl.allocate_shared_memory(gl.int32, [STAGES, 1], scalars)
    v_ids = gl.allocate_shared_memory(gl.int32, [2, 1], scalars)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    id_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    fetched = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)  # both consumer warpgroups arrive
    for i in gl.static_range(2):
        mbarrier.init(id_ready.index(i), count=1)
        mbarrier.init(v_ready.index(i), count=1)
        mbarrier.init(v_free.index(i), count=1)
        mbarrier.init(fetched.index(i), count=1)
    slices = gl.cdiv(channels, BV)
    # The first function runs on the kernel's own warps (num_warps = 4). The two lists below give the warps and the registers per
    # thread of the others: 4, 4 and 1 warps.
    gl.warp_specialize(
        [
            (multiply, (x_tiles, w_tiles, tile_ids, full, empty, v_tile, v_ids, id_ready, v_ready, v_free, width, BD, 0)),
            (multiply, (x_tiles, w_tiles, tile_ids, full, empty, v_tile, v_ids, id_ready, v_ready, v_free, width, BD, 1)),
            (scan_gate, (v_tile, v_ids, id_ready, v_ready, v_free, log_decay, gate, decay_rows, gate_rows, fetched,
                         initial, y, v, final, carries, words, (T, channels, pairs, slices), EVEN, GATED, INITIAL, FINAL, KEEP)),
            (produce, (x, weight, x_tiles, w_tiles, tile_ids, full, empty, counter,
                       (T, width, tiles, pairs, slices, gl.num_programs(0)))),
        ],
        [4, 4, 1],
        [MULTIPLY_REGISTERS, SCAN_REGISTERS, 24],
    )  # fmt: skip
    keep_barriers((full, empty, id_ready, v_ready, v_free, fetched))
