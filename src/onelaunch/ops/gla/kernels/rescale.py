"""Scaling of a float16 gradient of o by a power of 2, for Hopper's backward pass: no product leaves the range of float16.

Computes   do' = f do with f = 2^e, the largest power of 2 for which all of these are at most LIMIT in magnitude:
             V f |v| |do| |scale|                         bound of dP = scale do v^T, which is stored in 16 bits;
             T f |q| |do| |scale| + f |gradient of S_T|   bound of dS, the gradient of a state, which is stored in 16 bits;
             f |do| and f |do| |scale|                    do' itself, and what passes with a decay per head make of it;
           |x| is the largest magnitude in a tensor. No decay exceeds 1, so T terms bound a sum along time. All gradients are
           linear in do and in the gradient of the final state, so kernels multiply what they store by 1 / f, in float32,
           before they round it. A gradient that leaves the range of float16 is then inf, and no other is.
Launches   ``largest_kernel``, then ``rescale_kernel``; launch_rescale.py launches both for the backward pass of launch_hopper.py.
           The portable backward pass does not use them.
Grid       any number of CTAs, which take blocks of rows in turn; a row is a head of a step. No CTA waits for another one.
Order      each CTA of ``largest_kernel`` stores the maximum of its rows, and every CTA of ``rescale_kernel`` takes the maximum of
           all of them: there is nothing to initialize, and results do not depend on the order of CTAs.
Memory     reads q and v once, do twice, the gradient of the final state once, and writes do' once.
Numerics   products with powers of 2 are exact, but for elements of do' below 2^-14, which have fewer bits: with LIMIT = 2^15
           those are 2^-29 of the bound.
"""

import triton
import triton.language as tl

LIMIT_EXPONENT: tl.constexpr = tl.constexpr(15)
"""Logarithm to base 2 of LIMIT: half of the range of float16, so that rounding log2 up cannot leave the range."""
LARGEST_EXPONENT: tl.constexpr = tl.constexpr(60)
"""Largest magnitude of e: f and 1 / f, and gradients of the final state times f, stay within float32."""


@triton.jit
def largest_magnitude(x, rows, heads, channels, stride_t, stride_h, first, step, BLOCK: tl.constexpr, BX: tl.constexpr):
    """Return the largest magnitude in blocks of BLOCK rows, ``step`` blocks apart from ``first`` on; NaN counts as 0.

    A row is a head of a step; ``stride_t`` and ``stride_h`` are the elements from step to step and from head to head.
    """
    largest = tl.zeros([BLOCK], tl.float32)
    c = tl.arange(0, BX)[None, :]
    for block in range(first, tl.cdiv(rows, BLOCK), step):
        row = block * BLOCK + tl.arange(0, BLOCK)
        p_row = x + (row // heads).to(tl.int64) * stride_t + (row % heads) * stride_h
        values = tl.load(p_row[:, None] + c, mask=(row < rows)[:, None] & (c < channels), other=0.0)
        magnitude = tl.abs(values.to(tl.float32))
        largest = tl.maximum(largest, tl.max(tl.where(magnitude == magnitude, magnitude, 0.0), 1))
    return tl.max(largest, 0)


@triton.jit(do_not_specialize=["steps", "final_rows"])
def largest_kernel(
    q, v, do, dfinal, largest, steps, q_heads, v_heads, heads, K, V, final_rows,
    q_stride_t, q_stride_h, v_stride_t, v_stride_h, do_stride_t, do_stride_h,
    BLOCK: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Store in ``largest`` [4, CTAs], float32, the largest magnitudes in this CTA's rows of q, v, do and dfinal.

    q, v and do are [B, T, heads, K or V], ``steps`` is B T. ``dfinal`` [final_rows, V] is contiguous and float32, or None.
    """
    cta, ctas = tl.program_id(0), tl.num_programs(0)
    of_q = largest_magnitude(q, steps * q_heads, q_heads, K, q_stride_t, q_stride_h, cta, ctas, BLOCK, BK)
    of_v = largest_magnitude(v, steps * v_heads, v_heads, V, v_stride_t, v_stride_h, cta, ctas, BLOCK, BV)
    of_do = largest_magnitude(do, steps * heads, heads, V, do_stride_t, do_stride_h, cta, ctas, BLOCK, BV)
    tl.store(largest + cta, of_q)
    tl.store(largest + ctas + cta, of_v)
    tl.store(largest + 2 * ctas + cta, of_do)
    of_final = 0.0
    if dfinal is not None:
        of_final = largest_magnitude(dfinal, final_rows, 1, V, V, 0, cta, ctas, BLOCK, BV)
    tl.store(largest + 3 * ctas + cta, of_final)


@triton.jit(do_not_specialize=["steps", "length"])
def rescale_kernel(
    do, out, largest, factors, steps, heads, V, length, scale, do_stride_t, do_stride_h, CTAS, BLOCK: tl.constexpr,
    BV: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Store do' [B, T, heads, V], contiguous, in ``out``, and f and 1 / f in ``factors`` [2], float32.

    ``largest`` [4, CTAS] is what ``largest_kernel`` stored; BC is at least CTAS. ``steps`` is B T, and ``length`` T, the most
    steps of a sequence.
    """
    c = tl.arange(0, BC)
    of_q = tl.max(tl.load(largest + c, mask=c < CTAS, other=0.0), 0)
    of_v = tl.max(tl.load(largest + CTAS + c, mask=c < CTAS, other=0.0), 0)
    of_do = tl.max(tl.load(largest + 2 * CTAS + c, mask=c < CTAS, other=0.0), 0)
    of_final = tl.max(tl.load(largest + 3 * CTAS + c, mask=c < CTAS, other=0.0), 0)
    scaled = of_do * tl.abs(scale)
    bound = tl.maximum(tl.maximum(V * of_v * scaled, length.to(tl.float32) * of_q * scaled + of_final), tl.maximum(of_do, scaled))
    # Without a bound, or where an input is inf, results are 0, inf or NaN with any factor.
    usable = (bound > 0.0) & (bound < float("inf"))
    exponent = LIMIT_EXPONENT - tl.ceil(tl.log2(tl.where(usable, bound, 1.0))).to(tl.int32)
    exponent = tl.where(usable, tl.minimum(tl.maximum(exponent, -LARGEST_EXPONENT), LARGEST_EXPONENT), 0)
    # Bits of a float32 with this exponent: exp2 may be off by a bit.
    factor = ((exponent + 127) << 23).to(tl.float32, bitcast=True)
    if tl.program_id(0) == 0:
        tl.store(factors, factor)
        tl.store(factors + 1, ((127 - exponent) << 23).to(tl.float32, bitcast=True))
    cv = tl.arange(0, BV)[None, :]
    for block in range(tl.program_id(0), tl.cdiv(steps * heads, BLOCK), tl.num_programs(0)):
        row = block * BLOCK + tl.arange(0, BLOCK)
        inside = (row < steps * heads)[:, None] & (cv < V)
        p_row = do + (row // heads).to(tl.int64) * do_stride_t + (row % heads) * do_stride_h
        values = tl.load(p_row[:, None] + cv, mask=inside, other=0.0).to(tl.float32) * factor
        tl.store(out + row.to(tl.int64)[:, None] * V + cv, values.to(out.dtype.element_ty), mask=inside)
