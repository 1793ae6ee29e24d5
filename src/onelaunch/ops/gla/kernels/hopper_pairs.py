"""Sums of log-decays over parts of a chunk, and gradients of pairs of its steps, for the gradients on Hopper GPUs.

Computes   sums over steps as products with matrices of 0 and 1, from which decays are made; and what pairs of different steps of
           a chunk add to dq, dk and dg: by one product from the chunk's middle, or by levels of halves where decays are strong.
On chip    all operands in the shared memory of hopper_gradients.py, which says what lies there.
"""

from onelaunch.kernels.gluon.compat import fence_async_shared, gl, gluon, warpgroup_mma, warpgroup_mma_wait
from onelaunch.ops.gla.kernels.hopper_tiles import LOG2E, PANEL, C, exp2_flushed, ones_where, store_in_parts, zero_of

LONGEST = gl.constexpr(-512.0)
"""Logarithm to base 2 of a decay within a chunk down to which a difference of two is good for a decay: to 2^-12."""


@gluon.jit
def weights_of(PART: gl.constexpr, level, zero, acc: gl.constexpr, dtype: gl.constexpr):
    """[C, C] of 0 and 1: which steps (columns) each step (row) sums."""
    operand: gl.constexpr = gl.DotOperandLayout(0, acc, 2)
    t = gl.arange(0, C, layout=gl.SliceLayout(1, operand))[:, None] + zero
    s = gl.arange(0, C, layout=gl.SliceLayout(0, operand))[None, :]
    if PART == "before":
        weights = ones_where(t - s >= 0, gl.float32)
    elif PART == "behind":
        weights = ones_where(t - s < 0, gl.float32)
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
    return condition == 0


@gluon.jit
def summed(x, PART: gl.constexpr, level, zero, acc: gl.constexpr):
    """x [C, PANEL] in shared memory, summed over the steps that PART names."""
    d = gl.zeros([C, PANEL], gl.float32, layout=acc)
    d = warpgroup_mma(weights_of(PART, level, zero, acc, x.dtype), x, d, use_acc=False, is_async=True)
    return warpgroup_mma_wait(num_outstanding=0, deps=(d,))


@gluon.jit
def reciprocal(x):
    """1 / x of a normal number, computed again wherever it is wanted: registers are scarcer."""
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def logarithm(g, PART: gl.constexpr, zero, acc: gl.constexpr):
    """To base 2, of the decays [C, PANEL] that PART names together: those up to and with each step, those behind it, or (in
    every row the same) all of them or those of the first half.
    """
    E: gl.constexpr = g.dtype
    operand: gl.constexpr = gl.DotOperandLayout(0, acc, 2)
    if PART == "before" or PART == "behind":
        weights = weights_of(PART, 0, zero, acc, E)
    else:  # constants, which nobody has to compute
        gl.static_assert(PART == "all" or PART == "half")
        s = gl.arange(0, C, layout=gl.SliceLayout(0, operand))[None, :]
        weights = ones_where(s < (C if PART == "all" else C // 2), E) + gl.zeros([C, C], E, layout=operand)
    d = gl.zeros([C, PANEL], gl.float32, layout=acc)
    d = warpgroup_mma(weights, g, d, use_acc=False, is_async=True)
    return warpgroup_mma_wait(num_outstanding=0, deps=(d,)) * LOG2E


@gluon.jit
def summed_in_parts(x, high, low, d, PART: gl.constexpr, level, zero, acc: gl.constexpr):
    """d, and the same of float32 x in registers, through two bfloat16 tiles in shared memory."""
    store_in_parts(x, high, low)
    fence_async_shared()
    weights = weights_of(PART, level, zero, acc, gl.bfloat16)
    d = warpgroup_mma(weights, high, d, is_async=True)
    d = warpgroup_mma(weights, low, d, is_async=True)
    return warpgroup_mma_wait(num_outstanding=0, deps=(d,))


@gluon.jit
def pairs_from_middle(dq, onward, dscores, tiles, decay, one, acc: gl.constexpr):
    """Add what pairs of different steps give dq, and to what dg sums from each step onward; their dk on its own.

    ``dscores``: two tiles [C, C] that add up, 0 but below the diagonal. ``decay`` [C, PANEL]: from the chunk's middle to each
    step; one product serves all pairs where it fits the dtype.
    """
    E: gl.constexpr = tiles.dtype
    vector: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    d_q, d_k = tiles.index(2), tiles.index(3)
    same = zero_of(one, vector)
    d_k.store((tiles.index(1 + same).load(acc).to(gl.float32) * reciprocal(decay)).to(E))
    d_q.store((tiles.index(same).load(acc).to(gl.float32) * decay).to(E))
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
def pairs_by_levels(dq, stash, dg, dscores, dscores_low, q, k, g, x, high, low, flag, acc: gl.constexpr):
    """Add what pairs of different steps give dq and dg, and dk, which is in the ``stash``, for decays of any size.

    ``dscores`` [C, C], in shared memory in two parts, is 0 but below its diagonal. ``x`` is room for decayed queries and keys,
    ``high`` and ``low`` for parts; one of these may be the same.
    """
    E: gl.constexpr = q.dtype
    vector: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    operand: gl.constexpr = gl.DotOperandLayout(0, acc, 2)
    for level in range(6):
        # right steps are queries here and left ones keys, so one product has dq of those and dk of these
        zero = zero_of(flag, vector)
        factor = exp2_flushed(summed(g, "block", level, zero, acc) * LOG2E)
        row = gl.arange(0, C, layout=gl.SliceLayout(1, acc))[:, None] + zero
        right = ((row >> level) & 1) == 1
        x.store((factor * gl.where(right, q.load(acc).to(gl.float32), k.load(acc).to(gl.float32))).to(E))
        fence_async_shared()
        t = gl.arange(0, C, layout=gl.SliceLayout(1, operand))[:, None] + zero
        s = gl.arange(0, C, layout=gl.SliceLayout(0, operand))[None, :]
        across = ((t ^ s) >> level) == 1
        found = gl.zeros([C, PANEL], gl.float32, layout=acc)
        both = gl.where(t - s > 0, dscores.load(operand), dscores.permute((1, 0)).load(operand))
        found = warpgroup_mma(gl.where(across, both.to(gl.float32), 0.0).to(E), x, found, use_acc=False, is_async=True)
        found = warpgroup_mma_wait(num_outstanding=0, deps=(found,))
        both = gl.where(t - s > 0, dscores_low.load(operand), dscores_low.permute((1, 0)).load(operand))
        found = warpgroup_mma(gl.where(across, both.to(gl.float32), 0.0).to(E), x, found, is_async=True)
        found = warpgroup_mma_wait(num_outstanding=0, deps=(found,))
        dq += gl.where(right, found * factor, 0.0)
        stash.store(stash.load(acc) + gl.where(right, 0.0, found * factor))
        dg = summed_in_parts(x.load(acc).to(gl.float32) * found, high, low, dg, "around", level, zero_of(flag, vector), acc)
    return dq, dg
