"""Launches that scale a float16 gradient of o by a power of 2, for the backward pass of ``hopper`` (launch_hopper.py)."""

from __future__ import annotations

from typing import NamedTuple

import torch

from onelaunch.device.hardware import processors
from onelaunch.kernels.common.layout import cdiv, power_of_2
from onelaunch.launch.launch import Launch
from onelaunch.ops.gla.launch import Attention, pitch_of

_TILE = 8192
"""Elements that a CTA takes at a time; not measured yet."""

_CTAS_PER_SM = 4
"""Most CTAs of a launch per SM; not measured yet."""


class Rescaled(NamedTuple):
    """Scaled gradient of o, and what undoes the scaling."""

    do: torch.Tensor
    """``[B, T, H, V]``, contiguous: the gradient of o times a power of 2."""
    factors: torch.Tensor
    """``[2]`` float32: this power of 2, and its inverse."""


def _uniform(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``[B, T, H, X]``, copied unless steps of all batch entries are equally far apart."""
    batch, length, *_ = tensor.shape
    return tensor if batch == 1 or tensor.stride(0) == length * pitch_of(tensor) else tensor.contiguous()


def rescaled(call: Attention, do: torch.Tensor, dfinal: torch.Tensor | None) -> Rescaled:
    """Scale the gradient of o such that no 16-bit intermediate of the backward pass overflows; see kernels/rescale.py.

    Args:
        call: Tensors of the forward pass, float16.
        do: Gradient of o, ``[B, T, H, V]``; its last dimension is contiguous.
        dfinal: Gradient of the final state, float32, which bounds the factor but is not scaled here; ``None`` for zeros.
    """
    from onelaunch.ops.gla.kernels.rescale import largest_kernel, rescale_kernel

    batch, length, heads, keys, values = call.sizes
    q, v, do = _uniform(call.q), _uniform(call.v), _uniform(do)
    steps, device = batch * length, do.device
    key_block, value_block = power_of_2(keys), power_of_2(values)
    rows = max(_TILE // max(key_block, value_block), 1)
    ctas = min(cdiv(steps * heads, rows), _CTAS_PER_SM * processors(device))
    largest = torch.empty((4, ctas), dtype=torch.float32, device=device)
    result = Rescaled(torch.empty_like(do, memory_format=torch.contiguous_format), largest.new_empty(2))
    sizes = {"BLOCK": rows, "BV": value_block, "num_warps": 4}
    final_rows = 0 if dfinal is None else dfinal.numel() // values
    Launch(
        largest_kernel, (ctas,), q, v, do, None if dfinal is None else dfinal.contiguous(), largest, steps,
        q.shape[2], v.shape[2], heads, keys, values, final_rows, pitch_of(q), q.stride(2), pitch_of(v), v.stride(2),
        pitch_of(do), do.stride(2), BK=key_block, **sizes,
    ).run()  # fmt: skip
    Launch(
        rescale_kernel, (ctas,), do, result.do, largest, result.factors, steps, heads, values, length, call.scale,
        pitch_of(do), do.stride(2), ctas, BC=power_of_2(ctas), **sizes,
    ).run()  # fmt: skip
    return result
