"""Channels of exchanges by stores to the memory of peers: launches of the kernels, and their order on this rank.

A channel is memory that every rank of a group has and that all others can write: flags, epochs and two slots (``kernels.py``).
``exchange.py`` makes channels and decides which one an exchange takes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from triton import knobs

from onelaunch.launch.launch import Launch, Mma
from onelaunch.launch.planned import Planned
from onelaunch.parallel.collectives import InPlace, Outbox, Outgoing, Pending
from onelaunch.parallel.kernels import receive_kernel, send_kernel

WORD = 4
"""Bytes of a word; a message consists of words."""

SLOTS = 4096
"""Bytes from the beginning of a channel to its slots. The flags and epochs of 8 ranks, the most there are, take 2304."""

CTAS = 32
"""CTAs that send a message, and that copy the message of one rank.

No other number was measured. They end before the next launch of the stream begins, so they need not fit beside it. By prediction
16 CTAs could fill NVLink 4, 450 GB/s each way: an SM stores 30 to 60 GB/s. Their number does not follow the size of the message,
since each CTA counts exchanges for itself.
"""

_BLOCK, _WARPS = 4096, 8
"""Words that a CTA moves at once, 16 for each thread, and its warps."""


def channel_bytes(ranks: int, capacity: int) -> int:
    """Return the size of a channel whose slots hold ``capacity`` words of each rank."""
    return SLOTS + 2 * ranks * capacity * WORD


class Channel:
    """Memory for exchanges that follow one another, the same number in the same order on all ranks.

    Args:
        memory: This rank's memory, int64, zeros at first.
        addresses: Addresses of it at all ranks, by rank.
        rank: This rank.
        capacity: Largest message in words, a multiple of 16.
        limit: Nanoseconds to wait for a peer before the kernel ends with an error.
    """

    def __init__(self, memory: torch.Tensor, addresses: Sequence[int], rank: int, capacity: int, limit: int) -> None:
        self.memory, self.rank, self.ranks, self.capacity, self.limit = memory, rank, len(addresses), capacity, limit
        self.addresses = tuple(addresses)
        """Addresses of the channel at all ranks, by rank."""
        self.started = 0
        """Number of exchanges that this object has started."""
        self._sent: Sent | None = None
        self._stream: torch.cuda.Stream | None = None
        self._done: torch.cuda.Event | None = None

    def start(self, x: torch.Tensor | Outgoing, readers: Sequence[int] | None = None) -> Pending:
        """Send a contiguous tensor ``[M, ...]`` to all ranks, or to its ``readers`` alone, the first one first.

        With ``readers`` it may be an :class:`Outgoing`. If there are none, flags are sent without a message.

        If the result of an earlier all-gather has not been received, it is received first. Messages of an earlier exchange with
        readers cannot be read after this call, since kernels read the messages of the exchange that was started last.
        """
        if self._sent is not None:
            self._sent.result()
        if isinstance(x, torch.Tensor) and x.data_ptr() % 16:
            x = x.clone()
        self.order()
        order, count = self.order_of(readers)
        targets = tuple(self.addresses[each] for each in order)
        words = x.nbytes // WORD if isinstance(x, torch.Tensor) else x.elements
        if not count:
            _send_flags(self.memory, targets, words, self.rank, self.capacity, self.limit)
        elif isinstance(x, torch.Tensor):
            _send(x, self.memory, targets, count, self.rank, self.capacity, self.limit)
        else:
            assert x.send is not None  # noqa: S101 - it has readers
            x.send(Outbox(self.memory, targets, count, self.rank, self.capacity, self.limit))
        self.started += 1
        self._launched()
        if readers is not None:
            return SentToReaders(self, x.shape if isinstance(x, torch.Tensor) else (1, x.elements))
        assert isinstance(x, torch.Tensor)  # noqa: S101 - messages that are computed when they are sent have readers
        self._sent = Sent(self, (self.ranks * x.shape[0], *x.shape[1:]), x.dtype)
        return self._sent

    def order_of(self, readers: Sequence[int] | None) -> tuple[tuple[int, ...], int]:
        """Return all ranks in the order in which this rank stores to them, and the number of readers, which come first.

        Where all ranks are readers, each one begins with the next rank, so that they do not all store to one rank at once.
        """
        first = () if readers is None else tuple(readers)
        behind = (*range(self.rank + 1, self.ranks), *range(self.rank + 1))
        return (*first, *(each for each in behind if each not in first)), self.ranks if readers is None else len(first)

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return the messages of all ranks of the exchange that was started last."""
        self.order()
        gathered = _receive(self.memory, shape, dtype, self.ranks, self.capacity, self.limit)
        self._launched()
        self._sent = None
        return gathered

    def order(self) -> None:
        """Let the current stream wait for the last launch of this channel, if that was on another stream."""
        if not self.memory.is_cuda:
            return
        stream = torch.cuda.current_stream(self.memory.device)
        if self._stream is not None and self._done is not None and self._stream != stream:
            stream.wait_event(self._done)
        self._stream = stream

    def launched(self, launch: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Call a function that launches a kernel which reads this channel, in the order of the channel's launches."""
        self.order()
        result = launch()
        self._launched()
        return result

    def _launched(self) -> None:
        """Record that a kernel has been launched, for :meth:`order`."""
        if self._stream is not None:
            if self._done is None:
                self._done = torch.cuda.Event()
            self._done.record(self._stream)


class Sent(Pending):
    """All-gather for which this rank has sent its message.

    Args:
        channel: Channel of the exchange.
        shape: Shape of the result.
        dtype: Dtype of the result.
    """

    def __init__(self, channel: Channel, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self._channel, self._shape, self._dtype = channel, shape, dtype
        self._gathered: torch.Tensor | None = None

    def settle(self) -> None:
        """Do nothing: the message is sent before the pass begins, and peers wait for no kernel of this rank."""

    def result(self) -> torch.Tensor:
        """Return the result, a new tensor; at the first call the current stream waits for the messages of all ranks."""
        if self._gathered is None:
            self._gathered = self._channel.receive(self._shape, self._dtype)
        else:
            self._channel.order()  # a later exchange may have received it, on another stream
            if self._gathered.is_cuda:  # The allocator must not reuse its memory before this stream has read it.
                self._gathered.record_stream(torch.cuda.current_stream(self._gathered.device))
        return self._gathered


class SentToReaders(Pending):
    """Exchange with readers for which this rank has sent its message.

    Args:
        channel: Channel of the exchange.
        shape: Shape of a message.
    """

    def __init__(self, channel: Channel, shape: Sequence[int]) -> None:
        self._channel, self._shape, self._number = channel, tuple(shape), channel.started

    def settle(self) -> None:
        """Do nothing, as in :class:`Sent`."""

    def finish(self) -> None:
        """Do nothing: messages that this rank does not read were not sent to it, so there is nothing to wait for."""

    def in_place(self) -> InPlace:
        """Return the memory in which the messages for this rank can be read once the flags of their senders are set."""
        channel = self._channel
        return InPlace(channel.memory, channel.ranks, channel.capacity, channel.limit, self._shape, self._read)

    def _read(self, launch: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Launch a kernel that reads the messages, which it finds by the epoch of the exchange that was started last."""
        if self._channel.started != self._number:
            raise RuntimeError("messages must be read before the next exchange of their channel starts")
        return self._channel.launched(launch)

    def result(self) -> torch.Tensor:
        """Raise an error, since not every message was sent to this rank."""
        raise RuntimeError("messages were sent to their readers alone, and must be read in place")


def parts_of(memory: torch.Tensor, ranks: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the flags, epochs and slots of a channel."""
    flags, epochs = memory[: ranks * CTAS], memory[ranks * CTAS : (ranks + 1) * CTAS]
    return flags, epochs, memory[SLOTS // 8 :].view(torch.int32)


@Planned
def _send(
    x: torch.Tensor, memory: torch.Tensor, targets: tuple[int, ...], readers: int, rank: int, capacity: int, limit: int
) -> None:  # fmt: skip
    """Launch ``send_kernel``; the kernel explains the arguments."""
    words = x.view(-1).view(torch.int32)
    _launch_send(words, words.numel(), memory, targets, readers, rank, capacity, limit)


@Planned
def _send_flags(memory: torch.Tensor, targets: tuple[int, ...], count: int, rank: int, capacity: int, limit: int) -> None:
    """Launch ``send_kernel`` for a message of ``count`` words that no rank reads: it sets flags alone."""
    _launch_send(memory, count, memory, targets, 0, rank, capacity, limit)


def _launch_send(
    words: torch.Tensor, count: int, memory: torch.Tensor, targets: tuple[int, ...], readers: int, rank: int, capacity: int,
    limit: int,
) -> None:  # fmt: skip
    """Launch ``send_kernel`` for ``count`` words, which it reads only if there are readers."""
    ranks = len(targets)
    flags, epochs, _ = parts_of(memory, ranks)
    Launch(
        send_kernel, (CTAS,), words.view(torch.int32), flags, epochs, targets, rank, readers, count, capacity, limit,
        mma=Mma.NONE, SLOTS=SLOTS, RANKS=ranks, BLOCK=_BLOCK, TIMED=not knobs.runtime.interpret, num_warps=_WARPS,
    ).run()  # fmt: skip


@Planned
def _receive(
    memory: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, ranks: int, capacity: int, limit: int
) -> torch.Tensor:
    """Launch ``receive_kernel``, and return the messages of all ranks."""
    gathered = memory.new_empty(shape, dtype=dtype)
    words = gathered.view(-1).view(torch.int32)
    Launch(
        receive_kernel, (CTAS, ranks), words, *parts_of(memory, ranks), words.numel() // ranks, capacity, limit,
        mma=Mma.NONE, RANKS=ranks, CTAS=CTAS, BLOCK=_BLOCK, TIMED=not knobs.runtime.interpret, num_warps=_WARPS,
    ).run()  # fmt: skip
    return gathered
