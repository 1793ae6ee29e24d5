"""Tests of all-gathers by stores to the memory of peers, without a GPU.

The kernels run in Triton's interpreter, where the ranks of one process take turns on memory of the CPU. Decisions of a group are
tested with a thread for each rank. ``gpu_ranks.py`` compares the exchange with NCCL's on GPUs.
"""

from __future__ import annotations

import itertools
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

from onelaunch.cuda import driver as driver_module
from onelaunch.device.architectures import find_architecture
from onelaunch.errors import ArgumentError, DriverError
from onelaunch.launch.build import builds_of
from onelaunch.launch.imitation import record
from onelaunch.parallel import collectives, exchange
from onelaunch.parallel.collectives import Pending
from onelaunch.parallel.exchange import STORES, Exchange, PeerCollectives
from onelaunch.workbench.inspection import inspect_build

pytest.importorskip("triton", reason="it launches kernels of Triton")
from onelaunch.ops.gla import launch_slices
from onelaunch.parallel import peer_stores
from onelaunch.parallel.peer_stores import Channel, channel_bytes

CAPACITY = 512
"""Words of a rank in a slot, in the tests of kernels."""


@pytest.fixture
def channels(monkeypatch):
    """Return a function that makes the channels of a number of ranks, with few small CTAs."""
    monkeypatch.setattr(peer_stores, "CTAS", 3)
    monkeypatch.setattr(peer_stores, "_BLOCK", 64)

    def make(ranks, limit=3):
        memory = [torch.zeros(channel_bytes(ranks, CAPACITY) // 8, dtype=torch.int64) for _ in range(ranks)]
        addresses = [each.data_ptr() for each in memory]
        return [Channel(each, addresses, rank, CAPACITY, limit) for rank, each in enumerate(memory)]

    return make


def messages(ranks, shape, dtype, seed):
    """Return messages of any bits, NaNs among them."""
    random = torch.Generator().manual_seed(seed)
    words = torch.randint(-(2**15), 2**15, (ranks, *shape, dtype.itemsize // 2), generator=random, dtype=torch.int16)
    return [each.view(dtype).view(shape) for each in words]


def same(found, sent):
    """Assert that a gathered tensor has the bits of the messages that were sent."""
    wanted = torch.cat(sent)
    assert found.shape == wanted.shape
    assert found.dtype == wanted.dtype
    assert torch.equal(found.view(torch.int16), wanted.view(torch.int16))


@pytest.mark.interpret
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_rank_gathers_the_messages_of_all_in_any_order(ranks, channels):
    made = channels(ranks)
    shapes = itertools.cycle([((1, 1), torch.float32), ((1, 512), torch.float32), ((2, 3, 5), torch.float32)])
    for seed, (order, (shape, dtype)) in enumerate(zip(itertools.permutations(range(ranks)), shapes, strict=False)):
        sent = messages(ranks, shape, dtype, seed)
        pending = {rank: made[rank].start(sent[rank]) for rank in order}
        for rank in reversed(order):
            same(pending[rank].result(), sent)
            assert pending[rank].result() is pending[rank].result()


@pytest.mark.interpret
def test_a_rank_may_be_one_exchange_ahead(channels):
    """It sends the next message when it has received this one, which the others have not yet."""
    ahead, *others = channels(3)
    sent, results = messages(3, (1, 130), torch.bfloat16, 0), []
    pending = [each.start(x) for each, x in zip((ahead, *others), sent, strict=True)]
    for seed in range(1, 5):
        same(pending[0].result(), sent)
        later = messages(3, (1, 130), torch.bfloat16, seed)
        first = ahead.start(later[0])
        results += [(each.result(), sent) for each in pending[1:]]
        pending = [first, *(each.start(x) for each, x in zip(others, later[1:], strict=True))]
        sent = later
    for found, wanted in results:  # later exchanges have not changed them
        same(found, wanted)


@pytest.mark.interpret
def test_an_exchange_is_received_before_the_next_one_starts(channels):
    made = channels(2)
    early, late = (messages(2, (1, 8), torch.bfloat16, seed) for seed in range(2))
    pending = [each.start(x) for each, x in zip(made, early, strict=True)]
    shifted = torch.cat([late[1][0, :1], late[1][0]])[1:][None]  # an address that is no multiple of 4 bytes
    again = [made[0].start(late[0]), made[1].start(shifted)]
    for each, sent in ((again, late), (pending, early)):
        for one in each:
            same(one.result(), sent)


@pytest.mark.interpret
def test_a_rank_that_does_not_send_ends_the_others(channels):
    made = channels(3)
    pending = [each.start(torch.ones(1, 8)) for each in made[:2]]
    with pytest.raises(Exception, match="Assume failed"):  # on a GPU a trap
        pending[0].result()


@pytest.mark.interpret
def test_a_message_of_another_size_is_an_error(channels):
    made = channels(2)
    pending = [each.start(torch.ones(1, size)) for each, size in zip(made, (8, 200), strict=True)]
    for each in pending:
        with pytest.raises(Exception, match="Assume failed"):
            each.result()


@pytest.mark.interpret
def test_exchanges_that_nobody_receives_keep_the_ranks_together(channels):
    """As if their results were dropped in a captured graph: no rank sends before the others have sent the exchange before."""
    made = channels(2)

    def send(rank, x):
        channel = made[rank]
        order, readers = channel.order_of(None)
        targets = tuple(channel.addresses[each] for each in order)
        peer_stores._send(x, channel.memory, targets, readers, rank, CAPACITY, channel.limit)

    lost, sent = messages(2, (1, 70), torch.float32, 0), messages(2, (1, 70), torch.float32, 1)
    send(0, lost[0])
    with pytest.raises(Exception, match="Assume failed"):
        send(0, lost[0])
    send(1, lost[1])
    send(1, lost[1])
    send(0, lost[0])
    for each, x in zip(made, sent, strict=True):
        each.start(x)
    for each in made:
        same(each._sent.result(), sent)
    pending = [each.start(x) for each, x in zip(made, lost, strict=True)]
    assert all(int(each.memory[2 * 3]) == 4 for each in made)  # the first CTA's own epoch
    for each in pending:
        same(each.result(), lost)


def scan(messages, nearest_first, state, channels):
    """Return the state behind the slices of some ranks, from messages ``[1, elements]`` of all."""
    heads, keys, values = state
    found, factor = 0.0, 1.0
    for rank in nearest_first:
        rows = messages[rank].numel() // (keys * values + channels)
        added, decays = messages[rank][0].split([rows * keys * values, rows * channels])
        found = found + factor * added.view(rows, keys, values)
        factor = factor * decays.view(rows, channels, 1)
    return found.view(-1, heads, keys, values)


def random_messages(ranks, elements, seed):
    return list(torch.rand(ranks, 1, elements, generator=torch.Generator().manual_seed(seed)))


@pytest.mark.interpret
@pytest.mark.parametrize(("state", "decays"), [((2, 8, 12), 8), ((1, 20, 10), 1)])
def test_readers_fold_messages_where_they_arrive(state, decays, channels, monkeypatch):
    """Forwards and backwards in turn, with all-gathers between them; ranks send and read in any order."""
    monkeypatch.setattr(launch_slices, "_TILE", 8)
    made, (heads, keys, values) = channels(3), state
    elements = 2 * heads * (keys * values + decays)  # a batch of two
    for seed, order in enumerate(itertools.permutations(range(3))):
        messages = random_messages(3, elements, seed)
        nearest = {rank: (range(rank)[::-1], range(rank + 1, 3))[seed % 2] for rank in range(3)}
        readers = {rank: (range(rank + 1, 3), range(rank)[::-1])[seed % 2] for rank in range(3)}
        exchanges = {rank: made[rank].start(messages[rank], readers[rank]) for rank in order}
        for rank in reversed(order):
            if nearest[rank]:
                found = launch_slices.folded_in_place(exchanges[rank].in_place(), nearest[rank][::-1], state, decays)
                torch.testing.assert_close(found, scan(messages, nearest[rank], state, decays))
            exchanges[rank].settle()
            exchanges[rank].finish()
            with pytest.raises(RuntimeError, match="their readers alone"):
                exchanges[rank].result()
        gathered = [each.start(x) for each, x in zip(made, messages, strict=True)]
        for each in gathered:
            same(each.result(), messages)


@pytest.mark.interpret
def test_a_message_behind_decays_of_zero_is_not_waited_for(channels):
    state = (1, 8, 12)
    for decay in (0.0, 0.5):
        made, messages = channels(3), random_messages(3, 8 * 12 + 8, 0)
        messages[1][0, 8 * 12 :] = decay
        made[1].start(messages[1], (2,))
        in_place = made[2].start(messages[2], ()).in_place()  # rank 0 has not sent
        if decay:
            with pytest.raises(Exception, match="Assume failed"):
                launch_slices.folded_in_place(in_place, (0, 1), state, 8)
        else:
            found = launch_slices.folded_in_place(in_place, (0, 1), state, 8)
            torch.testing.assert_close(found, scan(messages, (1,), state, 8))


@pytest.mark.interpret
def test_no_rank_overwrites_a_message_before_its_reader_has_sent_again(channels):
    """A rank that reads nothing may be one exchange ahead of its readers, and no more."""
    made, messages = channels(2), random_messages(2, 8 * 12 + 8, 0)
    late = made[1].start(messages[1], ())
    made[0].start(messages[0], (1,))
    made[0].start(torch.zeros(1, 8 * 12 + 8), (1,))
    with pytest.raises(Exception, match="Assume failed"):
        made[0].start(torch.zeros(1, 8 * 12 + 8), (1,))
    found = launch_slices.folded_in_place(late.in_place(), (0,), (1, 8, 12), 8)
    torch.testing.assert_close(found, scan(messages, (0,), (1, 8, 12), 8))


@pytest.mark.interpret
def test_a_message_of_another_size_is_not_read_in_place(channels):
    made = channels(2)
    made[0].start(torch.zeros(1, 8), (1,))
    exchange = made[1].start(torch.zeros(1, 8 * 12 + 8), ())
    with pytest.raises(Exception, match="Assume failed"):
        launch_slices.folded_in_place(exchange.in_place(), (0,), (1, 8, 12), 8)


@pytest.mark.thorough
def test_the_kernels_compile_to_few_registers():
    """A message whose size is no multiple of 64 bytes takes narrower accesses."""
    for ranks, words in ((4, 264192), (8, 264192), (2, 37)):
        with record("sm_90a") as (device, launches), torch.no_grad():
            memory = torch.empty(channel_bytes(ranks, 1 << 20) // 8, dtype=torch.int64, device=device)
            addresses = tuple((1 << 40) + 4096 * each for each in range(ranks))
            limit = 20 * 10**9
            peer_stores._send(torch.empty(1, words, device=device), memory, addresses, ranks, 1, 1 << 20, limit)
            found = peer_stores._receive(memory, (ranks, words), torch.float32, ranks, 1 << 20, limit)
            if words == 264192:
                folded = launch_slices._folded_in_place(
                    memory, tuple(range(1, ranks)), 16, 128, 128, 128, ranks, 1 << 20, limit, words
                )
                assert folded.shape == (1, 16, 128, 128)
        assert found.shape == (ranks, words)
        builds = builds_of([(each.kernel.__name__, each) for each in launches], find_architecture("sm_90a"))
        assert len(builds) == (3 if words == 264192 else 2)
        for build in builds:
            inspection = inspect_build(build, "sm_90a")
            assert inspection.ok, build.name
            assert inspection.registers <= 80, (build.name, inspection.registers)


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
