"""Gated linear attention forward in one launch along time: the baseline of experiment 039, and its double buffering by hand.

Computes   o and the final state, by the chunkwise formulas of ops/gla/kernels/chunk.py.
Grid       one CTA per sequence, head and BV values; it holds the state [BK, BV] (BK >= K) and takes chunk after chunk. No CTA
           waits for another one.
On chip    in registers: the state, float32; a chunk's q, k, v, g, and with PREFETCH those of the next one.
Memory     q, k, g are read once per BV values (the scores read them again, from the cache, block by block of keys), v is read
           and o written once; no states.
Numerics   as in chunk.py, which also explains the constants. BS: keys of a block of the scores, at most BK. STATE_PARTS:
           number of 16-bit terms in which the decayed keys go into the product that is added to the state; with 0 both of its
           factors are float32. LOW is the inputs' dtype: the scores, the decayed queries and the state are
           rounded to it for the products that give o.
Lesson     load, product, decay, product, store follow one another, so every chunk waits for memory once and for each product in
           turn. PREFETCH loads the next chunk into registers before it works on this one. That hides no product behind another,
           and these registers are no longer free for anything else: it was four times slower than the baseline where it was
           first measured (a T4).
Caller     ``forward`` in ablations/gla.py launches it, for the variants ``sequential`` and ``pipelined``.
Source     experiment 039, docs/notebook/gla.md.
"""

import triton
import triton.language as tl

from onelaunch.ops.gla.kernels.chunk import (
    CHUNK,
    bounded,
    chunk_scores,
    exp,
    inside_state,
    load_rows,
    row_pointer,
    sequence_bounds,
    split_product,
    state_pointers,
    steps_of_chunk,
    store_rows,
    sum_after,
    sum_before,
)


@triton.jit
def load_chunk(
    p_q, p_k, p_v, p_g, chunk, length, q_stride_t, k_stride_t, v_stride_t, g_stride_t, t, k, v, K, V, SCALAR: tl.constexpr
):
    """Load q, k, v and g of a chunk in their dtypes; zeros behind the end of the sequence.

    ``t`` are the steps 0 to 63, ``k`` the channels of q and k, ``v`` those of the values.
    """
    at = tl.cast(chunk * CHUNK, tl.int64)
    left = length - chunk * CHUNK
    gk = tl.arange(0, 1) if SCALAR else k
    b_q = load_rows(p_q + at * q_stride_t, q_stride_t, t, left, k, K, False)
    b_k = load_rows(p_k + at * k_stride_t, k_stride_t, t, left, k, K, False)
    b_v = load_rows(p_v + at * v_stride_t, v_stride_t, t, left, v, V, False)
    b_g = load_rows(p_g + at * g_stride_t, g_stride_t, t, left, gk, 1 if SCALAR else K, False)
    return b_q, b_k, b_v, b_g


# Without do_not_specialize, Triton would compile again for a T or a number of sequences that is 1 or a multiple of 16.
@triton.jit(do_not_specialize=["T", "sequences"])
def forward_kernel(
    q, k, v, g, first, offsets, out, last, scale,
    T, H, K, V, sequences,
    q_stride_b, q_stride_t, q_stride_h, k_stride_b, k_stride_t, k_stride_h,
    v_stride_b, v_stride_t, v_stride_h, g_stride_b, g_stride_t, g_stride_h,
    BK: tl.constexpr, BV: tl.constexpr, BS: tl.constexpr, PARTS: tl.constexpr, STATE_PARTS: tl.constexpr, LIMIT: tl.constexpr,
    LARGEST: tl.constexpr, PRECISION: tl.constexpr, EVEN: tl.constexpr, SCALAR: tl.constexpr, PACKED: tl.constexpr,
    FIRST: tl.constexpr, LAST: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    """Loop over the chunks of one sequence, head and block of values; see the top of the file."""
    blocks = tl.cdiv(V, BV)
    head = tl.program_id(0) // blocks
    n, h = head // H, head % H
    c = tl.arange(0, BK)
    cv = (tl.program_id(0) % blocks) * BV + tl.arange(0, BV)
    t = tl.arange(0, CHUNK)
    mask = inside_state(c, cv, K, V)
    LOW: tl.constexpr = v.dtype.element_ty
    b, start, length, _ = sequence_bounds(offsets, n, T, PACKED)
    chunks = tl.cdiv(length, CHUNK)
    state = tl.zeros([BK, BV], tl.float32)
    if FIRST:
        state = tl.load(state_pointers(first, head, c, cv, K, V), mask=mask, other=0.0)
    p_q = row_pointer(q, b, start, h, q_stride_b, q_stride_t, q_stride_h)
    p_k = row_pointer(k, b, start, h, k_stride_b, k_stride_t, k_stride_h)
    p_v = row_pointer(v, b, start, h, v_stride_b, v_stride_t, v_stride_h)
    p_g = row_pointer(g, b, start, h, g_stride_b, g_stride_t, g_stride_h)
    p_out = row_pointer(out, b, start, h, tl.cast(T, tl.int64) * H * V, H * V, V)
    next_q, next_k, next_v, next_g = load_chunk(
        p_q, p_k, p_v, p_g, 0, length, q_stride_t, k_stride_t, v_stride_t, g_stride_t, t, c, cv, K, V, SCALAR
    )
    # num_stages=1 keeps Triton from pipelining the loads itself, which is what the two variants are to be compared without. The
    # last iteration loads a chunk behind the end: all its elements are masked.
    for chunk in tl.range(0, chunks, num_stages=1):
        at = tl.cast(chunk * CHUNK, tl.int64)
        left = length - chunk * CHUNK
        b_q, b_k, b_v, b_g = next_q, next_k, next_v, next_g
        if PREFETCH:
            next_q, next_k, next_v, next_g = load_chunk(
                p_q, p_k, p_v, p_g, chunk + 1, length, q_stride_t, k_stride_t, v_stride_t, g_stride_t, t, c, cv, K, V, SCALAR
            )
        scores = chunk_scores(
            p_q + at * q_stride_t, q_stride_t, p_k + at * k_stride_t, k_stride_t, p_g + at * g_stride_t, g_stride_t,
            scale, t, left, K, BS, LOW, PARTS, LIMIT, LARGEST, PRECISION, EVEN, SCALAR,
        )  # fmt: skip
        result = split_product(scores.to(LOW), b_v, tl.zeros([CHUNK, BV], tl.float32), 1, PRECISION)
        chunk_steps = steps_of_chunk(chunk)  # computed again in every chunk, instead of masks kept in registers
        decay = bounded(b_g)
        decayed_q = b_q.to(tl.float32) * scale * exp(sum_before(decay, chunk_steps, PRECISION))
        result = split_product(decayed_q.to(LOW), state.to(LOW), result, 1, PRECISION)
        store_rows(p_out + at * H * V, result, H * V, t, left, cv, V, EVEN)
        decayed_k = b_k.to(tl.float32) * exp(sum_after(decay, chunk_steps, PRECISION))
        state *= tl.trans(exp(tl.sum(decay, 0, keep_dims=True)))
        if STATE_PARTS == 0:  # split_product multiplies two float32 factors as such, whatever its PARTS
            b_v = b_v.to(tl.float32)
        state = split_product(tl.trans(decayed_k), b_v, state, STATE_PARTS, PRECISION)
        if not PREFETCH:
            next_q, next_k, next_v, next_g = load_chunk(
                p_q, p_k, p_v, p_g, chunk + 1, length, q_stride_t, k_stride_t, v_stride_t, g_stride_t, t, c, cv, K, V, SCALAR
            )
    if LAST:
        tl.store(state_pointers(last, head, c, cv, K, V), state, mask=mask)
