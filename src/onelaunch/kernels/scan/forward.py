"""Scan and gate in one pass over time: the forward kernels, and the tile functions that other kernels end with.

Computes   s_t = exp(log_decay_t) * s_{t-1} + v_t,  y_t = s_t * silu(gate_t)   (or y = s where GATED is false)
Grid       scan_gate_kernel: (ceil(T / BT), B * ceil(V / BV)). A CTA owns one tile of BT steps by BV channels, BT = SEGS * ROWS.
           sequential_scan_gate_kernel: (B * ceil(V / BV)). A CTA loops over the tiles of its channels and needs no look-back.
Warps      all alike. A thread scans ROWS consecutive steps of a channel serially.
Maps       consecutive steps map the state s that enters them to A s + S: A is the product of their decays, S the state behind
           them when started from zero. Below, a segment's or tile's map is the pair (A, S).
On chip    ROWS slabs [SEGS, BV] of v, log_decay and gate (see look_back.py) and one map per segment and channel, in registers.
Memory     reads v, log_decay and gate once, writes y once. For the look-back one 64-bit word per tile, and per
           group of tiles, and channel. Where a backward pass needs it (CARRIES), one float32 per tile and channel, of the state
           that enters the tile.
Protocol   the decoupled look-back of look_back.py: publish the tile's map, wait for the earlier tiles, then scan from the
           carry. scan_gate_kernel first reads the words that the previous launch left for its tile, since their phase
           bit decides the phase of this launch, and loads its operands meanwhile. The sequential kernel waits for no other CTA.
Padding    elements outside the tensor are loaded as 0: v = 0 and decay = exp(0) = 1, so a step past the end keeps the state.
Packing    sequences packed into one batch entry are one scan whose decay is set to 0 where a sequence starts. Each step finds
           its sequence by bisection of the offsets, on the device.
Numerics   decays multiply in linear space, float32; nothing is divided by a decay, so -inf is safe. y is rounded once, at its
           store.
Callers    kernels/scan/launch.py launches the kernels. backward.py and project_scan_gate.py of
           ``linear_rnn`` use loads, stores and other functions of tiles, and the latter ends with scan_gate_tile.
Source     Merrill and Garland (2016); docs/notebook/linear_rnn.md.
"""

import triton
import triton.language as tl

from onelaunch.kernels.common.activation import decay_of, silu
from onelaunch.kernels.scan.look_back import decoupled_look_back, launch_phase, read_previous_words, row, scan_segments

ROWS = tl.constexpr(8)
"""Number of consecutive steps that form a segment, which one thread scans serially."""


@triton.jit
def row_pointer(base, b, start, stride_b, stride_t):
    """Return the pointer to step ``start`` of batch entry ``b`` in a [B, T, V] tensor.

    Offsets are 64-bit, since an index times a stride may exceed 2^31.
    """
    return base + b.to(tl.int64) * stride_b + start.to(tl.int64) * stride_t


@triton.jit
def tile_pointers(base, b, start, stride_b, stride_t, rows, c):
    """Return pointers [rows, BV] into a [B, T, V] tensor, at ``rows`` steps behind ``start`` and channels ``c``."""
    return row_pointer(base, b, start, stride_b, stride_t) + (rows[:, None] * stride_t + c[None, :])


@triton.jit
def inside(t, T, c, channels, EVEN: tl.constexpr):
    """Return the mask of a slab's elements that lie in the tensor; a constant if EVEN, when every tile lies inside."""
    if EVEN:
        return tl.full((t.shape[0], c.shape[0]), 1, tl.int1)
    return (t < T)[:, None] & (c < channels)[None, :]


@triton.jit
def load_slabs(first, stride_t, segment, t, T, c, channels, EVEN: tl.constexpr):
    """Load the ROWS slabs [SEGS, BV] of the tile at the pointer ``first``; elements outside the tensor are 0."""
    offsets = segment[:, None] * (ROWS * stride_t) + c[None, :]
    slabs = ()
    for r in tl.static_range(ROWS):
        pointers = first + r * stride_t + offsets
        if EVEN:
            slabs = slabs + (tl.load(pointers),)
        else:
            slabs = slabs + (tl.load(pointers, mask=inside(t + r, T, c, channels, EVEN), other=0.0),)
    return slabs


@triton.jit
def store_slab(first, r: tl.constexpr, values, stride_t, segment, t, T, c, channels, EVEN: tl.constexpr):
    """Store slab r of the tile at the pointer ``first``, rounded to the dtype that it points to."""
    pointers = first + r * stride_t + (segment[:, None] * (ROWS * stride_t) + c[None, :])
    rounded = values.to(first.dtype.element_ty)
    if EVEN:
        tl.store(pointers, rounded)
    else:
        tl.store(pointers, rounded, mask=inside(t + r, T, c, channels, EVEN))


@triton.jit
def decays_of(log_decays):
    """Return exp of every slab of log-decays, in float32."""
    decays = ()
    for r in tl.static_range(ROWS):
        decays = decays + (decay_of(log_decays[r]),)
    return decays


@triton.jit
def sequence_of(offsets, sequences, t, STEPS: tl.constexpr):
    """Find the packed sequence that holds each time step ``t``, by bisection in STEPS halvings.

    Returns the sequence's index, its first step, and the step after its last.
    """
    low = tl.zeros_like(t)
    high = low + sequences
    for _ in tl.static_range(STEPS):
        middle = (low + high) // 2
        below = tl.load(offsets + middle) <= t
        low = tl.where(below, middle, low)
        high = tl.where(below, high, middle)
    return low, tl.load(offsets + low).to(tl.int32), tl.load(offsets + low + 1).to(tl.int32)


@triton.jit
def reset_at_sequence_starts(
    values, decays, initial, offsets, sequences, t, T, c, channels, INITIAL: tl.constexpr, STEPS: tl.constexpr
):
    """Return the slabs of v and decay, changed so that each packed sequence starts from its own initial state.

    At a sequence's first step the decay becomes 0, and decay * initial state is added to v.
    """
    new_values = ()
    new_decays = ()
    for r in tl.static_range(ROWS):
        sequence, first, _ = sequence_of(offsets, sequences, t + r, STEPS)
        starts = (first == t + r) & (t + r < T)
        value = values[r].to(tl.float32)
        if INITIAL:
            mask = starts[:, None] & (c < channels)[None, :]
            own = tl.load(initial + sequence.to(tl.int64)[:, None] * channels + c[None, :], mask=mask, other=0.0)
            value += decays[r] * own
        new_values = new_values + (value,)
        new_decays = new_decays + (tl.where(starts[:, None], 0.0, decays[r]),)
    return new_values, new_decays


@triton.jit
def copy_empty_sequences(source, target, offsets, sequences, tile, tiles, c, channels, GIVEN: tl.constexpr):
    """Set target[n] = source[n], or 0 if GIVEN is false, for packed sequences without steps, which lie in no tile.

    The CTAs along time share this work: ``tile`` of ``tiles`` takes every ``tiles``-th sequence.
    """
    n = tile
    while n < sequences:
        if tl.load(offsets + n) == tl.load(offsets + n + 1):
            value = tl.zeros(c.shape, tl.float32)
            if GIVEN:
                value = tl.load(source + n.to(tl.int64) * channels + c, mask=c < channels, other=0.0)
            tl.store(target + n.to(tl.int64) * channels + c, value, mask=c < channels)
        n += tiles


@triton.jit
def scan_serially(values, decays, decay, state):
    """Return the map (decay, state) [SEGS, BV] followed by the ROWS steps of each segment, which one thread scans.

    Started from the identity map (1, 0), the result is the map of the segment.
    """
    for r in tl.static_range(ROWS):
        state = decays[r] * state + values[r].to(tl.float32)
        decay *= decays[r]
    return decay, state


@triton.jit
def sequence_words(words, b, batches, tiles, channels, GROUP: tl.constexpr):
    """Return pointers to the look-back's words of batch entry b: first its tiles' words, then its groups' words.

    GROUP consecutive tiles form a group. The workspace holds the words of all tiles of all batch entries, then those of all
    groups; a tile or group has one word per channel.
    """
    groups = (tiles + GROUP - 1) // GROUP
    behind = words + batches.to(tl.int64) * tiles * channels
    return words + b.to(tl.int64) * tiles * channels, behind + b.to(tl.int64) * groups * channels


@triton.jit
def tile_maps(values, decays):
    """Return the maps of a tile up to each segment, exclusive and then inclusive, [SEGS, BV]."""
    one = tl.full(decays[0].shape, 1.0, tl.float32)
    decay, state = scan_serially(values, decays, one, tl.zeros_like(one))
    return scan_segments(decay, state)


@triton.jit
def gate_and_store(
    values, decays, gates, s, y, final, offsets, b, segment, start, c, T, channels, sequences,
    STEPS: tl.constexpr, EVEN: tl.constexpr, GATED: tl.constexpr, PACKED: tl.constexpr, FINAL: tl.constexpr,
):  # fmt: skip
    """Scan every segment from the state s [SEGS, BV] that enters it, gate and store every step, and store final states.

    A final state is stored where a sequence's last step lies in this tile (FINAL).
    """
    t = start + segment * ROWS
    in_range = c < channels
    p_y = row_pointer(y, b, start, tl.cast(T, tl.int64) * channels, channels)
    for r in tl.static_range(ROWS):
        s = decays[r] * s + values[r].to(tl.float32)
        out = s
        if GATED:
            out = s * silu(gates[r])
        store_slab(p_y, r, out, channels, segment, t, T, c, channels, EVEN)
        if FINAL:
            sequence = tl.zeros_like(t) + b
            ends = t + r == T - 1
            if PACKED:
                sequence, _, after = sequence_of(offsets, sequences, t + r, STEPS)
                ends = (t + r + 1 == after) & (t + r < T)
            target = final + sequence.to(tl.int64)[:, None] * channels + c[None, :]
            tl.store(target, s, mask=ends[:, None] & in_range[None, :])


@triton.jit
def load_initial_state(initial, b, c, channels, INITIAL: tl.constexpr, PACKED: tl.constexpr):
    """Return the state [BV] that enters the first tile: the initial state, or zeros.

    Packed sequences get theirs in :func:`reset_at_sequence_starts`.
    """
    state = tl.zeros(c.shape, tl.float32)
    if INITIAL and not PACKED:
        state = tl.load(initial + b.to(tl.int64) * channels + c, mask=c < channels, other=0.0)
    return state


@triton.jit
def scan_gate_tile(
    values, log_decays, gates,  # ROWS slabs [SEGS, BV] each, 0 outside the tensor
    initial, offsets, y, final, carries, own_words, group_words, before,
    tile, tiles, b, segment, c, T, channels, sequences,
    GROUP: tl.constexpr, STEPS: tl.constexpr, EVEN: tl.constexpr, GATED: tl.constexpr,
    INITIAL: tl.constexpr, PACKED: tl.constexpr, FINAL: tl.constexpr, CARRIES: tl.constexpr,
):  # fmt: skip
    """Do everything that follows once v is in registers: scan the tile, exchange the carry, gate, store.

    ``before`` are this CTA's words of the previous launch, from :func:`read_previous_words`. ``carries`` receives the state
    that enters the tile (CARRIES), for a backward pass.
    """
    start = tile * (segment.shape[0] * ROWS)  # segment.shape[0] * ROWS is BT
    decays = decays_of(log_decays)
    if PACKED:
        values, decays = reset_at_sequence_starts(
            values, decays, initial, offsets, sequences, start + segment * ROWS, T, c, channels, INITIAL, STEPS
        )
    decay_before, state_before, decay_with, state_with = tile_maps(values, decays)
    entering = load_initial_state(initial, b, c, channels, INITIAL, PACKED)
    last = segment.shape[0] - 1
    phase = launch_phase(before)
    carry = decoupled_look_back(
        own_words, group_words, decay_with, state_with, last, entering, tile, tiles, channels, c, phase, GROUP
    )
    if CARRIES:
        tl.store(carries + (b.to(tl.int64) * tiles + tile) * channels + c, carry, mask=c < channels)
    s = decay_before * carry[None, :] + state_before
    gate_and_store(
        values,
        decays,
        gates,
        s,
        y,
        final,
        offsets,
        b,
        segment,
        start,
        c,
        T,
        channels,
        sequences,
        STEPS,
        EVEN,
        GATED,
        PACKED,
        FINAL,
    )
    if FINAL and PACKED:
        copy_empty_sequences(initial, final, offsets, sequences, tile, tiles, c, channels, INITIAL)


# Without do_not_specialize, Triton would compile again for a T or a number of sequences that is 1 or a multiple of 16.
@triton.jit(do_not_specialize=["T", "sequences"])
def scan_gate_kernel(
    v, log_decay, gate, initial, offsets, y, final, carries, words,
    T, channels, sequences, v_stride_b, v_stride_t, decay_stride_b, decay_stride_t, gate_stride_b, gate_stride_t,
    BT: tl.constexpr, BV: tl.constexpr, GROUP: tl.constexpr, STEPS: tl.constexpr, EVEN: tl.constexpr,
    GATED: tl.constexpr, INITIAL: tl.constexpr, PACKED: tl.constexpr, FINAL: tl.constexpr, CARRIES: tl.constexpr,
):  # fmt: skip
    """Scan and gate one tile per CTA, joined by the look-back: see the top of the file."""
    tile, tiles = tl.program_id(0), tl.num_programs(0)
    slices = tl.cdiv(channels, BV)
    batches = tl.num_programs(1) // slices
    b = tl.program_id(1) // slices
    c = (tl.program_id(1) % slices) * BV + tl.arange(0, BV)
    own_words, group_words = sequence_words(words, b, batches, tiles, channels, GROUP)
    before = read_previous_words(own_words, tile, channels, c)
    segment = tl.arange(0, BT // ROWS)
    start = tile * BT
    t = start + segment * ROWS
    log_decays = load_slabs(
        row_pointer(log_decay, b, start, decay_stride_b, decay_stride_t), decay_stride_t, segment, t, T, c, channels, EVEN
    )
    values = load_slabs(row_pointer(v, b, start, v_stride_b, v_stride_t), v_stride_t, segment, t, T, c, channels, EVEN)
    gates = values  # stands for the argument, which is not read if GATED is false
    if GATED:
        p_gate = row_pointer(gate, b, start, gate_stride_b, gate_stride_t)
        gates = load_slabs(p_gate, gate_stride_t, segment, t, T, c, channels, EVEN)
    scan_gate_tile(
        values, log_decays, gates, initial, offsets, y, final, carries, own_words, group_words, before,
        tile, tiles, b, segment, c, T, channels, sequences,
        GROUP, STEPS, EVEN, GATED, INITIAL, PACKED, FINAL, CARRIES,
    )  # fmt: skip


@triton.jit(do_not_specialize=["T", "sequences"])
def sequential_scan_gate_kernel(
    v, log_decay, gate, initial, offsets, y, final, carries,
    T, channels, sequences, v_stride_b, v_stride_t, decay_stride_b, decay_stride_t, gate_stride_b, gate_stride_t,
    BT: tl.constexpr, BV: tl.constexpr, STEPS: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr,
    CARRY_STEPS: tl.constexpr,
    GATED: tl.constexpr, INITIAL: tl.constexpr, PACKED: tl.constexpr, FINAL: tl.constexpr, CARRIES: tl.constexpr,
):  # fmt: skip
    """Scan and gate with one CTA per BV channels, which loops over time and carries the state itself.

    For calls whose channels alone fill the device. The loads of the next STAGES - 1 tiles are in flight while one is computed;
    no CTA waits for another. The state before every CARRY_STEPS-th step is stored for the backward pass (CARRIES), whose tiles
    have CARRY_STEPS steps. CARRY_STEPS must be a multiple of BT, unless one tile holds all steps.
    """
    slices = tl.cdiv(channels, BV)
    b = tl.program_id(0) // slices
    c = (tl.program_id(0) % slices) * BV + tl.arange(0, BV)
    segment = tl.arange(0, BT // ROWS)
    tiles = tl.cdiv(T, BT)
    carry = load_initial_state(initial, b, c, channels, INITIAL, PACKED)
    for tile in tl.range(0, tiles, num_stages=STAGES):
        start = tile * BT
        t = start + segment * ROWS
        p_decay = row_pointer(log_decay, b, start, decay_stride_b, decay_stride_t)
        decays = decays_of(load_slabs(p_decay, decay_stride_t, segment, t, T, c, channels, EVEN))
        p_v = row_pointer(v, b, start, v_stride_b, v_stride_t)
        values = load_slabs(p_v, v_stride_t, segment, t, T, c, channels, EVEN)
        gates = values  # stands for the argument, which is not read if GATED is false
        if GATED:
            p_gate = row_pointer(gate, b, start, gate_stride_b, gate_stride_t)
            gates = load_slabs(p_gate, gate_stride_t, segment, t, T, c, channels, EVEN)
        scanned, scanned_decays = values, decays
        if PACKED:
            scanned, scanned_decays = reset_at_sequence_starts(
                values, decays, initial, offsets, sequences, t, T, c, channels, INITIAL, STEPS
            )
        decay_before, state_before, decay_with, state_with = tile_maps(scanned, scanned_decays)
        if CARRIES:
            if start % CARRY_STEPS == 0:
                saved_row = b.to(tl.int64) * tl.cdiv(T, CARRY_STEPS) + start // CARRY_STEPS
                tl.store(carries + saved_row * channels + c, carry, mask=c < channels)
        s = decay_before * carry[None, :] + state_before
        gate_and_store(
            scanned, scanned_decays, gates, s, y, final, offsets, b, segment, start, c, T, channels, sequences,
            STEPS, EVEN, GATED, PACKED, FINAL,
        )  # fmt: skip
        carry = row(decay_with * carry[None, :] + state_with, segment.shape[0] - 1)
    if FINAL and PACKED:
        copy_empty_sequences(initial, final, offsets, sequences, b, 1, c, channels, INITIAL)


@triton.jit(do_not_specialize=["T"])
def gate_kernel(s, gate, y, T, channels, gate_stride_b, gate_stride_t, BT: tl.constexpr, BV: tl.constexpr):
    """Compute y = s * silu(gate), elementwise: the last launch of unfused variants. s and y are contiguous [B, T, V]."""
    slices = tl.cdiv(channels, BV)
    b = tl.program_id(1) // slices
    c = (tl.program_id(1) % slices) * BV + tl.arange(0, BV)
    rows = tl.arange(0, BT)
    start = tl.program_id(0) * BT
    mask = (start + rows < T)[:, None] & (c < channels)[None, :]
    stride_b = tl.cast(T, tl.int64) * channels
    b_s = tl.load(tile_pointers(s, b, start, stride_b, channels, rows, c), mask=mask, other=0.0).to(tl.float32)  # [BT, BV]
    b_gate = tl.load(tile_pointers(gate, b, start, gate_stride_b, gate_stride_t, rows, c), mask=mask, other=0.0)
    out = tile_pointers(y, b, start, stride_b, channels, rows, c)
    tl.store(out, (b_s * silu(b_gate)).to(y.dtype.element_ty), mask=mask)
