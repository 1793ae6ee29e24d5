"""Gated linear attention by chunks of 64 steps: what the kernels share, the walk of the states, and the reading of them.

Computes   S_t = diag(exp(g_t)) S_{t-1} + k_t^T v_t,  o_t = scale * q_t S_t                                   (per head)
           over a chunk that S enters:  o = scale * (q e^before) S + tril(P) v,  S' = e^whole S + (k e^after)^T v,
           P[t, s] = scale * sum over channels of q_t k_s e^(g_s+1 + ... + g_t);
           before, after: sums of g in the chunk up to and with a step, and behind it; whole: of all of it.
Launches   1. carry_kernel, serial over chunks: the state that enters each chunk, and the final one;
           2. read_kernel, parallel over chunks: o from it.
           The same two, mirrored, are half of the backward pass: dS runs from the end to the start (q e^before for k e^after, do
           for v), and dv = (k e^after) dS + P^T do reads it. The other half is backward.py.
Grid       carry: (K / BK) * (V / BV) tiles of the state, per head and sequence; read: V / BV blocks, per head and chunk.
On chip    carry: the state's tile [BK, BV], float32; read: P [64, 64] and o [64, BV].
Memory     a state [K, V] per chunk goes out and in; all else is read once per tile or block of the other side.
Packing    chunks start where sequences start; a program finds its sequence by bisection of the offsets, on the device.

Decay      every exponent of the states is a sum of its own, from -inf to 0, never a difference: -inf minus -inf is NaN. So are
           those of P where steps lie far apart in decay: for block sizes 1, 2, 4... 32, the steps of every second block (right)
           read those of the block before it (left), through exp(sum from their block's start) and exp(sum to the other block's
           end), see sums_by_block. Where no sum of a chunk is farther than LIMIT from that at its middle, one product gives P,
           with factors exp(sums from the middle) and exp(-sums from the middle). One decay per head needs neither: its sums
           between any two steps are a matrix [64, 64], see pair_decay.
Rounding   16-bit inputs: the plain loop in float32 has one rounding, that of the result; twice its error is allowed, and
           roundings add up as squares. So a path may have two more. o through the state: q e^before and S; o through P: k and P,
           while q goes in as two 16-bit parts. dv likewise. What goes into the states is two parts as well, or as many as make
           float32 where a float32 result hangs on it. float32 inputs: see split_product.
Source     Yang et al., Gated Linear Attention Transformers with Hardware-Efficient Training (2024); experiment 039.
"""

import triton
import triton.language as tl

CHUNK = tl.constexpr(64)
LEVELS = tl.constexpr(6)
"""Its binary logarithm."""

LOG2E = tl.constexpr(1.4426950408889634)

LEAST = tl.constexpr(-1e30)
"""Log-decays are at least this: sums stay finite, and the decay is 0 all the same."""


# Where a chunk lies


@triton.jit
def steps_of_chunk(turn):
    """0 to 63, which the compiler does not know to be the same in every turn of a loop: else it keeps what follows from them, the
    many masks [64, 64], in registers throughout.
    """
    return tl.arange(0, CHUNK) + turn // (1 << 30)


@triton.jit
def sequence_bounds(offsets, n, T, PACKED: tl.constexpr):
    """Of sequence n: its batch entry, first step, length, and the slot of its first chunk.

    Packed, that is offsets[n] // 64 + n, which leaves each sequence at least as many slots as it has chunks.
    """
    if PACKED:
        first = tl.load(offsets + n).to(tl.int32)
        length = tl.load(offsets + n + 1).to(tl.int32) - first
        return n * 0, first, length, first // CHUNK + n
    return n, n * 0, T, n * tl.cdiv(T, CHUNK)


@triton.jit
def find_chunk(offsets, slot, T, sequences, STEPS: tl.constexpr, PACKED: tl.constexpr):
    """Of the chunk in ``slot``: its batch entry, first step, and steps from there to the sequence's end, none in a spare slot."""
    n = slot // tl.cdiv(T, CHUNK)
    if PACKED:
        n = slot * 0
        high = n + sequences
        for _ in tl.static_range(STEPS):
            middle = (n + high) // 2
            below = tl.load(offsets + middle).to(tl.int32) // CHUNK + middle <= slot
            n = tl.where(below, middle, n)
            high = tl.where(below, high, middle)
    b, start, length, first = sequence_bounds(offsets, n, T, PACKED)
    steps = (slot - first) * CHUNK
    return b, start + steps, length - steps


@triton.jit
def row_pointer(base, b, t, h, stride_b, stride_t, stride_h):
    """Where step t of head h of batch entry b begins; 64-bit, since sizes multiply."""
    return base + b.to(tl.int64) * stride_b + t.to(tl.int64) * stride_t + h.to(tl.int64) * stride_h


@triton.jit
def load_rows(first, stride_t, t, left, c, channels, EVEN: tl.constexpr):
    """[64, X] of the chunk whose first row ``first`` points to; 0 outside of the sequence and the channels."""
    pointers = first + t[:, None] * stride_t + c[None, :]
    if EVEN:
        return tl.load(pointers)
    return tl.load(pointers, mask=(t < left)[:, None] & (c < channels)[None, :], other=0.0)


@triton.jit
def store_rows(first, values, stride_t, t, left, c, channels, EVEN: tl.constexpr):
    """The same the other way, rounded to what ``first`` points to."""
    pointers = first + t[:, None] * stride_t + c[None, :]
    rounded = values.to(first.dtype.element_ty)
    if EVEN:
        tl.store(pointers, rounded)
    else:
        tl.store(pointers, rounded, mask=(t < left)[:, None] & (c < channels)[None, :])


@triton.jit
def state_pointers(states, index, k, v, K, V):
    """[BK, BV] of matrix ``index`` of [..., K, V]."""
    return states + index.to(tl.int64) * K * V + (k[:, None] * V + v[None, :])


@triton.jit
def inside_state(k, v, K, V):
    return (k < K)[:, None] & (v < V)[None, :]


# Decay


@triton.jit
def bounded(g):
    """float32 and at least LEAST; NaN stays."""
    g = g.to(tl.float32)
    return tl.where(g < LEAST, LEAST, g)


@triton.jit
def load_decay(first, stride_t, t, left, c, channels, EVEN: tl.constexpr):
    """Log-decays [64, BK] of a chunk, or [64, 1] where a head has one; 0 outside."""
    return bounded(load_rows(first, stride_t, t, left, c, channels, EVEN))


@triton.jit
def sums(g, low, high, PRECISION: tl.constexpr):
    """[64, X]: for each step t the sum of g [64, X] over the steps from low[t] on and before high[t], at least low[t].

    A product with 0 and 1, of three bfloat16 parts unless PRECISION is "ieee": fewer registers than a scan. The matrix is made as
    its transpose: a thread holds a single column of that, and would need the bounds of many rows.
    """
    steps = tl.arange(0, CHUNK)
    taken = (steps[:, None] - low[None, :]).to(tl.uint32) < (high - low).to(tl.uint32)[None, :]
    if g.shape[1] == 1:
        return tl.trans(tl.sum(tl.where(taken, g, 0.0), 0, keep_dims=True))
    if PRECISION == "ieee":
        return tl.dot(tl.trans(tl.where(taken, 1.0, 0.0)), g, input_precision=PRECISION)
    ones = tl.where(taken, tl.full([CHUNK, CHUNK], 1.0, tl.bfloat16), tl.full([CHUNK, CHUNK], 0.0, tl.bfloat16))
    return split_product(tl.trans(ones), g, tl.zeros(g.shape, tl.float32), 3, PRECISION)


@triton.jit
def sum_before(g, t, PRECISION: tl.constexpr):
    """Up to and with each step."""
    return sums(g, t * 0, t + 1, PRECISION)


@triton.jit
def sum_after(g, t, PRECISION: tl.constexpr):
    """Behind each step to the end of the chunk."""
    return sums(g, t + 1, t * 0 + CHUNK, PRECISION)


@triton.jit
def exp(x):
    """In the base that the hardware has."""
    return tl.exp2(x * LOG2E)


@triton.jit
def pair_decay(g, t, PRECISION: tl.constexpr):
    """exp(g_s+1 + ... + g_t) [64, 64] for t >= s of g [64, 1]; 1 elsewhere."""
    until = tl.where(t[None, :] <= t[:, None], tl.trans(g), 0.0)
    behind = tl.where(t[:, None] > t[None, :], 1.0, 0.0)
    if PRECISION != "ieee":
        behind = behind.to(tl.bfloat16)
    return exp(split_product(until, behind, tl.zeros([CHUNK, CHUNK], tl.float32), 3, PRECISION))


@triton.jit
def in_right_block(t, level):
    """Of blocks of 2^level steps, every second is a right one: its steps read those of the left block before it."""
    return ((t >> level) & 1) == 1


@triton.jit
def sums_by_block(g, t, level, PRECISION: tl.constexpr):
    """[64, BK]: in right blocks from the start up to and with each step, in left ones behind each step to the end."""
    right = in_right_block(t, level)
    start = (t >> level) << level
    return sums(g, tl.where(right, start, t + 1), tl.where(right, t + 1, ((t >> level) + 1) << level), PRECISION)


@triton.jit
def sums_around(x, t, level, PRECISION: tl.constexpr):
    """[64, BK]: from each step on to the block's end in right blocks, before each step from the block's start on in left ones."""
    right = in_right_block(t, level)
    start = (t >> level) << level
    return sums(x, tl.where(right, t, start), tl.where(right, ((t >> level) + 1) << level, t), PRECISION)


@triton.jit
def neighbours(t, level):
    """[64, 64]: steps of right blocks with those of the left blocks beside them, and the other way round."""
    return (t[:, None] >> level) ^ 1 == (t[None, :] >> level)


@triton.jit
def is_benign(q, k, g, t, LIMIT: tl.constexpr, LARGEST: tl.constexpr):
    """Whether one product will do: no factor beyond exp(LIMIT), and none times LARGEST beyond what the operands' dtype holds.

    Log-decays are at most 0, so no sum to or from the chunk's middle goes beyond that of a whole half.
    """
    first = tl.sum(tl.where((t < CHUNK // 2)[:, None], g, 0.0), 0)
    second = tl.sum(tl.where((t < CHUNK // 2)[:, None], 0.0, g), 0)
    benign = tl.min(tl.minimum(first, second)) >= -LIMIT
    if LARGEST is not None:
        benign = benign & (tl.max(tl.maximum(tl.abs(q), tl.abs(k)).to(tl.float32)) <= LARGEST)
    return benign


@triton.jit
def from_middle(g, t, PRECISION: tl.constexpr):
    """Sums from the middle of the chunk, at most 0 behind it and at least 0 before."""
    halves = sums_by_block(g, t, LEVELS - 1, PRECISION)
    return tl.where((t < CHUNK // 2)[:, None], -halves, halves)


# Products


@triton.jit
def split_product(a, b, out, PARTS: tl.constexpr, PRECISION: tl.constexpr):
    """out + a b.

    A float32 operand beside a 16-bit one goes in as the sum of PARTS of the other's dtype. Two float32 ones are multiplied as
    such if PRECISION is "ieee" (what the interpreter has), else as three bfloat16 parts each, in the six products that count: as
    exact, and every target has them in its matrix units. By hand, since Triton's own form of it keeps all parts in registers at
    once.
    """
    if a.dtype == tl.float32 and b.dtype == tl.float32:
        if PRECISION == "ieee":
            return tl.dot(a, b, out, input_precision=PRECISION)
        high = b.to(tl.bfloat16)
        rest = b - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        part = a.to(tl.bfloat16)
        out = tl.dot(part, high, tl.dot(part, middle, tl.dot(part, low, out)))
        rest = a - part.to(tl.float32)
        part = rest.to(tl.bfloat16)
        out = tl.dot(part, high, tl.dot(part, middle, out))
        return tl.dot((rest - part.to(tl.float32)).to(tl.bfloat16), high, out)
    if a.dtype == b.dtype:
        return tl.dot(a, b, out)
    if b.dtype == tl.float32:
        rest = b
        for _ in tl.static_range(PARTS):
            part = rest.to(a.dtype)
            out = tl.dot(a, part, out)
            rest -= part.to(tl.float32)
    else:
        rest = a
        for _ in tl.static_range(PARTS):
            part = rest.to(b.dtype)
            out = tl.dot(part, b, out)
            rest -= part.to(tl.float32)
    return out


@triton.jit
def add_pairs(
    scores, q, k, g, t,
    LOW: tl.constexpr, PARTS: tl.constexpr, LIMIT: tl.constexpr, LARGEST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """scores [64, 64] + those of steps with earlier ones over a block of keys; q, k, g float32 [64, BK]. Above the diagonal
    anything.

    k is rounded to LOW, q goes in as PARTS of it.
    """
    if is_benign(q, k, g, t, LIMIT, LARGEST):
        distance = from_middle(g, t, PRECISION)
        scores = split_product(q * exp(distance), tl.trans((k * exp(-distance)).to(LOW)), scores, PARTS, PRECISION)
    else:
        for level in range(LEVELS):
            # right steps are queries here and left ones keys
            decayed = exp(sums_by_block(g, t, level, PRECISION)) * tl.where(in_right_block(t, level)[:, None], q, k)
            found = split_product(decayed, tl.trans(decayed.to(LOW)), tl.zeros([CHUNK, CHUNK], tl.float32), PARTS, PRECISION)
            scores += tl.where(neighbours(t, level), found, 0.0)
    return scores


@triton.jit
def causal_scores(scores, alone, t):
    """Scores below the diagonal, on it those of steps with themselves, 0 above."""
    return tl.where(t[:, None] > t[None, :], scores, tl.where(t[:, None] == t[None, :], alone[:, None], 0.0))


@triton.jit
def scalar_scores(products, g, scale, t, PRECISION: tl.constexpr):
    """Scores from the products of queries and keys, for one decay per head: g [64, 1]."""
    return tl.where(t[:, None] >= t[None, :], products * (scale * pair_decay(g, t, PRECISION)), 0.0)


@triton.jit
def chunk_scores(
    p_q, q_stride_t, p_k, k_stride_t, p_g, g_stride_t, scale, t, left, K,
    BK: tl.constexpr, LOW: tl.constexpr, PARTS: tl.constexpr, LIMIT: tl.constexpr, LARGEST: tl.constexpr,
    PRECISION: tl.constexpr, EVEN: tl.constexpr, SCALAR: tl.constexpr,
):  # fmt: skip
    """P [64, 64] of the chunk whose rows the pointers begin with, block by block of keys."""
    scores = tl.zeros([CHUNK, CHUNK], tl.float32)
    alone = tl.zeros([CHUNK], tl.float32)  # scores of steps with themselves
    for first in range(0, K, BK):
        t = steps_of_chunk(first)
        c = first + tl.arange(0, BK)
        b_q = load_rows(p_q, q_stride_t, t, left, c, K, EVEN)  # [64, BK]
        b_k = load_rows(p_k, k_stride_t, t, left, c, K, EVEN)
        if SCALAR:
            scores = split_product(b_q, tl.trans(b_k), scores, 1, PRECISION)
        else:
            b_g = load_decay(p_g, g_stride_t, t, left, c, K, EVEN)
            b_q = b_q.to(tl.float32) * scale
            b_k = b_k.to(tl.float32)
            alone += tl.sum(b_q * b_k, 1)
            scores = add_pairs(scores, b_q, b_k, b_g, t, LOW, PARTS, LIMIT, LARGEST, PRECISION)
    if SCALAR:
        b_g = load_decay(p_g, g_stride_t, t, left, tl.arange(0, 1), 1, EVEN)
        return scalar_scores(scores, b_g, scale, t, PRECISION)
    return causal_scores(scores, alone, t)


# The walk of the states


@triton.jit(do_not_specialize=["T", "sequences"])
def carry_kernel(
    rows, values, g, first, offsets, states, last, scale,
    T, H, K, V, sequences,
    rows_stride_b, rows_stride_t, rows_stride_h, values_stride_b, values_stride_t, values_stride_h,
    g_stride_b, g_stride_t, g_stride_h,
    BK: tl.constexpr, BV: tl.constexpr, STAGES: tl.constexpr, PARTS: tl.constexpr, PRECISION: tl.constexpr,
    EVEN: tl.constexpr, SCALAR: tl.constexpr, PACKED: tl.constexpr,
    FIRST: tl.constexpr, LAST: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """The state that enters every chunk, from ``first`` (or zeros), and where LAST the one behind the last chunk as ``last``.

    Forward, rows are k and values v. REVERSE walks from the end with rows q and values do: the gradient of the state behind every
    chunk, and of the one that enters the first.
    """
    blocks = tl.cdiv(V, BV)
    tiles = tl.cdiv(K, BK) * blocks
    head = tl.program_id(0) // tiles  # of all sequences' heads
    n, h = head // H, head % H
    block = tl.program_id(0) % blocks
    k = ((tl.program_id(0) % tiles) // blocks) * BK + tl.arange(0, BK)
    v = block * BV + tl.arange(0, BV)
    t = tl.arange(0, CHUNK)
    c = tl.arange(0, 1) if SCALAR else k
    channels = 1 if SCALAR else K
    held = inside_state(k, v, K, V)
    b, start, length, slot = sequence_bounds(offsets, n, T, PACKED)
    chunks = tl.cdiv(length, CHUNK)
    state = tl.zeros([BK, BV], tl.float32)
    if FIRST:
        state = tl.load(state_pointers(first, head, k, v, K, V), mask=held, other=0.0)
    p_rows = row_pointer(rows, b, start, h, rows_stride_b, rows_stride_t, rows_stride_h)
    p_values = row_pointer(values, b, start, h, values_stride_b, values_stride_t, values_stride_h)
    p_g = row_pointer(g, b, start, h, g_stride_b, g_stride_t, g_stride_h)
    for step in tl.range(0, chunks, num_stages=STAGES):
        chunk = chunks - 1 - step if REVERSE else step
        left = length - chunk * CHUNK
        at = (chunk * CHUNK).to(tl.int64)
        b_rows = load_rows(p_rows + at * rows_stride_t, rows_stride_t, t, left, k, K, EVEN).to(tl.float32)  # [64, BK]
        b_values = load_rows(p_values + at * values_stride_t, values_stride_t, t, left, v, V, EVEN)  # [64, BV]
        b_g = load_decay(p_g + at * g_stride_t, g_stride_t, t, left, c, channels, EVEN)  # [64, BK]
        if PARTS == 0:
            b_values = b_values.to(tl.float32)
        if REVERSE:
            b_rows = b_rows * scale * exp(sum_before(b_g, t, PRECISION))
        else:
            b_rows *= exp(sum_after(b_g, t, PRECISION))
        index = (slot + chunk).to(tl.int64) * H + h
        tl.store(state_pointers(states, index, k, v, K, V), state.to(states.dtype.element_ty), mask=held)
        state *= tl.trans(exp(tl.sum(b_g, 0, keep_dims=True)))
        state = split_product(tl.trans(b_rows), b_values, state, PARTS, PRECISION)
    if LAST:
        tl.store(state_pointers(last, head, k, v, K, V), state, mask=held)


# The reading of them


@triton.jit(do_not_specialize=["T", "sequences"])
def read_kernel(
    q, k, values, g, offsets, states, out, scale,
    T, H, K, V, sequences,
    q_stride_b, q_stride_t, q_stride_h, k_stride_b, k_stride_t, k_stride_h,
    values_stride_b, values_stride_t, values_stride_h, g_stride_b, g_stride_t, g_stride_h, out_stride_t,
    BK: tl.constexpr, BV: tl.constexpr, STEPS: tl.constexpr, PARTS: tl.constexpr, LIMIT: tl.constexpr, LARGEST: tl.constexpr,
    PRECISION: tl.constexpr, EVEN: tl.constexpr, SCALAR: tl.constexpr, PACKED: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """out [B, T, H, V], tokens ``out_stride_t`` apart: o from the states that enter the chunks and v, or, TRANSPOSED, dv from the
    gradients of the states behind the chunks and do.
    """
    blocks = tl.cdiv(V, BV)
    slot, h = tl.program_id(0) // (blocks * H), (tl.program_id(0) // blocks) % H
    v = (tl.program_id(0) % blocks) * BV + tl.arange(0, BV)
    b, start, left = find_chunk(offsets, slot, T, sequences, STEPS, PACKED)
    if left <= 0:
        return
    t = tl.arange(0, CHUNK)
    p_q = row_pointer(q, b, start, h, q_stride_b, q_stride_t, q_stride_h)
    p_k = row_pointer(k, b, start, h, k_stride_b, k_stride_t, k_stride_h)
    p_g = row_pointer(g, b, start, h, g_stride_b, g_stride_t, g_stride_h)
    LOW: tl.constexpr = values.dtype.element_ty
    scores = chunk_scores(
        p_q, q_stride_t, p_k, k_stride_t, p_g, g_stride_t, scale, t, left, K,
        BK, LOW, PARTS, LIMIT, LARGEST, PRECISION, EVEN, SCALAR,
    )  # fmt: skip
    if TRANSPOSED:
        scores = tl.trans(scores)
    p_values = row_pointer(values, b, start, h, values_stride_b, values_stride_t, values_stride_h)
    b_values = load_rows(p_values, values_stride_t, t, left, v, V, EVEN)
    result = split_product(scores.to(LOW), b_values, tl.zeros([CHUNK, BV], tl.float32), 1, PRECISION)
    index = slot.to(tl.int64) * H + h
    for first in range(0, K, BK):
        t = steps_of_chunk(first)
        c = first + tl.arange(0, BK)
        gc = tl.arange(0, 1) if SCALAR else c
        channels = 1 if SCALAR else K
        b_g = load_decay(p_g, g_stride_t, t, left, gc, channels, EVEN)
        if TRANSPOSED:
            reading = load_rows(p_k, k_stride_t, t, left, c, K, EVEN).to(tl.float32) * exp(sum_after(b_g, t, PRECISION))
        else:
            b_q = load_rows(p_q, q_stride_t, t, left, c, K, EVEN).to(tl.float32)
            reading = b_q * scale * exp(sum_before(b_g, t, PRECISION))
        b_state = tl.load(state_pointers(states, index, c, v, K, V), mask=inside_state(c, v, K, V), other=0.0)
        result = split_product(reading.to(LOW), b_state.to(LOW), result, 1, PRECISION)
    p_out = row_pointer(out, b, start, h, tl.cast(T, tl.int64) * out_stride_t, out_stride_t, V)
    store_rows(p_out, result, out_stride_t, t, left, v, V, EVEN)
