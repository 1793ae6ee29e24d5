"""Collectives on a group given by its name: PyTorch's functional collectives, called as operators.

They return new tensors and start at once, so what a caller does before it asks a :class:`Pending` for its result overlaps with
them. A :class:`Context` has the :class:`Collectives` of its group, or the class of ``exchange.py`` derived from it. None is
differentiable here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch


class InPlace(NamedTuple):
    """Memory in which the messages of an exchange arrive, for a kernel that waits for them (``parallel/kernels.py``)."""

    memory: torch.Tensor
    """Channel of the exchange on this rank, int64."""
    ranks: int
    """Number of ranks of the group."""
    capacity: int
    """Number of 32-bit words that a slot holds for a rank."""
    limit: int
    """Nanoseconds that the kernel waits for a message before it ends with an error."""
    shape: tuple[int, ...]
    """Shape of a message, float32."""
    read: Callable[[Callable[[], torch.Tensor]], torch.Tensor]
    """Function that takes a launch of such a kernel, as a function, and calls it in the order of the channel's launches."""


class Pending:
    """Result of a collective that has been started."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self._waited = tensor, False

    def result(self) -> torch.Tensor:
        """Return the result, which may be read now; at the first call the current stream, on a CPU the caller, waits for it."""
        if not self._waited:
            self._tensor, self._waited = torch.ops._c10d_functional.wait_tensor(self._tensor), True  # noqa: SLF001
        return self._tensor

    def finish(self) -> None:
        """Complete the collective without using its result: this rank reads no message, or has read its messages already."""
        self.result()

    def in_place(self) -> InPlace | None:
        """Return the memory in which kernels can read messages as they arrive, or ``None`` if only :meth:`result` has them."""
        return None

    def settle(self) -> None:
        """Let a GPU's stream wait for the result now, before a pass whose CTAs keep nearly all SMs until it ends.

        A collective of NCCL is a kernel. If the pass has the SMs first, the transfer waits for its end, and so do other ranks.
        """
        if self._tensor.is_cuda:
            self.result()


class Collectives:
    """Collectives of a group of ranks.

    Args:
        group: Name of the process group.
        size: Number of its ranks.
    """

    def __init__(self, group: str, size: int) -> None:
        self.group, self.size = group, size
        self.used: set[str] = set()
        """Kinds of the exchanges so far, for reports: stores to peers, or the collective and the reason for it."""

    def start_all_gather(self, x: torch.Tensor) -> Pending:
        """Start to gather the tensors ``[M, ...]`` of all ranks to ``[size * M, ...]``."""
        return self._start_collective(x.contiguous())

    def start_scan(self, x: torch.Tensor, readers: Sequence[int]) -> Pending:
        """Start to send the message ``[1, elements]`` float32 to the ranks that read it, the nearest one first.

        All ranks make the call, with messages of one size. A rank reads what it needs, by :meth:`Pending.in_place` or
        :meth:`Pending.result`, before its next call, and ends with :meth:`Pending.finish`.
        """
        return self.start_all_gather(x)

    def _start_collective(self, x: torch.Tensor, why: str = "") -> Pending:
        """Start the group's own all-gather of a contiguous tensor; ``why`` is the reason for reports, with its punctuation."""
        self.used.add(f"collective{why}")
        return Pending(torch.ops._c10d_functional.all_gather_into_tensor(x, self.size, self.group))  # noqa: SLF001

    def start_all_reduce(self, x: torch.Tensor) -> Pending:
        """Start to sum the tensors of all ranks."""
        return Pending(torch.ops._c10d_functional.all_reduce(x.contiguous(), "sum", self.group))  # noqa: SLF001
