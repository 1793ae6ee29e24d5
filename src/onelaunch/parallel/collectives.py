"""Collectives on a group given by its name: PyTorch's functional collectives, called as operators.

They start at once and return new tensors in a :class:`Pending`. What the caller does before it asks for the result overlaps with
them. They are not differentiable. The :class:`Context` of a call holds the :class:`Collectives` of its group, or an object of the
class in ``exchange.py`` that is derived from it and stores to the memory of other GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch


class InPlace(NamedTuple):
    """Memory in which the messages of an exchange arrive, for a kernel that waits for them (``parallel/kernels.py``)."""

    memory: torch.Tensor
    """This rank's memory of the exchange, int64: flags, epochs and slots, as ``parallel/kernels.py`` describes."""
    ranks: int
    """Number of ranks of the group."""
    capacity: int
    """Number of 32-bit words that a slot has for the message of each rank."""
    limit: int
    """Nanoseconds that the kernel waits for a message before it ends with an error."""
    shape: tuple[int, ...]
    """Shape of a message, float32."""
    read: Callable[[Callable[[], torch.Tensor]], torch.Tensor]
    """Function that calls its argument, which launches such a kernel, in order with the other launches that use this memory."""


class Outbox(NamedTuple):
    """Memory of an exchange for a kernel that sends this rank's message, as ``send_kernel`` of ``parallel/kernels.py`` does."""

    memory: torch.Tensor
    """This rank's memory of the exchange, int64: flags, epochs and slots."""
    targets: tuple[int, ...]
    """Addresses of this memory at all ranks, those of the readers first."""
    readers: int
    """Number of ranks that read the message."""
    rank: int
    """This rank."""
    capacity: int
    """Number of 32-bit words that a slot has for the message of each rank."""
    limit: int
    """Nanoseconds that the kernel waits for a peer before it ends with an error."""


class Outgoing(NamedTuple):
    """Message ``[1, elements]`` float32 that is computed when it is sent."""

    elements: int
    """Number of elements."""
    like: torch.Tensor
    """Tensor on the device."""
    tensor: Callable[[], torch.Tensor]
    """Function that returns the message."""
    send: Callable[[Outbox], None] | None
    """Function that launches a kernel which computes the message and sends it; ``None`` if no rank reads it."""


class Pending:
    """Result of a collective that has been started."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self._waited = tensor, False

    def result(self) -> torch.Tensor:
        """Return the result. The first call makes the current stream wait for it; on a CPU the caller waits."""
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

    def start_scan(self, message: Outgoing, readers: Sequence[int]) -> Pending:
        """Start to send the message to the ranks that read it, the nearest one first.

        All ranks make the call, with messages of one size. A rank reads what it needs, by :meth:`Pending.in_place` or
        :meth:`Pending.result`, before its next call, and ends with :meth:`Pending.finish`.
        """
        return self.start_all_gather(message.tensor())

    def _start_collective(self, x: torch.Tensor, why: str = "") -> Pending:
        """Start the group's own all-gather of a contiguous tensor; ``why`` is the reason for reports, with its punctuation."""
        self.used.add(f"collective{why}")
        return Pending(torch.ops._c10d_functional.all_gather_into_tensor(x, self.size, self.group))  # noqa: SLF001

    def start_all_reduce(self, x: torch.Tensor) -> Pending:
        """Start to sum the tensors of all ranks."""
        return Pending(torch.ops._c10d_functional.all_reduce(x.contiguous(), "sum", self.group))  # noqa: SLF001
