"""What the kernels of ``gla``'s ``rescale.py`` compute, in plain PyTorch: a float16 gradient of o times a power of 2.

The power keeps bounds of the products of the backward pass at most 2^15, so that none leaves the range of float16.

Tests of these kernels compare with it, and tests that emulate the kernels of ``hopper`` put it in their place.
"""

from __future__ import annotations

import math

import torch

from onelaunch.ops.gla.launch import Attention
from onelaunch.ops.gla.launch_rescale import Rescaled


def largest(tensor: torch.Tensor | None) -> float:
    """Return the largest magnitude of a tensor, of which NaN counts as 0; 0 for none."""
    if tensor is None or not tensor.numel():
        return 0.0
    return tensor.double().nan_to_num(0.0, math.inf, -math.inf).abs().max().item()


def exponent_of(call: Attention, do: torch.Tensor, dfinal: torch.Tensor | None) -> int:
    """Return the exponent of the factor by which the gradient of o is scaled."""
    _, length, _, _, values = call.sizes
    scaled = abs(call.scale) * largest(do)
    products = values * largest(call.v) * scaled, length * largest(call.q) * scaled + largest(dfinal)
    bound = max(*products, largest(do), scaled)
    if not 0.0 < bound < math.inf:
        return 0
    return min(max(15 - math.ceil(math.log2(bound)), -60), 60)


def rescaled(call: Attention, do: torch.Tensor, dfinal: torch.Tensor | None) -> Rescaled:
    """Return the gradient of o times a power of 2, and that power and its inverse."""
    factor = 2.0 ** exponent_of(call, do, dfinal)
    return Rescaled((do.float() * factor).to(do.dtype).contiguous(), torch.tensor([factor, 1 / factor]))
