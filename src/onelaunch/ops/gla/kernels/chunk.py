"""Gated linear attention in chunks of 64 steps, portable Triton: the chunk state pass, and helpers of other kernels.

``chunk_states`` and ``chunk_state_gradients`` in launch.py launch it. chunk_output.py, backward.py, step.py and the kernels of
the ablations use the helpers; those for Hopper do not.

Computes   S_t = diag(e^(g_t)) S_{t-1} + k_t^T v_t,   o_t = scale * q_t S_t   per head; in chunkwise form, where S enters a
           chunk:
             o = scale * (q e^before) S + tril(P) v,      S' = e^whole S + (k e^after)^T v,
             P[t, s] = scale * sum over channels of q_t k_s e^(g_s+1 + ... + g_t).
           before and after are the sums of g in the chunk up to and with a step, and behind it; whole is the sum over all steps
           of the chunk. S' leaves the chunk.
Launches   1. ``chunk_state_kernel`` (fla's chunk_h), serial over chunks: the state that enters each chunk, and the final one;
           2. ``chunk_output_kernel`` (chunk_output.py; fla's chunk_o), parallel over chunks: o from it.
           With time reversed and q and k exchanged, the same two are half of the backward pass: dS runs from the end to the
               start (q e^before in the place of k e^after, do in that of v), and dv = (k e^after) dS + P^T do. The other half
               is backward.py.
Grid       chunk state: ceil(K / BK) * ceil(V / BV) tiles of the state, per head and sequence. Chunk output: ceil(V / BV)
           blocks, per head and chunk. No CTA waits for another one; the launches follow each other on the stream.
On chip    chunk state: the tile [BK, BV] of the state, float32, in registers. Chunk output: P [64, 64] and o [64, BV], float32.
Memory     a state [K, V] per chunk is written and read. All else is read once per tile or block of the other dimension, and by
           each head that shares it. The chunk output reads g and q (for dv: g and k) again for the product with the state.
Heads      tensors may share heads: GROUP neighbouring heads of o (or of the state) read one head of a tensor, found by a division
           (``shared_head``), so nothing is copied. The gradients of a shared head of v and of a shared state are summed over its
           heads in the CTA that owns it, one after the other, in float32.
Packing    chunks begin where sequences begin. A CTA finds its sequence by bisection of the offsets on the device.
Decay      every exponent at a state is a sum of its own, from -inf to 0, never a difference: -inf minus -inf is NaN. The
           exponents within P have two forms. If no half of the chunk decays by more than LIMIT (``is_benign``), both factors
           are anchored at the middle, e^(sum from the middle) and its inverse, and one product gives P. Otherwise secondary
           chunking, carried down to single steps: for blocks of 1, 2, 4, ... 32 steps, every right block is multiplied with the
           left block next to it, through e^(sum from the right block's start) and e^(sum to the left block's end), both at most
           1 (``sums_by_block``). One decay per head needs neither: its sums between any two steps are a matrix [64, 64]
           (``pair_decay``).
Numerics   u is the norm-wise error of rounding the exact result to 16 bits. A loop in float32 has that one rounding, and 2 u is
           allowed. Rounding errors add up as squares, so two more roundings on the way to a result give 1.73 u. For o through
           the state these two are q e^before and S. For o through P they are k and P, while q goes in as two 16-bit terms
           (PARTS). The same holds for dv. The decayed keys that are added to a state have two terms as well; where a float32
           result depends on the state, they are multiplied in float32. float32 inputs are multiplied as such, or in TF32 where
           PyTorch's settings allow it: see ``split_product``. Sums of log-decays are float32 in any case, since the error of an
           exponent is the relative error of its exponential.
Constants  BK, BV: channels of a block of keys and of values. LOW: dtype to which one factor of a product is rounded. PARTS:
           16-bit terms of a float32 factor next to a 16-bit one; 0: multiply float32. PRECISION: form of float32 products
           ("ieee", "tf32" or "bf16x6", see ``split_product``). LIMIT, LARGEST: bounds of ``is_benign``. EVEN: all chunks and
           blocks are whole, so nothing is masked. SCALAR: one decay per head. PACKED: sequences of different lengths are packed
           along T, and ``offsets`` holds their starts. FIRST, LAST: there is an initial state, a final state is wanted.
           BISECTION_STEPS: see ``find_chunk``. STAGES: stages of Triton's software pipeline.
Source     Yang et al., Gated Linear Attention Transformers with Hardware-Efficient Training (2024); experiment 039.
"""

import triton
import triton.language as tl

from onelaunch.kernels.common.tf32 import round_to_tf32

CHUNK = tl.constexpr(64)
"""Steps per chunk."""
LEVELS = tl.constexpr(6)
"""Base-2 logarithm of CHUNK: the number of block sizes 1, 2, ... 32 of secondary chunking."""

LOG2E = tl.constexpr(1.4426950408889634)

LEAST = tl.constexpr(-1e30)
"""Least log-decay: smaller ones are raised to it, so that sums stay finite. Its exponential is 0 all the same."""


# Where a chunk lies


@triton.jit
def steps_of_chunk(turn):
    """Return 0 to 63, in a form that the compiler must recompute in each iteration.

    ``turn``, a number that changes with the iteration, is far below 2^30 and adds 0, which the compiler cannot know. Otherwise
    it would compute the masks [64, 64] that follow from the steps before the loop and keep them in registers.
    """
    return tl.arange(0, CHUNK) + turn // (1 << 30)


@triton.jit
def sequence_bounds(offsets, n, T, PACKED: tl.constexpr):
    """Return the batch entry, the first step, the length, and the slot of the first chunk of sequence n.

    Slots number the chunks of all sequences. Packed, the first slot is offsets[n] // 64 + n, which leaves each sequence at
    least as many slots as it has chunks, without a scan over the sequences.
    """
    if PACKED:
        first = tl.load(offsets + n).to(tl.int32)
        length = tl.load(offsets + n + 1).to(tl.int32) - first
        return n * 0, first, length, first // CHUNK + n
    return n, n * 0, T, n * tl.cdiv(T, CHUNK)


@triton.jit
def find_chunk(offsets, slot, T, sequences, BISECTION_STEPS: tl.constexpr, PACKED: tl.constexpr):
    """Return the batch entry and the first step of the chunk in ``slot``, and the steps from there to the sequence's end.

    The last number is at most 0 in a spare slot, which has no chunk. The sequence is found by BISECTION_STEPS halvings of the
    ``sequences`` offsets.
    """
    n = slot // tl.cdiv(T, CHUNK)
    if PACKED:
        n = slot * 0
        high = n + sequences
        for _ in tl.static_range(BISECTION_STEPS):
            middle = (n + high) // 2
            below = tl.load(offsets + middle).to(tl.int32) // CHUNK + middle <= slot
            n = tl.where(below, middle, n)
            high = tl.where(below, high, middle)
    b, start, length, first = sequence_bounds(offsets, n, T, PACKED)
    steps = (slot - first) * CHUNK
    return b, start + steps, length - steps


@triton.jit
def shared_head(h, GROUP: tl.constexpr):
    """Return the head of a tensor that head h reads, where GROUP neighbouring heads share one."""
    if GROUP == 1:
        return h
    return h // GROUP


@triton.jit
def row_pointer(base, b, t, h, stride_b, stride_t, stride_h):
    """Return the pointer to step t of head h of batch entry b; in 64 bits, since sizes multiply."""
    return base + b.to(tl.int64) * stride_b + t.to(tl.int64) * stride_t + h.to(tl.int64) * stride_h


@triton.jit
def load_rows(first, stride_t, t, left, c, channels, EVEN: tl.constexpr):
    """Load [64, X] of the chunk whose first row ``first`` points to; 0 outside of the sequence and of the channels.

    ``t`` are the steps 0 to 63, ``c`` the channels, and ``left`` the number of steps from the chunk's start to the sequence's
    end.
    """
    pointers = first + t[:, None] * stride_t + c[None, :]
    if EVEN:
        return tl.load(pointers)
    return tl.load(pointers, mask=(t < left)[:, None] & (c < channels)[None, :], other=0.0)


@triton.jit
def store_rows(first, values, stride_t, t, left, c, channels, EVEN: tl.constexpr):
    """Store [64, X] of a chunk, rounded to the dtype of ``first``, which points to its first row; nothing outside."""
    pointers = first + t[:, None] * stride_t + c[None, :]
    rounded = values.to(first.dtype.element_ty)
    if EVEN:
        tl.store(pointers, rounded)
    else:
        tl.store(pointers, rounded, mask=(t < left)[:, None] & (c < channels)[None, :])


@triton.jit
def state_pointers(states, index, k, v, K, V):
    """Return the pointers to the tile [BK, BV] of state ``index`` of [..., K, V], at channels ``k`` and ``v``."""
    return states + index.to(tl.int64) * K * V + (k[:, None] * V + v[None, :])


@triton.jit
def inside_state(k, v, K, V):
    """Return the mask [BK, BV] of what lies inside a state [K, V]."""
    return (k < K)[:, None] & (v < V)[None, :]


# Decay


@triton.jit
def bounded(g):
    """Return g in float32, at least LEAST; NaN stays NaN."""
    g = g.to(tl.float32)
    return tl.where(g < LEAST, LEAST, g)


@triton.jit
def load_decay(first, stride_t, t, left, c, channels, EVEN: tl.constexpr):
    """Load the log-decays [64, BK] of a chunk, or [64, 1] for one per head, float32 and bounded; 0 outside."""
    return bounded(load_rows(first, stride_t, t, left, c, channels, EVEN))


@triton.jit
def sums(g, low, high, PRECISION: tl.constexpr):
    """Return [64, X]: for each step t the sum of g [64, X] over the steps from low[t] up to but without high[t] >= low[t].

    It is computed as a product with a matrix of 0 and 1, which takes fewer registers than a scan. g goes in as three bfloat16
    terms unless PRECISION is "ieee", also where other products are in TF32: the terms hold all bits of g. The matrix is made as
    its transpose, of which a thread holds a single column; otherwise a thread would need the bounds of many rows.
    """
    steps = tl.arange(0, CHUNK)
    summed = (steps[:, None] - low[None, :]).to(tl.uint32) < (high - low).to(tl.uint32)[None, :]  # low <= step < high
    if g.shape[1] == 1:
        return tl.trans(tl.sum(tl.where(summed, g, 0.0), 0, keep_dims=True))
    if PRECISION == "ieee":
        return tl.dot(tl.trans(tl.where(summed, 1.0, 0.0)), g, input_precision=PRECISION)
    ones = tl.where(summed, tl.full([CHUNK, CHUNK], 1.0, tl.bfloat16), tl.full([CHUNK, CHUNK], 0.0, tl.bfloat16))
    return split_product(tl.trans(ones), g, tl.zeros(g.shape, tl.float32), 3, PRECISION)


@triton.jit
def sum_before(g, t, PRECISION: tl.constexpr):
    """Return the sums of log-decays up to and with each step."""
    return sums(g, t * 0, t + 1, PRECISION)


@triton.jit
def sum_after(g, t, PRECISION: tl.constexpr):
    """Return the sums of log-decays behind each step to the end of the chunk."""
    return sums(g, t + 1, t * 0 + CHUNK, PRECISION)


@triton.jit
def exp(x):
    """Return e^x through 2^x, which the hardware has."""
    return tl.exp2(x * LOG2E)


@triton.jit
def pair_decay(g, t, PRECISION: tl.constexpr):
    """Return e^(g_s+1 + ... + g_t) [64, 64], row t and column s, for t >= s, from g [64, 1]; 1 elsewhere."""
    until = tl.where(t[None, :] <= t[:, None], tl.trans(g), 0.0)
    behind = tl.where(t[:, None] > t[None, :], 1.0, 0.0)
    if PRECISION != "ieee":
        behind = behind.to(tl.bfloat16)
    return exp(split_product(until, behind, tl.zeros([CHUNK, CHUNK], tl.float32), 3, PRECISION))


@triton.jit
def in_right_block(t, level):
    """Return whether steps lie in right blocks.

    The chunk consists of pairs of blocks of 2^level steps, a left and a right one. Queries of a right block are multiplied with
    keys of the left block next to it.
    """
    return ((t >> level) & 1) == 1


@triton.jit
def sums_by_block(g, t, level, PRECISION: tl.constexpr):
    """Return [64, BK], the exponents of secondary chunking, at most 0.

    In right blocks of 2^level steps the sum from the block's start up to and with each step; in left blocks the sum behind each
    step to the block's end.
    """
    right = in_right_block(t, level)
    start = (t >> level) << level
    return sums(g, tl.where(right, start, t + 1), tl.where(right, t + 1, ((t >> level) + 1) << level), PRECISION)


@triton.jit
def sums_around(x, t, level, PRECISION: tl.constexpr):
    """Return [64, BK], sums of x as the gradients of log-decays need them in blocks of 2^level steps.

    In right blocks from each step on to the block's end; in left blocks from the block's start up to each step, without it.
    """
    right = in_right_block(t, level)
    start = (t >> level) << level
    return sums(x, tl.where(right, t, start), tl.where(right, ((t >> level) + 1) << level, t), PRECISION)


@triton.jit
def adjacent_blocks(t, level):
    """Return the mask [64, 64] of pairs of steps in a right block and the left block next to it, both ways round."""
    return (t[:, None] >> level) ^ 1 == (t[None, :] >> level)


@triton.jit
def is_benign(q, k, g, t, LIMIT: tl.constexpr, LARGEST: tl.constexpr):
    """Return whether P may be computed as one product, anchored at the middle of the chunk.

    It may if no factor exceeds e^LIMIT, and if no element of q and k exceeds LARGEST, so that its product with such a factor
    stays within the range of the operands' dtype (LARGEST is None where that needs no check). Log-decays are at most 0, so no
    sum from or to the middle of the chunk is larger in magnitude than the sum over a whole half.
    """
    first = tl.sum(tl.where((t < CHUNK // 2)[:, None], g, 0.0), 0)
    second = tl.sum(tl.where((t < CHUNK // 2)[:, None], 0.0, g), 0)
    benign = tl.min(tl.minimum(first, second)) >= -LIMIT
    if LARGEST is not None:
        benign = benign & (tl.max(tl.maximum(tl.abs(q), tl.abs(k)).to(tl.float32)) <= LARGEST)
    return benign


@triton.jit
def from_middle(g, t, PRECISION: tl.constexpr):
    """Return the sums from the middle of the chunk to each step: at most 0 behind the middle, at least 0 before it."""
    halves = sums_by_block(g, t, LEVELS - 1, PRECISION)
    return tl.where((t < CHUNK // 2)[:, None], -halves, halves)


# Products


@triton.jit
def split_product(a, b, out, PARTS: tl.constexpr, PRECISION: tl.constexpr):
    """Return out + a b, with a float32 operand split into 16-bit terms.

    A float32 operand next to a 16-bit one goes in as the sum of PARTS terms of the other's dtype. Two float32 operands are
    multiplied as such if PRECISION is "ieee" (which the interpreter can do), and rounded to TF32 if it is "tf32". Otherwise
    each is three bfloat16 terms, of whose nine products the six largest are taken: nearly as exact, and every target has them
    in its matrix units. It is written out by hand, since Triton's own form keeps all terms in registers at once.
    """
    if a.dtype == tl.float32 and b.dtype == tl.float32:
        if PRECISION == "ieee":
            return tl.dot(a, b, out, input_precision=PRECISION)
        if PRECISION == "tf32":
            return tl.dot(round_to_tf32(a), round_to_tf32(b), out, input_precision=PRECISION)
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
    """Return scores [64, 64] plus the scores of later with earlier steps over a block of keys.

    On and above the diagonal the result has no meaning: the caller replaces it. q, k and g are float32 [64, BK]. k is rounded
    to LOW, and q goes in as the sum of PARTS numbers of that dtype.
    """
    if is_benign(q, k, g, t, LIMIT, LARGEST):
        distance = from_middle(g, t, PRECISION)
        scores = split_product(q * exp(distance), tl.trans((k * exp(-distance)).to(LOW)), scores, PARTS, PRECISION)
    else:
        for level in range(LEVELS):
            # Steps of right blocks are queries here, those of left blocks keys.
            decayed = exp(sums_by_block(g, t, level, PRECISION)) * tl.where(in_right_block(t, level)[:, None], q, k)
            pairs = split_product(decayed, tl.trans(decayed.to(LOW)), tl.zeros([CHUNK, CHUNK], tl.float32), PARTS, PRECISION)
            scores += tl.where(adjacent_blocks(t, level), pairs, 0.0)
    return scores


@triton.jit
def causal_scores(scores, diagonal, t):
    """Return ``scores`` below the diagonal, ``diagonal`` [64] on it (scores of steps with themselves), and 0 above."""
    return tl.where(t[:, None] > t[None, :], scores, tl.where(t[:, None] == t[None, :], diagonal[:, None], 0.0))


@triton.jit
def scalar_scores(products, g, scale, t, PRECISION: tl.constexpr):
    """Return the scores from the products q k^T, for one decay per head: g [64, 1]."""
    return tl.where(t[:, None] >= t[None, :], products * (scale * pair_decay(g, t, PRECISION)), 0.0)


@triton.jit
def chunk_scores(
    p_q, q_stride_t, p_k, k_stride_t, p_g, g_stride_t, scale, t, left, K,
    BK: tl.constexpr, LOW: tl.constexpr, PARTS: tl.constexpr, LIMIT: tl.constexpr, LARGEST: tl.constexpr,
    PRECISION: tl.constexpr, EVEN: tl.constexpr, SCALAR: tl.constexpr,
):  # fmt: skip
    """Return P [64, 64] of the chunk whose first rows the pointers point to, block by block of keys."""
    scores = tl.zeros([CHUNK, CHUNK], tl.float32)
    diagonal = tl.zeros([CHUNK], tl.float32)  # scores of steps with themselves
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
            diagonal += tl.sum(b_q * b_k, 1)
            scores = add_pairs(scores, b_q, b_k, b_g, t, LOW, PARTS, LIMIT, LARGEST, PRECISION)
    if SCALAR:
        b_g = load_decay(p_g, g_stride_t, t, left, tl.arange(0, 1), 1, EVEN)
        return scalar_scores(scores, b_g, scale, t, PRECISION)
    return causal_scores(scores, diagonal, t)


# Chunk state pass


@triton.jit
def add_queries(
    state, p_q, q_stride_t, p_do, do_stride_t, b_g, scale, t, left, k, v, K, V,
    PARTS: tl.constexpr, PRECISION: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Return the gradient of a state [BK, BV] plus (q e^before)^T do of one chunk, for one more head that reads the state."""
    b_q = load_rows(p_q, q_stride_t, t, left, k, K, EVEN).to(tl.float32)
    b_do = load_rows(p_do, do_stride_t, t, left, v, V, EVEN)
    if PARTS == 0:
        b_do = b_do.to(tl.float32)
    return split_product(tl.trans(b_q * scale * exp(sum_before(b_g, t, PRECISION))), b_do, state, PARTS, PRECISION)


@triton.jit(do_not_specialize=["T", "sequences"])
def chunk_state_kernel(
    added, values, g, first, offsets, states, last, scale,
    T, H, K, V, sequences,
    added_stride_b, added_stride_t, added_stride_h, values_stride_b, values_stride_t, values_stride_h,
    g_stride_b, g_stride_t, g_stride_h,
    BK: tl.constexpr, BV: tl.constexpr, STAGES: tl.constexpr, PARTS: tl.constexpr, PRECISION: tl.constexpr,
    EVEN: tl.constexpr, SCALAR: tl.constexpr, PACKED: tl.constexpr,
    FIRST: tl.constexpr, LAST: tl.constexpr, REVERSE: tl.constexpr,
    ADDED_GROUP: tl.constexpr = 1, VALUES_GROUP: tl.constexpr = 1, G_GROUP: tl.constexpr = 1, SUMMED: tl.constexpr = 1,
):  # fmt: skip
    """Store the state that enters every chunk in ``states`` [slots, H, K, V], and with LAST the final one as ``last``.

    The pass starts from ``first`` [N, H, K, V], or from zeros. Forward, ``added`` is k and ``values`` is v. With REVERSE it runs
    from the last chunk to the first, ``added`` is q, ``values`` is do, and ``first`` the gradient of the final state. Then it
    stores the gradient of the state that leaves each chunk, and as ``last`` the gradient of the initial state.

    H counts the heads of the state. ADDED_GROUP, VALUES_GROUP and G_GROUP of them share a head of ``added``, ``values`` and g.
    With SUMMED above 1, as many heads of q and do belong to one state instead, and are added to it one after the other.
    """
    blocks = tl.cdiv(V, BV)
    tiles = tl.cdiv(K, BK) * blocks
    head = tl.program_id(0) // tiles  # counts the heads of all sequences
    n, h = head // H, head % H
    block = tl.program_id(0) % blocks
    k = ((tl.program_id(0) % tiles) // blocks) * BK + tl.arange(0, BK)
    v = block * BV + tl.arange(0, BV)
    t = tl.arange(0, CHUNK)
    c = tl.arange(0, 1) if SCALAR else k
    channels = 1 if SCALAR else K
    inside = inside_state(k, v, K, V)
    b, start, length, slot = sequence_bounds(offsets, n, T, PACKED)
    chunks = tl.cdiv(length, CHUNK)
    state = tl.zeros([BK, BV], tl.float32)
    if FIRST:
        state = tl.load(state_pointers(first, head, k, v, K, V), mask=inside, other=0.0)
    added_head = shared_head(h, ADDED_GROUP) if SUMMED == 1 else h * SUMMED
    values_head = shared_head(h, VALUES_GROUP) if SUMMED == 1 else h * SUMMED
    p_added = row_pointer(added, b, start, added_head, added_stride_b, added_stride_t, added_stride_h)
    p_values = row_pointer(values, b, start, values_head, values_stride_b, values_stride_t, values_stride_h)
    p_g = row_pointer(g, b, start, shared_head(h, G_GROUP), g_stride_b, g_stride_t, g_stride_h)
    for step in tl.range(0, chunks, num_stages=STAGES):
        chunk = chunks - 1 - step if REVERSE else step
        left = length - chunk * CHUNK
        at = (chunk * CHUNK).to(tl.int64)
        b_added = load_rows(p_added + at * added_stride_t, added_stride_t, t, left, k, K, EVEN).to(tl.float32)  # [64, BK]
        b_values = load_rows(p_values + at * values_stride_t, values_stride_t, t, left, v, V, EVEN)  # [64, BV]
        b_g = load_decay(p_g + at * g_stride_t, g_stride_t, t, left, c, channels, EVEN)  # [64, BK]
        if PARTS == 0:
            b_values = b_values.to(tl.float32)
        if REVERSE:
            b_added = b_added * scale * exp(sum_before(b_g, t, PRECISION))
        else:
            b_added *= exp(sum_after(b_g, t, PRECISION))
        index = (slot + chunk).to(tl.int64) * H + h
        tl.store(state_pointers(states, index, k, v, K, V), state.to(states.dtype.element_ty), mask=inside)
        state *= tl.trans(exp(tl.sum(b_g, 0, keep_dims=True)))
        state = split_product(tl.trans(b_added), b_values, state, PARTS, PRECISION)
        if SUMMED > 1:
            tl.static_assert(REVERSE, "only queries share a state")
            for other in tl.range(1, SUMMED):
                ahead = tl.cast(other, tl.int64)
                state = add_queries(
                    state, p_added + at * added_stride_t + ahead * added_stride_h, added_stride_t,
                    p_values + at * values_stride_t + ahead * values_stride_h, values_stride_t,
                    b_g, scale, t, left, k, v, K, V, PARTS, PRECISION, EVEN,
                )  # fmt: skip
    if LAST:
        tl.store(state_pointers(last, head, k, v, K, V), state, mask=inside)
