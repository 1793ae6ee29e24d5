"""Scan and gate in one pass over time: the forward kernel, and the tile functions that other kernels end with.

Computes   s_t = exp(log_decay_t) * s_{t-1} + v_t,  y_t = s_t * silu(gate_t)   (or y = s where GATED is false)
Grid       (T / BT, B * V / BV): a program owns one tile of time and channels.
On chip    the tile of v, log_decay and gate; per channel the pair (product of decays, state), float32.
Memory     reads v, log_decay, gate once, writes y once; one word per tile and channel for the carry, one float where it is kept.
Carry      lookback_kernels.py.
Packing    sequences packed into one batch entry are one scan that forgets where a sequence starts; each row finds its sequence by
           bisection of the offsets, on the device.
Numerics   decays multiply in linear space, float32; nothing is divided by a decay, so -inf is safe.
"""

import triton
import triton.language as tl

from onelaunch.ops.lookback_kernels import combine, finish, last_row, launch_phase, pass_carry

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def decay_of(log_decay):
    """exp, in the base that the hardware has."""
    return tl.exp2(log_decay.to(tl.float32) * LOG2E)


@triton.jit
def silu(gate):
    """gate * sigmoid(gate), float32."""
    gate = gate.to(tl.float32)
    return gate / (1.0 + tl.exp2(-gate * LOG2E))


@triton.jit
def tile_pointers(base, b, start, stride_b, stride_t, rows, c):
    """[BT, BV] pointers into a [B, T, V] tensor; 64-bit where sizes multiply."""
    return base + b.to(tl.int64) * stride_b + start.to(tl.int64) * stride_t + rows[:, None] * stride_t + c[None, :]


@triton.jit
def sequence_of(offsets, sequences, t, STEPS: tl.constexpr):
    """For each time step the sequence that holds it, with its first step and the step after its last."""
    low = tl.zeros_like(t)
    high = low + sequences
    for _ in tl.static_range(STEPS):
        middle = (low + high) // 2
        below = tl.load(offsets + middle) <= t
        low = tl.where(below, middle, low)
        high = tl.where(below, high, middle)
    return low, tl.load(offsets + low).to(tl.int32), tl.load(offsets + low + 1).to(tl.int32)


@triton.jit
def enter_sequences(v, decay, initial, offsets, sequences, t, T, c, channels, INITIAL: tl.constexpr, STEPS: tl.constexpr):
    """Where a packed sequence starts, forget the state before it and add its own: the tile's v and decay, changed."""
    sequence, first, _ = sequence_of(offsets, sequences, t, STEPS)
    starts = (first == t) & (t < T)
    if INITIAL:
        mask = starts[:, None] & (c < channels)[None, :]
        own = tl.load(initial + sequence.to(tl.int64)[:, None] * channels + c[None, :], mask=mask, other=0.0)
        v += decay * own
    return v, tl.where(starts[:, None], 0.0, decay)


@triton.jit
def hand_over_empty(source, target, offsets, sequences, tile, tiles, c, channels, GIVEN: tl.constexpr):
    """target[n] = source[n] (or 0) for sequences without steps, which no tile meets; the programs along time share them."""
    n = tile
    while n < sequences:
        if tl.load(offsets + n) == tl.load(offsets + n + 1):
            value = tl.zeros(c.shape, tl.float32)
            if GIVEN:
                value = tl.load(source + n.to(tl.int64) * channels + c, mask=c < channels, other=0.0)
            tl.store(target + n.to(tl.int64) * channels + c, value, mask=c < channels)
        n += tiles


@triton.jit
def scan_gate_tile(
    v, log_decay, gate,  # [BT, BV]; v float32 and 0, log_decay 0 outside the tensor
    initial, offsets, y, final, carries, words, header,
    tile, tiles, b, c, T, channels, sequences, programs,
    BT: tl.constexpr, GROUP: tl.constexpr, STEPS: tl.constexpr,
    GATED: tl.constexpr, INITIAL: tl.constexpr, PACKED: tl.constexpr, FINAL: tl.constexpr, CARRIES: tl.constexpr,
):  # fmt: skip
    """Everything after v: scan the tile, pass the carry, gate, store."""
    rows = tl.arange(0, BT)
    start = tile * BT
    t = start + rows
    in_range = c < channels
    decay = decay_of(log_decay)
    if PACKED:
        v, decay = enter_sequences(v, decay, initial, offsets, sequences, t, T, c, channels, INITIAL, STEPS)
    decays, states = tl.associative_scan((decay, v), 0, combine)  # [BT, BV]

    entering = tl.zeros(c.shape, tl.float32)
    if INITIAL and not PACKED:
        entering = tl.load(initial + b.to(tl.int64) * channels + c, mask=in_range, other=0.0)
    groups = (tiles + GROUP - 1) // GROUP
    batches = programs // tiles // ((channels + c.shape[0] - 1) // c.shape[0])
    group_words = words + batches.to(tl.int64) * tiles * channels
    carry = pass_carry(
        words + b.to(tl.int64) * tiles * channels, group_words + b.to(tl.int64) * groups * channels,
        last_row(decays, rows, BT), last_row(states, rows, BT), entering,
        tile, tiles, channels, c, launch_phase(header), GROUP,
    )  # fmt: skip
    finish(header, programs)

    s = decays * carry[None, :] + states
    out = s
    if GATED:
        out = s * silu(gate)
    mask = (t < T)[:, None] & in_range[None, :]
    pointers = tile_pointers(y, b, start, T.to(tl.int64) * channels, channels, rows, c)
    tl.store(pointers, out.to(y.dtype.element_ty), mask=mask)
    if CARRIES:
        tl.store(carries + (b.to(tl.int64) * tiles + tile) * channels + c, carry, mask=in_range)
    if FINAL:
        sequence = tl.zeros_like(t) + b
        ends = t == T - 1
        if PACKED:
            sequence, _, after = sequence_of(offsets, sequences, t, STEPS)
            ends = (t + 1 == after) & (t < T)
            hand_over_empty(initial, final, offsets, sequences, tile, tiles, c, channels, INITIAL)
        tl.store(final + sequence.to(tl.int64)[:, None] * channels + c[None, :], s, mask=ends[:, None] & in_range[None, :])


@triton.jit(do_not_specialize=["T", "sequences"])
def scan_gate_kernel(
    v, log_decay, gate, initial, offsets, y, final, carries, words, header,
    T, channels, sequences, v_stride_b, v_stride_t, decay_stride_b, decay_stride_t, gate_stride_b, gate_stride_t,
    BT: tl.constexpr, BV: tl.constexpr, GROUP: tl.constexpr, STEPS: tl.constexpr,
    GATED: tl.constexpr, INITIAL: tl.constexpr, PACKED: tl.constexpr, FINAL: tl.constexpr, CARRIES: tl.constexpr,
):  # fmt: skip
    """See the top of the file."""
    tile, tiles = tl.program_id(0), tl.num_programs(0)
    slices = tl.cdiv(channels, BV)
    b = tl.program_id(1) // slices
    c = (tl.program_id(1) % slices) * BV + tl.arange(0, BV)
    rows = tl.arange(0, BT)
    start = tile * BT
    mask = (start + rows < T)[:, None] & (c < channels)[None, :]
    b_decay = tl.load(
        tile_pointers(log_decay, b, start, decay_stride_b, decay_stride_t, rows, c), mask=mask, other=0.0
    )  # [BT, BV]
    b_v = tl.load(tile_pointers(v, b, start, v_stride_b, v_stride_t, rows, c), mask=mask, other=0.0).to(tl.float32)
    b_gate = b_v
    if GATED:
        b_gate = tl.load(tile_pointers(gate, b, start, gate_stride_b, gate_stride_t, rows, c), mask=mask, other=0.0)
    scan_gate_tile(
        b_v, b_decay, b_gate, initial, offsets, y, final, carries, words, header,
        tile, tiles, b, c, T, channels, sequences, tiles * tl.num_programs(1),
        BT, GROUP, STEPS, GATED, INITIAL, PACKED, FINAL, CARRIES,
    )  # fmt: skip


@triton.jit(do_not_specialize=["T"])
def gate_kernel(s, gate, y, T, channels, gate_stride_b, gate_stride_t, BT: tl.constexpr, BV: tl.constexpr):
    """y = s * silu(gate), elementwise: the third launch of the unfused variants. s and y contiguous [B, T, V]."""
    slices = tl.cdiv(channels, BV)
    b = tl.program_id(1) // slices
    c = (tl.program_id(1) % slices) * BV + tl.arange(0, BV)
    rows = tl.arange(0, BT)
    start = tl.program_id(0) * BT
    mask = (start + rows < T)[:, None] & (c < channels)[None, :]
    stride_b = T.to(tl.int64) * channels
    b_s = tl.load(tile_pointers(s, b, start, stride_b, channels, rows, c), mask=mask, other=0.0).to(tl.float32)  # [BT, BV]
    b_gate = tl.load(tile_pointers(gate, b, start, gate_stride_b, gate_stride_t, rows, c), mask=mask, other=0.0)
    out = tile_pointers(y, b, start, stride_b, channels, rows, c)
    tl.store(out, (b_s * silu(b_gate)).to(y.dtype.element_ty), mask=mask)
