"""The linear-RNN layer in one launch, with a vector-matrix product per time step.

Computes   v = x W,  s_t = exp(log_decay_t) * s_{t-1} + v_t,  y_t = s_t * silu(gate_t)   (or y = s where GATED is false)
Grid       (B or the number of packed sequences, ceil(V / BV)): one CTA per sequence and BV channels, which waits for no other.
On chip    the weights [D, BV] of the CTA's channels in registers, and the state [BV].
Memory     reads x once per BV channels, log_decay and gate once; writes y once; for a backward pass also v and a row of states
           every BT steps.
Numerics   float32 throughout, rounded when stored.
Shows      the cost of a kernel without tensor cores, without parallelism over time and without loads ahead of their step: every
           step waits for memory once.
Caller     ``run_stepwise`` in ablations/linear_rnn.py launches it, for the variant ``fused_stepwise``.
Source     the single launch of experiment 040's write-up.
"""

import triton
import triton.language as tl

from onelaunch.kernels.common.activation import decay_of, silu


# Without do_not_specialize, Triton would compile again for a T or a number of sequences that is 1 or a multiple of 16.
@triton.jit(do_not_specialize=["T", "sequences"])
def stepwise_kernel(
    x, weight, log_decay, gate, initial, offsets, y, v, final, carries,
    T, width, channels, sequences, x_stride_b, x_stride_t, weight_stride,
    decay_stride_b, decay_stride_t, gate_stride_b, gate_stride_t,
    BT: tl.constexpr, BV: tl.constexpr, BD: tl.constexpr,
    GATED: tl.constexpr, INITIAL: tl.constexpr, PACKED: tl.constexpr, FINAL: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """Loop over the steps of one sequence and block of channels; see the top of the file.

    BD is at least D. GATED: multiply the states by the gate, which is not read otherwise. KEEP also writes v and
    the carries (the state before every BT-th step), which the backward pass reads.
    """
    sequence = tl.program_id(0)
    c = tl.program_id(1) * BV + tl.arange(0, BV)
    k = tl.arange(0, BD)
    in_range = c < channels
    b_weight = tl.load(
        weight + k[:, None] * weight_stride + c[None, :], mask=(k < width)[:, None] & in_range[None, :], other=0.0
    ).to(tl.float32)  # [BD, BV]
    first, after, b = tl.cast(0, tl.int32), T, sequence.to(tl.int64)
    if PACKED:
        first, after = tl.load(offsets + sequence).to(tl.int32), tl.load(offsets + sequence + 1).to(tl.int32)
        b = sequence.to(tl.int64) * 0  # 0 as an int64 tensor: packed sequences share batch entry 0
    s = tl.zeros([BV], tl.float32)
    if INITIAL:
        s = tl.load(initial + sequence.to(tl.int64) * channels + c, mask=in_range, other=0.0)
    t = first
    while t < after:
        row = t.to(tl.int64)
        out = (b * T + row) * channels + c
        if KEEP:
            if t % BT == 0:
                tl.store(carries + (b * tl.cdiv(T, BT) + t // BT) * channels + c, s, mask=in_range)
        # All loads of a step are issued before the sum over D, which has a barrier. Loads after it would wait for memory again.
        b_decay = tl.load(log_decay + b * decay_stride_b + row * decay_stride_t + c, mask=in_range, other=0.0)
        b_gate = b_decay  # stands for the argument, which is not read if GATED is false
        if GATED:
            b_gate = tl.load(gate + b * gate_stride_b + row * gate_stride_t + c, mask=in_range, other=0.0)
        b_x = tl.load(x + b * x_stride_b + row * x_stride_t + k, mask=k < width, other=0.0).to(tl.float32)
        b_v = tl.sum(b_x[:, None] * b_weight, 0)  # [BV]
        s = decay_of(b_decay) * s + b_v
        b_y = s
        if GATED:
            b_y = s * silu(b_gate)
        tl.store(y + out, b_y.to(y.dtype.element_ty), mask=in_range)
        if KEEP:
            tl.store(v + out, b_v.to(v.dtype.element_ty), mask=in_range)
        t += 1
    if FINAL:
        tl.store(final + sequence.to(tl.int64) * channels + c, s, mask=in_range)
