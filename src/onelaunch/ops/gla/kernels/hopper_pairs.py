"""Sums of log-decays over steps of a chunk, and gradients between pairs of its steps, for hopper_gradients.py.

Computes   sums over steps as WGMMA products with matrices of 0 and 1, from which decays are made; and the terms of dq, dk and
           dg that come from pairs of different steps t > s of one chunk,
             dq_t += dP[t, s] k_s e^(g_s+1 + ... + g_t),   dk_s += dP[t, s] q_t e^(g_s+1 + ... + g_t),
           anchored at the middle of the chunk (one product for all pairs), or by levels of blocks where decays are strong
           (secondary chunking as in hopper_prepare.py, ``scores_by_levels``).
Given      all operands in the shared memory of hopper_gradients.py, which lists them. All warps of the CTA call these functions
           together; there are no mbarriers here. Writes are fenced before WGMMA reads them, and every product is waited for.
Registers  are what is scarce. That is why factors are recomputed (``reciprocal``, ``opaque_zero``), and why dk of strong decay
           is added up in shared memory (``stash``).
"""

from onelaunch.kernels.gluon.compat import fence_async_shared, gl, gluon, warpgroup_mma, warpgroup_mma_wait
from onelaunch.ops.gla.kernels.hopper_tiles import LOG2E, PANEL, C, exp2_flushed, ones_where, opaque_zero, store_split

MIN_LOG2_SUM = gl.constexpr(-512.0)
"""Base-2 logarithm of a decay within a chunk down to which a difference of two such float32 sums gives a decay to 2^-12.

Beyond it, differences are noise, and decays are summed on their own.
"""


@gluon.jit
def weights_of(PART: gl.constexpr, level, zero, acc: gl.constexpr, dtype: gl.constexpr):
    """Return the matrix [C, C] of 0 and 1 whose product sums, for each step t (row), the steps s (columns) that PART names.

    "before": s <= t. "behind": s > t. "onward": s >= t. "block", in blocks of 2^level steps: where bit ``level`` of t is 1 (a
    right block), from the block's start up to and with t; in a left block, the steps after t to the block's end. "around": in a
    right block from t on to the block's end; in a left block the steps before t from the block's start on. ``zero`` is an
    ``opaque_zero``, so that the matrix is not kept in registers. Columns only occur as a difference from the row: otherwise the
    compiler keeps 17 numbers for all masks.
    """
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
    """Return the negation of a condition, element by element."""
    return condition == 0


@gluon.jit
def summed(x, PART: gl.constexpr, level, zero, acc: gl.constexpr):
    """Return x [C, PANEL], in shared memory, summed over the steps that PART names: see ``weights_of``. Waits for WGMMA."""
    d = gl.zeros([C, PANEL], gl.float32, layout=acc)
    d = warpgroup_mma(weights_of(PART, level, zero, acc, x.dtype), x, d, use_acc=False, is_async=True)
    return warpgroup_mma_wait(num_outstanding=0, deps=(d,))


@gluon.jit
def reciprocal(x):
    """Return 1 / x of normal numbers; not pure, so that it is recomputed at each use instead of being held in registers."""
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def logarithm(g, PART: gl.constexpr, zero, acc: gl.constexpr):
    """Return the base-2 logarithm of the decays [C, PANEL] over the steps that PART names.

    "before": up to and with each step; "behind": after each step; "all" and "half": all steps, or the first half, the same in
    every row. The matrices of the last two are constants.
    """
    E: gl.constexpr = g.dtype
    operand: gl.constexpr = gl.DotOperandLayout(0, acc, 2)
    if PART == "before" or PART == "behind":
        weights = weights_of(PART, 0, zero, acc, E)
    else:  # constants: they take no instructions
        gl.static_assert(PART == "all" or PART == "half")
        s = gl.arange(0, C, layout=gl.SliceLayout(0, operand))[None, :]
        weights = ones_where(s < (C if PART == "all" else C // 2), E) + gl.zeros([C, C], E, layout=operand)
    d = gl.zeros([C, PANEL], gl.float32, layout=acc)
    d = warpgroup_mma(weights, g, d, use_acc=False, is_async=True)
    return warpgroup_mma_wait(num_outstanding=0, deps=(d,)) * LOG2E


@gluon.jit
def sum_split(x, high, low, d, PART: gl.constexpr, level, zero, acc: gl.constexpr):
    """Return d plus float32 x [C, PANEL] in registers, summed over the steps that PART names: see ``weights_of``.

    x goes through two bfloat16 tiles in shared memory, ``high`` and ``low``, as a sum of two terms. Fences, and waits for
    WGMMA.
    """
    store_split(x, high, low)
    fence_async_shared()
    weights = weights_of(PART, level, zero, acc, gl.bfloat16)
    d = warpgroup_mma(weights, high, d, is_async=True)
    d = warpgroup_mma(weights, low, d, is_async=True)
    return warpgroup_mma_wait(num_outstanding=0, deps=(d,))


@gluon.jit
def pairs_from_middle(dq, onward, dscores, tiles, decay, one, acc: gl.constexpr):
    """Add the pair terms to dq, and to the terms whose suffix sum is dg; return the pair terms of dk. Moderate decays.

    Args:
        dq: Gradient of the queries so far, [C, PANEL], float32.
        onward: Terms of dg that are summed from each step to the end of the chunk; q dq - k dk is added. Only products of
            what was rounded are subtracted, so pairs on one side of a step cancel exactly.
        dscores: Two 16-bit tiles [C, C] that add up to dP, 0 on and above the diagonal.
        tiles: Tiles of hopper_gradients.py; 0 and 1 hold q and k, 2 and 3 are overwritten by the decayed ones.
        decay: Decay from the chunk's middle to each step, [C, PANEL], at most exp(LIMIT).
        one: int32 in shared memory that holds 1, for ``opaque_zero``.
        acc: Layout of the accumulators.
    """
    E: gl.constexpr = tiles.dtype
    vector: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    d_q, d_k = tiles.index(2), tiles.index(3)
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
def pairs_by_levels(dq, stash, dg, dscores, dscores_low, q, k, g, x, high, low, flag, acc: gl.constexpr):
    """Add the pair terms to dq and dg, and to dk, which is held in ``stash``, for decays of any size.

    Args:
        dq: Gradient of the queries so far, [C, PANEL], float32.
        stash: Gradient of the keys so far, [C, PANEL], float32 in shared memory.
        dg: Gradient of the log-decays so far, [C, PANEL], float32.
        dscores: First 16-bit term [C, C] of dP, 0 on and above the diagonal.
        dscores_low: Second term of it.
        q: Queries of the panel, [C, PANEL], in shared memory.
        k: Keys of the panel.
        g: Log-decays of the panel, all finite.
        x: Scratch tile for decayed queries and keys.
        high: Scratch tile for the first term of a sum; it may be ``x``.
        low: Scratch tile for the second term.
        flag: int32 in shared memory that holds 1, for ``opaque_zero``.
        acc: Layout of the accumulators.
    """
    E: gl.constexpr = q.dtype
    vector: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    operand: gl.constexpr = gl.DotOperandLayout(0, acc, 2)
    for level in range(6):
        # Steps of right blocks are queries and those of left blocks keys: one product gives dq of those and dk of these.
        zero = opaque_zero(flag, vector)
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
        dg = sum_split(x.load(acc).to(gl.float32) * found, high, low, dg, "around", level, opaque_zero(flag, vector), acc)
    return dq, dg
