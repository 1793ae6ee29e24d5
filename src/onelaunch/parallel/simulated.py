"""Context of one process that stands for one of several ranks, for measurements on one GPU and for tests.

``tools/time_slices.py`` calls :func:`simulated`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from onelaunch.errors import ArgumentError
from onelaunch.parallel.collectives import Collectives, Outgoing, Pending
from onelaunch.parallel.contexts import Context, context_of
from onelaunch.parallel.exchange import MOST_RANKS, capture_under_way

if TYPE_CHECKING:
    from onelaunch.parallel.peer_stores import Channel


class Done(Pending):
    """Result that needs no wait."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def result(self) -> torch.Tensor:
        """Return the result."""
        return self._tensor


class Neighbours(Collectives):
    """Collectives of one rank whose neighbours send zeros. Gathers of one shape write to two buffers in turn."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__("", size)
        self.rank = rank
        self._calls = 0
        self._gathered: dict[tuple[Any, ...], torch.Tensor] = {}

    def start_all_gather(self, x: torch.Tensor) -> Pending:
        """Return zeros as the messages of the other ranks, and a copy of this rank's message in its row."""
        self._calls ^= 1  # a backward pass reads what the forward pass has gathered
        key = (self._calls, x.shape, x.dtype)
        if key not in self._gathered:
            self._gathered[key] = x.new_zeros((self.size * x.shape[0], *x.shape[1:]))
        gathered = self._gathered[key]
        gathered[self.rank * x.shape[0] : (self.rank + 1) * x.shape[0]] = x
        return Done(gathered)

    def start_all_reduce(self, x: torch.Tensor) -> Pending:
        """Return this rank's tensor, as if the others had sent zeros."""
        return Done(x)


class Loopback(Neighbours):
    """Collectives of one rank that exchanges by stores, to other memory of the same GPU in the place of its peers' memory.

    The kernels of an exchange run as on several GPUs, but wait for nothing: the flags of the other ranks are set in advance, and
    their messages are zeros.

    Args:
        rank: Rank that this process stands for.
        size: Number of ranks.
        device: Device of the calls' tensors.
        capacity: Largest message in 32-bit words, a multiple of 16.
    """

    def __init__(self, rank: int, size: int, device: torch.device | str, capacity: int = 1 << 20) -> None:
        super().__init__(rank, size)
        from onelaunch.parallel import peer_stores  # it needs Triton

        if size > MOST_RANKS:
            raise ArgumentError(f"size is {size}; it must be at most {MOST_RANKS}, the ranks that a channel has flags for.")
        words = peer_stores.channel_bytes(size, capacity) // 8
        self.memory = torch.zeros((size, words), dtype=torch.int64, device=device)
        """Memory of the channel at each rank."""
        flags, _, _ = peer_stores.parts_of(self.memory[rank], size)
        others = [each for each in range(size) if each != rank]
        flags.view(size, peer_stores.CTAS)[others] = _LATER
        self._channels: dict[int | None, Channel] = {}
        self._capacity = capacity

    def start_scan(self, message: Outgoing, readers: Sequence[int]) -> Pending:
        """Send a message to the memory of its readers.

        Raises:
            ArgumentError: The message is larger than ``capacity``, so that it would be stored over other memory.
        """
        if message.elements > self._capacity:
            raise ArgumentError(f"A message has {message.elements} words; capacity is {self._capacity}. Make it larger.")
        return self._channel().start(message, readers)

    def _channel(self) -> Channel:
        """Return the channel of the capture of a CUDA graph that is under way, or of calls that are not captured.

        All share the memory. But a channel orders its launches by events, and a stream cannot wait for an event of a capture that
        has ended, nor a capture for one from outside.
        """
        from onelaunch.parallel.peer_stores import Channel

        capture = capture_under_way(self.memory.device)
        if capture not in self._channels:
            addresses = [each.data_ptr() for each in self.memory]
            self._channels[capture] = Channel(self.memory[self.rank], addresses, self.rank, self._capacity, 10**9)
        return self._channels[capture]


_LATER = 1 << 62
"""Flag of an exchange that is later than all others, see ``kernels.py``."""


def simulated(
    rank: int,
    lengths: Sequence[int],
    *,
    device: torch.device | str,
    cu_seqlens: torch.Tensor | None = None,
    collectives: Collectives | None = None,
) -> Context:
    """Return a context for calls of one process as one of several ranks, without a process group.

    Args:
        rank: Rank that this process stands for.
        lengths: Steps of all ranks.
        device: Device of the calls' tensors.
        cu_seqlens: Offsets of packed sequences among the steps of all ranks.
        collectives: Collectives in the place of a group's; :class:`Neighbours` by default.
    """
    collectives = Neighbours(rank, len(lengths)) if collectives is None else collectives
    return context_of(collectives, rank, tuple(lengths), torch.device(device), cu_seqlens)
