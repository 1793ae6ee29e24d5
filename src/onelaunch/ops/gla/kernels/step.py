"""Gated linear attention one step at a time, portable Triton: for decoding, and for sequences too short for chunks.

Computes   S_t = diag(e^(g_t)) S_{t-1} diag(e^(gv_t)) + k_t^T v_t,   o_t = scale * q_t S_t   per head, and the final state; gv
           is optional.
Grid       one CTA per sequence, head and BV values. No CTA waits for another one.
On chip    the state [BK, BV] in registers (BK >= K), float32: nothing is rounded but o.
Memory     the state is read and written once, which is nearly all the traffic of a single step; q, k, g are read once per BV
           values, v and gv once, each by every head of the state that shares it; o is written once.
Heads      a state is multiplied by the QUERIES queries that share it, one after the other; other tensors may have fewer heads
           than there are states (``shared_head`` in chunk.py).
Order      the vectors of a step are loaded one step ahead: the loop waits for memory once, not at every step. Only the
           further queries of a state (QUERIES above 1) are loaded in the step that needs them.
Caller     ``step`` in launch.py launches it, for the variants ``stepwise`` and, for a few steps forward, ``fused_recurrent``.
Source     the recurrent form; experiment 039.
"""

import triton
import triton.language as tl

from onelaunch.ops.gla.kernels.chunk import exp, inside_state, row_pointer, sequence_bounds, shared_head


@triton.jit
def load_step(p_q, p_k, p_v, p_g, p_gv, c, cv, inside, K, V, SCALAR: tl.constexpr, GV: tl.constexpr):
    """Load q, k [BK], v [BV], g [BK] and gv [BV] of one step, float32; zeros where not ``inside``, and for gv without GV."""
    b_q = tl.load(p_q + c, mask=(c < K) & inside, other=0.0).to(tl.float32)
    b_k = tl.load(p_k + c, mask=(c < K) & inside, other=0.0).to(tl.float32)
    b_v = tl.load(p_v + cv, mask=(cv < V) & inside, other=0.0).to(tl.float32)
    gc = c * 0 if SCALAR else c
    b_g = tl.load(p_g + gc, mask=(c < K) & inside, other=0.0).to(tl.float32)
    b_gv = 0.0
    if GV:
        b_gv = tl.load(p_gv + cv, mask=(cv < V) & inside, other=0.0).to(tl.float32)
    return b_q, b_k, b_v, b_g, b_gv


@triton.jit(do_not_specialize=["T", "sequences"])
def step_kernel(
    q, k, v, g, gv, first, offsets, out, last, scale,
    T, H, K, V, sequences, state_stride_k, state_stride_v,
    q_stride_b, q_stride_t, q_stride_h, k_stride_b, k_stride_t, k_stride_h, v_stride_b, v_stride_t, v_stride_h,
    g_stride_b, g_stride_t, g_stride_h, gv_stride_b, gv_stride_t, gv_stride_h,
    BK: tl.constexpr, BV: tl.constexpr, SCALAR: tl.constexpr, GV: tl.constexpr, PACKED: tl.constexpr, FIRST: tl.constexpr,
    LAST: tl.constexpr,
    Q_GROUP: tl.constexpr = 1, K_GROUP: tl.constexpr = 1, V_GROUP: tl.constexpr = 1, G_GROUP: tl.constexpr = 1,
    QUERIES: tl.constexpr = 1,
):  # fmt: skip
    """Loop over the steps of one sequence, head and block of values; see the top of the file.

    H counts the heads of the state. Q_GROUP, K_GROUP and V_GROUP of them share a head of q, k and v, G_GROUP one of g and gv, and
    the output has QUERIES heads for each. If QUERIES is above 1, q has as many heads as the output. GV: there is gv.

    States [N, H, K, V] may have values or keys next to each other in memory: ``state_stride_k`` and ``state_stride_v``, in
    elements.
    """
    blocks = tl.cdiv(V, BV)
    head = tl.program_id(0) // blocks
    n, h = head // H, head % H
    c = tl.arange(0, BK)
    cv = (tl.program_id(0) % blocks) * BV + tl.arange(0, BV)
    inside = inside_state(c, cv, K, V)
    cell = head.to(tl.int64) * K * V + c[:, None] * state_stride_k + cv[None, :] * state_stride_v
    b, start, length, _ = sequence_bounds(offsets, n, T, PACKED)
    state = tl.zeros([BK, BV], tl.float32)
    if FIRST:
        state = tl.load(first + cell, mask=inside, other=0.0)
    q_head = shared_head(h, Q_GROUP) if QUERIES == 1 else h * QUERIES
    p_q = row_pointer(q, b, start, q_head, q_stride_b, q_stride_t, q_stride_h)
    p_k = row_pointer(k, b, start, shared_head(h, K_GROUP), k_stride_b, k_stride_t, k_stride_h)
    p_v = row_pointer(v, b, start, shared_head(h, V_GROUP), v_stride_b, v_stride_t, v_stride_h)
    p_g = row_pointer(g, b, start, shared_head(h, G_GROUP), g_stride_b, g_stride_t, g_stride_h)
    p_gv = p_g
    if GV:
        p_gv = row_pointer(gv, b, start, shared_head(h, G_GROUP), gv_stride_b, gv_stride_t, gv_stride_h)
    out_heads = H if QUERIES == 1 else H * QUERIES
    out_head = h if QUERIES == 1 else h * QUERIES
    p_out = row_pointer(out, b, start, out_head, tl.cast(T, tl.int64) * out_heads * V, out_heads * V, V)
    next_q, next_k, next_v, next_g, next_gv = load_step(p_q, p_k, p_v, p_g, p_gv, c, cv, length > 0, K, V, SCALAR, GV)
    for t in tl.range(0, length, num_stages=1):
        b_q, b_k, b_v, b_g, b_gv = next_q, next_k, next_v, next_g, next_gv
        p_q += q_stride_t
        p_k += k_stride_t
        p_v += v_stride_t
        p_g += g_stride_t
        if GV:
            p_gv += gv_stride_t
        next_q, next_k, next_v, next_g, next_gv = load_step(p_q, p_k, p_v, p_g, p_gv, c, cv, t + 1 < length, K, V, SCALAR, GV)
        state *= exp(b_g)[:, None]
        if GV:
            state *= exp(b_gv)[None, :]
        state += b_k[:, None] * b_v[None, :]
        b_out = tl.sum(state * (b_q * scale)[:, None], 0)
        tl.store(p_out + cv, b_out.to(out.dtype.element_ty), mask=cv < V)
        if QUERIES > 1:
            for other in tl.range(1, QUERIES, num_stages=1):  # p_q points to the next step already
                p_other = p_q - q_stride_t + tl.cast(other, tl.int64) * q_stride_h
                b_q = tl.load(p_other + c, mask=c < K, other=0.0).to(tl.float32)
                b_out = tl.sum(state * (b_q * scale)[:, None], 0)
                tl.store(p_out + other * V + cv, b_out.to(out.dtype.element_ty), mask=cv < V)
        p_out += out_heads * V
    if LAST:
        tl.store(last + cell, state, mask=inside)
