"""Memory layout as kernels take it."""

from __future__ import annotations

import torch


def cdiv(count: int, size: int) -> int:
    """Return how many pieces of ``size`` cover ``count``; Triton's own function takes microseconds on the host."""
    return -(-count // size)


def power_of_2(count: int) -> int:
    """Return the least power of 2 that is at least ``count``, which is at least 1; also of a tracer's size."""
    return 1 << (int(count) - 1).bit_length()


def inner_contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, copied only if neighbouring channels are not neighbours in memory."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
