"""Copies of float32 heads as float16 times a power of 2, for Hopper's kernels where PyTorch's settings allow TF32.

Computes   x' = 2^e x in float16 for q, k and v, and for the gradient do of o in the backward pass, with an e for each tensor,
           sequence and head. float16 has the 11 significant bits of TF32, but 30 binades where TF32 has 254. The products are
           linear in each of these tensors, so the kernels of ``hopper`` multiply their float32 results by powers of 2, in
           ``tables``, and start from initial states times such a power (``scaled_back`` in hopper_states.py).
Bounds     |x| is the largest finite magnitude of x, scale' = scale / 2^s is below 1, and no decay exceeds 1. Then what kernels
           hold in float16 is at most 2^15, half of its range, if
             K |q'| |k'| <= 2^15 (scores),           T |k'| |v'| <= 2^14 and |S_0'| <= 2^14 (states),
             V |v'| |do'| <= 2^15 (scale do v^T),    T |q'| |do'| <= 2^14 and |dS_T'| <= 2^14 (gradients of states).
           q' and k' are below 2^7, for which the chunk's middle may be the anchor (LARGEST in hopper_tiles.py). The budgets are
           shared between the tensors of a product (``targets``). What is left of a state's budget bounds v' by the initial
           state, and do' by the gradient of the final one. Outputs and gradients leave in float32, so that they may be as large
           as float32 allows.
Lost       elements below 2^-14 / |x'| of the largest one of their head and sequence lose bits, those below 2^-25 / |x'| are 0.
           With T of 2^20, the most that ``hopper_tf32`` takes, |x'| is 2^-4 or more.
Not finite NaN and inf are copied as they are, and count as 0 in |x|. A tensor of zeros has any power.
Launches   ``head_largest_kernel``, then ``scaled_copies_kernel``; launch_hopper_tf32.py launches both.
Grid       a CTA for each head of each tensor and each of ``parts`` equal parts of a sequence's steps. The second launch goes
           through them in reverse, so that it first reads what the first one has left in the L2, and has a CTA for each row of
           ``tables`` besides.
Order      the first launch stores a maximum for each CTA, and CTAs of the second take the maximum of those that they need:
           there is nothing to initialize, and results do not depend on the order of CTAs.
Memory     reads q, k and v (and do) twice, states once, and writes the copies.
Numerics   products with powers of 2 are exact, but where a float16 is below 2^-14 and where results are below float32's normal
           numbers. Powers beyond the range of float32 are products of two or three.
Source     docs/notebook/gla.md.
"""

import triton
import triton.language as tl

FREE: tl.constexpr = tl.constexpr(1000)
"""Exponent of the power of a tensor that nothing bounds; it is replaced by 0."""
WIDEST: tl.constexpr = tl.constexpr(126)
"""Largest exponent, in magnitude, of which float32 holds the power of 2 and its inverse as normal numbers."""
STATE_EXPONENT: tl.constexpr = tl.constexpr(14)
"""Logarithm to base 2 of the bound of an initial state, and of all that is added to it."""
PRODUCT_EXPONENT: tl.constexpr = tl.constexpr(15)
"""Logarithm to base 2 of the bound of scores, and of the products of do and v."""
OPERAND_EXPONENT: tl.constexpr = tl.constexpr(7)
"""Logarithm to base 2 of the bound of copies of q and k: LARGEST of hopper_tiles.py."""
FORWARD: tl.constexpr = tl.constexpr(8)
"""Elements of a row of the table of the forward pass: powers for the initial state, o and the final state, two for each."""
BACKWARD: tl.constexpr = tl.constexpr(16)
"""Elements of a row of the table of the backward pass: for the gradients of the final state, v, the initial state, q, k and g."""


@triton.jit
def exponent_above(x):
    """Return the least E with x < 2^E, int32, for a positive float32; for 0 any number."""
    normal = tl.where(x < 1e-30, x * 18446744073709551616.0, x)  # 2^64
    return (normal.to(tl.int32, bitcast=True) >> 23) - tl.where(x < 1e-30, 190, 126)


@triton.jit
def limited(e):
    """Return the part of an exponent whose power of 2 is a normal float32; the rest is for another factor."""
    return tl.minimum(tl.maximum(e, -WIDEST), WIDEST)


@triton.jit
def power(e):
    """Return 2^e, float32, for an int32 of at most WIDEST in magnitude."""
    return ((e + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def targets(length, LOG_K: tl.constexpr, LOG_V: tl.constexpr):
    """Return the logarithms to base 2 of the bounds of q' and k', and of v' and do'; LOG_K and LOG_V are those of K and V."""
    budget = tl.where(length > 1, -exponent_above((length - 1).to(tl.float32)), 0) + STATE_EXPONENT
    of_keys = tl.minimum(tl.minimum(budget >> 1, (PRODUCT_EXPONENT - LOG_K) >> 1), OPERAND_EXPONENT)
    return of_keys, tl.minimum(budget - of_keys, (PRODUCT_EXPONENT - LOG_V) >> 1)


@triton.jit
def bounds_of(offsets, n, T, PACKED: tl.constexpr):
    """Return the first row and the number of steps of sequence n, among the rows of all sequences."""
    if PACKED:
        first = tl.load(offsets + n).to(tl.int64)
        return first, (tl.load(offsets + n + 1).to(tl.int64) - first).to(tl.int32)
    return n.to(tl.int64) * T, T + n * 0


@triton.jit
def part_of(rows, part, parts):
    """Return the first row and the end of one of the equal parts of so many rows."""
    size = tl.cdiv(rows, parts)
    return part * size, tl.minimum(part * size + size, rows)


@triton.jit
def largest_in_part(x, rows, part, parts, stride_t, X, BLOCK: tl.constexpr, BX: tl.constexpr):
    """Return the largest finite magnitude in a part of rows of X elements, ``stride_t`` elements apart."""
    first, end = part_of(rows, part, parts)
    largest = tl.zeros([BLOCK, BX], tl.float32)
    c = tl.arange(0, BX)[None, :]
    for start in range(first, end, BLOCK):
        row = start + tl.arange(0, BLOCK)[:, None]
        magnitude = tl.abs(tl.load(x + row.to(tl.int64) * stride_t + c, mask=(row < end) & (c < X), other=0.0))
        largest = tl.maximum(largest, tl.where(magnitude < float("inf"), magnitude, 0.0))
    return tl.max(tl.max(largest, 1), 0)


@triton.jit
def start_of(x, n, first, head, stride_b, stride_t, stride_h, PACKED: tl.constexpr):
    """Return a pointer to a head of the first step of sequence n, which is at row ``first`` if sequences are packed."""
    if PACKED:
        return x + first * stride_t + head.to(tl.int64) * stride_h
    return x + n.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h


@triton.jit(do_not_specialize=["T", "sequences", "parts"])
def head_largest_kernel(
    q, k, v, do, initial, dfinal, offsets, largest, T, sequences, parts, q_heads, k_heads, v_heads, heads, state_heads, K, V,
    q_stride_b, q_stride_t, q_stride_h, k_stride_b, k_stride_t, k_stride_h, v_stride_b, v_stride_t, v_stride_h,
    do_stride_b, do_stride_t, do_stride_h,
    BLOCK: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Store the largest finite magnitude of each part of each head of each sequence in ``largest`` [heads, N, parts], float32.

    Its heads are those of q, k, v, do, ``initial`` and ``dfinal``, one after the other; do has ``heads``, and all but q, k and v
    may be None. q, k, v and do are [B, T, heads, K or V] with contiguous channels, the states [N, state_heads, K, V] contiguous.
    ``sequences`` is N. BK and BV are powers of 2, at least K and V.
    """
    k_first = q_heads
    v_first = k_first + k_heads
    do_first = v_first + v_heads
    initial_first = do_first + (0 if do is None else heads)
    dfinal_first = initial_first + (0 if initial is None else state_heads)
    every = dfinal_first + (0 if dfinal is None else state_heads)
    item = tl.program_id(0)
    head = item % every
    part = item // every % parts
    n = item // every // parts
    first, length = bounds_of(offsets, n, T, PACKED)
    found = 0.0
    if head < k_first:
        p_x = start_of(q, n, first, head, q_stride_b, q_stride_t, q_stride_h, PACKED)
        found = largest_in_part(p_x, length, part, parts, q_stride_t, K, BLOCK, BK)
    elif head < v_first:
        p_x = start_of(k, n, first, head - k_first, k_stride_b, k_stride_t, k_stride_h, PACKED)
        found = largest_in_part(p_x, length, part, parts, k_stride_t, K, BLOCK, BK)
    elif head < do_first:
        p_x = start_of(v, n, first, head - v_first, v_stride_b, v_stride_t, v_stride_h, PACKED)
        found = largest_in_part(p_x, length, part, parts, v_stride_t, V, BLOCK, BV)
    if do is not None:
        if (head >= do_first) & (head < initial_first):
            p_x = start_of(do, n, first, head - do_first, do_stride_b, do_stride_t, do_stride_h, PACKED)
            found = largest_in_part(p_x, length, part, parts, do_stride_t, V, BLOCK, BV)
    if initial is not None:
        if (head >= initial_first) & (head < dfinal_first):
            p_x = initial + (n.to(tl.int64) * state_heads + (head - initial_first)) * K * V
            found = largest_in_part(p_x, K, part, parts, V, V, BLOCK, BV)
    if dfinal is not None:
        if head >= dfinal_first:
            p_x = dfinal + (n.to(tl.int64) * state_heads + (head - dfinal_first)) * K * V
            found = largest_in_part(p_x, K, part, parts, V, V, BLOCK, BV)
    tl.store(largest + (head.to(tl.int64) * sequences + n) * parts + part, found)


@triton.jit
def largest_of(largest, head, n, sequences, parts, BP: tl.constexpr):
    """Return the largest finite magnitude of a head of sequence n; ``head`` counts those of all tensors, BP is at least parts."""
    part = tl.arange(0, BP)
    return tl.max(tl.load(largest + (head.to(tl.int64) * sequences + n) * parts + part, mask=part < parts, other=0.0), 0)


@triton.jit
def operand_exponent(largest, head, n, sequences, parts, target, BP: tl.constexpr):
    """Return the exponent of the power of q or k."""
    found = largest_of(largest, head, n, sequences, parts, BP)
    return tl.where(found > 0.0, target - exponent_above(found), 0)


@triton.jit
def beside_state(e, largest, head, n, sequences, parts, other, BP: tl.constexpr):
    """Return the smaller of e and what a state allows, given the exponent ``other`` of what else its power is made of."""
    found = largest_of(largest, head, n, sequences, parts, BP)
    return tl.minimum(e, tl.where(found > 0.0, -exponent_above(found) - other + STATE_EXPONENT, FREE))


@triton.jit
def value_exponent(largest, head, n, sequences, parts, of_keys, of_values, q_heads, k_heads, v_heads, state_heads,
                   initial_first, INITIAL: tl.constexpr, BP: tl.constexpr):  # fmt: skip
    """Return the exponent of the power of a head of v, from the bounds ``of_keys`` and ``of_values`` of ``targets``.

    With INITIAL it is bounded by the initial states of all heads that share it, each times the power of its own head of k.
    """
    found = largest_of(largest, q_heads + k_heads + head, n, sequences, parts, BP)
    e = tl.where(found > 0.0, of_values - exponent_above(found), FREE)
    if INITIAL:
        group = state_heads // v_heads
        for turn in range(group):
            state = head * group + turn
            of_k = operand_exponent(largest, q_heads + state // (state_heads // k_heads), n, sequences, parts, of_keys, BP)
            e = beside_state(e, largest, initial_first + state, n, sequences, parts, of_k, BP)
    return tl.where(e < FREE, e, 0)


@triton.jit
def gradient_exponent(largest, head, n, sequences, parts, of_q, of_values, shift, heads, state_heads, do_first, dfinal_first,
                      FINAL: tl.constexpr, BP: tl.constexpr):  # fmt: skip
    """Return the exponent of the power of a head of do, given that of its head of q.

    With FINAL it is bounded by the gradient of the final state. ``shift`` is s at the top of the file.
    """
    found = largest_of(largest, do_first + head, n, sequences, parts, BP)
    e = tl.where(found > 0.0, of_values - exponent_above(found), FREE)
    if FINAL:
        state = dfinal_first + head // (heads // state_heads)
        e = beside_state(e, largest, state, n, sequences, parts, of_q - shift, BP)
    return tl.where(e < FREE, e, 0)


@triton.jit
def copy_part(x, out, rows, part, parts, stride_t, out_stride_t, X, e, BLOCK: tl.constexpr, BX: tl.constexpr):
    """Store a part of rows of X elements, times 2^e, in rows of ``out``, ``out_stride_t`` elements apart."""
    first, end = part_of(rows, part, parts)
    # The magnitude of an element goes one way, so that no product on the way leaves a range in which the last one is.
    e1 = limited(e)
    e2 = limited(e - e1)
    f1, f2, f3 = power(e1), power(e2), power(limited(e - e1 - e2))
    c = tl.arange(0, BX)[None, :]
    for start in range(first, end, BLOCK):
        row = start + tl.arange(0, BLOCK)[:, None]
        inside = (row < end) & (c < X)
        values = tl.load(x + row.to(tl.int64) * stride_t + c, mask=inside, other=0.0) * f1 * f2 * f3
        tl.store(out + row.to(tl.int64) * out_stride_t + c, values.to(out.dtype.element_ty), mask=inside)


@triton.jit
def store_power(to, WHICH: tl.constexpr, e):
    """Store 2^e as a product of two powers. Beyond 2^(2 WIDEST) every result is 0 or inf with the power next to that too."""
    e1 = limited(e)
    tl.store(to + 2 * WHICH, power(e1))
    tl.store(to + (2 * WHICH + 1), power(limited(e - e1)))


@triton.jit(do_not_specialize=["T", "sequences", "parts", "shift"])
def scaled_copies_kernel(
    q, k, v, do, initial, dfinal, offsets, largest, q_out, k_out, v_out, do_out, forward, backward, T, sequences, parts,
    q_heads, k_heads, v_heads, heads, state_heads, K, V,
    q_stride_b, q_stride_t, q_stride_h, k_stride_b, k_stride_t, k_stride_h, v_stride_b, v_stride_t, v_stride_h,
    do_stride_b, do_stride_t, do_stride_h, shift,
    BLOCK: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BP: tl.constexpr, LOG_K: tl.constexpr, LOG_V: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """Store the copies of q, k, v and do, float16 and contiguous, and the tables of powers.

    Arguments are those of ``head_largest_kernel``, which has filled ``largest``; ``shift`` is s at the top of the file. Tables
    ``forward`` [N, heads, FORWARD] and, with do, ``backward`` [N, heads, BACKWARD] are float32. Pairs of elements of a row are
    powers whose product multiplies: forward the initial state, o and the final state; backward the gradient of the final state,
    then dv, that of the initial state, dq, dk and dg.
    """
    BACK: tl.constexpr = do is not None
    k_first = q_heads
    v_first = k_first + k_heads
    do_first = v_first + v_heads
    copied = do_first + (heads if BACK else 0)
    dfinal_first = copied + (0 if initial is None else state_heads)
    table = tl.program_id(0) - sequences * heads  # negative for a row of the tables
    item = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.where(table < 0, 0, item % copied)
    n = tl.where(table < 0, tl.program_id(0) // heads, item // copied // parts)
    part = item // copied % parts
    first, length = bounds_of(offsets, n, T, PACKED)
    of_keys, of_values = targets(length, LOG_K, LOG_V)
    if table < 0:
        head = tl.program_id(0) % heads
        e_q = operand_exponent(largest, head // (heads // q_heads), n, sequences, parts, of_keys, BP)
        e_k = operand_exponent(largest, k_first + head // (heads // k_heads), n, sequences, parts, of_keys, BP)
        e_v = value_exponent(largest, head // (heads // v_heads), n, sequences, parts, of_keys, of_values, q_heads, k_heads,
                             v_heads, state_heads, copied, initial is not None, BP)  # fmt: skip
        p_row = forward + (n.to(tl.int64) * heads + head) * FORWARD
        store_power(p_row, 0, e_k + e_v)
        store_power(p_row, 1, shift - (e_q + e_k + e_v))
        store_power(p_row, 2, -(e_k + e_v))
        if BACK:
            e_do = gradient_exponent(largest, head, n, sequences, parts, e_q, of_values, shift, heads, state_heads, do_first,
                                     dfinal_first, dfinal is not None, BP)  # fmt: skip
            p_row = backward + (n.to(tl.int64) * heads + head) * BACKWARD
            store_power(p_row, 0, e_q + e_do - shift)
            store_power(p_row, 1, shift - (e_q + e_k + e_do))
            store_power(p_row, 2, shift - (e_q + e_do))
            store_power(p_row, 3, shift - (e_k + e_v + e_do))
            store_power(p_row, 4, shift - (e_q + e_v + e_do))
            store_power(p_row, 5, shift - (e_q + e_k + e_v + e_do))
    elif head < k_first:
        e = operand_exponent(largest, head, n, sequences, parts, of_keys, BP)
        p_x = start_of(q, n, first, head, q_stride_b, q_stride_t, q_stride_h, PACKED)
        p_out = q_out + (first * q_heads + head) * K
        copy_part(p_x, p_out, length, part, parts, q_stride_t, q_heads * K, K, e, BLOCK, BK)
    elif head < v_first:
        e = operand_exponent(largest, head, n, sequences, parts, of_keys, BP)
        p_x = start_of(k, n, first, head - k_first, k_stride_b, k_stride_t, k_stride_h, PACKED)
        p_out = k_out + (first * k_heads + (head - k_first)) * K
        copy_part(p_x, p_out, length, part, parts, k_stride_t, k_heads * K, K, e, BLOCK, BK)
    elif head < do_first:
        e = value_exponent(largest, head - v_first, n, sequences, parts, of_keys, of_values, q_heads, k_heads, v_heads,
                           state_heads, copied, initial is not None, BP)  # fmt: skip
        p_x = start_of(v, n, first, head - v_first, v_stride_b, v_stride_t, v_stride_h, PACKED)
        p_out = v_out + (first * v_heads + (head - v_first)) * V
        copy_part(p_x, p_out, length, part, parts, v_stride_t, v_heads * V, V, e, BLOCK, BV)
    if BACK:
        if (table >= 0) & (head >= do_first):
            of_head = head - do_first
            e_q = operand_exponent(largest, of_head // (heads // q_heads), n, sequences, parts, of_keys, BP)
            e = gradient_exponent(largest, of_head, n, sequences, parts, e_q, of_values, shift, heads, state_heads, do_first,
                                  dfinal_first, dfinal is not None, BP)  # fmt: skip
            p_x = start_of(do, n, first, of_head, do_stride_b, do_stride_t, do_stride_h, PACKED)
            p_out = do_out + (first * heads + of_head) * V
            copy_part(p_x, p_out, length, part, parts, do_stride_t, heads * V, V, e, BLOCK, BV)
