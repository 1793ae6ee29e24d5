"""Short causal convolution over time, one filter per channel, with SiLU or without, and its gradients: portable Triton.

Computes   y_t = silu(z_t), or z_t itself,   z_t = bias + sum over j of weight_j u_t-W+1+j   per channel, j from 0 to W - 1,
           where u is the input x of the sequence, and before its first step the last W - 1 inputs of its state (zeros without
           a state).
           Backward, with dz_t = dy_t silu'(z_t), or dy_t:
             dx_t = sum over j of weight_j dz_t+W-1-j,  where step t + W - 1 - j belongs to the sequence of t;
             dweight_j = sum over t of dz_t u_t-W+1+j,  dbias = sum over t of dz_t;
             gradient of the state: dx_t for the steps t = -W + 1 to -1.
Grid       forward: one CTA per BT steps and BC channels of a batch entry. Backward: one CTA per ``tiles`` such tiles, one after
           the other. Gradient of the state: one CTA per sequence and BC channels. No CTA waits for another one.
On chip    everything is in registers. An input that several steps need is loaded for each of them, W times forward and W^2 times
           backward; all loads but the first one hit L1.
Memory     forward reads x once and writes y once. Backward reads x and dy once and writes dx once; each CTA writes its float32
           sums for dweight [BC, W] and dbias [BC] in a row of ``partials`` and ``bias_partials``, which PyTorch adds up.
Order      sums over steps are made in the same order each time.
Numerics   float32 between the loads and the stores. With SiLU, z is computed again in the backward pass, not saved.
Caller     launch.py of this folder launches the kernels.
Source     Dao's causal_conv1d and fla's ShortConvolution compute the same.
"""

import triton
import triton.language as tl

from onelaunch.kernels.common.activation import silu, silu_slope


@triton.jit
def sequences_of(offsets, t, b, T, sequences, BISECTION_STEPS: tl.constexpr, PACKED: tl.constexpr):
    """Return the sequence of each step t, its first step and the step behind its last one.

    The sequence of a step is the last one that begins at or before it, so that empty ones have no steps.
    """
    if PACKED:
        low, high = t * 0, t * 0 + sequences  # the sequence is in [low, high)
        for _ in tl.static_range(BISECTION_STEPS):
            middle = (low + high) // 2
            begins = tl.load(offsets + middle).to(tl.int32)
            later = (begins <= t) & (high - low > 1)
            earlier = (begins > t) & (high - low > 1)
            low, high = tl.where(later, middle, low), tl.where(earlier, middle, high)
        # Within the tensor, whatever the offsets are: nobody checks their values on a GPU.
        first, end = tl.load(offsets + low).to(tl.int32), tl.load(offsets + low + 1).to(tl.int32)
        return low, tl.maximum(first, 0), tl.minimum(end, T)
    return t * 0 + b, t * 0, t * 0 + T


@triton.jit
def inputs_at(x, state, n, t, first, end, inside, c, C, stride_t, W: tl.constexpr):
    """Return the inputs [BT, BC] at steps t, which may lie up to W - 1 before the first step of their sequence.

    ``x`` points to the batch entry. Steps from ``end`` on, and those that are not ``inside``, give zeros.
    """
    valid = (inside & (t >= first) & (t < end))[:, None] & (c < C)[None, :]
    found = tl.load(x + t.to(tl.int64)[:, None] * stride_t + c[None, :], mask=valid, other=0.0).to(tl.float32)
    if state is not None:
        place = W - 1 + t - first
        before = (inside & (t < first) & (place >= 0))[:, None] & (c < C)[None, :]
        p_state = state + (n.to(tl.int64)[:, None] * C + c[None, :]) * (W - 1) + place[:, None]
        found += tl.load(p_state, mask=before, other=0.0).to(tl.float32)
    return found


@triton.jit
def preactivations(x, weight, bias, state, n, t, first, end, inside, c, C, stride_t, W: tl.constexpr):
    """Return z [BT, BC] at steps t of their sequences; what it is at other steps has no meaning."""
    z = tl.zeros([t.shape[0], c.shape[0]], tl.float32)
    if bias is not None:
        z += tl.load(bias + c, mask=c < C, other=0.0).to(tl.float32)[None, :]
    for j in tl.static_range(W):
        tap = tl.load(weight + c * W + j, mask=c < C, other=0.0).to(tl.float32)
        z += tap[None, :] * inputs_at(x, state, n, t - (W - 1 - j), first, end, inside, c, C, stride_t, W)
    return z


@triton.jit
def preactivation_gradients(
    x, weight, bias, state, dy, n, t, first, end, inside, c, C, stride_t, dy_stride_t, W: tl.constexpr, SILU: tl.constexpr
):  # fmt: skip
    """Return dz [BT, BC] at steps t; zeros at steps that are not ``inside`` or lie outside of the sequence."""
    valid = (inside & (t >= first) & (t < end))[:, None] & (c < C)[None, :]
    incoming = tl.load(dy + t.to(tl.int64)[:, None] * dy_stride_t + c[None, :], mask=valid, other=0.0).to(tl.float32)
    if SILU:
        incoming *= silu_slope(preactivations(x, weight, bias, state, n, t, first, end, inside, c, C, stride_t, W))
    return incoming


@triton.jit(do_not_specialize=["T", "sequences"])
def convolution_kernel(
    x, weight, bias, state, offsets, y, T, C, sequences, x_stride_b, x_stride_t,
    W: tl.constexpr, SILU: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, BISECTION_STEPS: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """Compute y [B, T, C], contiguous, of one tile.

    x is [B, T, C] with its channels next to each other, weight [C, W] and bias [C] are contiguous, and so is the state
    [sequences, C, W - 1]; bias and state may be None. With PACKED there is one batch entry, and ``offsets`` [sequences + 1] are
    the first steps of its sequences. BISECTION_STEPS is at least the logarithm to base 2 of their number.
    """
    blocks, tiles = tl.cdiv(C, BC), tl.cdiv(T, BT)
    item = tl.program_id(0)
    c = (item % blocks) * BC + tl.arange(0, BC)
    b = item // blocks // tiles
    t = (item // blocks % tiles) * BT + tl.arange(0, BT)
    inside = t < T
    n, first, end = sequences_of(offsets, tl.minimum(t, T - 1), b, T, sequences, BISECTION_STEPS, PACKED)
    z = preactivations(x + b.to(tl.int64) * x_stride_b, weight, bias, state, n, t, first, end, inside, c, C, x_stride_t, W)
    p_y = y + (b.to(tl.int64) * T + t)[:, None] * C + c[None, :]
    tl.store(p_y, (silu(z) if SILU else z).to(y.dtype.element_ty), mask=inside[:, None] & (c < C)[None, :])


@triton.jit(do_not_specialize=["T", "sequences", "tiles"])
def convolution_gradients_kernel(
    x, weight, bias, state, offsets, dy, dx, partials, bias_partials, T, C, sequences, tiles,
    x_stride_b, x_stride_t, dy_stride_b, dy_stride_t,
    W: tl.constexpr, SILU: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, BISECTION_STEPS: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """Compute dx [B, T, C], contiguous, of ``tiles`` tiles of a batch entry, and this CTA's part of the sums over steps.

    A row of ``partials`` [rows, C, W] and of ``bias_partials`` [rows, C], float32, gets the terms of these tiles of dweight and
    dbias; CTAs of other channels share the row. dx and each of the two may be None. The other arguments are those of
    ``convolution_kernel``; dy is laid out as x is.
    """
    blocks, groups = tl.cdiv(C, BC), tl.cdiv(tl.cdiv(T, BT), tiles)
    item = tl.program_id(0)
    c = (item % blocks) * BC + tl.arange(0, BC)
    b = item // blocks // groups
    group = item // blocks % groups
    p_x, p_dy = x + b.to(tl.int64) * x_stride_b, dy + b.to(tl.int64) * dy_stride_b
    taps = tl.arange(0, triton.next_power_of_2(W))
    sums = tl.zeros([triton.next_power_of_2(W), BC], tl.float32)
    bias_sum = tl.zeros([BC], tl.float32)
    for turn in range(tiles):
        t = (group * tiles + turn) * BT + tl.arange(0, BT)
        inside = t < T
        n, first, end = sequences_of(offsets, tl.minimum(t, T - 1), b, T, sequences, BISECTION_STEPS, PACKED)
        found = tl.zeros([BT, BC], tl.float32)
        for j in tl.static_range(W):
            later = t + (W - 1 - j)
            dz = preactivation_gradients(
                p_x, weight, bias, state, p_dy, n, later, first, end, inside, c, C, x_stride_t, dy_stride_t, W, SILU
            )
            found += tl.load(weight + c * W + j, mask=c < C, other=0.0).to(tl.float32)[None, :] * dz
            if j == W - 1 and bias_partials is not None:  # dz of the steps t themselves
                bias_sum += tl.sum(dz, 0)
            if j == W - 1 and partials is not None:
                for tap in tl.static_range(W):
                    u = inputs_at(p_x, state, n, t - (W - 1 - tap), first, end, inside, c, C, x_stride_t, W)
                    sums += tl.where((taps == tap)[:, None], tl.sum(dz * u, 0)[None, :], 0.0)
        if dx is not None:
            p_dx = dx + (b.to(tl.int64) * T + t)[:, None] * C + c[None, :]
            tl.store(p_dx, found.to(dx.dtype.element_ty), mask=inside[:, None] & (c < C)[None, :])
    row = (item // blocks).to(tl.int64) * C
    if partials is not None:
        tl.store(partials + (row + c)[None, :] * W + taps[:, None], sums, mask=(taps < W)[:, None] & (c < C)[None, :])
    if bias_partials is not None:
        tl.store(bias_partials + row + c, bias_sum, mask=c < C)


@triton.jit(do_not_specialize=["T", "sequences"])
def state_gradients_kernel(
    x, weight, bias, state, offsets, dy, dstate, T, C, sequences, x_stride_b, x_stride_t, dy_stride_b, dy_stride_t,
    W: tl.constexpr, SILU: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of one sequence's state, BC channels of ``dstate`` [sequences, C, W - 1].

    BP is at least W - 1. The other arguments are those of ``convolution_gradients_kernel``.
    """
    blocks = tl.cdiv(C, BC)
    sequence = tl.program_id(0) // blocks
    c = (tl.program_id(0) % blocks) * BC + tl.arange(0, BC)
    place = tl.arange(0, BP)
    b = sequence
    first, end = place * 0, place * 0 + T
    if PACKED:
        b = sequence * 0
        first += tl.maximum(tl.load(offsets + sequence).to(tl.int32), 0)
        end = place * 0 + tl.minimum(tl.load(offsets + sequence + 1).to(tl.int32), T)
    p_x, p_dy = x + b.to(tl.int64) * x_stride_b, dy + b.to(tl.int64) * dy_stride_b
    t = first + place - (W - 1)  # step of each input of the state
    n = place * 0 + sequence
    inside = place < W - 1
    found = tl.zeros([BP, BC], tl.float32)
    for j in tl.static_range(W):
        dz = preactivation_gradients(
            p_x, weight, bias, state, p_dy, n, t + (W - 1 - j), first, end, inside, c, C, x_stride_t, dy_stride_t, W, SILU
        )
        found += tl.load(weight + c * W + j, mask=c < C, other=0.0).to(tl.float32)[None, :] * dz
    p_dstate = dstate + (sequence.to(tl.int64) * C + c[None, :]) * (W - 1) + place[:, None]
    tl.store(p_dstate, found.to(dstate.dtype.element_ty), mask=inside[:, None] & (c < C)[None, :])
