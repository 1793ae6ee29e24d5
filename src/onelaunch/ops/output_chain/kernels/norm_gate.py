"""RMSNorm of every head times the gate, and the gradients of both, each in one pass.

Computes   a = h * rstd * norm_weight * act(gate), rstd = 1 / sqrt(mean(h^2) + eps) of every head; act is SiLU, or nothing where
           the gate is activated already. From da: dh, dgate, dnorm_weight, and a again, which is not kept.
Grid       forward a program per BM tokens and head; backward a program per ``steps`` such tiles, one behind the other.
On chip    whole heads [BM, BV] in float32, backward also the program's share of dnorm_weight.
Memory     reads h, the gate (and da) once, writes a (dh, dgate) once; rstd, a number for each head; backward a row of partial
           sums of dnorm_weight for each program, so that their sum does not depend on who comes first.
Numerics   float32 between the loads and the stores.
"""

import triton
import triton.language as tl

from onelaunch.kernels.common.activation import silu, silu_slope


@triton.jit
def reciprocal_rms(x, eps, V: tl.constexpr, AXIS: tl.constexpr):
    """1 / sqrt(mean(x^2) + eps) along AXIS, of V channels; what masks left out is zero."""
    return 1.0 / tl.sqrt(tl.sum(x * x, axis=AXIS) * (1.0 / V) + eps)


@triton.jit
def activate(gate, ACTIVATED: tl.constexpr):
    """The activated gate, float32."""
    return gate.to(tl.float32) if ACTIVATED else silu(gate)


@triton.jit
def place(tile, M, H, BM: tl.constexpr):
    """Tokens of a tile, 64-bit, which of them there are, and its head: heads of the same tokens follow each other."""
    m = (tile // H).to(tl.int64) * BM + tl.arange(0, BM)
    return m, m < M, tile % H


@triton.jit
def norm_gate_kernel(
    h, gate, norm_weight, a, rstd, M, H, h_stride, gate_stride, eps,
    V: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr, ACTIVATED: tl.constexpr,
):  # fmt: skip
    """a ``[M, H * V]``; rstd ``[M, H]`` if there is room for it."""
    m, tokens_there, head = place(tl.program_id(0), M, H, BM)
    c = tl.arange(0, BV)
    there = tokens_there[:, None] & (c < V)[None, :]
    column = (head * V + c)[None, :]
    x = tl.load(h + m[:, None] * h_stride + column, mask=there, other=0.0).to(tl.float32)  # [BM, BV]
    r = reciprocal_rms(x, eps, V, 1)  # [BM]
    if rstd is not None:
        tl.store(rstd + m * H + head, r, mask=tokens_there)
    x *= r[:, None]
    if norm_weight is not None:
        x *= tl.load(norm_weight + c, mask=c < V, other=0.0).to(tl.float32)[None, :]
    if gate is not None:
        x *= activate(tl.load(gate + m[:, None] * gate_stride + column, mask=there, other=0.0), ACTIVATED)
    tl.store(a + m[:, None] * (H * V) + column, x.to(a.dtype.element_ty), mask=there)


@triton.jit
def norm_gate_gradients_kernel(
    da, h, gate, norm_weight, rstd, a, dh, dgate, partials, M, H, steps, da_stride, h_stride, gate_stride, dgate_stride,
    V: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr, ACTIVATED: tl.constexpr,
):  # fmt: skip
    """a again, if there is room for it, and from da, if it is there, all gradients; partials are ``[programs, V]``."""
    c = tl.arange(0, BV)
    weight = 1.0
    if norm_weight is not None:
        weight = tl.load(norm_weight + c, mask=c < V, other=0.0).to(tl.float32)[None, :]
    dweight = tl.zeros([BM, BV], tl.float32)
    for step in range(steps):
        m, tokens_there, head = place(tl.program_id(0) * steps + step, M, H, BM)
        there = tokens_there[:, None] & (c < V)[None, :]
        column = (head * V + c)[None, :]
        packed = m[:, None] * (H * V) + column
        r = tl.load(rstd + m * H + head, mask=tokens_there, other=0.0)[:, None]
        x = tl.load(h + m[:, None] * h_stride + column, mask=there, other=0.0).to(tl.float32) * r  # [BM, BV]
        if gate is not None:
            g = tl.load(gate + m[:, None] * gate_stride + column, mask=there, other=0.0)
            opened, slope = activate(g, ACTIVATED), 1.0 if ACTIVATED else silu_slope(g)
        else:
            opened, slope = 1.0, 0.0
        factor = opened * weight
        if a is not None:
            tl.store(a + packed, (x * factor).to(a.dtype.element_ty), mask=there)
        if da is not None:
            d = tl.load(da + m[:, None] * da_stride + column, mask=there, other=0.0).to(tl.float32)
            both = d * x
            along = tl.sum(both * factor, axis=1) * (1.0 / V)  # [BM]
            tl.store(dh + packed, (r * (d * factor - x * along[:, None])).to(dh.dtype.element_ty), mask=there)
            if partials is not None:
                dweight += both * opened
            if dgate is not None:
                to = dgate + m[:, None] * dgate_stride + column
                tl.store(to, (both * weight * slope).to(dgate.dtype.element_ty), mask=there)
    if partials is not None:
        tl.store(partials + tl.program_id(0).to(tl.int64) * V + c, tl.sum(dweight, axis=0), mask=c < V)
