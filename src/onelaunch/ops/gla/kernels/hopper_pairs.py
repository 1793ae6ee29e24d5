"""Sums of log-decays over steps of a chunk, and gradients between pairs of its steps, for hopper_gradients.py.

Computes   sums over steps as WGMMA products with matrices of 0 and 1, from which decays are made; and the terms of dq, dk and
           dg that come from pairs of different steps t > s of one chunk,
             dq_t += dP[t, s] k_s e^(g_s+1 + ... + g_t),   dk_s += dP[t, s] q_t e^(g_s+1 + ... + g_t),
             dg_u += the sum of dP[t, s] q_t k_s e^(g_s+1 + ... + g_t) over all pairs with s < u <= t.
Decay      moderate: ``pairs_from_middle`` anchors all decays at the middle of the chunk, and one product serves all pairs.
           Strong: ``pairs_by_levels`` is secondary chunking, as in hopper_prepare.py. For blocks of 1, 2, 4, ... 32 steps it
           multiplies every right block with the left block next to it, anchored between the two, so that no factor exceeds 1.
           For a float32 dg decayed queries and keys are two 16-bit terms in both (``pairs_from_middle_in_terms``).
Sizes      a chunk has C = 64 steps, a panel PANEL = 64 channels. Sums and gradients are [C, PANEL], float32 in registers.
Given      tiles in the shared memory of hopper_gradients.py, which lists them. All warps of the CTA call these functions
           together; there are no mbarriers here. Writes are fenced before WGMMA reads them, and every product is waited for.
Registers  are what is scarce. That is why factors are recomputed (``reciprocal``), and why dk of strong decay is added up in
           shared memory (``dk_sum``). ``opaque_zero`` returns a 0 that the compiler cannot know, from an int32 in shared memory
           that holds 1: index tensors and masks that depend on it are computed where they are used, not held in registers.
"""

from onelaunch.kernels.gluon.compat import fence_async_shared, gl, gluon, warpgroup_mma, warpgroup_mma_wait
from onelaunch.ops.gla.kernels.hopper_tiles import LOG2E, PANEL, C, exp2_flushed, ones_where, opaque_zero, store_split

MIN_LOG2_SUM = gl.constexpr(-512.0)
"""Least base-2 logarithm of a chunk's decay for which decays may be computed from differences of float32 sums.

Down to it, 2 to the power of a difference of two such sums is accurate to 2^-12. Below it, rounding errors of the sums dominate
their difference. Then hopper_gradients.py takes the path of strong decay, which sums each decay's own steps.
"""


@gluon.jit
def weights_of(PART: gl.constexpr, level, zero, acc: gl.constexpr, dtype: gl.constexpr):
    """Return the matrix [C, C] of 0 and 1 whose product sums, for each step t (row), the steps s (columns) that PART names.

    - "before": the steps up to and with t, s <= t;
    - "behind": the steps after t, s > t;
    - "middle": the steps from the chunk's middle up to and with t; where t comes before it, the steps after t up to the middle,
      which are subtracted, with weights of -1;
    - "onward": t and the steps after it, s >= t, which is the transpose of "before";
    - "block", within the block of 2^level steps that holds t: in a right block (bit ``level`` of t is 1) the steps from the
      block's start up to and with t; in a left block the steps after t to the block's end. These are the steps between t and
      the boundary of the two blocks;
    - "around": the transpose of "block", which sums for a log-decay the terms whose factor contains it. In a right block these
      are the steps from t on to the block's end, in a left block those from the block's start to before t.

    ``zero`` is an ``opaque_zero``, so that the matrix is not kept in registers. Columns only occur together with rows, as t - s
    or t ^ s: with columns on their own the compiler holds 17 more numbers in registers, for all masks.
    """
    operand: gl.constexpr = gl.DotOperandLayout(0, acc, 2)
    t = gl.arange(0, C, layout=gl.SliceLayout(1, operand))[:, None] + zero
    s = gl.arange(0, C, layout=gl.SliceLayout(0, operand))[None, :]
    if PART == "before":
        weights = ones_where(t - s >= 0, gl.float32)
    elif PART == "behind":
        weights = ones_where(t - s < 0, gl.float32)
    elif PART == "middle":
        weights = ones_where(t - s >= 0, gl.float32) - ones_where(s < C // 2, gl.float32)
    elif PART == "onward":
        weights = ones_where(t - s <= 0, gl.float32)
    else:
        right = ((t >> level) & 1) == 1
        block = ((t ^ s) >> level) == 0
        if PART == "block":
            weights = ones_where(block & ((right & (t - s >= 0)) | (not_(right) & (t - s < 0))), gl.float32)
        else:
            weights = ones_where(block & ((right & (t - s <= 0)) | (not_(right) & (t - s > 0))), gl.float32)
    return weights.to(dtype)


@gluon.jit
def not_(condition):
    """Return the negation of a condition, element by element."""
    return condition == 0


@gluon.jit
def summed(x, PART: gl.constexpr, level, zero, acc: gl.constexpr):
    """Return x [C, PANEL], in shared memory, summed over the steps that PART names (``weights_of``). It waits for WGMMA.

    x may also be two terms [2, C, PANEL], which are added up.
    """
    return weighted(weights_of(PART, level, zero, acc, x.dtype), x, zero, acc)


@gluon.jit
def weighted(weights, x, zero, acc: gl.constexpr):
    """Return the product of weights [C, C] in registers and x [C, PANEL] in shared memory, or the sum of its two terms.

    Terms [2, C, PANEL] are found through ``zero``, for the reason that hopper_gradients.py gives before its branch. The function
    waits for WGMMA.
    """
    d = gl.zeros([C, PANEL], gl.float32, layout=acc)
    if x.rank == 3:
        d = warpgroup_mma(weights, x.index(zero), d, use_acc=False, is_async=True)
        d = warpgroup_mma(weights, x.index(1 + zero), d, is_async=True)
    else:
        d = warpgroup_mma(weights, x, d, use_acc=False, is_async=True)
    return warpgroup_mma_wait(num_outstanding=0, deps=(d,))


@gluon.jit
def reciprocal(x):
    """Return 1 / x of normal numbers.

    The assembly is marked as not pure, so that it is recomputed at each use instead of being held in registers.
    """
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def logarithm(g, PART: gl.constexpr, zero, acc: gl.constexpr):
    """Return the base-2 logarithm of the decays [C, PANEL] over the steps that PART names. It waits for WGMMA.

    ``g`` holds natural log-decays [C, PANEL] in shared memory, or two terms of them, see ``summed``. "before" sums the steps up
    to and with each step, "behind" those after each step, and "middle" gives the decay from the chunk's middle. "all" and "half"
    sum all steps, or the first half of the chunk, so that all rows are the same.
    """
    E: gl.constexpr = g.dtype
    operand: gl.constexpr = gl.DotOperandLayout(0, acc, 2)
    if PART == "before" or PART == "behind" or PART == "middle":
        weights = weights_of(PART, 0, zero, acc, E)
    else:  # the matrices are constants: computing them takes no instructions
        gl.static_assert(PART == "all" or PART == "half")
        s = gl.arange(0, C, layout=gl.SliceLayout(0, operand))[None, :]
        weights = ones_where(s < (C if PART == "all" else C // 2), E) + gl.zeros([C, C], E, layout=operand)
    return weighted(weights, g, zero, acc) * LOG2E


@gluon.jit
def sum_split(x, high, low, d, PART: gl.constexpr, level, zero, acc: gl.constexpr):
    """Return d plus the sums of x over the steps that PART names (``weights_of``); x and d are float32 [C, PANEL] in registers.

    x is stored as a sum of two bfloat16 numbers in the shared tiles ``high`` and ``low``, whose content is overwritten. The
    function fences these writes and waits for WGMMA.

    It sums terms of dg. hopper_gradients.py calls it with "onward", for moderate and strong decay: it sums the terms of the state
    and those of ``pairs_from_middle`` from each step to the chunk's end. ``pairs_by_levels`` calls it with "around".
    """
    store_split(x, high, low)
    fence_async_shared()
    weights = weights_of(PART, level, zero, acc, gl.bfloat16)
    d = warpgroup_mma(weights, high, d, is_async=True)
    d = warpgroup_mma(weights, low, d, is_async=True)
    return warpgroup_mma_wait(num_outstanding=0, deps=(d,))


@gluon.jit
def pairs_from_middle(dq, onward, dscores, tiles, spare, decay, one, acc: gl.constexpr):
    """Compute the pair terms of dq, dk and dg of a chunk with moderate decay, by one product for each of dq and dk.

    A pair s < t belongs to dg of the steps u with s < u <= t. So these terms of dg are the suffix sums of q dq - k dk: the two
    terms of a pair have opposite signs, and cancel for u <= s. They cancel but for the rounding of float32 sums, because q, k and
    dP are the same rounded numbers in both of them.

    Args:
        dq: Gradient of the queries so far, [C, PANEL], float32.
        onward: Terms of dg so far, [C, PANEL], float32. The caller sums them from each step to the end of the chunk.
        dscores: Two 16-bit tiles [C, C] that add up to dP, 0 on and above the diagonal.
        tiles: Tiles of hopper_gradients.py; 0 and 1 hold q and k.
        spare: Two scratch tiles [C, PANEL], for decayed queries and keys.
        decay: Decay from the chunk's middle to each step, [C, PANEL], between exp(-LIMIT) and exp(LIMIT); LIMIT is that of
            hopper_gradients.py.
        one: int32 in shared memory that holds 1, for ``opaque_zero``.
        acc: Layout of the accumulators.

    Returns:
        ``dq`` with the pair terms; the pair terms of dk alone; ``onward`` with the pair terms of q dq - k dk.
    """
    E: gl.constexpr = tiles.dtype
    vector: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    d_q, d_k = spare
    opaque = opaque_zero(one, vector)
    d_k.store((tiles.index(1 + opaque).load(acc).to(gl.float32) * reciprocal(decay)).to(E))
    d_q.store((tiles.index(opaque).load(acc).to(gl.float32) * decay).to(E))
    fence_async_shared()
    found = gl.zeros([C, PANEL], gl.float32, layout=acc)
    found = warpgroup_mma(dscores[0], d_k, found, use_acc=False, is_async=True)
    found = warpgroup_mma(dscores[1], d_k, found, is_async=True)
    found = warpgroup_mma_wait(num_outstanding=0, deps=(found,))
    onward += d_q.load(acc).to(gl.float32) * found
    dq += found * decay
    found = warpgroup_mma(dscores[0].permute((1, 0)), d_q, found, use_acc=False, is_async=True)
    found = warpgroup_mma(dscores[1].permute((1, 0)), d_q, found, is_async=True)
    found = warpgroup_mma_wait(num_outstanding=0, deps=(found,))
    onward -= d_k.load(acc).to(gl.float32) * found
    return dq, found * reciprocal(decay), onward


@gluon.jit
def pairs_from_middle_in_terms(dq, onward, dscores, tiles, spare, decay, one, acc: gl.constexpr):
    """Do what ``pairs_from_middle`` does, with decayed queries and keys as sums of two 16-bit terms, for a float32 dg.

    Arguments and results are those of ``pairs_from_middle``. The scratch tiles hold the two terms, of the keys and then of the
    queries; products of two second terms are left out. The two sums of a pair cancel to 2^-17. The reciprocal is taken twice,
    the second time of a number that the compiler cannot know to be the same: held between the two uses it would be spilled.
    """
    vector: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    high, low = spare
    store_split(tiles.index(1 + opaque_zero(one, vector)).load(acc).to(gl.float32) * reciprocal(decay), high, low)
    fence_async_shared()
    found = gl.zeros([C, PANEL], gl.float32, layout=acc)
    found = warpgroup_mma(dscores[0], high, found, use_acc=False, is_async=True)
    found = warpgroup_mma(dscores[1], high, found, is_async=True)
    found = warpgroup_mma(dscores[0], low, found, is_async=True)
    found = warpgroup_mma_wait(num_outstanding=0, deps=(found,)) * decay
    dq += found
    b_q = tiles.index(opaque_zero(one, vector)).load(acc).to(gl.float32)
    onward += b_q * found
    store_split(b_q * decay, high, low)
    fence_async_shared()
    found = warpgroup_mma(dscores[0].permute((1, 0)), high, found, use_acc=False, is_async=True)
    found = warpgroup_mma(dscores[1].permute((1, 0)), high, found, is_async=True)
    found = warpgroup_mma(dscores[0].permute((1, 0)), low, found, is_async=True)
    found = warpgroup_mma_wait(num_outstanding=0, deps=(found,)) * reciprocal(decay + opaque_zero(one, vector))
    onward -= tiles.index(1 + opaque_zero(one, vector)).load(acc).to(gl.float32) * found
    return dq, found, onward


@gluon.jit
def pairs_by_levels(dq, dk_sum, dg, dscores, dscores_low, q, k, g, x, x_low, high, low, one, acc: gl.constexpr):
    """Add the pair terms to dq, dk and dg, for decays of any size, by one product for each level of blocks.

    Two different steps of a chunk lie in a right and a left block next to each other at exactly one of the levels.

    Args:
        dq: Gradient of the queries so far, [C, PANEL], float32.
        dk_sum: Gradient of the keys so far, [C, PANEL], float32 in shared memory; the pair terms are added in place.
        dg: Gradient of the log-decays so far, [C, PANEL], float32.
        dscores: First 16-bit term [C, C] of dP, 0 on and above the diagonal.
        dscores_low: Second term of it.
        q: Queries of the panel, [C, PANEL], in shared memory.
        k: Keys of the panel.
        g: Log-decays of the panel, all finite; for float32 ones two terms, see ``summed``.
        x: Scratch tile for decayed queries and keys.
        x_low: Scratch tile for their second 16-bit terms, or None to leave these out. With strong decay a few elements of dg are
            many times larger than most. A float32 dg must be as accurate there as elsewhere, and one term is not: its rounding
            shows in an element that comes from one pair of steps.
        high: Scratch tile, bfloat16, for the first term of a sum; it may be ``x``.
        low: Scratch tile, bfloat16, for the second term; it may be ``x_low``.
        one: int32 in shared memory that holds 1, for ``opaque_zero``.
        acc: Layout of the accumulators.

    Returns:
        ``dq`` and ``dg`` with the pair terms.
    """
    E: gl.constexpr = q.dtype
    vector: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    operand: gl.constexpr = gl.DotOperandLayout(0, acc, 2)
    for level in range(6):  # 2^6 = C
        # Steps of right blocks are queries, and steps of left blocks are keys. With dP and its transpose in one operand, one
        # product gives dq of the former and dk of the latter.
        zero = opaque_zero(one, vector)
        factor = exp2_flushed(summed(g, "block", level, zero, acc) * LOG2E)
        row = gl.arange(0, C, layout=gl.SliceLayout(1, acc))[:, None] + zero
        right = ((row >> level) & 1) == 1
        decayed = factor * gl.where(right, q.load(acc).to(gl.float32), k.load(acc).to(gl.float32))
        if x_low is None:
            x.store(decayed.to(E))
        else:
            store_split(decayed, x, x_low)
        fence_async_shared()
        t = gl.arange(0, C, layout=gl.SliceLayout(1, operand))[:, None] + zero
        s = gl.arange(0, C, layout=gl.SliceLayout(0, operand))[None, :]
        across = ((t ^ s) >> level) == 1
        found = gl.zeros([C, PANEL], gl.float32, layout=acc)
        both = gl.where(t - s > 0, dscores.load(operand), dscores.permute((1, 0)).load(operand))
        both = gl.where(across, both.to(gl.float32), 0.0).to(E)
        found = warpgroup_mma(both, x, found, use_acc=False, is_async=True)
        if x_low is not None:
            found = warpgroup_mma(both, x_low, found, is_async=True)
        found = warpgroup_mma_wait(num_outstanding=0, deps=(found,))
        both = gl.where(t - s > 0, dscores_low.load(operand), dscores_low.permute((1, 0)).load(operand))
        found = warpgroup_mma(gl.where(across, both.to(gl.float32), 0.0).to(E), x, found, is_async=True)
        found = warpgroup_mma_wait(num_outstanding=0, deps=(found,))
        dq += gl.where(right, found * factor, 0.0)
        dk_sum.store(dk_sum.load(acc) + gl.where(right, 0.0, found * factor))
        # The gradient of log(factor) is x * found. That logarithm sums the steps "block", so dg sums its transpose "around".
        decayed = x.load(acc).to(gl.float32)
        if x_low is not None:
            decayed += x_low.load(acc).to(gl.float32)
        dg = sum_split(decayed * found, high, low, dg, "around", level, opaque_zero(one, vector), acc)
    return dq, dg
