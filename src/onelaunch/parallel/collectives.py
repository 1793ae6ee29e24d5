"""Collectives on a group given by its name: PyTorch's functional collectives, called as operators.

They return new tensors and start at once, so what a caller does before it asks a :class:`Pending` for its result overlaps with
them. ``carry.py`` and ``halo.py`` call them. None is differentiable here.
"""

from __future__ import annotations

import torch


class Pending:
    """Result of a collective that has been started."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self._waited = tensor, False

    def result(self) -> torch.Tensor:
        """Return the result, which may be read now; at the first call the current stream, on a CPU the caller, waits for it."""
        if not self._waited:
            self._tensor, self._waited = torch.ops._c10d_functional.wait_tensor(self._tensor), True  # noqa: SLF001
        return self._tensor


def start_all_gather(x: torch.Tensor, size: int, group: str) -> Pending:
    """Start to gather the tensors ``[M, ...]`` of all ranks to ``[size * M, ...]``."""
    return Pending(torch.ops._c10d_functional.all_gather_into_tensor(x.contiguous(), size, group))  # noqa: SLF001


def start_all_reduce(x: torch.Tensor, group: str) -> Pending:
    """Start to sum the tensors of all ranks."""
    return Pending(torch.ops._c10d_functional.all_reduce(x.contiguous(), "sum", group))  # noqa: SLF001


def all_reduce(x: torch.Tensor, group: str) -> torch.Tensor:
    """Return the sum of the tensors of all ranks."""
    return start_all_reduce(x, group).result()
