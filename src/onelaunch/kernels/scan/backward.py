"""Gradients of the scan and the gate in one pass over time, last step first.

Computes   u_t = dy_t * silu(gate_t);  ds_t = u_t + a_{t+1} ds_{t+1}, started from the final state's gradient;
           a_t = exp(log_decay_t);  dv = ds,  dlog_decay_t = ds_t a_t s_{t-1},  dgate_t = dy_t s_t silu'(gate_t),
           dinitial = a_1 ds_1
Grid       (ceil(T / BT), B * ceil(V / BV)). CTA 0 along time owns the last tile, since the carry comes from there: a CTA waits
           only for CTAs of a lower index, which the hardware starts no later.
Warps      all alike. A thread scans ROWS consecutive steps of a channel serially, forward for s and backward for ds.
On chip    ROWS slabs [SEGS, BV] (see look_back.py) of v, log_decay, gate, dy and of the state before each step, in registers.
Recompute  Each tile scans v again from the state that entered it, which the forward pass saved (one float32 row per tile).
           s_{t-1} is taken from this scan: s_t - v_t would cancel where the decay is strong.
Memory     reads v, log_decay, gate and dy once (of log_decay each segment's first step twice), writes the three gradients once;
           reads one float32 per tile and channel.
Protocol   the decoupled look-back of look_back.py over ds, with tiles in reverse order. The tile's pair is published early; the
           states are recomputed after the carry of ds has arrived.
Padding    elements outside the tensor are loaded as 0: dy = 0, v = 0 and decay = exp(0) = 1. So steps past the end add nothing
           to ds and pass the final state's gradient on unchanged; a_{T+1} is 1 in the recurrence above.
Numerics   float32 between loads and stores; nothing is divided by a decay. dv and the others are rounded once.
Caller     kernels/scan/launch.py launches scan_gate_backward_kernel, and gate_backward_kernel where scan and gate are two
           launches.
Source     Merrill and Garland (2016); docs/notebook/linear_rnn.md.
"""

import triton
import triton.language as tl

from onelaunch.kernels.common.activation import decay_of, silu, silu_slope
from onelaunch.kernels.scan.forward import (
    ROWS,
    copy_empty_sequences,
    decays_of,
    load_slabs,
    reset_at_sequence_starts,
    row_pointer,
    scan_serially,
    sequence_of,
    sequence_words,
    store_slab,
    tile_pointers,
)
from onelaunch.kernels.scan.look_back import (
    decoupled_look_back,
    launch_phase,
    read_previous_words,
    scan_segments,
    scan_segments_reverse,
)


@triton.jit
def states_before(
    values,
    decays,
    state,
    initial,
    offsets,
    sequences,
    t,
    T,
    c,
    channels,
    INITIAL: tl.constexpr,
    PACKED: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Return the state before every step, as ROWS slabs, from ``state``, the state before each segment [SEGS, BV].

    Where a packed sequence starts, that is its initial state (or 0 without INITIAL).
    """
    before = ()
    for r in tl.static_range(ROWS):
        known = state
        if PACKED:
            sequence, first, _ = sequence_of(offsets, sequences, t + r, STEPS)
            starts = ((first == t + r) & (t + r < T))[:, None]
            given = tl.zeros_like(state)
            if INITIAL:
                own = initial + sequence.to(tl.int64)[:, None] * channels + c[None, :]
                given = tl.load(own, mask=starts & (c < channels)[None, :], other=0.0)
            known = tl.where(starts, given, state)
        before = before + (known,)
        state = decays[r] * known + values[r].to(tl.float32)
    return before


@triton.jit
def gradient_terms(
    dy,
    gates,
    decays,
    p_decay,
    decay_stride_t,
    dfinal,
    offsets,
    sequences,
    segment,
    t,
    T,
    c,
    channels,
    GATED: tl.constexpr,
    PACKED: tl.constexpr,
    DFINAL: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Return the terms of the reverse recurrence, ROWS slabs each: ds_t = addend_t + factor_t * ds_{t+1}.

    addend_t is dy_t * silu(gate_t), plus the final state's gradient at a packed sequence's last step. factor_t is a_{t+1}, and
    0 at a packed sequence's last step, where the next sequence's ds must not enter.
    """
    in_range = (c < channels)[None, :]
    addends = ()
    factors = ()
    for r in tl.static_range(ROWS):
        addend = dy[r].to(tl.float32)
        if GATED:
            addend *= silu(gates[r])
        if r + 1 < ROWS:
            factor = decays[r + 1]
        else:
            mask = (t + ROWS < T)[:, None] & in_range
            # The next segment's first decay is held by another thread, or by another CTA, so it is loaded again.
            next_decay = p_decay + ROWS * decay_stride_t + (segment[:, None] * (ROWS * decay_stride_t) + c[None, :])
            factor = decay_of(tl.load(next_decay, mask=mask, other=0.0))
        if PACKED:
            sequence, _, after = sequence_of(offsets, sequences, t + r, STEPS)
            ends = ((after == t + r + 1) & (t + r < T))[:, None]
            factor = tl.where(ends, 0.0, factor)
            if DFINAL:
                own = dfinal + sequence.to(tl.int64)[:, None] * channels + c[None, :]
                addend += tl.load(own, mask=ends & in_range, other=0.0)
        addends = addends + (addend,)
        factors = factors + (factor,)
    return addends, factors


# Without do_not_specialize, Triton would compile again for a T or a number of sequences that is 1 or a multiple of 16.
@triton.jit(do_not_specialize=["T", "sequences"])
def scan_gate_backward_kernel(
    dy, dfinal, v, log_decay, gate, initial, offsets, carries, dv, dlog_decay, dgate, dinitial, words,
    T, channels, sequences, dy_stride_b, dy_stride_t, v_stride_b, v_stride_t,
    decay_stride_b, decay_stride_t, gate_stride_b, gate_stride_t,
    BT: tl.constexpr, BV: tl.constexpr, GROUP: tl.constexpr, STEPS: tl.constexpr, EVEN: tl.constexpr,
    GATED: tl.constexpr, INITIAL: tl.constexpr, PACKED: tl.constexpr, DFINAL: tl.constexpr,
):  # fmt: skip
    """Compute all gradients: see the top of the file.

    If GATED is false, dy is the gradient of the states and dgate is not written.
    """
    order, tiles = tl.program_id(0), tl.num_programs(0)  # order: the tile's place in the look-back, 0 for the last steps
    tile = tiles - 1 - order
    slices = tl.cdiv(channels, BV)
    b = tl.program_id(1) // slices
    c = (tl.program_id(1) % slices) * BV + tl.arange(0, BV)
    in_range = c < channels
    own_words, group_words = sequence_words(words, b, tl.num_programs(1) // slices, tiles, channels, GROUP)
    words_before = read_previous_words(own_words, order, channels, c)
    segment = tl.arange(0, BT // ROWS)
    start = tile * BT
    t = start + segment * ROWS
    p_decay = row_pointer(log_decay, b, start, decay_stride_b, decay_stride_t)
    decays = decays_of(load_slabs(p_decay, decay_stride_t, segment, t, T, c, channels, EVEN))
    p_dy = row_pointer(dy, b, start, dy_stride_b, dy_stride_t)
    b_dy = load_slabs(p_dy, dy_stride_t, segment, t, T, c, channels, EVEN)
    gates = b_dy  # stands for the argument, which is not read if GATED is false
    if GATED:
        p_gate = row_pointer(gate, b, start, gate_stride_b, gate_stride_t)
        gates = load_slabs(p_gate, gate_stride_t, segment, t, T, c, channels, EVEN)
    p_v = row_pointer(v, b, start, v_stride_b, v_stride_t)
    values = load_slabs(p_v, v_stride_t, segment, t, T, c, channels, EVEN)
    one = tl.full(decays[0].shape, 1.0, tl.float32)
    zero = tl.zeros_like(one)

    # Gradients of the states, from the right. They come first, so that other tiles get this tile's pair early.
    addends, factors = gradient_terms(
        b_dy,
        gates,
        decays,
        p_decay,
        decay_stride_t,
        dfinal,
        offsets,
        sequences,
        segment,
        t,
        T,
        c,
        channels,
        GATED,
        PACKED,
        DFINAL,
        STEPS,
    )
    factor, total = one, zero  # map of each segment: ds behind its last step -> ds of its first step
    for r in tl.static_range(ROWS - 1, -1, -1):
        total = factors[r] * total + addends[r]
        factor *= factors[r]
    factor_behind, total_behind, factor_with, total_with = scan_segments_reverse(factor, total)
    from_right = tl.zeros(c.shape, tl.float32)
    if DFINAL and not PACKED:
        from_right = tl.load(dfinal + b.to(tl.int64) * channels + c, mask=in_range, other=0.0)
    phase = launch_phase(words_before)
    carry = decoupled_look_back(
        own_words, group_words, factor_with, total_with, 0, from_right, order, tiles, channels, c, phase, GROUP
    )
    ds = factor_behind * carry[None, :] + total_behind

    # The states before each step, recomputed from the left. The scan over segments takes v and decays as changed at the starts
    # of packed sequences, and states_before takes them unchanged: before a sequence's first step it returns the initial state.
    entering = tl.load(carries + (b.to(tl.int64) * tiles + tile) * channels + c, mask=in_range, other=0.0)
    scanned, scanned_decays = values, decays
    if PACKED:
        scanned, scanned_decays = reset_at_sequence_starts(
            values, decays, initial, offsets, sequences, t, T, c, channels, INITIAL, STEPS
        )
    decay, state = scan_serially(scanned, scanned_decays, one, zero)
    decay_before, state_before, _, _ = scan_segments(decay, state)
    before = states_before(
        values, decays, decay_before * entering[None, :] + state_before,
        initial, offsets, sequences, t, T, c, channels, INITIAL, PACKED, STEPS,
    )  # fmt: skip

    stride_b = tl.cast(T, tl.int64) * channels
    p_dv = row_pointer(dv, b, start, stride_b, channels)
    p_dlog_decay = row_pointer(dlog_decay, b, start, stride_b, channels)
    for r in tl.static_range(ROWS - 1, -1, -1):
        ds = factors[r] * ds + addends[r]
        store_slab(p_dv, r, ds, channels, segment, t, T, c, channels, EVEN)
        dprevious = ds * decays[r]  # gradient of s_{t-1}; at a sequence's first step, of its initial state
        store_slab(p_dlog_decay, r, dprevious * before[r], channels, segment, t, T, c, channels, EVEN)
        if GATED:
            s = decays[r] * before[r] + values[r].to(tl.float32)
            gate_gradient = b_dy[r].to(tl.float32) * s * silu_slope(gates[r])
            p_dgate = row_pointer(dgate, b, start, stride_b, channels)
            store_slab(p_dgate, r, gate_gradient, channels, segment, t, T, c, channels, EVEN)
        if INITIAL:
            sequence = tl.zeros_like(t) + b
            starts = t + r == 0
            if PACKED:
                sequence, first, _ = sequence_of(offsets, sequences, t + r, STEPS)
                starts = (first == t + r) & (t + r < T)
            target = dinitial + sequence.to(tl.int64)[:, None] * channels + c[None, :]
            tl.store(target, dprevious, mask=starts[:, None] & in_range[None, :])
    if INITIAL and PACKED:
        # An empty sequence's final state is its initial state, so dinitial is dfinal there.
        copy_empty_sequences(dfinal, dinitial, offsets, sequences, order, tiles, c, channels, DFINAL)


@triton.jit(do_not_specialize=["T"])
def gate_backward_kernel(
    dy,
    s,
    gate,
    ds,
    dgate,
    T,
    channels,
    dy_stride_b,
    dy_stride_t,
    gate_stride_b,
    gate_stride_t,
    BT: tl.constexpr,
    BV: tl.constexpr,
):
    """Compute ds = dy * silu(gate) and dgate = dy * s * silu'(gate), elementwise, for unfused variants.

    s, ds and dgate are contiguous.
    """
    slices = tl.cdiv(channels, BV)
    b = tl.program_id(1) // slices
    c = (tl.program_id(1) % slices) * BV + tl.arange(0, BV)
    rows = tl.arange(0, BT)
    start = tl.program_id(0) * BT
    mask = (start + rows < T)[:, None] & (c < channels)[None, :]
    stride_b = tl.cast(T, tl.int64) * channels
    b_dy = tl.load(tile_pointers(dy, b, start, dy_stride_b, dy_stride_t, rows, c), mask=mask, other=0.0).to(
        tl.float32
    )  # [BT, BV]
    b_s = tl.load(tile_pointers(s, b, start, stride_b, channels, rows, c), mask=mask, other=0.0).to(tl.float32)
    b_gate = tl.load(tile_pointers(gate, b, start, gate_stride_b, gate_stride_t, rows, c), mask=mask, other=0.0)
    p_ds = tile_pointers(ds, b, start, stride_b, channels, rows, c)
    tl.store(p_ds, (b_dy * silu(b_gate)).to(ds.dtype.element_ty), mask=mask)
    p_dgate = tile_pointers(dgate, b, start, stride_b, channels, rows, c)
    tl.store(p_dgate, (b_dy * b_s * silu_slope(b_gate)).to(dgate.dtype.element_ty), mask=mask)
