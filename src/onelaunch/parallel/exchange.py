"""Exchanges of a group by stores to the memory of peers, where every GPU reaches all others, else by the group's all-gather.

``contexts.py`` asks :func:`collectives_of` for the collectives of a group. All ranks must choose the same of the two. So each
choice depends on facts that are the same on all ranks (the size of the message, whether a graph is captured, how many captures
came before), or that the ranks have exchanged. Symmetric memory of PyTorch (``torch.distributed._symmetric_memory``) gives every
rank the addresses of its peers' memory.

A channel is memory on every rank that all ranks can write, for exchanges one after the other (``peer_stores.py``). Calls of a
process that are not captured share a channel, and are ordered by their streams. Each capture of a CUDA graph takes a channel of
its own, since the graph may be replayed between other calls. Channels are made in calls that are not captured: in the first
exchange, where a message is larger than before, and where none is left for captures. A capture that finds none takes the
collective.
"""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

import torch

from onelaunch.cuda import driver
from onelaunch.errors import ArgumentError, DriverError
from onelaunch.parallel.agreement import backends
from onelaunch.parallel.collectives import Collectives, Outgoing, Pending

if TYPE_CHECKING:
    from onelaunch.parallel.peer_stores import Channel

R = TypeVar("R")

STORES = "stores to peers"
"""Name of exchanges by stores in :attr:`Collectives.used`."""

PEER_STORES = "ONELAUNCH_PEER_STORES"
"""Environment variable that switches exchanges by stores off: if it is not 1 on one rank, all ranks take collectives."""

_DEFAULT = "1"
"""Value where the variable is not set."""

MOST_RANKS = 8
"""Largest number of ranks whose flags and epochs fit into the beginning of a channel."""

MOST_BYTES = 4 << 20
"""Largest message of a rank. A larger one is bound by the links, which NCCL fills too, and its slots would take much memory."""

MOST_CHANNELS = 32
"""Largest number of channels of a group; captures beyond them take the collective."""

_RESERVE = 64 << 20
"""Most bytes of the channels that are made in advance for captures. One is made even if it is larger."""

_MOST_IN_ADVANCE = 7
"""Largest number of channels that are made in advance at a time."""

_STEP = 64 << 10
"""Bytes to a multiple of which the part of a slot for one rank's message is rounded up."""

_LIMIT = 600.0
"""Seconds to wait for a peer where the time-out of the group cannot be read: that of NCCL's groups by default."""


class Peers:
    """Functions of the process group, the driver and PyTorch that an :class:`Exchange` needs; tests replace this class.

    Args:
        group: Process group.
        device: This rank's GPU.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        self.name, self.device = group.group_name, device
        self.rank, self.size = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
        self._handles: list[Any] = []

    def _group(self) -> Any:
        """Return the process group. An attribute for it would let its entry in :data:`_EXCHANGES` keep it alive."""
        return torch.distributed.distributed_c10d._resolve_process_group(self.name)  # noqa: SLF001 - no public name

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, by rank; a collective call."""
        found: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(found, value, group=self._group())
        return found

    def capture(self) -> int | None:
        """Return the number of the capture that is under way on the current stream, or ``None``."""
        return capture_under_way(self.device)

    def facts(self) -> tuple[str, str, str]:
        """Return the host, the GPU's UUID, and why this rank cannot take part, or an empty string."""
        why = ""
        if os.environ.get(PEER_STORES, _DEFAULT) != "1":
            why = f"{PEER_STORES} is not 1"
        else:
            try:
                import triton  # noqa: F401 - whether it is installed
                from torch.distributed import _symmetric_memory  # noqa: F401 - whether this PyTorch has it

                driver.capture_of(torch.cuda.current_stream(self.device).cuda_stream)
            except (ImportError, AttributeError, OSError, DriverError) as error:
                why = f"{type(error).__name__}: {error}"
        return _host(), str(torch.cuda.get_device_properties(self.device).uuid), why

    def unreachable(self, uuids: list[str]) -> str:
        """Return why this rank's GPU cannot write the memory of all others, or an empty string."""
        index = torch.cuda.current_device() if self.device.index is None else self.device.index
        visible = {str(torch.cuda.get_device_properties(each).uuid): each for each in range(torch.cuda.device_count())}
        for rank, uuid in enumerate(uuids):
            if rank != self.rank and uuid not in visible:
                return f"the GPU of rank {rank} is not visible"
            try:
                if rank != self.rank and not driver.reaches(index, visible[uuid]):
                    return f"no peer access with atomics to the GPU of rank {rank}"
            except (OSError, DriverError) as error:
                return str(error)
        return ""

    def allocate(self, words: int) -> torch.Tensor:
        """Return int64 zeros that :meth:`connect` can make known to all ranks."""
        from torch.distributed import _symmetric_memory as symmetric

        # `symmetric.empty` may return a part of a larger allocation, at an offset that differs between ranks.
        memory = symmetric._SymmetricMemory.empty_strided_p2p((words,), (1,), torch.int64, self.device)  # noqa: SLF001
        memory.zero_()
        torch.cuda.synchronize(self.device)  # After the ranks' next exchange of values, peers may store here.
        return memory

    def connect(self, memory: torch.Tensor) -> list[int]:
        """Return the addresses of memory that every rank has allocated alike, by rank; a collective call."""
        from torch.distributed import _symmetric_memory as symmetric

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # later versions of PyTorch do not need the call
            symmetric.enable_symm_mem_for_group(self.name)
        handle = symmetric.rendezvous(memory, self.name)
        self._handles.append(handle)
        addresses = [handle.get_buffer(rank, (len(memory),), torch.int64).data_ptr() for rank in range(self.size)]
        if addresses[self.rank] != memory.data_ptr() or any(address % 16 for address in addresses):
            raise RuntimeError("symmetric memory has unexpected addresses")
        return addresses

    def limit(self) -> int:
        """Return the time-out of the group in nanoseconds."""
        try:
            seconds = self._group()._get_backend(self.device).options._timeout.total_seconds()  # noqa: SLF001 - no public name
        except (AttributeError, RuntimeError):
            seconds = _LIMIT
        return int(seconds * 1e9)


def capture_under_way(device: torch.device) -> int | None:
    """Return the number of the capture of a CUDA graph that is under way on the current stream of a device, or ``None``."""
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        return None
    return driver.capture_of(torch.cuda.current_stream(device).cuda_stream)


class Exchange:
    """Channels of a group on this rank.

    Args:
        peers: Group and device.
    """

    def __init__(self, peers: Any) -> None:
        self.peers = peers
        self.why_not = f"it has more than {MOST_RANKS} ranks" if peers.size > MOST_RANKS else ""
        """Reason why the group cannot exchange by stores, the same on all ranks; empty while it can."""
        self._eager: Channel | None = None
        self._spare: list[Channel] = []
        self._captured: dict[int, Channel] = {}
        self._all: list[Channel] = []
        """All channels. None is freed: graphs hold their addresses, and peers may still store into them."""

    def start(self, x: torch.Tensor | Outgoing, readers: Sequence[int] | None = None) -> Pending | str:
        """Start to send a contiguous tensor of each rank, or return the reason why the group's collective has to do it.

        Without ``readers`` all ranks gather the tensors of all ranks. With it each rank names the ranks that read its tensor,
        which may be an :class:`Outgoing` then.
        """
        if self.why_not:
            return self.why_not
        like, nbytes = (x, x.nbytes) if isinstance(x, torch.Tensor) else (x.like, 4 * x.elements)
        if not 0 < nbytes <= MOST_BYTES or nbytes % 4:
            return f"messages of {nbytes} bytes"
        if not _is_plain(like) or like.device.type != self.peers.device.type:
            return f"a {type(like).__name__} on {like.device.type}"
        if like.device != self.peers.device:
            problem = f"the group's first exchange on this rank was on {self.peers.device}, and this one is on {like.device}."
            raise ArgumentError(f"A process group exchanges states on one GPU of each rank: {problem}")
        channel = self._channel(nbytes)
        return channel.start(x, readers) if channel is not None else self.why_not or "a capture found no channel"

    def _channel(self, nbytes: int) -> Channel | None:
        """Return the channel for a message of this rank, or ``None`` if there is none."""
        words, capture = nbytes // 4, self.peers.capture()
        if capture is not None:
            if capture not in self._captured and self._spare:
                self._captured[capture] = self._spare.pop()
            found = self._captured.get(capture)
            return None if found is None or found.capacity < words else found
        if self._too_small(nbytes) or not (self._spare or len(self._all) >= MOST_CHANNELS):
            self._make(nbytes)
        return None if self.why_not else self._eager

    def _make(self, nbytes: int) -> None:
        """Make channels for messages of this size and smaller ones, or find out why that is impossible; a collective call."""
        facts = self.peers.gather(self.peers.facts())
        hosts, uuids, reasons = zip(*facts, strict=True)
        if len(set(hosts)) > 1:
            self.why_not = "its ranks are on several hosts"
        elif len(set(uuids)) < len(uuids):
            self.why_not = "ranks share a GPU"
        else:
            self.why_not = _first(reasons) or _first(self.peers.gather(self.peers.unreachable(list(uuids))))
        if self.why_not:
            return
        from onelaunch.parallel.peer_stores import Channel, channel_bytes  # it needs Triton

        capacity, count = self._sizes(nbytes)
        each = channel_bytes(self.peers.size, capacity)
        memory = self._agreed(lambda: self.peers.allocate(count * each // 8))
        addresses = None if memory is None else self._agreed(lambda: self.peers.connect(memory))
        if memory is None or addresses is None:
            return
        limit, words = self.peers.limit(), each // 8
        made = [
            Channel(memory[at * words : (at + 1) * words], [a + at * each for a in addresses], self.peers.rank, capacity, limit)
            for at in range(count)
        ]
        self._all += made
        if self._too_small(nbytes):
            self._eager, *self._spare = made
        else:  # captures have taken all others
            self._spare = made

    def _agreed(self, function: Callable[[], R]) -> R | None:
        """Return what a function returns, or ``None`` if it failed on any rank; a collective call."""
        result, reason = None, ""
        try:
            result = function()
        except Exception as error:  # noqa: BLE001 - whatever this rank fails by, the others must know
            reason = f"{type(error).__name__}: {error}"[:300]
        self.why_not = _first(self.peers.gather(reason))
        return None if self.why_not else result

    def _sizes(self, nbytes: int) -> tuple[int, int]:
        """Return the capacity of new channels, in words of each rank in a slot, and the number of channels to make.

        One of them is for calls that are not captured, unless these already have one that is large enough.
        """
        from onelaunch.parallel.peer_stores import channel_bytes  # it needs Triton

        before = 0 if self._eager is None else 4 * self._eager.capacity
        most = before if nbytes <= before else max(nbytes, 3 * before // 2)
        capacity = -(-most // _STEP) * _STEP // 4
        eager = int(self._too_small(nbytes))
        room = max(MOST_CHANNELS - len(self._all) - eager, 0)
        return capacity, eager + min(_MOST_IN_ADVANCE, max(_RESERVE // channel_bytes(self.peers.size, capacity), 1), room)

    def _too_small(self, nbytes: int) -> bool:
        """Return whether calls that are not captured need another channel for messages of this size."""
        return self._eager is None or 4 * self._eager.capacity < nbytes


class PeerCollectives(Collectives):
    """Collectives of a group whose all-gathers and scans store to the memory of peers where that is possible.

    Args:
        group: Name of the process group.
        size: Number of its ranks.
        exchange: Channels of the group.
    """

    def __init__(self, group: str, size: int, exchange: Exchange) -> None:
        super().__init__(group, size)
        self._exchange = exchange

    def start_all_gather(self, x: torch.Tensor) -> Pending:
        """Start to gather the tensors ``[M, ...]`` of all ranks to ``[size * M, ...]``."""
        x = x.contiguous()
        return self._started(x, None)

    def start_scan(self, message: Outgoing, readers: Sequence[int]) -> Pending:
        """Start to send a message to its readers; they read it where it arrives."""
        return self._started(message, readers)

    def _started(self, x: torch.Tensor | Outgoing, readers: Sequence[int] | None) -> Pending:
        """Start an exchange by stores, or the group's own all-gather."""
        started = self._exchange.start(x, readers)
        if isinstance(started, Pending):
            self.used.add(STORES)
            return started
        return self._start_collective(x if isinstance(x, torch.Tensor) else x.tensor().contiguous(), f", since {started}")


_EXCHANGES: WeakKeyDictionary[Any, Exchange] = WeakKeyDictionary()
"""Channels of each process group of this process."""


def collectives_of(group: Any, size: int, device: torch.device) -> Collectives:
    """Return the collectives of a group for tensors on a device, the same kind on all ranks."""
    known = device.type == "cuda" and not torch.version.hip and size > 1 and backends(group).get("cuda") == "nccl"
    if not known:
        return Collectives(group.group_name, size)
    found = _EXCHANGES.get(group)
    if found is None:
        index = torch.cuda.current_device() if device.index is None else device.index
        found = _EXCHANGES[group] = Exchange(Peers(group, torch.device("cuda", index)))
    return PeerCollectives(group.group_name, size, found)


def _is_plain(x: torch.Tensor) -> bool:
    """Return whether a tensor is a plain one or a parameter. Fake tensors are of a subclass, which then is so on all ranks."""
    return type(x) in (torch.Tensor, torch.nn.Parameter)


def _first(reasons: Any) -> str:
    """Return the first reason that is not empty, with its rank, or an empty string."""
    return next((f"{reason} (rank {rank})" for rank, reason in enumerate(reasons) if reason), "")


def _host() -> str:
    """Return an identifier of this host: Linux's boot ID, else the host name."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()
