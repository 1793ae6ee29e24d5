"""Gradients of gated linear attention with respect to q, k and g, parallel over chunks.

Computes   over a chunk that S enters, with dS the gradient of the state behind it, and dP = tril(do v^T):
           dq = scale * (e^before (do S^T) + sum_s dP[t, s] k_s e^(g_s+1 + ... + g_t))
           dk = e^after (v dS^T) + scale * sum_t dP[t, s] q_t e^(g_s+1 + ... + g_t)
           dg_t = the sum of all that passes from before t to t or behind it: from S to dS, from S to steps behind, from steps before to
           dS, and between steps of the chunk
Grid       a program per chunk and head; blocks of K one after the other, blocks of V inside.
On chip    dP [64, 64]; dq, dk and dg [64, BK], float32.
Memory     S and dS of the chunk in (carry_kernel wrote them), q, k, g in and dq, dk, dg out once; v and do once per block of K.
Decay      as in kernels.py. Every part of dg has exp(g_t) as a factor, none is the difference of larger ones but where a chunk's decay
           is benign: there the pairs within the chunk are suffix sums of q dq - k dk, in which pairs that lie behind t altogether
           cancel. They do so only if dq and dk hold the very same terms, so what is summed are products of what was rounded.
           dg adds up over a chunk alone: errors do not along T.
Rounding   dq and dk may have two roundings beside their own: those of dP and k, or that of a state. A float32 dg beside 16-bit inputs
           is held to float32's own accuracy: then nothing is rounded (EXACT).
"""

import triton
import triton.language as tl

from onelaunch.ops.gla.kernels import (
    CHUNK,
    LEVELS,
    exp,
    find_chunk,
    from_middle,
    in_right_block,
    inside_state,
    is_benign,
    load_decay,
    load_rows,
    neighbours,
    pair_decay,
    row_pointer,
    split_product,
    state_pointers,
    steps_of_chunk,
    store_rows,
    sum_after,
    sum_before,
    sums,
    sums_around,
    sums_by_block,
)


@triton.jit
def sum_earlier(x, t, PRECISION: tl.constexpr):
    """Before each step."""
    return sums(x, t * 0, t, PRECISION)


@triton.jit
def sum_onward(x, t, PRECISION: tl.constexpr):
    """From each step on."""
    return sums(x, t, t * 0 + CHUNK, PRECISION)


@triton.jit
def pair_gradients(both, q, k, t, LOW: tl.constexpr, PARTS: tl.constexpr, PRECISION: tl.constexpr):
    """Of decayed queries and keys [64, BK], and the products of the rounded ones with theirs; both [64, 64] is dP and its
    transpose."""
    zero = tl.zeros(q.shape, tl.float32)
    none = tl.zeros([CHUNK, CHUNK], LOW)
    keys = k.to(LOW)
    dq = split_product(tl.where(t[:, None] > t[None, :], both, none), keys, zero, PARTS, PRECISION)
    dk = split_product(tl.where(t[:, None] < t[None, :], both, none), q, zero, PARTS, PRECISION)
    return dq, dk, q * dq, keys.to(tl.float32) * dk


@triton.jit
def by_pairs(
    both, q, k, g, t,
    LOW: tl.constexpr, PARTS: tl.constexpr, LIMIT: tl.constexpr, LARGEST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What pairs of different steps give dq, dk and dg, over a block of keys; q, k, g float32 [64, BK], both as in
    pair_gradients."""
    distance = from_middle(g, t, PRECISION)
    if is_benign(distance, q, k, LIMIT, LARGEST):
        shrink = exp(distance)
        grow = exp(-distance)
        dq, dk, of_q, of_k = pair_gradients(both, q * shrink, k * grow, t, LOW, PARTS, PRECISION)
        dq *= shrink
        dk *= grow
        dg = sum_onward(of_q - of_k, t, PRECISION)
    else:
        dq = tl.zeros(q.shape, tl.float32)
        dk = tl.zeros(q.shape, tl.float32)
        dg = tl.zeros(q.shape, tl.float32)
        for level in range(LEVELS):
            # right steps are queries here and left ones keys, so one product has dq of those and dk of these
            right = in_right_block(t, level)[:, None]
            factor = exp(sums_by_block(g, t, level, PRECISION))
            decayed = factor * tl.where(right, q, k)
            taken = tl.where(neighbours(t, level), both, tl.zeros([CHUNK, CHUNK], LOW))
            found = split_product(taken, decayed, tl.zeros(q.shape, tl.float32), PARTS, PRECISION)
            dg += sums_around(decayed * found, t, level, PRECISION)
            found *= factor
            dq += tl.where(right, found, 0.0)
            dk += tl.where(right, 0.0, found)
    return dq, dk, dg


@triton.jit(do_not_specialize=["T", "sequences"])
def gradients_kernel(
    q, k, v, g, do, offsets, states, dstates, dq, dk, dg, scale,
    T, H, K, V, sequences,
    q_stride_b, q_stride_t, q_stride_h, k_stride_b, k_stride_t, k_stride_h, v_stride_b, v_stride_t, v_stride_h,
    g_stride_b, g_stride_t, g_stride_h, do_stride_b, do_stride_t, do_stride_h,
    BK: tl.constexpr, BV: tl.constexpr, STEPS: tl.constexpr, EXACT: tl.constexpr, PARTS: tl.constexpr,
    LIMIT: tl.constexpr, LARGEST: tl.constexpr, PRECISION: tl.constexpr, EVEN: tl.constexpr, SCALAR: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """dq, dk [B, T, H, K] and dg [B, T, H, K or 1], contiguous."""
    slot, h = tl.program_id(0) // H, tl.program_id(0) % H
    b, start, left = find_chunk(offsets, slot, T, sequences, STEPS, PACKED)
    if left <= 0:
        return
    t = tl.arange(0, CHUNK)
    LOW: tl.constexpr = tl.float32 if EXACT else v.dtype.element_ty
    p_q = row_pointer(q, b, start, h, q_stride_b, q_stride_t, q_stride_h)
    p_k = row_pointer(k, b, start, h, k_stride_b, k_stride_t, k_stride_h)
    p_v = row_pointer(v, b, start, h, v_stride_b, v_stride_t, v_stride_h)
    p_g = row_pointer(g, b, start, h, g_stride_b, g_stride_t, g_stride_h)
    p_do = row_pointer(do, b, start, h, do_stride_b, do_stride_t, do_stride_h)
    stride_b = tl.cast(T, tl.int64) * H * K
    index = slot.to(tl.int64) * H + h

    dscores = tl.zeros([CHUNK, CHUNK], tl.float32)
    for first in range(0, V, BV):
        c = first + tl.arange(0, BV)
        b_do = load_rows(p_do, do_stride_t, t, left, c, V, EVEN)
        b_v = load_rows(p_v, v_stride_t, t, left, c, V, EVEN)
        dscores = tl.dot(b_do, tl.trans(b_v), dscores, input_precision=PRECISION)
    alone = tl.sum(tl.where(t[:, None] == t[None, :], dscores, 0.0), 1)[:, None]  # of steps with themselves
    dscores = tl.where(t[:, None] > t[None, :], dscores, 0.0)
    if SCALAR:
        b_g = load_decay(p_g, g_stride_t, t, left, tl.arange(0, 1), 1, EVEN)
        dscores *= pair_decay(b_g, t, PRECISION)
        scores = tl.zeros([CHUNK, CHUNK], tl.float32)
        dg_before = tl.zeros([CHUNK, 1], tl.float32)
        dg_behind = tl.zeros([CHUNK, 1], tl.float32)
        dg_through = tl.zeros([1, 1], tl.float32)

    both = (dscores + tl.trans(dscores)).to(LOW)

    for first in range(0, K, BK):
        t = steps_of_chunk(first)
        c = first + tl.arange(0, BK)
        gc = tl.arange(0, 1) if SCALAR else c
        channels = 1 if SCALAR else K
        b_q = load_rows(p_q, q_stride_t, t, left, c, K, EVEN)
        b_k = load_rows(p_k, k_stride_t, t, left, c, K, EVEN)
        if SCALAR:
            scores = tl.dot(b_q, tl.trans(b_k), scores, input_precision=PRECISION)
        b_q = b_q.to(tl.float32) * scale
        b_k = b_k.to(tl.float32)
        if SCALAR:
            b_dq, b_dk, _, _ = pair_gradients(both, b_q, b_k, t, LOW, PARTS, PRECISION)
        else:
            b_g = load_decay(p_g, g_stride_t, t, left, gc, channels, EVEN)
            b_dq, b_dk, b_dg = by_pairs(both, b_q, b_k, b_g, t, LOW, PARTS, LIMIT, LARGEST, PRECISION)
        b_dq += alone * b_k
        b_dk += alone * b_q

        t = steps_of_chunk(first + 1)
        from_states = tl.zeros([CHUNK, BK], tl.float32)
        from_dstates = tl.zeros([CHUNK, BK], tl.float32)
        through = tl.zeros([BK], tl.float32)  # from S to dS
        for other in range(0, V, BV):
            cv = other + tl.arange(0, BV)
            held = inside_state(c, cv, K, V)
            b_state = tl.load(state_pointers(states, index, c, cv, K, V), mask=held, other=0.0)
            b_dstate = tl.load(state_pointers(dstates, index, c, cv, K, V), mask=held, other=0.0)
            through += tl.sum(b_state.to(tl.float32) * b_dstate.to(tl.float32), 1)
            b_do = load_rows(p_do, do_stride_t, t, left, cv, V, EVEN)
            b_v = load_rows(p_v, v_stride_t, t, left, cv, V, EVEN)
            if PARTS == 0:
                b_do = b_do.to(tl.float32)
                b_v = b_v.to(tl.float32)
            from_states = split_product(b_do, tl.trans(b_state), from_states, PARTS, PRECISION)
            from_dstates = split_product(b_v, tl.trans(b_dstate), from_dstates, PARTS, PRECISION)
        b_g = load_decay(p_g, g_stride_t, t, left, gc, channels, EVEN)
        through = through[None, :] * exp(tl.sum(b_g, 0, keep_dims=True))
        from_states *= exp(sum_before(b_g, t, PRECISION))
        b_q = load_rows(p_q, q_stride_t, t, left, c, K, EVEN).to(tl.float32) * scale
        behind = b_q * from_states  # from S to each step
        p_dq = row_pointer(dq, b, start, h, stride_b, H * K, K)
        store_rows(p_dq, (b_dq + from_states) * scale, H * K, t, left, c, K, EVEN)
        from_dstates *= exp(sum_after(b_g, t, PRECISION))
        b_k = load_rows(p_k, k_stride_t, t, left, c, K, EVEN).to(tl.float32)
        before = b_k * from_dstates  # from each step to dS
        p_dk = row_pointer(dk, b, start, h, stride_b, H * K, K)
        store_rows(p_dk, b_dk + from_dstates, H * K, t, left, c, K, EVEN)
        if SCALAR:
            dg_before += tl.sum(before, 1, keep_dims=True)
            dg_behind += tl.sum(behind, 1, keep_dims=True)
            dg_through += tl.sum(through, 1, keep_dims=True)
        else:
            b_dg += through + sum_earlier(before, t, PRECISION) + sum_onward(behind, t, PRECISION)
            p_dg = row_pointer(dg, b, start, h, stride_b, H * K, K)
            store_rows(p_dg, b_dg, H * K, t, left, c, K, EVEN)
    if SCALAR:
        b_dg = dg_through + sum_earlier(dg_before, t, PRECISION)
        b_dg += sum_onward(dg_behind, t, PRECISION)
        # [t, s]: from s to all steps from t on; what comes from before t is what passes t
        onward = sum_onward(scores * dscores * scale, t, PRECISION)
        b_dg += tl.sum(tl.where(t[None, :] < t[:, None], onward, 0.0), 1, keep_dims=True)
        p_dg = row_pointer(dg, b, start, h, tl.cast(T, tl.int64) * H, H, 1)
        store_rows(p_dg, b_dg, H, t, left, tl.arange(0, 1), 1, EVEN)
