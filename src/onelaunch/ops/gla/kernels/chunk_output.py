"""Chunk output of gated linear attention (fla's chunk_o), portable Triton: o, or dv with time reversed, parallel over chunks.

Computes   o = scale * (q e^before) S + tril(P) v of one chunk of 64 steps, or dv = (k e^after) dS + P^T do. chunk.py explains
           the formula, the grid, the decays, the roundings and the constants.
Caller     ``chunk_output`` in launch.py launches it.
Source     as chunk.py.
"""

import triton
import triton.language as tl

from onelaunch.ops.gla.kernels.chunk import (
    CHUNK,
    chunk_scores,
    exp,
    find_chunk,
    inside_state,
    load_decay,
    load_rows,
    row_pointer,
    shared_head,
    split_product,
    state_pointers,
    steps_of_chunk,
    store_rows,
    sum_after,
    sum_before,
)


@triton.jit
def add_state_gradient(
    dv, p_k, k_stride_t, p_g, g_stride_t, dstates, index, left, v, K, V,
    BK: tl.constexpr, LOW: tl.constexpr, PRECISION: tl.constexpr, EVEN: tl.constexpr, SCALAR: tl.constexpr,
):  # fmt: skip
    """Return ``dv`` [64, BV] plus (k e^after) dS, for the gradient ``index`` of a state."""
    for first in range(0, K, BK):
        t = steps_of_chunk(first)  # 0 to 63, computed anew, so that no masks stay in registers (chunk.py)
        c = first + tl.arange(0, BK)
        gc = tl.arange(0, 1) if SCALAR else c
        channels = 1 if SCALAR else K
        b_g = load_decay(p_g, g_stride_t, t, left, gc, channels, EVEN)
        decayed_rows = load_rows(p_k, k_stride_t, t, left, c, K, EVEN).to(tl.float32) * exp(sum_after(b_g, t, PRECISION))
        b_dstate = tl.load(state_pointers(dstates, index, c, v, K, V), mask=inside_state(c, v, K, V), other=0.0)
        dv = split_product(decayed_rows.to(LOW), b_dstate.to(LOW), dv, 1, PRECISION)
    return dv


@triton.jit(do_not_specialize=["T", "sequences"])
def chunk_output_kernel(
    q, k, values, g, offsets, states, out, scale,
    T, H, K, V, sequences,
    q_stride_b, q_stride_t, q_stride_h, k_stride_b, k_stride_t, k_stride_h,
    values_stride_b, values_stride_t, values_stride_h, g_stride_b, g_stride_t, g_stride_h, out_stride_t,
    BK: tl.constexpr, BV: tl.constexpr, BISECTION_STEPS: tl.constexpr, PARTS: tl.constexpr, LIMIT: tl.constexpr,
    LARGEST: tl.constexpr, PRECISION: tl.constexpr, EVEN: tl.constexpr, SCALAR: tl.constexpr, PACKED: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    Q_GROUP: tl.constexpr = 1, K_GROUP: tl.constexpr = 1, VALUES_GROUP: tl.constexpr = 1, G_GROUP: tl.constexpr = 1,
    STATE_GROUP: tl.constexpr = 1, STATES: tl.constexpr = 1, QUERIES: tl.constexpr = 1,
):  # fmt: skip
    """Store ``out`` [B, T, H, V], tokens ``out_stride_t`` elements apart.

    It is o from ``values`` = v and the ``states`` that enter the chunks. With TRANSPOSED it is dv from ``values`` = do and the
    gradients of the states that leave the chunks. ``slot`` is the place of a chunk among all sequences, see
    ``sequence_bounds`` in chunk.py.

    H counts the heads of ``out``. A head of dv is the sum over its STATES states and their QUERIES heads of o each. Of the heads
    of o, Q_GROUP share a head of q, and so on.
    """
    blocks = tl.cdiv(V, BV)
    slot, out_head = tl.program_id(0) // (blocks * H), (tl.program_id(0) // blocks) % H
    v = (tl.program_id(0) % blocks) * BV + tl.arange(0, BV)
    b, start, left = find_chunk(offsets, slot, T, sequences, BISECTION_STEPS, PACKED)
    if left <= 0:
        return
    t = tl.arange(0, CHUNK)
    LOW: tl.constexpr = values.dtype.element_ty
    HEADS: tl.constexpr = STATES * QUERIES  # heads of o per head of ``out``
    if HEADS == 1:
        p_q = row_pointer(q, b, start, shared_head(out_head, Q_GROUP), q_stride_b, q_stride_t, q_stride_h)
        p_k = row_pointer(k, b, start, shared_head(out_head, K_GROUP), k_stride_b, k_stride_t, k_stride_h)
        p_g = row_pointer(g, b, start, shared_head(out_head, G_GROUP), g_stride_b, g_stride_t, g_stride_h)
        scores = chunk_scores(
            p_q, q_stride_t, p_k, k_stride_t, p_g, g_stride_t, scale, t, left, K,
            BK, LOW, PARTS, LIMIT, LARGEST, PRECISION, EVEN, SCALAR,
        )  # fmt: skip
        if TRANSPOSED:
            scores = tl.trans(scores)
        values_head = shared_head(out_head, VALUES_GROUP)
        p_values = row_pointer(values, b, start, values_head, values_stride_b, values_stride_t, values_stride_h)
        b_values = load_rows(p_values, values_stride_t, t, left, v, V, EVEN)
        result = split_product(scores.to(LOW), b_values, tl.zeros([CHUNK, BV], tl.float32), 1, PRECISION)
        index = slot.to(tl.int64) * shared_head(H, STATE_GROUP) + shared_head(out_head, STATE_GROUP)
        for first in range(0, K, BK):
            t = steps_of_chunk(first)  # 0 to 63, computed anew, so that no masks stay in registers (chunk.py)
            c = first + tl.arange(0, BK)
            gc = tl.arange(0, 1) if SCALAR else c
            channels = 1 if SCALAR else K
            b_g = load_decay(p_g, g_stride_t, t, left, gc, channels, EVEN)
            if TRANSPOSED:
                decayed_rows = load_rows(p_k, k_stride_t, t, left, c, K, EVEN).to(tl.float32) * exp(sum_after(b_g, t, PRECISION))
            else:
                b_q = load_rows(p_q, q_stride_t, t, left, c, K, EVEN).to(tl.float32)
                decayed_rows = b_q * scale * exp(sum_before(b_g, t, PRECISION))
            b_state = tl.load(state_pointers(states, index, c, v, K, V), mask=inside_state(c, v, K, V), other=0.0)
            result = split_product(decayed_rows.to(LOW), b_state.to(LOW), result, 1, PRECISION)
    else:  # dv of a head that several heads of o share; ``values`` is do, which has all heads
        tl.static_assert(TRANSPOSED, "only dv is a sum over heads")
        result = tl.zeros([CHUNK, BV], tl.float32)
        for each in tl.range(0, STATES):
            state = out_head * STATES + each
            k_head, g_head = shared_head(state * QUERIES, K_GROUP), shared_head(state * QUERIES, G_GROUP)
            p_k = row_pointer(k, b, start, k_head, k_stride_b, k_stride_t, k_stride_h)
            p_g = row_pointer(g, b, start, g_head, g_stride_b, g_stride_t, g_stride_h)
            for query in tl.range(0, QUERIES):
                h = state * QUERIES + query
                p_q = row_pointer(q, b, start, shared_head(h, Q_GROUP), q_stride_b, q_stride_t, q_stride_h)
                scores = chunk_scores(
                    p_q, q_stride_t, p_k, k_stride_t, p_g, g_stride_t, scale, t, left, K,
                    BK, LOW, PARTS, LIMIT, LARGEST, PRECISION, EVEN, SCALAR,
                )  # fmt: skip
                p_values = row_pointer(values, b, start, h, values_stride_b, values_stride_t, values_stride_h)
                b_values = load_rows(p_values, values_stride_t, t, left, v, V, EVEN)
                result = split_product(tl.trans(scores).to(LOW), b_values, result, 1, PRECISION)
            index = slot.to(tl.int64) * (H * STATES) + state
            result = add_state_gradient(
                result, p_k, k_stride_t, p_g, g_stride_t, states, index, left, v, K, V, BK, LOW, PRECISION, EVEN, SCALAR,
            )  # fmt: skip
    p_out = row_pointer(out, b, start, out_head, tl.cast(T, tl.int64) * out_stride_t, out_stride_t, V)
    store_rows(p_out, result, out_stride_t, t, left, v, V, EVEN)
