"""Tests of the kernel that combines sums of segments to a message and sends it, in Triton's interpreter and as machine code."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from onelaunch.device.architectures import find_architecture
from onelaunch.launch.build import builds_of
from onelaunch.launch.imitation import record
from onelaunch.workbench.inspection import inspect_build

pytest.importorskip("triton", reason="it launches kernels of Triton")
from onelaunch.errors import ArgumentError
from onelaunch.ops.gla import launch_slices
from onelaunch.ops.gla.contract import gla
from onelaunch.ops.gla.launch_slices import MessageSizes, outgoing
from onelaunch.ops.gla.slices import GlaRules
from onelaunch.parallel import Outbox, peer_stores
from onelaunch.parallel import simulated as loopback
from onelaunch.parallel.peer_stores import Channel, channel_bytes
from onelaunch.parallel.simulated import Loopback, simulated
from tests.ops.gluon_on_cpu import emulate
from tests.parallel.test_peer_stores import order_of

CAPACITY = 4096
"""Words of a rank in a slot."""


@pytest.fixture
def channels(monkeypatch):
    """Return a function that makes the channels of a number of ranks, with few CTAs."""
    monkeypatch.setattr(peer_stores, "CTAS", 3)

    def make(ranks):
        memory = [torch.zeros(channel_bytes(ranks, CAPACITY) // 8, dtype=torch.int64) for _ in range(ranks)]
        addresses = [each.data_ptr() for each in memory]
        return [Channel(each, addresses, rank, CAPACITY, 3) for rank, each in enumerate(memory)]

    return make


def sums_of(heads, segments, values, keys, group, seed):
    """Return padded sums of segments, and decays that are the same for heads of a group."""
    random = torch.Generator().manual_seed(seed)
    states = torch.randn(1, heads * group, segments, values, keys, generator=random)
    decays = torch.rand(1, heads, 1, segments, keys, generator=random).expand(-1, -1, group, -1, -1)
    return states, decays.reshape(1, heads * group, segments, keys).clone()


def received(channel, sender, words):
    """Return the message of a rank in the latest exchange of a channel."""
    flags, epochs, slots = peer_stores.parts_of(channel.memory, channel.ranks)
    epoch = int(epochs[0])
    mine = flags[sender * peer_stores.CTAS :][: peer_stores.CTAS]
    assert (mine == (epoch << 24 | words)).all()
    slot = ((epoch & 1) * channel.ranks + sender) * channel.capacity
    return slots[slot : slot + words].view(torch.float32)


@pytest.mark.interpret
@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize(
    ("heads", "group", "keys", "values", "channels_of_decay", "before"),
    [(3, 1, 40, 20, 40, True), (2, 2, 16, 33, 16, False), (1, 2, 64, 16, 1, True), (5, 1, 24, 24, 24, False)],
)
def test_every_reader_gets_the_message_that_a_collective_would_send(
    heads, group, keys, values, channels_of_decay, before, back, channels, monkeypatch
):
    monkeypatch.setattr(launch_slices, "_SENT_VALUES", 16)
    made, sizes = channels(3), MessageSizes(heads, keys, values, channels_of_decay)
    for exchange in range(3):  # of which each takes the other slot
        sums = sums_of(heads, 4, 40, 64, group, exchange)
        if channels_of_decay == 1:
            sums[1][:] = sums[1][..., :1].clone()
        initial = torch.rand(1, heads, keys, values, generator=torch.Generator().manual_seed(9)) if before else None
        sent = outgoing(*sums, sizes, initial, sums[0], back=back)
        nothing = sent._replace(send=None)
        for each, message, readers in zip(made, (sent, nothing, sent), ((1, 2), (), (1,)), strict=True):
            each.start(message, readers)
        wanted = sent.tensor()[0]
        for reader, sender in ((1, 0), (2, 0), (1, 2)):
            torch.testing.assert_close(received(made[reader], sender, sizes.elements), wanted)


@pytest.mark.interpret
@pytest.mark.parametrize("rank", range(3))
def test_one_process_exchanges_with_other_memory_in_the_place_of_peers(rank, monkeypatch):
    """The neighbours that it stands for send zeros, so the states before and behind its slice are zeros."""
    monkeypatch.setattr(peer_stores, "CTAS", 3)
    made, sizes = Loopback(rank, 3, "cpu", CAPACITY), MessageSizes(2, 16, 24, 16)
    for exchange in range(4):
        sent = outgoing(*sums_of(2, 3, 24, 16, 1, exchange), sizes, None, torch.zeros(1), back=exchange % 2 == 1)
        readers, ranks = (range(rank + 1, 3), range(rank)) if exchange % 2 == 0 else (range(rank)[::-1], range(rank + 1, 3)[::-1])
        pending = made.start_scan(sent if readers else sent._replace(send=None), readers)
        slots = made.memory[:, peer_stores.SLOTS // 8 :].view(torch.float32)
        for reader in readers:
            slot = ((exchange + 1) % 2 * 3 + rank) * CAPACITY
            torch.testing.assert_close(slots[reader, slot : slot + sizes.elements], sent.tensor()[0])
        if ranks:
            assert (launch_slices.folded_in_place(pending.in_place(), ranks, (2, 16, 24), 16) == 0).all()


@pytest.mark.interpret
def test_each_capture_of_one_process_has_an_order_of_its_own(monkeypatch):
    """A stream cannot wait for an event of a capture that has ended. The messages still go to the same memory."""
    monkeypatch.setattr(peer_stores, "CTAS", 3)
    made, sizes, channels = Loopback(0, 2, "cpu", CAPACITY), MessageSizes(1, 16, 16, 16), []
    for exchange, capture in enumerate((None, 5, 5, 6, None), 1):
        monkeypatch.setattr(loopback, "capture_under_way", lambda device, capture=capture: capture)
        sent = outgoing(*sums_of(1, 2, 16, 16, 1, exchange), sizes, None, torch.zeros(1), back=False)
        pending = made.start_scan(sent, (1,))
        channels.append(pending._channel)
        assert int(channels[-1].memory[2 * 3]) == exchange
    none, first, again, second, eager = channels
    assert first is again
    assert none is eager
    assert len({none, first, second}) == 3


def test_one_process_stores_nothing_beyond_its_memory():
    made, sizes = Loopback(0, 2, "cpu", 256), MessageSizes(1, 16, 16, 16)
    with pytest.raises(ArgumentError, match="has 272 words; capacity is 256"):
        made.start_scan(outgoing(*sums_of(1, 1, 16, 16, 1, 0), sizes, None, torch.zeros(1), back=False), (1,))
    with pytest.raises(ArgumentError, match="size is 9"):
        Loopback(0, 9, "cpu")


@pytest.mark.interpret
def test_a_rank_without_readers_sends_no_tensor(channels, monkeypatch):
    """A view of the channel in the place of a message would be a second argument that lies in the channel's memory."""
    made, sizes, given = channels(2), MessageSizes(1, 16, 16, 16), []
    monkeypatch.setattr(peer_stores, "_send", None)
    run = peer_stores.Launch.run
    monkeypatch.setattr(peer_stores.Launch, "run", lambda self: (given.append(self.arguments[0]), run(self)))
    sent = outgoing(*sums_of(1, 2, 16, 16, 1, 0), sizes, None, torch.zeros(1), back=False)
    for message in (sent, sent._replace(send=None), torch.ones(1, sizes.elements)):
        made[0].start(message, ())
        made[1].start(message, ())
        assert given[-1].data_ptr() == made[1].memory.data_ptr()
        received(made[0], 1, sizes.elements)  # the flags are set, with the number of words


@pytest.mark.interpret
def test_a_message_that_cannot_be_sent_has_no_readers(channels):
    """They would read what an earlier exchange has left."""
    made, sizes = channels(2), MessageSizes(1, 16, 16, 16)
    sent = outgoing(*sums_of(1, 2, 16, 16, 1, 0), sizes, None, torch.zeros(1), back=False)
    with pytest.raises(AssertionError):
        made[0].start(sent._replace(send=None), (1,))


@pytest.mark.interpret
@pytest.mark.parametrize("back", [False, True])
def test_segments_behind_decays_of_zero_are_not_read(back, channels):
    """As a pass does not read them. Elsewhere a NaN, also one of a decay, reaches the message."""
    made, sizes = channels(2), MessageSizes(1, 16, 16, 16)
    states, decays = sums_of(1, 3, 16, 16, 1, 0)
    nearest, far = (0, 2) if back else (2, 0)
    decays[:, :, 1] = 0
    states[:, :, far] = float("nan")
    for decay in (None, float("nan")):
        if decay is not None:
            decays[:, :, 1, 3] = decay
        made[0].start(outgoing(states, decays, sizes, torch.full((1, 1, 16, 16), 7.0), states, back=back), (1,))
        made[1].start(outgoing(states, decays, sizes, None, states, back=back)._replace(send=None), ())
        state, factors = received(made[1], 0, sizes.elements).split([256, 16])
        wanted = states[0, 0, nearest].T + decays[0, 0, nearest, :, None] * states[0, 0, 1].T
        if decay is None:
            torch.testing.assert_close(state.view(16, 16), wanted)
            assert (factors == 0).all()
        else:
            assert state.view(16, 16)[3].isnan().all()
            assert factors[3].isnan()


SENDS, READS, SUMS, PASS = "fold_and_send_kernel", "fold_in_place_kernel", "segment_sum_kernel", "chunk_state_kernel"

LAUNCHES = {
    0: ([SUMS, SENDS, PASS], ["send_kernel", PASS, READS, SUMS, PASS, "gradients_kernel"]),
    1: ([SUMS, SENDS, READS, PASS], [SUMS, SENDS, PASS, READS, PASS, "gradients_kernel"]),
    2: ([SUMS, "send_kernel", READS, PASS], [SUMS, SENDS, PASS, PASS, "gradients_kernel"]),
}
"""Launches of each of three ranks, forward and backward, where the passes cut T into segments."""


@pytest.mark.interpret
@pytest.mark.parametrize("rank", LAUNCHES)
def test_a_training_step_of_a_rank_has_no_other_launches(rank, monkeypatch):
    """Other operators of PyTorch than allocations and views would be launches too."""
    launch_hopper = emulate(monkeypatch, segments=2)
    monkeypatch.setattr(GlaRules, "passes", lambda rules: launch_slices.HopperPasses(rules.scale))
    found, inside = [], []

    def observed(launch: type) -> None:
        run = launch.run

        def logged(self: Any) -> None:
            found.append(self.kernel.__name__)
            inside.append(self)
            run(self)
            inside.pop()

        monkeypatch.setattr(launch, "run", logged)

    class Operators(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            results = function(*args, **(kwargs or {}))
            stays = not any(each.alias_info is not None for each in function._schema.returns)
            if stays and not inside and "empty" not in str(function):
                found.append(str(function))
            return results

    for each in (launch_hopper.Launch, launch_slices.Launch, peer_stores.Launch):
        if each.run.__name__ != "logged":
            observed(each)
    tensors = [torch.zeros(1, 140, 1, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(4)]
    context = simulated(rank, (140,) * 3, device="cpu", collectives=Loopback(rank, 3, "cpu", 1 << 14))
    with Operators():
        o, _ = gla(*tensors, mesh=context, variant="chunked")
        first = [each for each in found if each not in ("aten.max.default", "aten._local_scalar_dense.default")]  # checks
        found.clear()
        torch.autograd.grad(o, tensors, torch.zeros(o.shape, dtype=o.dtype))
    assert (first, [each for each in found if each != "aten.zeros.default"]) == LAUNCHES[rank]


@pytest.mark.thorough
@pytest.mark.parametrize(("heads", "group", "channels_of_decay"), [(16, 1, 128), (8, 2, 1)])
def test_the_kernel_compiles_to_few_registers_and_sets_flags_after_its_stores(heads, group, channels_of_decay):
    with record("sm_90a") as (device, launches), torch.no_grad():
        states, decays = (torch.empty(1, heads * group, 8, *of, device=device) for of in ((128, 128), (128,)))
        memory = torch.empty(channel_bytes(4, 1 << 19) // 8, dtype=torch.int64, device=device)
        targets = tuple((1 << 40) + 4096 * each for each in range(4))
        sizes = MessageSizes(heads, 128, 128, channels_of_decay)
        sent = outgoing(states, decays, sizes, torch.empty(1, heads, 128, 128, device=device), states, back=True)
        sent.send(Outbox(memory, targets, 3, 0, 1 << 19, 20 * 10**9))
    (build,) = builds_of([("send", each) for each in launches], find_architecture("sm_90a"))
    inspection = inspect_build(build, "sm_90a")
    assert inspection.ok
    assert inspection.registers <= 128, inspection.registers
    order = order_of(inspection.assembly["sass"])
    assert re.fullmatch("(AI)+B[SB]*BFR[SB]*BFRS", order), order


@pytest.mark.thorough
def test_the_kernels_compile_for_a_single_state():
    """Triton makes a constant of an argument that is 1."""
    with record("sm_90a") as (device, launches), torch.no_grad():
        states, decays = (torch.empty(1, 1, 1, *of, device=device) for of in ((64, 64), (64,)))
        memory = torch.empty(channel_bytes(2, 1 << 19) // 8, dtype=torch.int64, device=device)
        sent = outgoing(states, decays, MessageSizes(1, 64, 64, 64), None, states, back=False)
        sent.send(Outbox(memory, (1 << 40, 1 << 41), 1, 1, 1 << 19, 1))
        launch_slices._folded_in_place(memory, (1,), 1, 64, 64, 64, 2, 1 << 19, 1, sent.elements)
    for build in builds_of([(each.kernel.__name__, each) for each in launches], find_architecture("sm_90a")):
        assert inspect_build(build, "sm_90a").instructions
