"""Gradients of the scan and the gate in one pass over time, last step first.

Computes   u_t = dy_t * silu(gate_t);  ds_t = u_t + a_{t+1} ds_{t+1}, from the final state's gradient;   a_t = exp(log_decay_t)
           dv = ds,  dlog_decay_t = ds_t a_t s_{t-1},  dgate_t = dy_t s_t silu'(gate_t),  dinitial = a_1 ds_1
Grid       (T / BT, B * V / BV); program 0 owns the last tile of time, since the carry comes from there.
Recompute  the states: each tile scans v again from the state that entered it, which the forward kept (one float32 row a tile).
           The scan runs over rows shifted by one, which gives s_{t-1} directly: s_t - v_t would cancel where the decay is strong.
Memory     reads v, log_decay, gate, dy once (shifted rows come from the cache), writes three gradients once.
Carry      lookback_kernels.py, with tiles counted from the end.
"""

import triton
import triton.language as tl

from onelaunch.ops.gated_scan.kernels import (
    LOG2E,
    decay_of,
    enter_sequences,
    hand_over_empty,
    sequence_of,
    silu,
    tile_pointers,
)
from onelaunch.ops.lookback_kernels import combine, finish, launch_phase, pass_carry


@triton.jit
def silu_slope(gate):
    """The derivative of silu, float32."""
    gate = gate.to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp2(-gate * LOG2E))
    return sigmoid * (1.0 + gate * (1.0 - sigmoid))


@triton.jit(do_not_specialize=["T", "sequences"])
def scan_gate_backward_kernel(
    dy, dfinal, v, log_decay, gate, initial, offsets, carries, dv, dlog_decay, dgate, dinitial, words, header,
    T, channels, sequences, dy_stride_b, dy_stride_t, v_stride_b, v_stride_t,
    decay_stride_b, decay_stride_t, gate_stride_b, gate_stride_t,
    BT: tl.constexpr, BV: tl.constexpr, GROUP: tl.constexpr, STEPS: tl.constexpr,
    GATED: tl.constexpr, INITIAL: tl.constexpr, PACKED: tl.constexpr, DFINAL: tl.constexpr,
):  # fmt: skip
    """See the top of the file. Where GATED is false, dy is the gradient of the states and dgate is not written."""
    order, tiles = tl.program_id(0), tl.num_programs(0)
    tile = tiles - 1 - order
    slices = tl.cdiv(channels, BV)
    b = tl.program_id(1) // slices
    c = (tl.program_id(1) % slices) * BV + tl.arange(0, BV)
    in_range = c < channels
    rows = tl.arange(0, BT)
    start = tile * BT
    t = start + rows
    mask = (t < T)[:, None] & in_range[None, :]
    inner = mask & (rows > 0)[:, None]  # rows whose predecessor lies in this tile
    followed = (t + 1 < T)[:, None] & in_range[None, :]

    p_decay = tile_pointers(log_decay, b, start, decay_stride_b, decay_stride_t, rows, c)
    p_v = tile_pointers(v, b, start, v_stride_b, v_stride_t, rows, c)
    decay = decay_of(tl.load(p_decay, mask=mask, other=0.0))  # [BT, BV]
    next_decay = decay_of(tl.load(p_decay + decay_stride_t, mask=followed, other=0.0))
    u = tl.load(tile_pointers(dy, b, start, dy_stride_b, dy_stride_t, rows, c), mask=mask, other=0.0).to(tl.float32)
    b_gate = u
    if GATED:
        b_gate = tl.load(tile_pointers(gate, b, start, gate_stride_b, gate_stride_t, rows, c), mask=mask, other=0.0)

    # The states before each step
    before_decay = decay_of(tl.load(p_decay - decay_stride_t, mask=inner, other=0.0))
    before_v = tl.load(p_v - v_stride_t, mask=inner, other=0.0).to(tl.float32)
    if PACKED:
        before_v, entered = enter_sequences(
            before_v, before_decay, initial, offsets, sequences, tl.maximum(t - 1, 0), T, c, channels, INITIAL, STEPS
        )
        before_decay = tl.where((rows > 0)[:, None], entered, 1.0)
        before_v = tl.where((rows > 0)[:, None], before_v, 0.0)
    products, states = tl.associative_scan((before_decay, before_v), 0, combine)
    entering = tl.load(carries + (b.to(tl.int64) * tiles + tile) * channels + c, mask=in_range, other=0.0)
    before = products * entering[None, :] + states

    # The gradients of the states, from the right
    addend = u
    if GATED:
        addend = u * silu(b_gate)
    from_right = tl.zeros(c.shape, tl.float32)
    sequence = tl.zeros_like(t) + b
    starts = t == 0
    if PACKED:
        sequence, first, after = sequence_of(offsets, sequences, t, STEPS)
        starts = (first == t) & (t < T)
        ends = (after == t + 1) & (t < T)
        next_decay = tl.where(ends[:, None], 0.0, next_decay)
        own = sequence.to(tl.int64)[:, None] * channels + c[None, :]
        if DFINAL:
            addend += tl.load(dfinal + own, mask=ends[:, None] & in_range[None, :], other=0.0)
        if INITIAL:
            given = tl.load(initial + own, mask=starts[:, None] & in_range[None, :], other=0.0)
            before = tl.where(starts[:, None], given, before)
        else:
            before = tl.where(starts[:, None], 0.0, before)
    elif DFINAL:
        from_right = tl.load(dfinal + b.to(tl.int64) * channels + c, mask=in_range, other=0.0)
    products, sums = tl.associative_scan((next_decay, addend), 0, combine, reverse=True)
    is_first = (rows == 0)[:, None]
    groups = (tiles + GROUP - 1) // GROUP
    group_words = words + (tl.num_programs(1) // slices).to(tl.int64) * tiles * channels
    carry = pass_carry(
        words + b.to(tl.int64) * tiles * channels, group_words + b.to(tl.int64) * groups * channels,
        tl.sum(tl.where(is_first, products, 0.0), 0), tl.sum(tl.where(is_first, sums, 0.0), 0), from_right,
        order, tiles, channels, c, launch_phase(header), GROUP,
    )  # fmt: skip
    finish(header, tiles * tl.num_programs(1))
    ds = products * carry[None, :] + sums

    stride_b = T.to(tl.int64) * channels
    tl.store(tile_pointers(dv, b, start, stride_b, channels, rows, c), ds.to(dv.dtype.element_ty), mask=mask)
    dfactor = ds * decay
    tl.store(
        tile_pointers(dlog_decay, b, start, stride_b, channels, rows, c),
        (dfactor * before).to(dlog_decay.dtype.element_ty), mask=mask,
    )  # fmt: skip
    if GATED:
        s = decay * before + tl.load(p_v, mask=mask, other=0.0).to(tl.float32)
        slope = u * s * silu_slope(b_gate)
        tl.store(tile_pointers(dgate, b, start, stride_b, channels, rows, c), slope.to(dgate.dtype.element_ty), mask=mask)
    if INITIAL:
        if PACKED:
            hand_over_empty(dfinal, dinitial, offsets, sequences, order, tiles, c, channels, DFINAL)
        tl.store(
            dinitial + sequence.to(tl.int64)[:, None] * channels + c[None, :], dfactor, mask=starts[:, None] & in_range[None, :]
        )


@triton.jit(do_not_specialize=["T"])
def gate_backward_kernel(
    dy, s, gate, ds, dgate, T, channels, dy_stride_b, dy_stride_t, gate_stride_b, gate_stride_t, BT: tl.constexpr, BV: tl.constexpr
):
    """ds = dy * silu(gate), dgate = dy * s * silu'(gate), elementwise: for the unfused variants. s, ds, dgate contiguous."""
    slices = tl.cdiv(channels, BV)
    b = tl.program_id(1) // slices
    c = (tl.program_id(1) % slices) * BV + tl.arange(0, BV)
    rows = tl.arange(0, BT)
    start = tl.program_id(0) * BT
    mask = (start + rows < T)[:, None] & (c < channels)[None, :]
    stride_b = T.to(tl.int64) * channels
    b_dy = tl.load(tile_pointers(dy, b, start, dy_stride_b, dy_stride_t, rows, c), mask=mask, other=0.0).to(tl.float32)  # [BT, BV]
    b_s = tl.load(tile_pointers(s, b, start, stride_b, channels, rows, c), mask=mask, other=0.0).to(tl.float32)
    b_gate = tl.load(tile_pointers(gate, b, start, gate_stride_b, gate_stride_t, rows, c), mask=mask, other=0.0)
    p_ds = tile_pointers(ds, b, start, stride_b, channels, rows, c)
    tl.store(p_ds, (b_dy * silu(b_gate)).to(ds.dtype.element_ty), mask=mask)
    p_dgate = tile_pointers(dgate, b, start, stride_b, channels, rows, c)
    tl.store(p_dgate, (b_dy * b_s * silu_slope(b_gate)).to(dgate.dtype.element_ty), mask=mask)
