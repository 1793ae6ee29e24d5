"""Sizes and memory layout of kernel arguments, computed on the host.

The launch code of kernels calls these functions, in operations, ablations and the other folders of ``kernels``, and so does the
code that chooses configurations.
"""

from __future__ import annotations

import torch


def cdiv(count: int, size: int) -> int:
    """Return ``count / size`` rounded up. Triton's own ``cdiv`` takes microseconds on the host."""
    return -(-count // size)


def power_of_2(count: int) -> int:
    """Return the least power of 2 that is at least ``count``, which must be at least 1. A tracer's symbolic size is allowed."""
    return 1 << (int(count) - 1).bit_length()


def by_columns(matrix: torch.Tensor) -> bool:
    """Return whether the elements of a column are next to each other, as in a transposed matrix, and those of a row are not."""
    return matrix.stride(0) == 1 != matrix.stride(1)


def inner_contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, copied only if the stride of its last dimension is not 1."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
