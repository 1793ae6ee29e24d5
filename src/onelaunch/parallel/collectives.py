"""Collectives on a group given by its name: PyTorch's functional collectives, called as operators.

They return new tensors and start at once. :func:`wait` makes the current stream (on a CPU, the caller) wait for a result.
``carry.py`` and ``halo.py`` call them. None is differentiable here.
"""

from __future__ import annotations

import torch


def start_all_gather(x: torch.Tensor, size: int, group: str) -> torch.Tensor:
    """Start to gather the tensors ``[M, ...]`` of all ranks; the result ``[size * M, ...]`` needs :func:`wait`."""
    return torch.ops._c10d_functional.all_gather_into_tensor(x.contiguous(), size, group)  # noqa: SLF001


def wait(x: torch.Tensor) -> torch.Tensor:
    """Return the result of a collective, which may be read now."""
    return torch.ops._c10d_functional.wait_tensor(x)  # noqa: SLF001


def all_reduce(x: torch.Tensor, group: str) -> torch.Tensor:
    """Return the sum of the tensors of all ranks."""
    return wait(torch.ops._c10d_functional.all_reduce(x.contiguous(), "sum", group))  # noqa: SLF001
