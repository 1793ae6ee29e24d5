"""Short causal convolution over time, one filter per channel, with SiLU or without, and its gradients: portable Triton.

Computes   y_t = silu(z_t), or z_t itself,   z_t = bias + sum over j of weight_j u_t-W+1+j   per channel, j from 0 to W - 1,
           where u is the input x of the sequence, and before its first step the last W - 1 inputs of its state (zeros without
           a state).
           Backward, with dz_t = dy_t silu'(z_t), or dy_t:
             dx_t = sum over j of weight_j dz_t+W-1-j,  where step t + W - 1 - j belongs to the sequence of t;
             dweight_j = sum over t of dz_t u_t-W+1+j,  dbias = sum over t of dz_t;
             gradient of the state: dx_t for the steps t = -W + 1 to -1.
Grid       forward and backward: one CTA per BC channels and G stretches of L steps of a batch entry, one behind the other.
           Sums of partial sums: one CTA per tap and BC channels. Gradient of the state: one CTA per sequence and BC channels. No
           CTA waits for another one.
On chip    everything is in registers. All stretches of a CTA are walked at once, a tile [G, BC] per step, of which a thread has
           neighboring channels of one step. It keeps the filter, the last W - 1 inputs and, backward, the W - 1 unfinished
           gradients of x and the sums for dweight and dbias. The loads of U steps are issued while the U steps before are
           computed. Each z_t and dz_t is computed once, but at the W - 1 steps before a stretch (their inputs are only loaded)
           and, backward, at those behind it.
Memory     forward reads x once and writes y once. Backward reads x and dy once and writes dx once, besides the W - 1 steps around
           a stretch, which hit L1 or L2. Each CTA writes its float32 sums for dweight and dbias in a row of ``partials``, which
           ``sums_kernel`` adds up.
Order      sums over steps are made in the same order each time: step by step in a stretch, then over the stretches of a CTA, then
           over CTAs.
Numerics   float32 between the loads and the stores. With SiLU, z is computed again in the backward pass, not saved.
Caller     launch.py of this folder launches the kernels.
Source     Dao's causal_conv1d and fla's ShortConvolution compute the same.
"""

import triton
import triton.language as tl

from onelaunch.kernels.common.activation import silu, silu_slope


@triton.jit
def bisected(offsets, t, low, high, steps):
    """Return the last sequence in [low, high) that begins at or before step t: the sequence of t, as empty ones have no steps.

    ``steps`` is at least the logarithm to base 2 of their number.
    """
    low, high = t * 0 + low, t * 0 + high
    for _ in range(steps):
        middle = (low + high) // 2
        begins = tl.load(offsets + middle).to(tl.int32)
        later = (begins <= t) & (high - low > 1)
        earlier = (begins > t) & (high - low > 1)
        low, high = tl.where(later, middle, low), tl.where(earlier, middle, high)
    return low


@triton.jit
def candidates(offsets, begin, stop, T, sequences, BISECTION_STEPS: tl.constexpr, PACKED: tl.constexpr):
    """Return the range of sequences that steps from ``begin`` to before ``stop`` belong to, and the steps that bisect it.

    Most CTAs have one sequence, and no steps. BISECTION_STEPS is at least the logarithm to base 2 of all sequences' number.
    """
    steps = begin * 0
    low, high = steps, steps + 1
    if PACKED:
        low = bisected(offsets, tl.minimum(begin, T - 1), 0, sequences, BISECTION_STEPS)
        high = bisected(offsets, tl.minimum(stop, T) - 1, 0, sequences, BISECTION_STEPS) + 1
        for power in tl.static_range(BISECTION_STEPS):
            steps += (high - low > (1 << power)).to(tl.int32)
    return low, high, steps


@triton.jit
def sequences_of(offsets, t, b, T, low, high, steps, PACKED: tl.constexpr):
    """Return the sequence of each step t, which is one of ``candidates``, and its first step; from T on as at T - 1."""
    if PACKED:
        n = bisected(offsets, tl.minimum(t, T - 1), low, high, steps)
        return n, tl.load(offsets + n).to(tl.int32)
    return t * 0 + b, t * 0


@triton.jit
def filters(weight, c, C, W: tl.constexpr):
    """Return the taps [1, BC] of the channels c, the oldest input's first.

    One tile is loaded, and sums select each tap: several loads would wait for each other at the barriers of their exchange.
    """
    place = tl.arange(0, triton.next_power_of_2(W))
    mask = (c < C)[:, None] & (place < W)[None, :]
    loaded = tl.load(weight + c[:, None] * W + place[None, :], mask=mask, other=0.0).to(tl.float32)
    taps = ()
    for j in tl.static_range(W):
        taps += (tl.sum(tl.where((place == j)[None, :], loaded, 0.0), 1)[None, :],)
    return taps


@triton.jit
def row_of(x, t, c, C, stride_t, FULL: tl.constexpr):
    """Return the rows [G, BC] at steps t of the tensor, as they are in memory. With FULL, no load is predicated."""
    p_row = x + t.to(tl.int64)[:, None] * stride_t + c[None, :]
    if FULL:
        return tl.load(p_row)
    return tl.load(p_row, mask=(c < C)[None, :], other=0.0)


@triton.jit
def rows_of(x, t, stop, c, C, stride_t, U: tl.constexpr, FULL: tl.constexpr):
    """Return the rows at steps t, t + 1, ... of U steps; the row at ``stop - 1`` from ``stop`` on."""
    rows = ()
    for u in tl.static_range(U):
        rows += (row_of(x, tl.minimum(t + u, stop - 1), c, C, stride_t, FULL),)
    return rows


@triton.jit
def inputs_before(x, state, n, t, first, T, c, C, stride_t, W: tl.constexpr, FULL: tl.constexpr):
    """Return the W - 1 inputs before the steps t of their sequences, the latest first."""
    inputs = ()
    for k in tl.static_range(1, W):
        row = row_of(x, tl.minimum(tl.maximum(t - k, 0), T - 1), c, C, stride_t, FULL).to(tl.float32)
        row = tl.where((t - k >= first)[:, None], row, 0.0)
        if state is not None:
            place = W - 1 + t - k - first
            before = ((place >= 0) & (place < W - 1))[:, None] & (c < C)[None, :]
            p_state = state + (n.to(tl.int64)[:, None] * C + c[None, :]) * (W - 1) + place[:, None]
            row += tl.load(p_state, mask=before, other=0.0).to(tl.float32)
        inputs += (row,)
    return inputs


@triton.jit
def restarted(inputs, state, n, begins, c, C, W: tl.constexpr):
    """Return the last W - 1 inputs with those of the sequence's state, or zeros, where a sequence ``begins``."""
    kept = ()
    for k in tl.static_range(W - 1):
        before = tl.zeros([n.shape[0], c.shape[0]], tl.float32)
        if state is not None:
            p_state = state + (n.to(tl.int64)[:, None] * C + c[None, :]) * (W - 1) + (W - 2 - k)
            before = tl.load(p_state, mask=begins[:, None] & (c < C)[None, :], other=0.0).to(tl.float32)
        kept += (tl.where(begins[:, None], before, inputs[k]),)
    return kept


@triton.jit
def followed(latest, inputs, W: tl.constexpr):
    """Return the last W - 1 inputs after one more step."""
    kept = (latest,)
    for k in tl.static_range(W - 2):
        kept += (inputs[k],)
    return kept


@triton.jit
def filtered(latest, inputs, taps, bias_row, W: tl.constexpr):
    """Return z of a step from its input and the W - 1 inputs before, the latest first."""
    z = latest * taps[W - 1]
    if bias_row is not None:
        z += bias_row
    for k in tl.static_range(W - 1):
        z += inputs[k] * taps[W - 2 - k]
    return z


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


@triton.jit(do_not_specialize=["T", "sequences", "L"])
def convolution_kernel(
    x, weight, bias, state, offsets, y, T, C, sequences, L, x_stride_b, x_stride_t,
    W: tl.constexpr, SILU: tl.constexpr, G: tl.constexpr, U: tl.constexpr, BC: tl.constexpr, FULL: tl.constexpr,
    BISECTION_STEPS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Compute y [B, T, C], contiguous, of G stretches of L steps.

    x is [B, T, C] with its channels next to each other, weight [C, W] and bias [C] are contiguous, and so is the state
    [sequences, C, W - 1]; bias and state may be None. With PACKED there is one batch entry, and ``offsets`` [sequences + 1] are
    the first steps of its sequences. BISECTION_STEPS is at least the logarithm to base 2 of their number. FULL says that C is a
    multiple of BC.
    """
    blocks, groups = tl.cdiv(C, BC), tl.cdiv(T, L * G)
    item = tl.program_id(0)
    c = (item % blocks) * BC + tl.arange(0, BC)
    b = item // blocks // groups
    begin = (item // blocks % groups) * (L * G)
    start = begin + tl.arange(0, G) * L
    stop = tl.minimum(start + L, T)
    p_x = x + b.to(tl.int64) * x_stride_b
    now = rows_of(p_x, start, stop, c, C, x_stride_t, U, FULL)
    low, high, steps = candidates(offsets, begin, begin + L * G, T, sequences, BISECTION_STEPS, PACKED)
    n, first = sequences_of(offsets, start, b, T, low, high, steps, PACKED)
    inputs = inputs_before(p_x, state, n, start, first, T, c, C, x_stride_t, W, FULL)
    bias_row = None
    if bias is not None:
        bias_row = tl.load(bias + c, mask=c < C, other=0.0).to(tl.float32)[None, :]
    taps = filters(weight, c, C, W)
    for s in range(0, L, U):
        ahead = rows_of(p_x, start + s + U, stop, c, C, x_stride_t, U, FULL)
        for u in tl.static_range(U):
            t = start + s + u
            if PACKED and W > 1:
                n, first = sequences_of(offsets, t, b, T, low, high, steps, PACKED)
                inputs = restarted(inputs, state, n, t == first, c, C, W)
            latest = now[u].to(tl.float32)
            z = filtered(latest, inputs, taps, bias_row, W)
            if W > 1:
                inputs = followed(latest, inputs, W)
            p_y = y + (b.to(tl.int64) * T + t)[:, None] * C + c[None, :]
            tl.store(p_y, (silu(z) if SILU else z).to(y.dtype.element_ty), mask=(t < stop)[:, None] & (c < C)[None, :])
        now = ahead


@triton.jit
def spread(dz, unfinished, taps, age, W: tl.constexpr, PACKED: tl.constexpr):
    """Return the gradients of the inputs at a step and at the W - 1 steps before, to which dz of this step has been added.

    ``age`` is the number of steps since the sequence's first one; inputs before that belong to other sequences.
    """
    sums = (dz * taps[W - 1],)
    for k in tl.static_range(1, W):
        term = tl.where((age >= k)[:, None], dz, 0.0) if PACKED else dz
        sums += (unfinished[k - 1] + term * taps[W - 1 - k],)
    return sums


@triton.jit
def without_last(sums, W: tl.constexpr):
    """Return the first W - 1 of W tensors."""
    kept = ()
    for k in tl.static_range(W - 1):
        kept += (sums[k],)
    return kept


@triton.jit
def increased(sums, dz, latest, inputs, W: tl.constexpr):
    """Return the sums for dweight, the latest input's first, with the terms of one more step."""
    found = (sums[0] + dz * latest,)
    for k in tl.static_range(1, W):
        found += (sums[k] + dz * inputs[k - 1],)
    return found


@triton.jit
def zeros_of(count: tl.constexpr, G: tl.constexpr, BC: tl.constexpr):
    """Return tiles of zeros."""
    tiles = ()
    for _ in tl.static_range(count):
        tiles += (tl.zeros([G, BC], tl.float32),)
    return tiles


@triton.jit(do_not_specialize=["T", "sequences", "L"])
def convolution_gradients_kernel(
    x, weight, bias, state, offsets, dy, dx, partials, T, C, sequences, L, x_stride_b, x_stride_t, dy_stride_b, dy_stride_t,
    dx_stride_t, W: tl.constexpr, SILU: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, G: tl.constexpr,
    U: tl.constexpr, BC: tl.constexpr, FULL: tl.constexpr, BISECTION_STEPS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Compute dx [B, T, C], rows of which are ``dx_stride_t`` apart, of G stretches of L steps, and this CTA's sums over steps.

    A row of ``partials`` [rows, W * WEIGHT + BIAS, C], float32, gets the terms of these steps of dweight and dbias; CTAs of other
    channels share the row. dx and, with neither sum, ``partials`` may be None. The other arguments are those of
    ``convolution_kernel``; dy is laid out as x is.
    """
    blocks, groups = tl.cdiv(C, BC), tl.cdiv(T, L * G)
    item = tl.program_id(0)
    c = (item % blocks) * BC + tl.arange(0, BC)
    b = item // blocks // groups
    begin = (item // blocks % groups) * (L * G)
    start = begin + tl.arange(0, G) * L
    stop, load_stop = tl.minimum(start + L, T), tl.minimum(start + L + (W - 1), T)
    p_x, p_dy = x + b.to(tl.int64) * x_stride_b, dy + b.to(tl.int64) * dy_stride_b
    now = rows_of(p_x, start, load_stop, c, C, x_stride_t, U, FULL)
    now_dy = rows_of(p_dy, start, load_stop, c, C, dy_stride_t, U, FULL)
    low, high, steps = candidates(offsets, begin, begin + L * G + (W - 1), T, sequences, BISECTION_STEPS, PACKED)
    n, first = sequences_of(offsets, start, b, T, low, high, steps, PACKED)
    inputs = inputs_before(p_x, state, n, start, first, T, c, C, x_stride_t, W, FULL)
    bias_row = None
    if bias is not None:
        bias_row = tl.load(bias + c, mask=c < C, other=0.0).to(tl.float32)[None, :]
    taps = filters(weight, c, C, W)
    unfinished, sums, bias_sum = zeros_of(W - 1, G, BC), zeros_of(W, G, BC), tl.zeros([G, BC], tl.float32)
    for s in range(0, L + (W - 1), U):
        ahead = rows_of(p_x, start + s + U, load_stop, c, C, x_stride_t, U, FULL)
        ahead_dy = rows_of(p_dy, start + s + U, load_stop, c, C, dy_stride_t, U, FULL)
        for u in tl.static_range(U):
            t = start + s + u
            if PACKED and W > 1:
                n, first = sequences_of(offsets, t, b, T, low, high, steps, PACKED)
                inputs = restarted(inputs, state, n, t == first, c, C, W)
            latest, dz = now[u].to(tl.float32), now_dy[u].to(tl.float32)
            if SILU:
                dz *= silu_slope(filtered(latest, inputs, taps, bias_row, W))
            dz = tl.where((t < T)[:, None], dz, 0.0)
            counted = tl.where((t < stop)[:, None], dz, 0.0)
            if WEIGHT:
                sums = increased(sums, counted, latest, inputs, W)
            if BIAS:
                bias_sum += counted
            if dx is not None:
                reached = spread(dz, unfinished, taps, t - first, W, PACKED)
                done = t - (W - 1)
                p_dx = dx + (b.to(tl.int64) * T + done)[:, None] * dx_stride_t + c[None, :]
                mask = ((done >= start) & (done < stop))[:, None] & (c < C)[None, :]
                tl.store(p_dx, reached[W - 1].to(dx.dtype.element_ty), mask=mask)
                if W > 1:
                    unfinished = without_last(reached, W)
            if W > 1:
                inputs = followed(latest, inputs, W)
        now, now_dy = ahead, ahead_dy
    row = partials
    if WEIGHT or BIAS:
        row += (item // blocks).to(tl.int64) * C * (W * WEIGHT + BIAS) + c
    if WEIGHT:
        for k in tl.static_range(W):
            tl.store(row + (W - 1 - k) * C, tl.sum(sums[k], 0), mask=c < C)
    if BIAS:
        tl.store(row + W * WEIGHT * C, tl.sum(bias_sum, 0), mask=c < C)


@triton.jit(do_not_specialize=["rows"])
def sums_kernel(partials, dweight, dbias, rows, C, W: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    """Add up the rows of ``partials``: BC channels of one tap of dweight [C, W], or of dbias [C]; one of the two may be None."""
    blocks = tl.cdiv(C, BC)
    place = tl.program_id(0) // blocks  # tap, or the bias behind all taps
    c = (tl.program_id(0) % blocks) * BC + tl.arange(0, BC)
    places = tl.num_programs(0) // blocks
    sums = tl.zeros([BR, BC], tl.float32)
    for first in range(0, rows, BR):
        row = first + tl.arange(0, BR)
        p_row = partials + (row.to(tl.int64) * places + place)[:, None] * C + c[None, :]
        sums += tl.load(p_row, mask=(row < rows)[:, None] & (c < C)[None, :], other=0.0)
    found = tl.sum(sums, 0)
    if dweight is not None:
        tl.store(dweight + c * W + place, found.to(dweight.dtype.element_ty), mask=(c < C) & (place < W))
        place -= W
    if dbias is not None:
        tl.store(dbias + c, found.to(dbias.dtype.element_ty), mask=(c < C) & (place == 0))


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
