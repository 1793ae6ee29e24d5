"""Tests of whole calls of ``gla`` on ranks that exchange by stores, each in a thread of its own, in any order in time.

The kernels of ``hopper`` are emulated (``gluon_on_cpu.py``), and those of exchanges are interpreted, one launch at a time. A
kernel that would wait for another rank is launched again later. Slots that a rank has read are filled with NaN, so that no result
may depend on what an exchange did not send.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="it launches kernels of Triton")
from triton.runtime.errors import InterpreterError

from onelaunch.ops.gla import launch_slices
from onelaunch.ops.gla.contract import gla
from onelaunch.ops.gla.slices import GlaRules
from onelaunch.parallel import peer_stores
from onelaunch.parallel.collectives import Collectives, Outgoing, Pending
from onelaunch.parallel.peer_stores import Channel, channel_bytes
from onelaunch.parallel.simulated import Done, simulated
from tests.ops.cases import GLA, arguments_of, assert_near
from tests.ops.gluon_on_cpu import emulate
from tests.ops.rescaled import rescaled
from tests.parallel.test_passes import BOUND, expected
from tests.thorough import thorough_but

CAPACITY = 1 << 16
"""Words of a rank in a slot."""

PATIENCE = 100.0
"""Seconds in which another rank must send."""

here = threading.local()
"""Rank of this thread (``here.rank``), and the number of its steps (``here.steps``)."""


class Node:
    """Memory of all ranks, and the lock of the one device that interprets and emulates their kernels.

    Args:
        ranks: Number of ranks.
        slow: Rank whose launches are late; none by default.
    """

    def __init__(self, ranks: int, slow: int = -1) -> None:
        self.ranks, self.slow, self.device = ranks, slow, threading.Lock()
        self.memory = [torch.zeros(channel_bytes(ranks, CAPACITY) // 8, dtype=torch.int64) for _ in range(ranks)]
        self.meeting = threading.Barrier(ranks)
        self.summands: list[Any] = [None] * ranks

    def launch(self, run: Callable[[Any], None], launch: Any) -> None:
        """Run a kernel, again and again until it need not wait."""
        end = time.monotonic() + PATIENCE
        while True:
            time.sleep(0.03 if here.rank == self.slow else random.random() / 300)
            try:
                with self.device:
                    run(launch)
            except InterpreterError as error:
                if "Assume failed" not in str(error) or time.monotonic() > end or self.meeting.broken:
                    raise
            else:
                return

    def on_all_ranks(self, function: Callable[[int], Any]) -> list[Any]:
        """Return the results of a function of the rank, called in a thread for each rank."""
        results: list[Any] = [None] * self.ranks
        errors: list[BaseException] = []

        def run(rank: int) -> None:
            try:
                results[rank] = function(rank)
            except BaseException as error:  # noqa: BLE001 - raised again below
                errors.append(error)
                self.meeting.abort()

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(self.ranks)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        if errors:
            raise errors[0]
        return results


class OfNode(Collectives):
    """Collectives of one rank of a :class:`Node`."""

    def __init__(self, node: Node, rank: int) -> None:
        super().__init__("", node.ranks)
        self.node, self.rank = node, rank
        self.channel = Channel(node.memory[rank], [each.data_ptr() for each in node.memory], rank, CAPACITY, 1)

    def start_all_gather(self, x: torch.Tensor) -> Pending:
        self.spoil()
        return self.channel.start(x.contiguous())

    def start_scan(self, message: Outgoing, readers: Sequence[int]) -> Pending:
        self.spoil()
        return self.channel.start(message, readers)

    def spoil(self) -> None:
        """Fill the slots of the latest exchange with NaN: its messages have been read, or are not read by this rank."""
        if self.channel._sent is not None:
            self.channel._sent.result()
        with self.node.device:
            _, _, slots = peer_stores.parts_of(self.channel.memory, self.size)
            slots.view(torch.float32).view(2, self.size, CAPACITY)[self.channel.started & 1] = float("nan")

    def start_all_reduce(self, x: torch.Tensor) -> Pending:
        self.node.summands[self.rank] = x
        self.node.meeting.wait(PATIENCE)
        total = torch.stack(self.node.summands).sum(0)
        self.node.meeting.wait(PATIENCE)
        return Done(total)


@pytest.fixture
def ranks(monkeypatch):
    """Return a function that lets the ranks of a node run ``hopper``'s passes, but for some that make ordinary calls."""

    def prepare(node: Node, segments: int, ordinary: Sequence[int] = ()) -> None:
        launch_hopper = emulate(monkeypatch, segments=segments)
        monkeypatch.setattr(launch_hopper, "rescaled", rescaled)
        add = lambda parts, to: to.copy_(parts.unflatten(2, (to.shape[2], -1)).sum(3))  # noqa: E731
        monkeypatch.setattr(launch_hopper, "sum_heads", add)
        monkeypatch.setattr(peer_stores, "CTAS", 3)
        for launch in {launch_hopper.Launch, launch_slices.Launch, peer_stores.Launch}:
            run = launch.run
            monkeypatch.setattr(launch, "run", lambda self, run=run: node.launch(run, self))

        def passes(rules: GlaRules) -> Any:
            return launch_slices.HopperPasses(rules.scale) if here.steps and here.rank not in ordinary else None

        monkeypatch.setattr(GlaRules, "passes", passes)

    return prepare


CASES: dict[str, dict[str, Any]] = {
    "two_ranks": {"slices": (70, 130), "initial_state": True, "final_state": True},
    "four_ranks": {"slices": (70, 80, 66, 84), "B": 2, "initial_state": True, "final_state": True},
    "eight_ranks": {"slices": (66,) * 8, "initial_state": True},
    "slices_without_steps": {"slices": (0, 70, 0, 130, 16, 0), "initial_state": True, "final_state": True},
    "slices_of_one_step": {"slices": (1, 64, 1, 65), "initial_state": True, "final_state": True},
    "per_head": {"slices": (70, 66, 64), "B": 2, "H": 3, "decay_per": "head", "initial_state": True, "final_state": True},
    "shared_heads": {"slices": (70, 60, 70), "B": 2, "H": 4, "k_heads": 1, "v_heads": 2, "g_heads": 2, "final_state": True},
    "packed": {"slices": (90, 60, 60, 90), "lengths": (30, 0, 190, 0, 80), "initial_state": True, "final_state": True},
    "one_packed": {"slices": (70, 70, 70), "lengths": (210,), "initial_state": True},
    "float16": {"slices": (70, 70, 70), "K": 40, "V": 72, "dtype": "float16", "initial_state": True, "final_state": True},
    "float32_decay": {"slices": (70, 70, 70), "log_decay_dtype": "float32", "initial_state": True, "final_state": True},
    "strong_decay": {"slices": (70, 130, 70, 70), "B": 2, "strong": True, "initial_state": True, "final_state": True},
    "mixed": {"slices": (70, 70, 0, 70, 70), "ordinary": (1,), "initial_state": True, "final_state": True},
    "mixed_at_the_ends": {"slices": (70, 70, 70, 70), "ordinary": (0, 3), "initial_state": True},
    "mixed_and_packed": {"slices": (90, 60, 60, 90), "lengths": (100, 200), "ordinary": (2,), "final_state": True},
}
"""Calls by name. Slices are the steps of each rank. Ranks that are ``ordinary`` run another variant than ``hopper``."""


@pytest.mark.interpret
@pytest.mark.parametrize("name", thorough_but("four_ranks", "packed", "mixed", of=list(CASES)))
def test_ranks_at_the_same_time_give_what_one_process_gives(name, ranks):
    options = {"B": 1, "H": 1, "K": 64, "V": 64, "dtype": "bfloat16", **CASES[name]}
    slices, ordinary, strong = options.pop("slices"), options.pop("ordinary", ()), options.pop("strong", False)
    arguments = arguments_of(GLA, T=sum(slices), **options)
    if strong:
        arguments["g"] -= 3  # the decay of a slice of 64 steps is 0
        arguments["g"][:, 20::37] = -120
    wanted, (do, dfinal) = expected(arguments)
    node, starts = Node(len(slices)), [0, *itertools.accumulate(slices)]
    ranks(node, segments=2, ordinary=ordinary)
    names = [name for name in (*"qkvg", "initial_state") if arguments.get(name) is not None]

    def run(rank: int) -> dict[str, torch.Tensor]:
        here.rank, here.steps, part = rank, slices[rank], slice(starts[rank], starts[rank + 1])
        offsets, collectives = arguments.get("cu_seqlens"), OfNode(node, rank)
        context = simulated(rank, slices, device="cpu", cu_seqlens=offsets, collectives=collectives)
        given = {name: arguments[name] if name == "initial_state" else arguments[name][:, part] for name in names}
        for _ in range(2):  # each exchange of the second step takes a slot that was used before
            leaves = {name: each.clone().requires_grad_() for name, each in given.items()}
            o, final = gla(**leaves, output_final_state=dfinal is not None, mesh=context, variant="chunked")
            ends = [(o, do[:, part])] if dfinal is None else [(o, do[:, part]), (final, dfinal / len(slices))]
            torch.autograd.backward(*zip(*ends, strict=True))
        found = {"o": o.detach()} if dfinal is None else {"o": o.detach(), "final": final.detach()}
        return found | {name: each.grad for name, each in leaves.items()}

    found = node.on_all_ranks(run)
    results = {name: torch.cat([each[name] for each in found], 1) for name in ("o", *"qkvg")}
    if dfinal is not None:
        results["final"] = found[0]["final"]
        assert all(torch.equal(each["final"], results["final"]) for each in found)
    if "initial_state" in names:
        results["initial_state"] = sum(each["initial_state"] for each in found)
    assert_near({name: results[name].double() for name in wanted}, wanted, BOUND)


@pytest.mark.interpret
def test_ranks_that_read_nothing_wait_for_slow_readers(ranks):
    """The first rank makes calls without gradients, and so reads no message, while the last one is late."""
    node, calls = Node(3, slow=2), 5
    ranks(node, segments=1)
    q, k, v = (torch.randn(1, 192, 1, 64, generator=torch.Generator().manual_seed(each)).bfloat16() for each in range(3))
    g = torch.full_like(q, -0.01)

    def run(rank: int) -> list[torch.Tensor]:
        here.rank, here.steps = rank, 64
        context = simulated(rank, (64,) * 3, device="cpu", collectives=OfNode(node, rank))
        mine = [each[:, 64 * rank : 64 * rank + 64] for each in (q, k, v, g)]
        with torch.no_grad():
            return [gla(mine[0], mine[1], mine[2] * 2**n, mine[3], mesh=context, variant="chunked")[0] for n in range(calls)]

    found = [torch.cat(each, 1) for each in zip(*node.on_all_ranks(run), strict=True)]
    for n, each in enumerate(found):
        assert torch.equal(each, found[0] * 2**n)
    wanted, _ = GLA.reference(**{name: each.double() for name, each in zip("qkvg", (q, k, v, g), strict=True)})
    assert_near({"o": found[0].double()}, {"o": wanted}, BOUND)
