"""Gradients of gated linear attention with respect to q, k and g, portable Triton, parallel over chunks.

Computes   for one chunk of 64 steps. S [K, V] is the state that enters it, dS the gradient of the state that leaves it, and
           dP = tril(do v^T). before and after are sums of the log-decays g in the chunk: up to and with a step, and behind it.
             dq = scale * (e^before (do S^T) + sum over s of dP[t, s] k_s e^(g_s+1 + ... + g_t))
             dk = e^after (v dS^T) + scale * sum over t of dP[t, s] q_t e^(g_s+1 + ... + g_t)
             dg_t = the sum of all terms whose decay contains g_t. Such a term leads from a source before t (S, or a key) to a
             destination at t or later (a query, or dS). Its value is the product of the query with that term of dq, or of the
             key with that term of dk; from S to dS it is e^(sum of g over the chunk) times the sum over V of S dS.
           dS is computed by chunk.py and dv by chunk_output.py, with time reversed.
Heads      q, k and g may have fewer heads than o (``shared_head`` in chunk.py). A CTA then stores what its head of o gives to dq,
           dk or dg, in float32, and sum_heads.py adds the heads up in a fixed order. One CTA per shared head, with a loop over
           the heads that share it, would compute dP again for every block of keys, or keep all of them in registers. What comes
           from dS counts once for a state: the first of the heads that share it stores it.
Grid       one CTA per chunk and head of o; blocks of K one after the other, blocks of V inside. No CTA waits for another one.
On chip    in registers: dP [64, 64], summed in float32 and then kept in LOW, with one decay per head in float32 too, beside
           q k^T [64, 64]; dq and dk [64, BK] in float32, and dg [64, BK], or [64, 1] with one decay per head.
Memory     S and dS of the chunk (``chunk_state_kernel`` stored them) are read once, dq, dk, dg written once. v and do are loaded
           once for dP and once per block of K. With a decay per channel g is loaded three times, q and k two or three times
           (``chunk_is_benign`` and Registers); with one decay per head q, k and g once.
Decay      as in chunk.py. Every term of dg has e^(g_t) as a factor. None is the difference of larger ones, except in a chunk of
           moderate decay (``is_benign``). There, terms between steps are suffix sums of q dq - k dk, in which the pairs with
           both steps at t or later cancel. They cancel only if dq and dk hold the very same terms. Therefore the subtraction
           uses the rounded keys that were also operands of dq. dg is added up within a chunk only, so errors do not grow with T.
Numerics   the tolerance (chunk.py) allows two roundings to 16 bits on the way to dq and dk, besides that of the result: those
           of dP and k, or that of a state. A float32 dg next to 16-bit inputs must have float32's own accuracy, and float16 has
           too narrow a range for products of gradients. In both cases nothing is rounded (EXACT). Nor is anything with float32
           inputs, but for the operands of products where PyTorch's settings allow TF32 (chunk.py).
Registers  q, k and g are loaded again where they are needed a second time, and ``steps_of_chunk`` makes the compiler compute
           step numbers and masks again: the registers would not hold all of them at once.
Caller     ``backward`` in launch.py launches ``gradients_kernel``, for gla's own kernels but those of ``hopper``, and for
           ``gla_layer`` where its plan does not take the Hopper kernels.
Source     experiment 039; docs/notebook/gla.md.
"""

import triton
import triton.language as tl

from onelaunch.kernels.common.tf32 import round_to_tf32
from onelaunch.ops.gla.kernels.chunk import (
    CHUNK,
    LEVELS,
    adjacent_blocks,
    exp,
    find_chunk,
    from_middle,
    in_right_block,
    inside_state,
    is_benign,
    load_decay,
    load_rows,
    pair_decay,
    row_pointer,
    shared_head,
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
def prefix_sum_exclusive(x, t, PRECISION: tl.constexpr):
    """Return the sums over the steps before each step."""
    return sums(x, t * 0, t, PRECISION)


@triton.jit
def suffix_sum(x, t, PRECISION: tl.constexpr):
    """Return the sums from each step on to the end of the chunk."""
    return sums(x, t, t * 0 + CHUNK, PRECISION)


@triton.jit
def pair_gradients(both, q, k, t, LOW: tl.constexpr, PARTS: tl.constexpr, PRECISION: tl.constexpr):
    """Return the gradients of decayed queries and keys [64, BK], and the products q dq and k dk, whose difference dg sums.

    ``both`` [64, 64] is dP below the diagonal and its transpose above. Keys are rounded to LOW for dq, and k dk is made of the
    same rounded keys. In TF32 queries are rounded too, and both products are made of what was multiplied.
    """
    zero = tl.zeros(q.shape, tl.float32)
    none = tl.zeros([CHUNK, CHUNK], LOW)
    keys = k.to(LOW)
    if PRECISION == "tf32":
        q = round_to_tf32(q)
        keys = round_to_tf32(keys)
    dq = split_product(tl.where(t[:, None] > t[None, :], both, none), keys, zero, PARTS, PRECISION)
    dk = split_product(tl.where(t[:, None] < t[None, :], both, none), q, zero, PARTS, PRECISION)
    return dq, dk, q * dq, keys.to(tl.float32) * dk


@triton.jit
def pair_terms(both, q, k, g, t, LOW: tl.constexpr, PARTS: tl.constexpr, PRECISION: tl.constexpr, BENIGN: tl.constexpr):
    """Return the terms of dq, dk and dg from pairs of different steps, over a block of keys; q, k, g are float32 [64, BK].

    ``both`` is that of ``pair_gradients``. BENIGN: one product anchored at the middle of the chunk; otherwise secondary
    chunking as in chunk.py.
    """
    if BENIGN:
        distance = from_middle(g, t, PRECISION)
        shrink = exp(distance)
        grow = exp(-distance)
        dq, dk, q_dq, k_dk = pair_gradients(both, q * shrink, k * grow, t, LOW, PARTS, PRECISION)
        return dq * shrink, dk * grow, suffix_sum(q_dq - k_dk, t, PRECISION)
    dq = tl.zeros(q.shape, tl.float32)
    dk = tl.zeros(q.shape, tl.float32)
    dg = tl.zeros(q.shape, tl.float32)
    for level in range(LEVELS):
        # Steps of right blocks are queries and those of left blocks keys: one product gives dq of those and dk of these.
        right = in_right_block(t, level)[:, None]
        factor = exp(sums_by_block(g, t, level, PRECISION))
        decayed = factor * tl.where(right, q, k)
        dscores = tl.where(adjacent_blocks(t, level), both, tl.zeros([CHUNK, CHUNK], LOW))
        gradient = split_product(dscores, decayed, tl.zeros(q.shape, tl.float32), PARTS, PRECISION)
        dg += sums_around(decayed * gradient, t, level, PRECISION)
        gradient *= factor
        dq += tl.where(right, gradient, 0.0)
        dk += tl.where(right, 0.0, gradient)
    return dq, dk, dg


@triton.jit
def score_gradients(
    p_do, do_stride_t, p_v, v_stride_t, t, left, V, BV: tl.constexpr, PRECISION: tl.constexpr, EVEN: tl.constexpr
):
    """Return dP = do v^T [64, 64] below the diagonal, 0 elsewhere, and its diagonal [64, 1]; block by block of values."""
    dscores = tl.zeros([CHUNK, CHUNK], tl.float32)
    for first in range(0, V, BV):
        c = first + tl.arange(0, BV)
        b_do = load_rows(p_do, do_stride_t, t, left, c, V, EVEN)
        b_v = load_rows(p_v, v_stride_t, t, left, c, V, EVEN)
        dscores = split_product(b_do, tl.trans(b_v), dscores, 1, PRECISION)
    diagonal = tl.sum(tl.where(t[:, None] == t[None, :], dscores, 0.0), 1)[:, None]
    return tl.where(t[:, None] > t[None, :], dscores, 0.0), diagonal


@triton.jit
def state_products(
    p_do, do_stride_t, p_v, v_stride_t, states, dstates, index, h, t, left, c, K, V,
    BV: tl.constexpr, PARTS: tl.constexpr, PRECISION: tl.constexpr, EVEN: tl.constexpr, STATE_GROUP: tl.constexpr,
):  # fmt: skip
    """Return do S^T and v dS^T [64, BK] for a block of keys, without decay, and the sum over V of S times dS [1, BK].

    ``index`` counts the states, one per chunk and head of the state. PARTS of 0 multiplies float32 without loss. Of STATE_GROUP
    heads h of o that share a state, only the first gets the last two results; the others get 0.
    """
    from_states = tl.zeros([CHUNK, c.shape[0]], tl.float32)
    from_dstates = tl.zeros([CHUNK, c.shape[0]], tl.float32)
    s_ds = tl.zeros([c.shape[0]], tl.float32)
    for first in range(0, V, BV):
        cv = first + tl.arange(0, BV)
        inside = inside_state(c, cv, K, V)
        b_state = tl.load(state_pointers(states, index, c, cv, K, V), mask=inside, other=0.0)
        b_dstate = tl.load(state_pointers(dstates, index, c, cv, K, V), mask=inside, other=0.0)
        s_ds += tl.sum(b_state.to(tl.float32) * b_dstate.to(tl.float32), 1)
        b_do = load_rows(p_do, do_stride_t, t, left, cv, V, EVEN)
        b_v = load_rows(p_v, v_stride_t, t, left, cv, V, EVEN)
        if PARTS == 0:
            b_do = b_do.to(tl.float32)
            b_v = b_v.to(tl.float32)
        from_states = split_product(b_do, tl.trans(b_state), from_states, PARTS, PRECISION)
        from_dstates = split_product(b_v, tl.trans(b_dstate), from_dstates, PARTS, PRECISION)
    if STATE_GROUP > 1:
        owns = h % STATE_GROUP == 0
        from_dstates = tl.where(owns, from_dstates, 0.0)
        s_ds = tl.where(owns, s_ds, 0.0)
    return from_states, from_dstates, s_ds[None, :]


@triton.jit
def chunk_gradients(
    p_q, p_k, p_v, p_g, p_do, p_dq, p_dk, p_dg, states, dstates, index, scale, t, h, left, H, K, V,
    q_stride_t, k_stride_t, v_stride_t, g_stride_t, do_stride_t, dq_stride_t, dk_stride_t,
    BK: tl.constexpr, BV: tl.constexpr, LOW: tl.constexpr, PARTS: tl.constexpr, PRECISION: tl.constexpr, EVEN: tl.constexpr,
    STATE_GROUP: tl.constexpr, BENIGN: tl.constexpr,
):  # fmt: skip
    """Compute and store dq, dk and dg of a chunk with a decay per channel, block by block of keys."""
    dscores, diagonal = score_gradients(p_do, do_stride_t, p_v, v_stride_t, t, left, V, BV, PRECISION, EVEN)
    both = (dscores + tl.trans(dscores)).to(LOW)
    for first in range(0, K, BK):
        t = steps_of_chunk(first)
        c = first + tl.arange(0, BK)
        b_q = load_rows(p_q, q_stride_t, t, left, c, K, EVEN).to(tl.float32) * scale
        b_k = load_rows(p_k, k_stride_t, t, left, c, K, EVEN).to(tl.float32)
        b_g = load_decay(p_g, g_stride_t, t, left, c, K, EVEN)
        b_dq, b_dk, b_dg = pair_terms(both, b_q, b_k, b_g, t, LOW, PARTS, PRECISION, BENIGN)
        b_dq += diagonal * b_k
        b_dk += diagonal * b_q
        t = steps_of_chunk(first + 1)  # step numbers from a second expression, or the first ones would stay in registers
        from_states, from_dstates, s_ds = state_products(
            p_do, do_stride_t, p_v, v_stride_t, states, dstates, index, h, t, left, c, K, V,
            BV, PARTS, PRECISION, EVEN, STATE_GROUP,
        )  # fmt: skip
        b_g = load_decay(p_g, g_stride_t, t, left, c, K, EVEN)
        b_dg += s_ds * exp(tl.sum(b_g, 0, keep_dims=True))
        from_states *= exp(sum_before(b_g, t, PRECISION))
        store_rows(p_dq, (b_dq + from_states) * scale, dq_stride_t, t, left, c, K, EVEN)
        b_q = load_rows(p_q, q_stride_t, t, left, c, K, EVEN).to(tl.float32) * scale
        b_dg += suffix_sum(b_q * from_states, t, PRECISION)
        from_dstates *= exp(sum_after(b_g, t, PRECISION))
        store_rows(p_dk, b_dk + from_dstates, dk_stride_t, t, left, c, K, EVEN)
        b_k = load_rows(p_k, k_stride_t, t, left, c, K, EVEN).to(tl.float32)
        b_dg += prefix_sum_exclusive(b_k * from_dstates, t, PRECISION)
        store_rows(p_dg, b_dg, H * K, t, left, c, K, EVEN)


@triton.jit
def chunk_gradients_scalar(
    p_q, p_k, p_v, p_g, p_do, p_dq, p_dk, p_dg, states, dstates, index, scale, t, h, left, H, K, V,
    q_stride_t, k_stride_t, v_stride_t, g_stride_t, do_stride_t, dq_stride_t, dk_stride_t,
    BK: tl.constexpr, BV: tl.constexpr, LOW: tl.constexpr, PARTS: tl.constexpr, PRECISION: tl.constexpr, EVEN: tl.constexpr,
    STATE_GROUP: tl.constexpr,
):  # fmt: skip
    """Compute and store dq, dk and dg of a chunk with one decay per head, block by block of keys."""
    one = tl.arange(0, 1)
    b_g = load_decay(p_g, g_stride_t, t, left, one, 1, EVEN)
    dscores, diagonal = score_gradients(p_do, do_stride_t, p_v, v_stride_t, t, left, V, BV, PRECISION, EVEN)
    dscores *= pair_decay(b_g, t, PRECISION)
    both = (dscores + tl.trans(dscores)).to(LOW)
    scores = tl.zeros([CHUNK, CHUNK], tl.float32)
    dg_before = tl.zeros([CHUNK, 1], tl.float32)  # terms from each step to dS
    dg_behind = tl.zeros([CHUNK, 1], tl.float32)  # terms from S to each step
    dg_through = tl.zeros([1, 1], tl.float32)  # terms from S to dS
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
        from_states, from_dstates, s_ds = state_products(
            p_do, do_stride_t, p_v, v_stride_t, states, dstates, index, h, t, left, c, K, V,
            BV, PARTS, PRECISION, EVEN, STATE_GROUP,
        )  # fmt: skip
        from_states *= before
        from_dstates *= after
        dg_behind += tl.sum(b_q * from_states, 1, keep_dims=True)
        dg_before += tl.sum(b_k * from_dstates, 1, keep_dims=True)
        dg_through += tl.sum(s_ds, 1, keep_dims=True)
        store_rows(p_dq, (b_dq + from_states + diagonal * b_k) * scale, dq_stride_t, t, left, c, K, EVEN)
        store_rows(p_dk, b_dk + from_dstates + diagonal * b_q, dk_stride_t, t, left, c, K, EVEN)
    b_dg = dg_through * exp(tl.sum(b_g, 0, keep_dims=True))
    b_dg += prefix_sum_exclusive(dg_before, t, PRECISION) + suffix_sum(dg_behind, t, PRECISION)
    # onward[t, s]: terms from step s to all steps from t on. Those with s < t contain g_t.
    onward = suffix_sum(scores * dscores * scale, t, PRECISION)
    b_dg += tl.sum(tl.where(t[None, :] < t[:, None], onward, 0.0), 1, keep_dims=True)
    store_rows(p_dg, b_dg, H, t, left, one, 1, EVEN)


@triton.jit
def chunk_is_benign(
    p_q, q_stride_t, p_k, k_stride_t, p_g, g_stride_t, t, left, K,
    BK: tl.constexpr, LIMIT: tl.constexpr, LARGEST: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Return whether ``is_benign`` holds for all keys of a chunk.

    The kernel calls it before anything else and then runs one of two loops. A single loop that chose block by block would need
    the registers of both forms.
    """
    benign = left > 0  # true: the chunk has steps
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
    BK: tl.constexpr, BV: tl.constexpr, BISECTION_STEPS: tl.constexpr, EXACT: tl.constexpr, PARTS: tl.constexpr,
    LIMIT: tl.constexpr, LARGEST: tl.constexpr, PRECISION: tl.constexpr, EVEN: tl.constexpr, SCALAR: tl.constexpr,
    PACKED: tl.constexpr,
    Q_GROUP: tl.constexpr = 1, K_GROUP: tl.constexpr = 1, V_GROUP: tl.constexpr = 1, G_GROUP: tl.constexpr = 1,
    STATE_GROUP: tl.constexpr = 1,
):  # fmt: skip
    """Store dq, dk [B, T, H, K], tokens ``d_stride_t`` elements apart, and dg [B, T, H, K or 1], contiguous.

    H counts the heads of o, of which Q_GROUP, K_GROUP, V_GROUP, G_GROUP and STATE_GROUP share a head of q, k, v, g and the
    states. With Q_GROUP or K_GROUP above 1, dq or dk are contiguous too.

    ``states`` and ``dstates`` hold S and dS [slots, H / STATE_GROUP, K, V]; a slot is the place of a chunk, see ``find_chunk``.
    ``offsets`` [N + 1] are the first steps of packed sequences, and their end.

    Constants: BK, BV: channels of a block of keys and of values. BISECTION_STEPS: see ``find_chunk``. EXACT: round nothing.
    PARTS: 16-bit terms of a float32 factor next to a 16-bit one, 0 to multiply float32 (``split_product``); PRECISION: the form
    of float32 products there. LIMIT, LARGEST: bounds of ``is_benign``. EVEN: every block is whole, so no masks. SCALAR: one
    decay per head. PACKED: sequences are packed along T. In the functions above, LOW is the dtype to which a factor is rounded,
    ``left`` the number of steps from the chunk's start to the sequence's end, ``t`` the steps 0 to 63, ``c`` the channels.
    """
    slot, h = tl.program_id(0) // H, tl.program_id(0) % H
    b, start, left = find_chunk(offsets, slot, T, sequences, BISECTION_STEPS, PACKED)
    if left <= 0:
        return
    t = tl.arange(0, CHUNK)
    LOW: tl.constexpr = tl.float32 if EXACT else v.dtype.element_ty
    p_q = row_pointer(q, b, start, shared_head(h, Q_GROUP), q_stride_b, q_stride_t, q_stride_h)
    p_k = row_pointer(k, b, start, shared_head(h, K_GROUP), k_stride_b, k_stride_t, k_stride_h)
    p_v = row_pointer(v, b, start, shared_head(h, V_GROUP), v_stride_b, v_stride_t, v_stride_h)
    p_g = row_pointer(g, b, start, shared_head(h, G_GROUP), g_stride_b, g_stride_t, g_stride_h)
    p_do = row_pointer(do, b, start, h, do_stride_b, do_stride_t, do_stride_h)
    steps = tl.cast(T, tl.int64)
    dq_stride_t = d_stride_t if Q_GROUP == 1 else H * K
    dk_stride_t = d_stride_t if K_GROUP == 1 else H * K
    p_dq = row_pointer(dq, b, start, h, steps * dq_stride_t, dq_stride_t, K)
    p_dk = row_pointer(dk, b, start, h, steps * dk_stride_t, dk_stride_t, K)
    index = slot.to(tl.int64) * shared_head(H, STATE_GROUP) + shared_head(h, STATE_GROUP)
    if SCALAR:
        p_dg = row_pointer(dg, b, start, h, steps * H, H, 1)
        chunk_gradients_scalar(
            p_q, p_k, p_v, p_g, p_do, p_dq, p_dk, p_dg, states, dstates, index, scale, t, h, left, H, K, V,
            q_stride_t, k_stride_t, v_stride_t, g_stride_t, do_stride_t, dq_stride_t, dk_stride_t,
            BK, BV, LOW, PARTS, PRECISION, EVEN, STATE_GROUP,
        )  # fmt: skip
        return
    p_dg = row_pointer(dg, b, start, h, steps * H * K, H * K, K)
    if chunk_is_benign(p_q, q_stride_t, p_k, k_stride_t, p_g, g_stride_t, t, left, K, BK, LIMIT, LARGEST, EVEN):
        chunk_gradients(
            p_q, p_k, p_v, p_g, p_do, p_dq, p_dk, p_dg, states, dstates, index, scale, t, h, left, H, K, V,
            q_stride_t, k_stride_t, v_stride_t, g_stride_t, do_stride_t, dq_stride_t, dk_stride_t,
            BK, BV, LOW, PARTS, PRECISION, EVEN, STATE_GROUP, True,
        )  # fmt: skip
    else:
        chunk_gradients(
            p_q, p_k, p_v, p_g, p_do, p_dq, p_dk, p_dg, states, dstates, index, scale, t, h, left, H, K, V,
            q_stride_t, k_stride_t, v_stride_t, g_stride_t, do_stride_t, dq_stride_t, dk_stride_t,
            BK, BV, LOW, PARTS, PRECISION, EVEN, STATE_GROUP, False,
        )  # fmt: skip
