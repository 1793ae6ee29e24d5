"""Tests of how a group decides on all-gathers by stores to the memory of peers, and makes their channels, without a GPU.

There is a thread for each rank. ``test_peer_stores.py`` runs the kernels in Triton's interpreter.
"""

from __future__ import annotations

import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

from onelaunch.cuda import driver as driver_module
from onelaunch.errors import ArgumentError, DriverError
from onelaunch.parallel import collectives, exchange
from onelaunch.parallel.collectives import Pending
from onelaunch.parallel.exchange import STORES, Exchange, PeerCollectives

pytest.importorskip("triton", reason="it launches kernels of Triton")
from onelaunch.parallel.peer_stores import Channel, channel_bytes


class Together:
    """Peers of a group whose ranks are threads; what they agree on and allocate is on the CPU.

    Args:
        rank: This rank.
        shared: Barrier and values of all ranks.
        odd: Facts of a rank in place of the ordinary ones, by the name of the method.
    """

    device = torch.device("cpu")

    def __init__(self, rank, shared, odd):
        self.rank, self.size, self.shared, self.odd = rank, shared.barrier.parties, shared, odd
        self.under_way, self.gathers = None, 0

    def gather(self, value):
        self.gathers += 1
        self.shared.values[self.rank] = value
        self.shared.barrier.wait()
        found = [self.shared.values[rank] for rank in range(self.size)]
        self.shared.barrier.wait()
        return found

    def capture(self):
        return self.under_way

    def facts(self):
        return self.odd.get("facts", ("host", f"gpu {self.rank}", ""))

    def unreachable(self, uuids):
        assert uuids == [f"gpu {rank}" for rank in range(self.size)]
        return self.odd.get("unreachable", "")

    def allocate(self, words):
        if "allocate" in self.odd:
            raise self.odd["allocate"]
        return torch.zeros(words, dtype=torch.int64)

    def connect(self, memory):
        addresses = self.gather(memory.data_ptr())
        if "connect" in self.odd:
            raise self.odd["connect"]
        return addresses

    def limit(self):
        return 3


def on_ranks(ranks, function, odd=None):
    """Return what a function of an exchange and its peers returns in a thread for each rank; ``odd`` is by rank."""
    shared = SimpleNamespace(barrier=threading.Barrier(ranks, timeout=20), values={})

    def one(rank):
        peers = Together(rank, shared, (odd or {}).get(rank, {}))
        return function(Exchange(peers), peers)

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(one, range(ranks)))


@pytest.fixture
def started(monkeypatch):
    """Replace the start of an exchange by a pending result that holds its channel."""
    monkeypatch.setattr(Channel, "start", lambda channel, x, readers: Pending(channel))


def test_channels_are_made_once_and_for_larger_messages_again(started):
    def run(found, peers):
        small = [found.start(torch.zeros(1, each))._tensor for each in (8, 1000, 16384)]
        assert small[0] is small[1] is small[2]
        assert small[0].capacity == 16384
        gathers = peers.gathers
        assert found.start(torch.zeros(1, 16385))._tensor.capacity == 32768
        assert found.start(torch.zeros(1, 16384))._tensor.capacity == 32768
        assert peers.gathers == 2 * gathers
        assert found.start(torch.zeros(1, 1 << 19))._tensor.capacity == 1 << 19
        assert found.start(torch.zeros(1, 3, dtype=torch.int8)) == "messages of 3 bytes"
        assert found.start(torch.zeros(0)) == "messages of 0 bytes"
        assert "bytes" in found.start(torch.zeros(1, (4 << 20) + 4, dtype=torch.int8))
        assert "meta" in found.start(torch.zeros(1, 4, device="meta"))
        peers.device = torch.device("cpu", 1)
        with pytest.raises(ArgumentError, match=r"first exchange on this rank was on cpu:1, and this one is on cpu\."):
            found.start(torch.zeros(1, 4))
        first = found._all[0]
        assert first.addresses[peers.rank] == first.memory.data_ptr()
        assert first.order_of(None)[0][-1] == peers.rank
        assert all(each.memory.numel() == channel_bytes(2, each.capacity) // 8 for each in found._all)
        assert len({each.memory.data_ptr() for each in found._all}) == len(found._all)
        return [(each.capacity, each.addresses) for each in found._all]

    first, second = on_ranks(2, run)
    assert first == second


def test_each_capture_takes_a_channel_of_its_own(started, monkeypatch):
    monkeypatch.setattr(exchange, "_MOST_IN_ADVANCE", 2)
    monkeypatch.setattr(exchange, "MOST_CHANNELS", 6)

    def run(found, peers):
        x = torch.zeros(1, 8)
        peers.under_way = 1
        assert found.start(x) == "a capture found no channel"
        peers.under_way = None
        taken = [found.start(x)._tensor]
        for capture in (2, 3, 2):
            peers.under_way = capture
            taken.append(found.start(x)._tensor)
        assert taken[1] is taken[3]
        assert len(set(map(id, taken))) == 3
        peers.under_way = 4
        assert found.start(x) == "a capture found no channel"
        peers.under_way = None
        assert found.start(x)._tensor is taken[0]  # none was left for captures, so new ones are made for these
        peers.under_way = 5
        assert found.start(x)._tensor not in taken
        assert found.start(torch.zeros(1, 20000)) == "a capture found no channel"
        peers.under_way = 6
        found.start(x)
        peers.under_way = None
        found.start(x)
        assert len(found._all) == 6
        return True

    assert on_ranks(2, run) == [True, True]


@pytest.mark.parametrize(
    ("odd", "why"),
    [
        ({2: {"facts": ("another", "gpu 2", "")}}, "its ranks are on several hosts"),
        ({2: {"facts": ("host", "gpu 0", "")}}, "ranks share a GPU"),
        ({1: {"facts": ("host", "gpu 1", "ONELAUNCH_PEER_STORES=0")}}, "ONELAUNCH_PEER_STORES=0 (rank 1)"),
        ({0: {"unreachable": "no link"}, 2: {"unreachable": "no link"}}, "no link (rank 0)"),
        ({1: {"allocate": RuntimeError("no memory")}}, "RuntimeError: no memory (rank 1)"),
        ({2: {"connect": OSError("no handle")}}, "OSError: no handle (rank 2)"),
    ],
)
def test_all_ranks_take_the_collective_if_one_cannot_store(odd, why, started):
    def run(found, peers):
        said = found.start(torch.zeros(1, 8))
        gathers = peers.gathers
        assert found.start(torch.zeros(1, 99)) == said
        assert peers.gathers == gathers  # it is not tried again
        return said

    assert on_ranks(3, run, odd) == [why] * 3


def test_collectives_say_which_way_they_have_taken(started, monkeypatch):
    monkeypatch.setattr(collectives.torch.ops, "_c10d_functional", SimpleNamespace(all_gather_into_tensor=lambda x, *_: x))

    def run(found, peers):
        made = PeerCollectives("group", 2, found)
        assert isinstance(made.start_all_gather(torch.zeros(8, 2).T)._tensor, Channel)
        assert made.used == {STORES}
        assert made.start_all_gather(torch.zeros(1, 3, dtype=torch.int8))._tensor.shape == (1, 3)
        assert made.used == {STORES, "collective, since messages of 3 bytes"}
        return True

    assert on_ranks(2, run) == [True, True]
    assert "9" not in Exchange(SimpleNamespace(size=8)).why_not
    assert Exchange(SimpleNamespace(size=9)).why_not == "it has more than 8 ranks"


class Driver:
    """Driver with one capture and two devices, of which one cannot change the other's memory atomically."""

    def __init__(self, *, refuses=False):
        self.refuses = refuses

    def cuStreamGetCaptureInfo_v2(self, stream, status, number, *rest):
        assert rest == (None, None, None)
        status._obj.value, number._obj.value = (1, 2**33) if stream.value == 7 else (0, 0)
        return int(self.refuses)

    def cuDeviceGetP2PAttribute(self, value, attribute, index, other):
        value._obj.value = int(attribute == 2 or (attribute == 3 and index < other))
        return int(self.refuses)


def test_the_driver_is_asked_for_captures_and_peer_access(monkeypatch):
    monkeypatch.setattr(driver_module, "library", Driver)
    assert driver_module.capture_of(7) == 2**33
    assert driver_module.capture_of(8) is None
    assert driver_module.reaches(0, 1)
    assert not driver_module.reaches(1, 0)
    monkeypatch.setattr(driver_module, "library", lambda: Driver(refuses=True))
    for call in (lambda: driver_module.capture_of(7), lambda: driver_module.reaches(0, 1)):
        with pytest.raises(DriverError):
            call()


class Group:
    """Process group of NCCL without processes, as far as :class:`~onelaunch.parallel.exchange.Peers` reads one."""

    group_name = "a group"

    def __init__(self, timeout=None):
        options = SimpleNamespace(_timeout=timeout)
        self.backend = SimpleNamespace(options=options)

    def _get_backend(self, device):
        assert device == torch.device("cuda", 1)
        return self.backend


@pytest.fixture
def peers(monkeypatch):
    """Peers of a group of two ranks, of which this process is the second, on a host with three GPUs."""
    group = Group(timedelta(seconds=20))
    fakes = {"get_rank": lambda _: 1, "get_world_size": lambda _: 2, "get_backend_config": lambda _: "cpu:gloo,cuda:nccl"}
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.distributed, name, fake)
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_resolve_process_group", lambda name: group)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=7))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda at: SimpleNamespace(uuid=f"gpu {getattr(at, 'index', at)}"))
    monkeypatch.setattr(driver_module, "library", Driver)
    found = exchange.Peers(group, torch.device("cuda", 1))
    found.group = group  # else nothing keeps it
    return found


def test_a_rank_tells_its_peers_what_it_can_do(peers, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert peers.capture() == 2**33
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert peers.capture() is None
    monkeypatch.setenv("ONELAUNCH_PEER_STORES", "1")
    host, uuid, why = peers.facts()
    assert (bool(host), uuid, why) == (True, "gpu 1", "")
    assert peers.unreachable(["gpu 2", "gpu 1"]) == ""
    assert peers.unreachable(["gpu 0", "gpu 1"]) == "no peer access with atomics to the GPU of rank 0"
    assert peers.unreachable(["gpu 9", "gpu 1"]) == "the GPU of rank 0 is not visible"
    assert peers.limit() == 20 * 10**9
    del peers.group.backend.options._timeout
    assert peers.limit() == 600 * 10**9
    monkeypatch.setattr(driver_module, "library", lambda: Driver(refuses=True))
    assert "cuStreamGetCaptureInfo" in peers.facts()[2]
    assert "cuDeviceGetP2PAttribute" in peers.unreachable(["gpu 2", "gpu 1"])
    monkeypatch.setattr(driver_module, "library", Driver)
    for value, why in (("0", "ONELAUNCH_PEER_STORES is not 1"), (None, "")):
        monkeypatch.delenv("ONELAUNCH_PEER_STORES") if value is None else monkeypatch.setenv("ONELAUNCH_PEER_STORES", value)
        assert peers.facts()[2] == why


def test_memory_of_all_ranks_has_an_address_on_each(peers, monkeypatch):
    """PyTorch's symmetric memory is replaced by memory of the CPU; that of the other rank lies behind this rank's."""
    symmetric, done = pytest.importorskip("torch.distributed._symmetric_memory"), []
    both = torch.ones(200, dtype=torch.int64)

    class Handle:
        shift = 0

        def get_buffer(self, rank, size, dtype):
            return both[self.shift + 100 * (1 - rank) :].view(dtype)[: size[0]]

    def empty(size, stride, dtype, device):
        assert (size, stride, dtype, device) == ((80,), (1,), torch.int64, peers.device)
        return both[:80]

    def enable(name):
        warnings.warn("there is no need to call it", FutureWarning, stacklevel=2)
        done.append(name)

    monkeypatch.setattr(symmetric._SymmetricMemory, "empty_strided_p2p", empty)
    monkeypatch.setattr(symmetric, "enable_symm_mem_for_group", enable)
    monkeypatch.setattr(symmetric, "rendezvous", lambda memory, name: done.append((len(memory), name)) or Handle())
    monkeypatch.setattr(torch.cuda, "synchronize", done.append)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        memory = peers.allocate(80)
        assert done == [peers.device]
        addresses = peers.connect(memory)
    assert done[1:] == ["a group", (80, "a group")]
    assert memory.count_nonzero() == 0
    assert both[80:].all()
    assert addresses == [memory.data_ptr() + 800, memory.data_ptr()]
    monkeypatch.setattr(Handle, "shift", 2)
    with pytest.raises(RuntimeError, match="unexpected addresses"):
        peers.connect(memory)


def test_calls_of_a_group_share_its_channels(peers, monkeypatch):
    first, again = (exchange.collectives_of(peers.group, 2, torch.device(device)) for device in ("cuda", "cuda:1"))
    assert first is not again
    assert first._exchange is again._exchange
    assert exchange.collectives_of(Group(), 2, torch.device("cuda", 1))._exchange is not first._exchange
    assert type(exchange.collectives_of(peers.group, 2, torch.device("cpu"))) is collectives.Collectives
    assert type(exchange.collectives_of(peers.group, 1, torch.device("cuda"))) is collectives.Collectives
    monkeypatch.setattr(torch.distributed, "get_backend_config", lambda _: "cpu:gloo,cuda:gloo")
    assert type(exchange.collectives_of(peers.group, 2, torch.device("cuda"))) is collectives.Collectives
