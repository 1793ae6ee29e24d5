"""Tests of the passes that ``hopper``'s kernels share between local passes and ordinary ones, without a GPU.

One process takes the parts of the ranks one after the other: forwards from the first rank, since a rank reads what earlier ones
have sent, and backwards from the last. The kernels are emulated (``gluon_on_cpu.py``); the fold of sums is PyTorch's here, and a
test of its own compares Triton's kernel with it in the interpreter.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from onelaunch.device.architectures import find_architecture
from onelaunch.launch.build import builds_of
from onelaunch.launch.imitation import record
from onelaunch.ops.gla.contract import bind, gla
from onelaunch.ops.gla.slices import GlaRules
from onelaunch.parallel.collectives import Collectives, Outbox, Outgoing, Pending
from onelaunch.parallel.rules import Passes
from onelaunch.parallel.simulated import Done, simulated
from onelaunch.workbench.inspection import inspect_build
from tests.ops.cases import GLA, arguments_of, assert_near
from tests.ops.gluon_on_cpu import emulate
from tests.ops.rescaled import rescaled
from tests.thorough import thorough_but

BOUND = 4e-3
"""Largest norm-wise error, as in the tests of whole sequences."""


class InTurn(Collectives):
    """Collectives of ranks that take turns: the n-th gather of a rank reads what the ranks before it have sent by theirs."""

    def __init__(self, rank: int, size: int, sent: dict[int, list[torch.Tensor]]) -> None:
        super().__init__("", size)
        self.rank, self.sent, self.calls = rank, sent, 0

    def start_all_gather(self, x: torch.Tensor) -> Done:
        messages = self.sent.setdefault(self.calls, [torch.full_like(x, float("nan")) for _ in range(self.size)])
        messages[self.rank] = x
        self.calls += 1
        return Done(torch.cat(messages))

    def start_all_reduce(self, x: torch.Tensor) -> Done:
        return Done(x)


def fold(added, decays, strides, count, state, *, initial=None, factors=None, group=1, back):
    """Compute what ``fold_kernel`` does."""
    (added_head, added_item, added_key, added_value, *of_decays), (heads, keys, values) = strides, state.shape
    sums = added.as_strided((heads * group, count, keys, values), (added_head, added_item, added_key, added_value))
    products = decays.as_strided((heads * group, count, keys), of_decays)
    found = torch.zeros(heads * group, keys, values)
    if initial is not None:
        found[::group] = initial.reshape(heads, keys, values)
    product = torch.ones(heads * group, keys)
    for item in range(count)[:: -1 if back else 1]:
        found = found * products[:, item, :, None] + sums[:, item]
        product = product * products[:, item]
    state.copy_(found.unflatten(0, (heads, group)).sum(1))
    if factors is not None:
        factors.copy_(product[::group, : factors.shape[1]])


def by_ranks(
    lengths: tuple[int, ...], arguments: dict[str, Any], incoming: list[torch.Tensor | None], variant: str = "chunked"
) -> dict[str, torch.Tensor]:
    """Return the results and gradients of all ranks together, by name, in float64."""
    starts = [sum(lengths[:rank]) for rank in range(len(lengths))]
    sent: dict[int, list[torch.Tensor]] = {}
    offsets, initial = arguments.get("cu_seqlens"), arguments.get("initial_state")
    ranks = []
    for rank, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        leaves = {name: arguments[name][:, start : start + length].clone().requires_grad_() for name in "qkvg"}
        if initial is not None:
            leaves["initial_state"] = initial.clone().requires_grad_()
        context = simulated(
            rank, lengths, device=arguments["q"].device, cu_seqlens=offsets, collectives=InTurn(rank, len(lengths), sent)
        )
        wanted = incoming[1] is not None
        ranks.append((leaves, gla(**leaves, output_final_state=wanted, mesh=context, variant=variant)))
    results = {"o": torch.cat([o for _, (o, _) in ranks], 1).detach()}
    if incoming[1] is not None:
        results["final"] = sum(final.detach() for _, (_, final) in ranks)
    for rank in range(len(lengths))[::-1]:
        _, outputs = ranks[rank]
        part = slice(starts[rank], starts[rank] + lengths[rank])
        given = [incoming[0][:, part], incoming[1]]
        torch.autograd.backward(*zip(*[pair for pair in zip(outputs, given, strict=True) if pair[1] is not None], strict=True))
    for name in "qkvg":
        results[name] = torch.cat([leaves[name].grad for leaves, _ in ranks], 1)
    if initial is not None:
        results["initial_state"] = sum(leaves["initial_state"].grad for leaves, _ in ranks)
    return {name: each.double() for name, each in results.items()}


CASES: dict[str, dict[str, Any]] = {
    "states": {"T": 200, "slices": (70, 130), "initial_state": True, "final_state": True, "segments": 2},
    "three_ranks_per_head": {"B": 2, "T": 150, "slices": (70, 16, 64), "decay_per": "head"},
    "shared_heads": {"T": 140, "slices": (70, 70), "H": 4, "k_heads": 2, "v_heads": 2, "g_heads": 2, "segments": 2},
    "packed": {"T": 200, "slices": (90, 110), "lengths": (30, 0, 120, 50), "initial_state": True, "final_state": True},
    "float16": {"T": 140, "slices": (70, 70), "K": 40, "V": 72, "dtype": "float16", "segments": 2},
    "float32_decay": {"T": 140, "slices": (70, 70), "log_decay_dtype": "float32", "final_state": True},
}


def expected(arguments: dict[str, Any]) -> tuple[dict[str, torch.Tensor], list[torch.Tensor | None]]:
    """Return the results and gradients of the oracle in float64, and random gradients of o and of the final state."""
    names = [name for name in (*"qkvg", "initial_state") if arguments.get(name) is not None]
    exact = dict(arguments) | {name: arguments[name].double().requires_grad_() for name in names}
    o, final = GLA.reference(**exact)
    random = torch.Generator().manual_seed(1)
    do = torch.randn(o.shape, generator=random).to(arguments["v"])
    dfinal = None if final is None else torch.randn(final.shape, generator=random).to(o.device)
    outputs = {"o": o} if final is None else {"o": o, "final": final}
    incoming = [do.double()] if dfinal is None else [do.double(), dfinal.double()]
    gradients = torch.autograd.grad(list(outputs.values()), [exact[name] for name in names], incoming)
    return outputs | dict(zip(names, gradients, strict=True)), [do, dfinal]


RARE = ("shared_heads", "float32_decay")
"""Cases that differ from others by what tests of whole sequences show."""


@pytest.mark.parametrize(
    "name", thorough_but("states", of=[pytest.param(name, marks=pytest.mark.every) if name in RARE else name for name in CASES])
)
def test_ranks_that_share_sums_give_what_one_process_gives(name, monkeypatch):
    options = {"B": 1, "H": 1, "K": 64, "V": 64, "dtype": "bfloat16", **CASES[name]}
    slices, segments = options.pop("slices"), options.pop("segments", 1)
    launch_hopper = emulate(monkeypatch, segments=segments)
    monkeypatch.setattr(launch_hopper, "rescaled", rescaled)
    monkeypatch.setattr(launch_hopper, "sum_heads", lambda parts, to: to.copy_(parts.unflatten(2, (to.shape[2], -1)).sum(3)))
    from onelaunch.ops.gla import launch_slices

    monkeypatch.setattr(launch_slices, "_fold", fold)
    monkeypatch.setattr(GlaRules, "passes", lambda rules: launch_slices.HopperPasses(rules.scale))
    arguments = arguments_of(GLA, **options)
    wanted, incoming = expected(arguments)
    found = by_ranks(slices, arguments, incoming)
    assert_near({name: found[name] for name in wanted}, wanted, BOUND)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_every_rank_sums_its_segments_once_in_each_direction_of_time(rank, monkeypatch):
    """Also the last rank, which sends no state: its pass with outputs and the one that recomputes states share the sums."""
    launch_hopper = emulate(monkeypatch, segments=2)
    from onelaunch.ops.gla import launch_slices

    summed, sum_segments = [], launch_hopper.sum_segments

    def counted(call: Any, operands: Any, *others: Any, **named: Any) -> Any:
        summed.append(operands.reverse)
        return sum_segments(call, operands, *others, **named)

    monkeypatch.setattr(launch_hopper, "sum_segments", counted)
    monkeypatch.setattr(launch_slices, "_fold", fold)
    monkeypatch.setattr(GlaRules, "passes", lambda rules: launch_slices.HopperPasses(rules.scale))
    tensors = [torch.zeros(1, 140, 1, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(4)]
    o, _ = gla(*tensors, mesh=simulated(rank, (140, 140, 140), device="cpu"), variant="chunked")
    torch.autograd.grad(o, tensors, torch.zeros_like(o))
    assert summed == [False, True]


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
def test_a_sum_that_stops_earlier_has_the_same_bits(reverse, per_head, monkeypatch):
    """Factors of e^-76 change no bit of sums of numbers that are about as large, and the decay of a segment that stops is 0."""
    launch_hopper = emulate(monkeypatch, segments=2)
    random = torch.Generator().manual_seed(3)
    Attention = launch_hopper.Attention
    q, k, v = (torch.randn(1, 640, 1, 64, generator=random).to(torch.bfloat16) for _ in range(3))
    call = Attention.of(q, k, v, torch.full(q.shape[: 3 if per_head else 4], -0.6).to(torch.bfloat16), None, None, 1.0)
    operands = launch_hopper.PassOperands(None, k, v, reverse=reverse)
    configuration = launch_hopper.configured(call, operands, output=True, store_states=False, split=True)
    found = []
    for stop in (-1e30, -88.0, -44.0):
        monkeypatch.setattr(launch_hopper, "STOP", stop)
        found.append(launch_hopper.sum_segments(call, operands, configuration, last=True))
    for each in found[1:]:
        assert torch.equal(each.states, found[0].states)
        assert torch.equal(each.decays, found[0].decays)
    assert (found[0].decays == 0).all()


class Logged(Collectives):
    """Collectives of a rank whose neighbours send zeros, with a log of the collectives that it waits for."""

    def __init__(self, size: int) -> None:
        super().__init__("", size)
        self.log: list[str] = []

    def _pending(self, name: str, tensor: torch.Tensor) -> Pending:
        class Waited(Done):
            def result(done) -> torch.Tensor:  # noqa: N805 - self is the outer object
                self.log.append(name)
                return tensor

        return Waited(tensor)

    def start_all_gather(self, x: torch.Tensor) -> Pending:
        return self._pending("all-gather", torch.cat([torch.zeros_like(x)] * self.size))

    def start_all_reduce(self, x: torch.Tensor) -> Pending:
        return self._pending("all-reduce", x)


class Zeros(Passes):
    """Passes whose states and gradients are zeros."""

    def local_state(self, tensors: Any, start: int, before: Any) -> Any:
        elements = 2 * (16 * 24 + 16)
        return Outgoing(elements, tensors[0], lambda: torch.zeros(1, elements), None), ()

    def forward(self, tensors: Any, initial: Any, offsets: Any, kept: Any, *, want_final: bool) -> Any:
        return torch.zeros_like(tensors[2]), torch.zeros(1, 2, 16, 24) if want_final else None

    def initial_gradient(self, tensors: Any, dy: Any, stop: int, behind: Any) -> Any:
        return self.local_state(tensors, 0, None)

    def states(self, *_: Any) -> Any:
        return ()

    def gradients(self, tensors: Any, initial: Any, *_: Any, want_initial: bool) -> Any:
        gradients = tuple(None if each is None else torch.zeros_like(each) for each in tensors)
        return gradients, torch.zeros_like(initial) if want_initial else None


@pytest.mark.parametrize("passes", [None, Zeros()])
@pytest.mark.parametrize("rank", [0, 1])
def test_an_all_reduce_has_ended_before_a_kernel_waits_for_messages(rank, passes, monkeypatch):
    """The last rank sends after it. If the kernel that waits had all SMs of another rank first, it could not run there."""
    monkeypatch.setattr(GlaRules, "passes", lambda _: passes)
    made = Logged(3)
    tensors = [each.clone().requires_grad_() for each in gla_inputs()]
    o, final = gla(*tensors, output_final_state=True, mesh=simulated(rank, (3, 3, 3), device="cpu", collectives=made))
    made.log.clear()
    torch.autograd.backward([o, final], [torch.ones_like(o), torch.ones_like(final)])
    assert "all-gather" in made.log
    assert "all-reduce" not in made.log[made.log.index("all-gather") :], made.log


@pytest.mark.interpret
@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize(("group", "keys", "values", "first"), [(1, 40, 72, True), (2, 16, 33, True), (1, 64, 16, False)])
def test_the_kernel_folds_sums_and_messages(group, keys, values, first, back):
    from onelaunch.ops.gla import launch_slices

    random = torch.Generator().manual_seed(2)
    heads, count, rows, width = 3, 4, 80, 64  # sums of segments are padded, [V, K]
    added, decays = torch.randn(heads * group, count, rows, width, generator=random), torch.rand(heads * group, count, width)
    decays = decays.unflatten(0, (heads, group))[:, :1].expand(-1, group, -1, -1).reshape(decays.shape)
    initial = torch.randn(heads, keys, values, generator=random) if first else None
    results = []
    for function in (fold, launch_slices._fold):
        state, factors = torch.zeros(heads, keys, values), torch.zeros(heads, keys if first else 1)
        strides = (count * rows * width, rows * width, 1, width, count * width, width, 1)
        function(added, decays, strides, count, state, initial=initial, factors=factors, group=group, back=back)
        results.append((state, factors))
    torch.testing.assert_close(*results)
    state = (2, 16, 24)
    gathered = torch.randn(5, 2 * (16 * 24 + 16), generator=random)
    ranks = (3, 2, 1) if back else (1, 2, 3)
    rules = GlaRules(gla, bind(*gla_inputs()), "chunked")
    found = launch_slices.folded(gathered, ranks, state, 16, back=back)
    torch.testing.assert_close(found, rules.fold(gathered, ranks, back=back))


def gla_inputs() -> list[torch.Tensor]:
    """Return q, k, v and g of two heads with K of 16 and V of 24."""
    q, v = torch.zeros(1, 3, 2, 16), torch.zeros(1, 3, 2, 24)
    return [q, q, v, q]


@pytest.mark.extra
@pytest.mark.thorough
@pytest.mark.parametrize("per_head", [False, True])
def test_the_kernels_of_local_passes_compile_without_spills(per_head):
    """Those of the passes with outputs are examples of ``hopper``. Sums of a pass are launched once for both of its uses."""
    pytest.importorskip("triton", reason="it compiles kernels of Triton")
    with record("sm_90a") as (device, launches), torch.no_grad():
        q, do = (torch.empty(1, 8192, 16, 128, dtype=torch.bfloat16, device=device) for _ in range(2))
        decays = torch.empty(q.shape[: 3 if per_head else 4], dtype=q.dtype, device=device)
        tensors = (q, q, q, decays, None)
        state = torch.empty(1, 16, 128, 128, device=device)
        from onelaunch.ops.gla.launch_slices import HopperPasses

        passes = HopperPasses(0.09)
        sent, kept = passes.local_state(tensors, 0, state)
        sent.tensor()
        sent.send(Outbox(torch.empty(1 << 20, dtype=torch.int64, device=device), (1 << 40, 1 << 41, 1 << 42), 2, 0, 1 << 19, 1))
        passes.forward(tensors, state, None, kept, want_final=True)
        sent, sums = passes.initial_gradient(tensors, do, 8192, None)
        sent.tensor()
        passes.gradients(tensors, state, None, do, state, passes.states(tensors, state, None, kept), sums, want_initial=False)
    names = [launch.kernel.__name__ for launch in launches]
    assert (names.count("segment_sum_kernel"), names.count("fold_kernel"), names.count("chunk_state_kernel")) == (2, 2, 3)
    own = ("segment_sum_kernel", "fold_kernel", "fold_and_send_kernel")
    local = [("local", each) for each in launches if each.kernel.__name__ in own]
    for build in builds_of(local, find_architecture("sm_90a")):
        assert inspect_build(build, "sm_90a").ok, build.name
