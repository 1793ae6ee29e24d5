"""RMSNorm of every head times the gate, and the gradients of both, each in one pass.

Computes   a = h * rstd * norm_weight * act(gate), rstd = 1 / sqrt(mean(h^2) + eps) of every head. act is SiLU, or the identity
           if the gate is activated already. Backward, from da: dh, dgate, dnorm_weight, and a again if it was not saved.
           With x = h * rstd and f = act(gate) * norm_weight:
             a = x f,  dh = rstd (da f - x mean(da x f)) with the mean over the head,  dgate = da x norm_weight act'(gate),
             dnorm_weight = sum of da x act(gate) over tokens and heads.
Grid       forward: one CTA per BM tokens and head. Backward: one CTA per ``steps`` such tiles, one after the other. The heads
           of the same tokens are neighbouring tiles. All warps do the same work.
On chip    whole heads [BM, BV] in float32 registers, with BV the power of 2 that holds the V channels of a head; backward also
           the CTA's own sum of dnorm_weight, [BM, BV].
Memory     forward reads h and the gate once, writes a once, and rstd, one float32 per token and head, if there is a buffer for
           it. Backward reads h, the gate, da and rstd once, writes dh, dgate and maybe a once, and a row of partial sums of
           dnorm_weight per CTA. If CTAs have few tiles, the one that ends last reads those rows and adds them in a fixed order,
           so the result does not depend on which CTA that is. Otherwise PyTorch adds them (MOST_STEPS_WITH_SUM in launch.py).
Protocol   forward: CTAs do not exchange anything. Backward: when all warps of a CTA have stored its row (bar.sync), one thread
           adds 1 to ``counter`` with release and acquire semantics at GPU scope. The CTA that finds all others counted sees
           their rows, and sets the counter back to 0 for the next launch. No CTA waits for another.
Numerics   float32 between the loads and the stores. dh is orthogonal to h, but for eps, and a decay of the recurrence before the
           norm scales h: its gradient is what is left of large terms that cancel. dh is therefore rounded so that the inner
           product of a head's dh and h, 0 but for eps, is kept by the rounding (``round_across``).
Callers    launch.py launches the kernels; prologue.py uses ``reciprocal_rms`` and ``activate``.
Source     study 058-output-chain; norm and gate as in fla's FusedRMSNormGated; docs/notebook/output_chain.md.
"""

import triton
import triton.language as tl

from onelaunch.kernels.common.activation import silu, silu_slope

SUM_ELEMENTS = tl.constexpr(8192)
"""Elements of partial sums that the last CTA of a backward launch loads at once: 32 per thread with eight warps. Not tuned."""


@triton.jit
def reciprocal_rms(x, eps, V: tl.constexpr, AXIS: tl.constexpr):
    """Return 1 / sqrt(mean(x^2) + eps) along AXIS, of V channels; elements beyond V must be 0."""
    return 1.0 / tl.sqrt(tl.sum(x * x, axis=AXIS) * (1.0 / V) + eps)


@triton.jit
def activate(gate, ACTIVATED: tl.constexpr):
    """Return the activated gate in float32: itself if ACTIVATED, else its SiLU."""
    return gate.to(tl.float32) if ACTIVATED else silu(gate)


@triton.jit
def tile_coordinates(tile, M, H, BM: tl.constexpr):
    """Return a tile's tokens, 64-bit, the mask of those below M, and its head; heads of the same tokens are adjacent tiles."""
    m = (tile // H).to(tl.int64) * BM + tl.arange(0, BM)
    return m, m < M, tile % H


@triton.jit
def norm_gate_kernel(
    h, gate, norm_weight, a, rstd, M, H, h_stride, gate_stride, eps,
    V: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr, ACTIVATED: tl.constexpr,
):  # fmt: skip
    """Compute one tile of a ``[M, H * V]``, and of rstd ``[M, H]`` unless it is ``None``."""
    m, tokens_valid, head = tile_coordinates(tl.program_id(0), M, H, BM)
    c = tl.arange(0, BV)
    valid = tokens_valid[:, None] & (c < V)[None, :]
    column = (head * V + c)[None, :]
    x = tl.load(h + m[:, None] * h_stride + column, mask=valid, other=0.0).to(tl.float32)  # [BM, BV]
    r = reciprocal_rms(x, eps, V, 1)  # [BM]
    if rstd is not None:
        tl.store(rstd + m * H + head, r, mask=tokens_valid)
    factor = 1.0  # multiplied in the order of the backward pass, so that computing a again gives the same bits
    if gate is not None:
        factor = activate(tl.load(gate + m[:, None] * gate_stride + column, mask=valid, other=0.0), ACTIVATED)
    if norm_weight is not None:
        factor *= tl.load(norm_weight + c, mask=c < V, other=0.0).to(tl.float32)[None, :]
    x = x * r[:, None] * factor
    tl.store(a + m[:, None] * (H * V) + column, x.to(a.dtype.element_ty), mask=valid)


@triton.jit
def add_rows(partials, total, rows, V: tl.constexpr, BV: tl.constexpr):
    """Store the sum of all rows of partials [rows, V] in total [V], added in the same order each time.

    Other CTAs have just written the rows, so they are read from L2.
    """
    ROWS: tl.constexpr = max(SUM_ELEMENTS // BV, 1)
    r, c = tl.arange(0, ROWS), tl.arange(0, BV)
    sums = tl.zeros([ROWS, BV], tl.float32)
    for first in range(0, rows, ROWS):
        row = first + r
        valid = (row < rows)[:, None] & (c < V)[None, :]
        sums += tl.load(partials + row.to(tl.int64)[:, None] * V + c[None, :], mask=valid, other=0.0, cache_modifier=".cg")
    tl.store(total + c, tl.sum(sums, axis=0).to(total.dtype.element_ty), mask=c < V)


@triton.jit
def round_across(exact, x, c, DTYPE: tl.constexpr, BV: tl.constexpr):
    """Return rows [BM, BV] rounded to DTYPE so that each row's inner product with the same row of x is nearly unchanged.

    What rounding takes from the inner product goes into the element where |x| is largest. ``c`` numbers the elements. A row
    that is not finite, or that the correction would take out of DTYPE's range, is rounded as usual.
    """
    rounded = exact.to(DTYPE)
    if exact.dtype == DTYPE:
        return rounded
    wide = rounded.to(tl.float32)
    lost = tl.sum((exact - wide) * x, axis=1)  # [BM]
    # Magnitudes with the element's number in their lowest bits: one maximum finds both, and no two are equal.
    LOW: tl.constexpr = BV - 1
    keys = (x.to(tl.int32, bitcast=True) & (0x7FFFFFFF - LOW)) | c[None, :]
    largest_key = tl.max(keys, axis=1)
    largest = (largest_key & (0x7FFFFFFF - LOW)).to(tl.float32, bitcast=True)
    factor = lost / tl.maximum(largest * largest, 1e-30)
    corrected = (wide + factor[:, None] * x).to(DTYPE)
    taken = (keys == largest_key[:, None]) & (tl.abs(corrected.to(tl.float32)) < float("inf"))
    return tl.where(taken, corrected, rounded)


@triton.jit
def norm_gate_gradients_kernel(
    da, h, gate, norm_weight, rstd, a, dh, dgate, partials, dnorm_weight, counter, M, H, steps, da_stride, h_stride, gate_stride,
    dgate_stride, V: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr, ACTIVATED: tl.constexpr,
):  # fmt: skip
    """Compute a again, unless ``a`` is ``None``, and from da, unless it is ``None``, the gradients.

    dgate and ``partials`` [CTAs, V] float32 may be ``None``. Each CTA stores its partial sum of dnorm_weight in its row of
    ``partials``. dnorm_weight [V] and ``counter`` may be ``None`` together: then nobody adds up the rows. ``counter`` is 0 before
    and after the launch. The last CTA may have fewer than ``steps`` tiles: the tokens of those beyond the end are masked.
    """
    c = tl.arange(0, BV)
    weight = 1.0
    if norm_weight is not None:
        weight = tl.load(norm_weight + c, mask=c < V, other=0.0).to(tl.float32)[None, :]
    dweight = tl.zeros([BM, BV], tl.float32)
    for step in range(steps):
        m, tokens_valid, head = tile_coordinates(tl.program_id(0) * steps + step, M, H, BM)
        valid = tokens_valid[:, None] & (c < V)[None, :]
        column = (head * V + c)[None, :]
        contiguous = m[:, None] * (H * V) + column  # offsets in a and dh
        r = tl.load(rstd + m * H + head, mask=tokens_valid, other=0.0)[:, None]
        x = tl.load(h + m[:, None] * h_stride + column, mask=valid, other=0.0).to(tl.float32) * r  # [BM, BV]
        if gate is not None:
            g = tl.load(gate + m[:, None] * gate_stride + column, mask=valid, other=0.0)
            activated, slope = activate(g, ACTIVATED), 1.0 if ACTIVATED else silu_slope(g)
        else:
            activated, slope = 1.0, 0.0  # the slope is not used, since dgate is None without a gate
        factor = activated * weight
        if a is not None:
            tl.store(a + contiguous, (x * factor).to(a.dtype.element_ty), mask=valid)
        if da is not None:
            d = tl.load(da + m[:, None] * da_stride + column, mask=valid, other=0.0).to(tl.float32)
            d_times_x = d * x
            mean = tl.sum(d_times_x * factor, axis=1) * (1.0 / V)  # [BM]
            rounded = round_across(r * (d * factor - x * mean[:, None]), x, c, dh.dtype.element_ty, BV)
            tl.store(dh + contiguous, rounded, mask=valid)
            if partials is not None:
                dweight += d_times_x * activated
            if dgate is not None:
                at = dgate + m[:, None] * dgate_stride + column
                tl.store(at, (d_times_x * weight * slope).to(dgate.dtype.element_ty), mask=valid)
    if partials is not None:
        tl.store(partials + tl.program_id(0).to(tl.int64) * V + c, tl.sum(dweight, axis=0), mask=c < V)
        if counter is not None:
            tl.debug_barrier()  # all warps have stored before one thread counts the CTA
            if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == tl.num_programs(0) - 1:
                add_rows(partials, dnorm_weight, tl.num_programs(0), V, BV)
                tl.store(counter, 0)
