"""Elementwise activations for Triton kernels, in float32 registers.

Each function takes a tile of any shape and returns a tile of the same shape. ``exp`` is computed with ``exp2``, the hardware's
base. The Triton kernels of ``kernels/scan`` and ``kernels/convolution``, of the operations ``swiglu``, ``output_chain`` and
``projections``, and of the ablations call them.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def decay_of(log_decay):
    """Return exp(log_decay) in float32."""
    return tl.exp2(log_decay.to(tl.float32) * LOG2E)


@triton.jit
def sigmoid(gate):
    """Return 1 / (1 + exp(-gate)) for a float32 gate.

    It is computed as a squared reciprocal square root, two instructions; a division would be eight.
    """
    root = tl.math.rsqrt(1.0 + tl.exp2(gate * -LOG2E))
    return root * root


@triton.jit
def silu(gate):
    """Return gate * sigmoid(gate) in float32."""
    gate = gate.to(tl.float32)
    return gate * sigmoid(gate)


@triton.jit
def silu_slope(gate):
    """Return the derivative of silu at ``gate`` in float32."""
    gate = gate.to(tl.float32)
    sigma = sigmoid(gate)
    return sigma * (1.0 + gate * (1.0 - sigma))
