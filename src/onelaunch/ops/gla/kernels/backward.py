"""Gradients of gated linear attention with respect to q, k and g, parallel over chunks.

Computes   over a chunk that S enters, with dS the gradient of the state behind it, and dP = tril(do v^T):
           dq = scale * (e^before (do S^T) + sum_s dP[t, s] k_s e^(g_s+1 + ... + g_t))
           dk = e^after (v dS^T) + scale * sum_t dP[t, s] q_t e^(g_s+1 + ... + g_t)
           dg_t = the sum of all that passes from before t to t or behind it: from S to dS, from S to steps, from steps to dS, and
           between steps of the chunk
Grid       a program per chunk and head; blocks of K one after the other, blocks of V inside.
On chip    dP [64, 64]; dq, dk and dg [64, BK], float32.
Memory     S and dS of the chunk in (carry_kernel wrote them), q, k, g in and dq, dk, dg out once; v and do once per block of K.
Decay      as in chunk.py. Every part of dg has exp(g_t) as a factor, and none is the difference of larger ones but where a
           chunk's decay is benign: there the pairs within the chunk are suffix sums of q dq - k dk, in which pairs that lie
           behind t altogether cancel. They do so only if dq and dk hold the very same terms, so the products are those of what
           was rounded. dg adds up over a chunk alone, so that errors do not add up along T.
Rounding   dq and dk may have two roundings beside their own: those of dP and k, or that of a state. A float32 dg beside 16-bit
           inputs is held to float32's own accuracy: then nothing is rounded (EXACT).
"""

import triton
import triton.language as tl

from onelaunch.ops.gla.kernels.chunk import (
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
    """Of decayed queries and keys [64, BK], and each one's product with its own; ``both`` [64, 64] is dP and its transpose."""
    zero = tl.zeros(q.shape, tl.float32)
    none = tl.zeros([CHUNK, CHUNK], LOW)
    keys = k.to(LOW)
    dq = split_product(tl.where(t[:, None] > t[None, :], both, none), keys, zero, PARTS, PRECISION)
    dk = split_product(tl.where(t[:, None] < t[None, :], both, none), q, zero, PARTS, PRECISION)
    return dq, dk, q * dq, keys.to(tl.float32) * dk


@triton.jit
def by_pairs(both, q, k, g, t, LOW: tl.constexpr, PARTS: tl.constexpr, PRECISION: tl.constexpr, BENIGN: tl.constexpr):
    """What pairs of different steps give dq, dk and dg, over a block of keys; q, k, g float32 [64, BK]."""
    if BENIGN:
        distance = from_middle(g, t, PRECISION)
        shrink = exp(distance)
        grow = exp(-distance)
        dq, dk, of_q, of_k = pair_gradients(both, q * shrink, k * grow, t, LOW, PARTS, PRECISION)
        return dq * shrink, dk * grow, sum_onward(of_q - of_k, t, PRECISION)
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


@triton.jit
def score_gradients(
    p_do, do_stride_t, p_v, v_stride_t, t, left, V, BV: tl.constexpr, PRECISION: tl.constexpr, EVEN: tl.constexpr
):
    """dP [64, 64] below the diagonal, and on it [64, 1]."""
    dscores = tl.zeros([CHUNK, CHUNK], tl.float32)
    for first in range(0, V, BV):
        c = first + tl.arange(0, BV)
        b_do = load_rows(p_do, do_stride_t, t, left, c, V, EVEN)
        b_v = load_rows(p_v, v_stride_t, t, left, c, V, EVEN)
        dscores = split_product(b_do, tl.trans(b_v), dscores, 1, PRECISION)
    alone = tl.sum(tl.where(t[:, None] == t[None, :], dscores, 0.0), 1)[:, None]
    return tl.where(t[:, None] > t[None, :], dscores, 0.0), alone


@triton.jit
def through_states(
    p_do, do_stride_t, p_v, v_stride_t, states, dstates, index, t, left, c, K, V,
    BV: tl.constexpr, PARTS: tl.constexpr, PRECISION: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """For a block of keys do S^T and v dS^T [64, BK], undecayed, and the sum over V of S and dS [1, BK]."""
    from_states = tl.zeros([CHUNK, c.shape[0]], tl.float32)
    from_dstates = tl.zeros([CHUNK, c.shape[0]], tl.float32)
    whole = tl.zeros([c.shape[0]], tl.float32)
    for first in range(0, V, BV):
        cv = first + tl.arange(0, BV)
        held = inside_state(c, cv, K, V)
        b_state = tl.load(state_pointers(states, index, c, cv, K, V), mask=held, other=0.0)
        b_dstate = tl.load(state_pointers(dstates, index, c, cv, K, V), mask=held, other=0.0)
        whole += tl.sum(b_state.to(tl.float32) * b_dstate.to(tl.float32), 1)
        b_do = load_rows(p_do, do_stride_t, t, left, cv, V, EVEN)
        b_v = load_rows(p_v, v_stride_t, t, left, cv, V, EVEN)
        if PARTS == 0:
            b_do = b_do.to(tl.float32)
            b_v = b_v.to(tl.float32)
        from_states = split_product(b_do, tl.trans(b_state), from_states, PARTS, PRECISION)
        from_dstates = split_product(b_v, tl.trans(b_dstate), from_dstates, PARTS, PRECISION)
    return from_states, from_dstates, whole[None, :]


@triton.jit
def chunk_gradients(
    p_q, p_k, p_v, p_g, p_do, p_dq, p_dk, p_dg, states, dstates, index, scale, t, left, H, K, V,
    q_stride_t, k_stride_t, v_stride_t, g_stride_t, do_stride_t, d_stride_t,
    BK: tl.constexpr, BV: tl.constexpr, LOW: tl.constexpr, PARTS: tl.constexpr, PRECISION: tl.constexpr, EVEN: tl.constexpr,
    BENIGN: tl.constexpr,
):  # fmt: skip
    """dq, dk and dg of a chunk with a decay per channel."""
    dscores, alone = score_gradients(p_do, do_stride_t, p_v, v_stride_t, t, left, V, BV, PRECISION, EVEN)
    both = (dscores + tl.trans(dscores)).to(LOW)
    for first in range(0, K, BK):
        t = steps_of_chunk(first)
        c = first + tl.arange(0, BK)
        b_q = load_rows(p_q, q_stride_t, t, left, c, K, EVEN).to(tl.float32) * scale
        b_k = load_rows(p_k, k_stride_t, t, left, c, K, EVEN).to(tl.float32)
        b_g = load_decay(p_g, g_stride_t, t, left, c, K, EVEN)
        b_dq, b_dk, b_dg = by_pairs(both, b_q, b_k, b_g, t, LOW, PARTS, PRECISION, BENIGN)
        b_dq += alone * b_k
        b_dk += alone * b_q
        t = steps_of_chunk(first + 1)
        from_states, from_dstates, whole = through_states(
            p_do, do_stride_t, p_v, v_stride_t, states, dstates, index, t, left, c, K, V, BV, PARTS, PRECISION, EVEN
        )
        b_g = load_decay(p_g, g_stride_t, t, left, c, K, EVEN)
        b_dg += whole * exp(tl.sum(b_g, 0, keep_dims=True))
        from_states *= exp(sum_before(b_g, t, PRECISION))
        store_rows(p_dq, (b_dq + from_states) * scale, d_stride_t, t, left, c, K, EVEN)
        b_q = load_rows(p_q, q_stride_t, t, left, c, K, EVEN).to(tl.float32) * scale
        b_dg += sum_onward(b_q * from_states, t, PRECISION)
        from_dstates *= exp(sum_after(b_g, t, PRECISION))
        store_rows(p_dk, b_dk + from_dstates, d_stride_t, t, left, c, K, EVEN)
        b_k = load_rows(p_k, k_stride_t, t, left, c, K, EVEN).to(tl.float32)
        b_dg += sum_earlier(b_k * from_dstates, t, PRECISION)
        store_rows(p_dg, b_dg, H * K, t, left, c, K, EVEN)


@triton.jit
def chunk_gradients_scalar(
    p_q, p_k, p_v, p_g, p_do, p_dq, p_dk, p_dg, states, dstates, index, scale, t, left, H, K, V,
    q_stride_t, k_stride_t, v_stride_t, g_stride_t, do_stride_t, d_stride_t,
    BK: tl.constexpr, BV: tl.constexpr, LOW: tl.constexpr, PARTS: tl.constexpr, PRECISION: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """The same with a decay per head."""
    one = tl.arange(0, 1)
    b_g = load_decay(p_g, g_stride_t, t, left, one, 1, EVEN)
    dscores, alone = score_gradients(p_do, do_stride_t, p_v, v_stride_t, t, left, V, BV, PRECISION, EVEN)
    dscores *= pair_decay(b_g, t, PRECISION)
    both = (dscores + tl.trans(dscores)).to(LOW)
    scores = tl.zeros([CHUNK, CHUNK], tl.float32)
    dg_before = tl.zeros([CHUNK, 1], tl.float32)  # from each step to dS
    dg_behind = tl.zeros([CHUNK, 1], tl.float32)  # from S to each step
    dg_whole = tl.zeros([1, 1], tl.float32)  # from S to dS
    before = exp(sum_before(b_g, t, PRECISION))
    after = exp(sum_after(b_g, t, PRECISION))
    for first in range(0, K, BK):
        t = steps_of_chunk(first)
        c = first + tl.arange(0, BK)
        b_q = load_rows(p_q, q_stride_t, t, left, c, K, EVEN)
        b_k = load_rows(p_k, k_stride_t, t, left, c, K, EVEN)
        scores = split_product(b_q, tl.trans(b_k), scores, 1, PRECISION)
        b_q = b_q.to(tl.float32) * scale
        b_k = b_k.to(tl.float32)
        b_dq, b_dk, _, _ = pair_gradients(both, b_q, b_k, t, LOW, PARTS, PRECISION)
        from_states, from_dstates, whole = through_states(
            p_do, do_stride_t, p_v, v_stride_t, states, dstates, index, t, left, c, K, V, BV, PARTS, PRECISION, EVEN
        )
        from_states *= before
        from_dstates *= after
        dg_behind += tl.sum(b_q * from_states, 1, keep_dims=True)
        dg_before += tl.sum(b_k * from_dstates, 1, keep_dims=True)
        dg_whole += tl.sum(whole, 1, keep_dims=True)
        store_rows(p_dq, (b_dq + from_states + alone * b_k) * scale, d_stride_t, t, left, c, K, EVEN)
        store_rows(p_dk, b_dk + from_dstates + alone * b_q, d_stride_t, t, left, c, K, EVEN)
    b_dg = dg_whole * exp(tl.sum(b_g, 0, keep_dims=True))
    b_dg += sum_earlier(dg_before, t, PRECISION) + sum_onward(dg_behind, t, PRECISION)
    # [t, s]: from s to all steps from t on; what comes from before t is what passes t
    onward = sum_onward(scores * dscores * scale, t, PRECISION)
    b_dg += tl.sum(tl.where(t[None, :] < t[:, None], onward, 0.0), 1, keep_dims=True)
    store_rows(p_dg, b_dg, H, t, left, one, 1, EVEN)


@triton.jit
def chunk_is_benign(
    p_q, q_stride_t, p_k, k_stride_t, p_g, g_stride_t, t, left, K,
    BK: tl.constexpr, LIMIT: tl.constexpr, LARGEST: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """The same of a whole chunk, before anything else: code that serves both kinds in turn needs the registers of both."""
    benign = left > 0
    for first in range(0, K, BK):
        c = first + tl.arange(0, BK)
        b_g = load_decay(p_g, g_stride_t, t, left, c, K, EVEN)
        b_q = b_g
        b_k = b_g
        if LARGEST is not None:
            b_q = load_rows(p_q, q_stride_t, t, left, c, K, EVEN)
            b_k = load_rows(p_k, k_stride_t, t, left, c, K, EVEN)
        benign = benign & is_benign(b_q, b_k, b_g, t, LIMIT, LARGEST)
    return benign


@triton.jit(do_not_specialize=["T", "sequences"])
def gradients_kernel(
    q, k, v, g, do, offsets, states, dstates, dq, dk, dg, scale,
    T, H, K, V, sequences,
    q_stride_b, q_stride_t, q_stride_h, k_stride_b, k_stride_t, k_stride_h, v_stride_b, v_stride_t, v_stride_h,
    g_stride_b, g_stride_t, g_stride_h, do_stride_b, do_stride_t, do_stride_h, d_stride_t,
    BK: tl.constexpr, BV: tl.constexpr, STEPS: tl.constexpr, EXACT: tl.constexpr, PARTS: tl.constexpr,
    LIMIT: tl.constexpr, LARGEST: tl.constexpr, PRECISION: tl.constexpr, EVEN: tl.constexpr, SCALAR: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """dq, dk [B, T, H, K], tokens ``d_stride_t`` apart, and dg [B, T, H, K or 1], contiguous."""
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
    steps = tl.cast(T, tl.int64)
    p_dq = row_pointer(dq, b, start, h, steps * d_stride_t, d_stride_t, K)
    p_dk = row_pointer(dk, b, start, h, steps * d_stride_t, d_stride_t, K)
    index = slot.to(tl.int64) * H + h
    if SCALAR:
        p_dg = row_pointer(dg, b, start, h, steps * H, H, 1)
        chunk_gradients_scalar(
            p_q, p_k, p_v, p_g, p_do, p_dq, p_dk, p_dg, states, dstates, index, scale, t, left, H, K, V,
            q_stride_t, k_stride_t, v_stride_t, g_stride_t, do_stride_t, d_stride_t, BK, BV, LOW, PARTS, PRECISION, EVEN,
        )  # fmt: skip
        return
    p_dg = row_pointer(dg, b, start, h, steps * H * K, H * K, K)
    if chunk_is_benign(p_q, q_stride_t, p_k, k_stride_t, p_g, g_stride_t, t, left, K, BK, LIMIT, LARGEST, EVEN):
        chunk_gradients(
            p_q, p_k, p_v, p_g, p_do, p_dq, p_dk, p_dg, states, dstates, index, scale, t, left, H, K, V,
            q_stride_t, k_stride_t, v_stride_t, g_stride_t, do_stride_t, d_stride_t, BK, BV, LOW, PARTS, PRECISION, EVEN, True,
        )  # fmt: skip
    else:
        chunk_gradients(
            p_q, p_k, p_v, p_g, p_do, p_dq, p_dk, p_dg, states, dstates, index, scale, t, left, H, K, V,
            q_stride_t, k_stride_t, v_stride_t, g_stride_t, do_stride_t, d_stride_t, BK, BV, LOW, PARTS, PRECISION, EVEN, False,
        )  # fmt: skip
