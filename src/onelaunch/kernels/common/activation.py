"""Activations that kernels apply to numbers in registers, in float32."""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def decay_of(log_decay):
    """exp, in the base that the hardware has."""
    return tl.exp2(log_decay.to(tl.float32) * LOG2E)


@triton.jit
def sigmoid(gate):
    """1 / (1 + exp(-gate)) of float32 as a squared reciprocal root: a division would be eight instructions instead of two."""
    root = tl.math.rsqrt(1.0 + tl.exp2(gate * -LOG2E))
    return root * root


@triton.jit
def silu(gate):
    """gate * sigmoid(gate), float32."""
    gate = gate.to(tl.float32)
    return gate * sigmoid(gate)


@triton.jit
def silu_slope(gate):
    """The derivative of silu, float32."""
    gate = gate.to(tl.float32)
    open_part = sigmoid(gate)
    return open_part * (1.0 + gate * (1.0 - open_part))
