"""Tests of the kernels that store to the memory of peers, and of channels, in Triton's interpreter.

The ranks of one process take turns on memory of the CPU. ``gpu_ranks.py`` compares exchanges with NCCL's on GPUs.
"""

from __future__ import annotations

import itertools
import re
from functools import partial
from random import Random
from types import SimpleNamespace

import pytest
import torch

from onelaunch.device.architectures import find_architecture
from onelaunch.launch.build import builds_of
from onelaunch.launch.imitation import record
from onelaunch.workbench.inspection import inspect_build

pytest.importorskip("triton", reason="it launches kernels of Triton")
from triton.runtime.errors import InterpreterError

from onelaunch.ops.gla import launch_slices
from onelaunch.parallel import peer_stores
from onelaunch.parallel.peer_stores import Channel, Sent, channel_bytes

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
    """A rank may send its next message once it has received an exchange, even if other ranks have not received it yet."""
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


def test_memory_of_a_result_is_kept_for_a_stream_that_did_not_receive_it(monkeypatch):
    """The next exchange, on another stream, receives the result, so PyTorch would reuse its memory in that stream's order."""
    reading = []
    gathered = SimpleNamespace(is_cuda=True, device="cuda:1", record_stream=reading.append)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"a stream of {device}")
    pending = Sent(SimpleNamespace(receive=lambda *_: gathered, order=lambda: None), (2, 8), torch.float32)
    assert pending.result() is gathered
    assert pending.result() is gathered
    assert reading == ["a stream of cuda:1"]


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
    """A captured graph may drop the results of exchanges. No rank sends before the others have sent the exchange before."""
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


@pytest.mark.interpret
def test_exchanges_are_counted_beyond_31_bits(channels):
    """A graph with many short exchanges, replayed for days, counts that many."""
    made = channels(2)
    first, last = messages(2, (1, 5), torch.float32, 0), messages(2, (1, CAPACITY), torch.float32, 1)
    for each in made:
        flags, epochs, _ = peer_stores.parts_of(each.memory, 2)
        epochs += 2**31 - 2
        flags += (2**31 - 2) * (_flag_of(made[0], first[0]) - 5)
    for sent in (first, last, first, last):
        pending = [each.start(x) for each, x in zip(made, sent, strict=True)]
        for each in pending:
            same(each.result(), sent)
    assert int(peer_stores.parts_of(made[0].memory, 2)[1][0]) == 2**31 + 2


def _flag_of(channel, x):
    """Return the flag that the first exchange of other channels of this kind sets."""
    memory = torch.zeros_like(channel.memory)
    Channel(memory, [memory.data_ptr()], 0, CAPACITY, 3).start(x)
    return int(memory[0])


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
    """Scans go forwards and backwards in turn, with all-gathers between them, and ranks send and read in any order."""
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


@pytest.mark.interpret
def test_messages_are_not_read_after_the_next_exchange_has_started(channels):
    """The kernel would take messages of the next exchange for these."""
    made, elements = channels(2), 8 * 12 + 8
    made[0].start(torch.ones(1, elements), (1,))
    late = made[1].start(torch.ones(1, elements), ()).in_place()
    for each in made:
        each.start(torch.zeros(1, elements))
    with pytest.raises(RuntimeError, match="before the next exchange"):
        launch_slices.folded_in_place(late, (0,), (1, 8, 12), 8)


def mixed_steps(made, random, seed, state, exchanges):
    """Return the steps of each rank, functions that start an exchange, or read it and compare what they have read.

    Readers are those of slices of packed sequences, which end at random ranks. A rank may take part in an exchange with readers
    by an all-gather, as one without steps does. An all-gather may be read after the next exchange has started.
    """
    size, elements = len(made), state[1] * state[2] + state[1]
    steps, late = [[] for _ in made], [None] * size

    def start(rank, sent, pending, readers):
        pending[rank] = made[rank].start(sent[rank], readers)

    def gathered(rank, sent, pending, senders):
        same(pending[rank].result()[list(senders)], [sent[each] for each in senders])

    def folded(rank, sent, pending, nearest):
        found = launch_slices.folded_in_place(pending[rank].in_place(), nearest[::-1], state, state[1])
        torch.testing.assert_close(found, scan(sent, nearest, state, state[1]))

    for number in range(exchanges):
        sent, pending = random_messages(size, elements, 100 * seed + number), {}
        for each in sent:
            each[0, -state[1] :] *= random.random() < 0.7
        gathers, back, through = random.random() < 0.4, random.random() < 0.5, [random.random() < 0.8 for _ in made]
        for rank in range(size):
            earlier = [each for each in range(rank)[::-1] if all(through[each:rank])]
            later = [each for each in range(rank + 1, size) if all(through[rank:each])]
            readers, nearest = (earlier, later) if back else (later, earlier)
            gathers_here = gathers or random.random() < 0.2
            steps[rank].append(partial(start, rank, sent, pending, None if gathers_here else readers))
            if late[rank]:
                steps[rank].append(late[rank])
            late[rank] = None
            if gathers or (gathers_here and nearest):
                late[rank] = partial(gathered, rank, sent, pending, range(size) if gathers else nearest)
                if random.random() < 0.5:
                    steps[rank].append(late[rank])
                    late[rank] = None
            elif nearest:  # it reads before it starts another exchange
                steps[rank].append(partial(folded, rank, sent, pending, nearest))
    return steps


@pytest.mark.interpret
@pytest.mark.parametrize("seed", range(3))
def test_ranks_read_any_mix_of_exchanges_right_in_any_order_of_their_steps(seed, channels, monkeypatch):
    """A step that would spin on a GPU raises an error here, and is tried again when other ranks have gone on."""
    monkeypatch.setattr(launch_slices, "_TILE", 16)
    random = Random(seed)
    steps = mixed_steps(channels(3, limit=0), random, seed, (1, 8, 12), 10)
    failures = 0
    while any(steps):
        mine = random.choice([each for each in steps if each])
        for _ in range(random.randrange(1, 6)):  # some steps in a row, so that a rank gets as far ahead as it can
            if not (mine and ends(mine[0])):
                failures += bool(mine)
                break
            del mine[0]
        assert failures < 500, "the ranks wait for one another"


def ends(step):
    """Take a step, and return whether it ended; it would have spun on a GPU otherwise."""
    try:
        step()
    except InterpreterError as error:
        if "Assume failed" not in str(error):
            raise
        return False
    return True


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
            order = order_of(inspection.assembly["sass"])
            if build.name == "send":
                assert re.fullmatch("(AI)+B[SB]*BFR[SB]*BFRS", order), order
            else:
                assert re.fullmatch("((AI)+B[LSB]+)+", order), (build.name, order)


def order_of(machine_code):
    """Return what orders the accesses to a channel in a kernel's machine code, one letter for each instruction.

    A loads flags, I drops L1, B is a barrier, L loads messages past L1, S stores, F is a fence at system scope, R sets flags.
    """
    letters = {
        "A": r"LDG?\.\S*STRONG\.SYS", "I": r"CCTL\.IVALL", "B": r"BAR\.SYNC", "L": r"LDG?\.\S*STRONG\.GPU",
        "S": r"STG?\.", "F": r"MEMBAR\.\S*SYS", "R": r"ATOMG\.\S*STRONG\.SYS",
    }  # fmt: skip
    found = re.finditer("|".join(f"(?P<{letter}>{each})" for letter, each in letters.items()), machine_code)
    return "".join(str(each.lastgroup) for each in found)
