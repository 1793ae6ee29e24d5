"""Tests of tapes: calls of operations with gradients, and calls on a CPU, that are repeated without dispatch.

Of the checks a repeated call makes only those that read values (``check_always``).

``scale`` registers the toy operation ``scale`` of ``tests/toys.py`` for one test. A test marked ``thorough`` does not run in
``make test``.
"""

from __future__ import annotations

import contextlib
import time

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from onelaunch import dispatch
from onelaunch.errors import ShapeError, ValueRangeError
from onelaunch.launch import plan
from onelaunch.launch.operator import Operator
from onelaunch.launch.parameters import NotPlannable
from onelaunch.launch.planned import Planned, forget_plans
from onelaunch.launch.tape import Tape, check_always
from onelaunch.ops import gated_scan, gla


class Counted:
    """Planned function with gradients that counts how often its Python code runs."""

    def __init__(self, function):
        self.count = 0

        def counted(*inputs, **named):
            self.count += 1
            return function(*inputs, **named)

        self.planned = Planned(counted, taped=True)

    def __call__(self, *inputs, **named):
        return self.planned(*inputs, **named)


CONSTANT = torch.ones(4)


def leaf(*size):
    return torch.randn(*size, dtype=torch.float64, requires_grad=True)


def test_a_call_with_gradients_is_repeated_for_other_tensors():
    def run(a, b, *, factor):
        both = torch.cat([a.mT.flatten(), b[1:]])
        halves = (both * factor).chunk(2)
        return halves[0] - halves[1], None, a.float()

    called = Counted(run)
    for call in range(5):
        a, b = leaf(2, 3), leaf(3)
        out, nothing, low = called(a, b, factor=0.5)
        expected, _, _ = run(a, b, factor=0.5)
        assert torch.equal(out, expected)
        assert nothing is None
        assert low.dtype is torch.float32
        for found, wanted in zip(
            torch.autograd.grad(out.square().sum(), (a, b)), torch.autograd.grad(expected.square().sum(), (a, b)), strict=True
        ):
            assert torch.equal(found, wanted)
        assert called.count == min(call + 1, 2)
    assert torch.autograd.gradcheck(lambda a, b: called(a, b, factor=0.5)[0], (leaf(2, 3), leaf(3)))
    assert torch.autograd.gradgradcheck(lambda a, b: called(a, b, factor=0.5)[0].square(), (leaf(2, 3), leaf(3)))


def test_a_tape_is_replayed_on_the_gpu_of_its_tensors(monkeypatch):
    """As the function ran when it was recorded. Tensors of this test stand for some on GPU 0, while GPU 1 is current."""
    now, seen = [1], []

    @contextlib.contextmanager
    def at(index):
        now.append(index)
        yield
        now.pop()

    for name, function in (("index_of", lambda _: 0), ("current", lambda: now[-1]), ("at", at)):
        monkeypatch.setattr(plan.Device, name, function)

    def run(a):
        check_always(lambda _: seen.append(now[-1]), a)
        return a * 2

    called = Counted(run)
    for _ in range(5):
        assert called(leaf(16)).requires_grad
    assert (seen, now, called.count) == ([0] * 5, [1], 2)


@pytest.mark.parametrize("steps", [5, 40])
@pytest.mark.parametrize("operation", [gated_scan, gla])
def test_activation_checkpointing_may_begin_at_any_call(operation, steps):
    """It repeats a call in the backward pass, and both must save as many tensors: recorded, replayed, or one of each."""
    for before in range(4):
        forget_plans()
        inputs = (
            [torch.randn(2, steps, 3, 16) for _ in range(4)] if operation is gla else [torch.randn(2, steps, 8) for _ in range(3)]
        )
        inputs[-1 if operation is gla else 1].abs_().neg_()
        leaves = [each.requires_grad_() for each in inputs]

        def call(*given):
            result = operation(*given)
            return result[0] if isinstance(result, tuple) else result

        for _ in range(before):
            call(*leaves)
        out = checkpoint(call, *leaves, use_reentrant=False)
        found = torch.autograd.grad(out.square().sum(), leaves)
        expected = torch.autograd.grad(call(*leaves).square().sum(), leaves)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)


def test_steps_that_take_gradients_are_repeated_though_nothing_needs_them():
    def run(a, b):
        _ = a * b
        _ = a.detach() * 2
        return a + b

    called, counts = Planned(run, taped=True), []
    a, b = leaf(3), leaf(3)
    for _ in range(4):
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor, saved=saved: saved.append(tensor), lambda _: None):
            called(a, b)
        counts.append(len(saved))
    assert counts == [2] * 4


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(lambda a: a * a.sum().item(), id="reads a value"),
        pytest.param(lambda a: a if bool((a > 0).any()) else -a, id="branches on a value"),
        pytest.param(lambda a: a.clone().mul_(2), id="writes in place"),
        pytest.param(lambda a: a.clone().__imul__(2), id="assigns in place"),
        pytest.param(lambda a: torch.mul(a, 2, out=torch.empty(4)), id="writes to out"),
        pytest.param(lambda a: a + CONSTANT, id="reads a tensor that is no input"),
        pytest.param(lambda a: sum((a + number for number in range(500)), start=a), id="takes too many steps"),
    ],
)
def test_a_call_that_cannot_be_repeated_runs_every_time(function):
    called = Counted(function)
    for call in range(4):
        a = torch.randn(4)
        assert torch.equal(called(a), function(a))
        assert called.count == call + 1


def test_checks_of_values_are_repeated():
    def refuse(value):
        if value.max() > 0:
            raise ValueError("positive")

    def run(a):
        check_always(refuse, a)
        return a + 1

    called = Counted(run)
    for _ in range(3):
        called(-torch.rand(4))
    with pytest.raises(ValueError, match="positive"):
        called(torch.ones(4))
    assert called.count == 2


def test_a_tape_of_unknown_tensors_is_refused():
    a = torch.ones(2)
    with Tape([a]) as tape:
        made = a + 1
    with pytest.raises(NotPlannable):
        tape.finish(torch.ones(2))
    assert torch.equal(tape.finish(made).replay([torch.zeros(2)]), torch.ones(2))


def test_an_operator_is_called_by_a_tape_with_gradients_and_without():
    def forward(x: torch.Tensor, factor: float) -> tuple[torch.Tensor, torch.Tensor]:
        return x * factor, x.new_empty(0)

    def backward(dy: torch.Tensor, factor: float) -> torch.Tensor:
        return dy * factor

    def save(ctx, inputs, output):
        ctx.factor = inputs[1]

    def gradients(ctx, run, dy):
        return run(dy, ctx.factor), None

    scaled = Operator("tape_scaled", forward, save=save, gradients=gradients, backward=Operator("tape_scaled_backward", backward))
    called = Counted(lambda x: scaled(x.flatten(), 3.0, grad=x.requires_grad)[0].view(2, 2))
    for grad in (True, False):
        for _ in range(4):
            x = torch.randn(2, 2, requires_grad=grad)
            y = called(x)
            assert torch.equal(y, 3 * x)
            assert y.requires_grad == grad
            if grad:
                (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
                torch.testing.assert_close(dx, 18 * x)
                with pytest.raises(RuntimeError, match="once_differentiable"):
                    dx.sum().backward()
    assert called.count == 4


def test_a_backward_pass_under_autocast_is_that_outside():
    def forward(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x @ w

    def backward(dy: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return dy @ w.mT

    def save(ctx, inputs, output):
        ctx.save_for_backward(inputs[1])

    def gradients(ctx, run, dy):
        (w,) = ctx.saved_tensors
        return run(dy, w), dy.mT @ w

    product = Operator(
        "tape_product", forward, save=save, gradients=gradients, backward=Operator("tape_product_backward", backward)
    )
    x, w = (torch.randn(4, 4, requires_grad=True) for _ in range(2))
    wanted = torch.autograd.grad(product(x, w, grad=True).sum(), (x, w))
    for create_graph in (False, True):
        y = product(x, w, grad=True).sum()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = torch.autograd.grad(y, (x, w), create_graph=create_graph)
            assert torch.is_autocast_enabled("cpu")
        assert all(map(torch.equal, found, wanted))


# Operations on a CPU


def arguments(steps=1, **changes):
    """Return arguments of ``gla`` for two heads of 16 channels."""
    made = {
        "q": torch.randn(1, steps, 2, 16), "k": torch.randn(1, steps, 2, 16), "v": torch.randn(1, steps, 2, 16),
        "g": -torch.rand(1, steps, 2, 16), "initial_state": torch.randn(1, 2, 16, 16), "output_final_state": True,
    }  # fmt: skip
    return made | changes


def taped(operation):
    return len(operation._function.plans())


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("grad", [False, True])
def test_a_replayed_call_of_gla_equals_the_call_itself(steps, grad):
    for _ in range(4):
        given = arguments(steps)
        if grad:
            for name in ("q", "k", "v", "g", "initial_state"):
                given[name].requires_grad_()
        found = gla(**given, variant="recurrent")
        wanted = gla._function.__wrapped__(**given, variant="recurrent")
        for one, other in zip(found, wanted, strict=True):
            assert torch.equal(one, other)
            if grad:
                named = [given[name] for name in ("q", "k", "v", "g", "initial_state")]
                gradients = [
                    torch.autograd.grad(each.sum(), named, retain_graph=True, allow_unused=True) for each in (one, other)
                ]
                for first, second in zip(*gradients, strict=True):
                    assert (first is None and second is None) or torch.equal(first, second)
    assert taped(gla) == 1


def test_a_replayed_call_of_gla_still_refuses_a_positive_log_decay():
    for _ in range(3):
        gla(**arguments())
    assert taped(gla) == 1
    wrong = arguments()
    wrong["g"][0, 0, 1, 3] = 0.5
    with pytest.raises(ValueRangeError, match=r"0\.5"):
        gla(**wrong)
    wrong["g"][0, 0, 0, 0] = float("nan")
    with pytest.raises(ValueRangeError, match=r"0\.5"):
        gla(**wrong)
    wrong["g"][0, 0, 1, 3] = -0.5
    assert gla(**wrong)[0].isnan().any()


def test_a_replayed_call_of_gated_scan_still_refuses_a_positive_log_decay():
    given = {"v": torch.randn(1, 4, 16), "log_decay": -torch.rand(1, 4, 16), "gate": torch.randn(1, 4, 16)}
    for _ in range(3):
        gated_scan(**given)
    with pytest.raises(ValueRangeError):
        gated_scan(**(given | {"log_decay": torch.ones(1, 4, 16)}))


def test_a_wrong_call_is_refused_each_time():
    for _ in range(4):
        with pytest.raises(ShapeError):
            gla(**arguments(k=torch.randn(1, 2, 2, 16)))
    assert taped(gla) == 0


def test_a_replaced_variant_runs_after_replays(monkeypatch):
    for _ in range(3):
        gla(**arguments(), variant="recurrent")
    heard = []
    recurrent = gla.get("recurrent")
    registered = recurrent.registered
    monkeypatch.setattr(recurrent, "run", lambda call: heard.append(call) or registered(call))
    for call in range(3):  # it is not repeatable, since nobody knows what it does
        gla(**arguments(), variant="recurrent")
        assert len(heard) == call + 1


def test_a_variant_of_another_package_is_not_replayed(scale):
    heard = []

    def run(call):
        heard.append(call)
        return (call.x * call.factor,)

    run.__module__ = "acme.variants"
    scale.variant("acme")(run)
    scale._function = Planned(scale._function, taped=True)  # as operations are that are declared with planned=True
    for call in range(4):
        scale(torch.ones(4), 2.0, variant="acme")
        assert len(heard) == call + 1


def test_a_tape_of_a_call_that_ends_after_plans_were_forgotten_is_not_replayed():
    """Another thread may forget all plans, because the function has changed, while a call is recorded."""
    calls = []

    def scaled(x):
        calls.append(None)
        if len(calls) == 2:  # the call that is recorded
            planned.forget()
        return x * (1 if len(calls) < 3 else 100)

    planned = Planned(scaled, taped=True)
    assert [planned(torch.ones(2))[0].item() for _ in range(5)] == [1, 1, 100, 100, 100]
    assert len(calls) == 4, "the fifth call is a replay of the fourth"


def test_forgotten_choices_forget_tapes():
    for _ in range(3):
        gla(**arguments())
    dispatch.forget()
    assert taped(gla) == 0


LOW = (torch.bfloat16, torch.float16)


def test_calls_under_autocast_are_replayed_for_its_dtype():
    for _ in range(3):
        gla(**arguments())
    plain = taped(gla)
    for low in LOW:
        with torch.autocast("cpu", dtype=low):
            given = arguments()
            results = [gla(**given)[0] for _ in range(4)]
            assert torch.is_autocast_enabled("cpu")
        assert [each.dtype for each in results] == 4 * [low]
        assert all(torch.equal(each, results[0]) for each in results)
    assert taped(gla) == plain + len(LOW)
    assert gla(**arguments())[0].dtype is torch.float32


@pytest.mark.parametrize("low", LOW)
def test_steps_of_a_replay_run_with_autocast_on_or_off_as_they_were(low):
    seen = []

    def run(a, b):
        a, b = a.to(torch.get_autocast_dtype("cpu")), b.float()
        lowered = torch.mm(b, b)  # by autocast
        with torch.autocast("cpu", enabled=False):
            seen.append(torch.is_autocast_enabled("cpu"))
            kept = torch.mm(b, b)  # in float32
            product = a @ a
        return lowered, kept, product, torch.mm(b, b)

    called = Counted(run)
    for call in range(4):
        a, b = (torch.randn(3, 3, requires_grad=True) for _ in range(2))
        with torch.autocast("cpu", dtype=low):
            found, wanted = called(a, b), run(a, b)
            assert torch.is_autocast_enabled("cpu")
        assert [each.dtype for each in found] == [low, torch.float32, low, low]
        assert all(map(torch.equal, found, wanted))
        gradients = [torch.autograd.grad(sum(each.float().sum() for each in results), (a, b)) for results in (found, wanted)]
        assert all(map(torch.equal, *gradients))
        assert called.count == min(call + 1, 2)
    with torch.no_grad(), torch.autocast("cpu", dtype=low):
        for _ in range(4):
            found, wanted = called(a, b), run(a, b)
            assert all(map(torch.equal, found, wanted))
    assert called.count == 4
    assert not torch.is_autocast_enabled("cpu")
    assert len(called.planned.plans()) == 2


def test_autocast_is_on_again_behind_a_replay_that_raises():
    def refuse(value):
        if value.max() > 0:
            raise ValueError("a is positive")

    def run(a):
        with torch.autocast("cpu", enabled=False):
            check_always(refuse, a)
            return a + 1

    called = Counted(run)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for _ in range(3):
            called(-torch.rand(4))
        with pytest.raises(ValueError, match="positive"):
            called(torch.ones(4))
        assert torch.is_autocast_enabled("cpu")
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.bfloat16
    assert called.count == 2


def step(q, k, v, g, state, scale):
    """Compute one step of gated linear attention, as somebody would write it in PyTorch."""
    state = state * g[:, 0].exp().unsqueeze(-1) + k[:, 0].unsqueeze(-1) * v[:, 0].unsqueeze(-2)
    return torch.matmul((q[:, 0] * scale).unsqueeze(-2), state).squeeze(-2).unsqueeze(1), state


MOST = 1.6
"""Largest ratio of the time of ``gla`` at one step on a CPU to that of :func:`step`."""


@pytest.mark.parametrize(("heads", "size"), [(1, 16), pytest.param(4, 64, marks=pytest.mark.thorough)])
def test_one_step_on_a_cpu_takes_at_most_as_long_as_claimed(heads, size):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    shape = (1, 1, heads, size)
    q, k, v = (torch.randn(shape) for _ in range(3))
    g, state = -torch.rand(shape), torch.randn(1, heads, size, size)

    def ours():
        return gla(q, k, v, g, initial_state=state, output_final_state=True)

    def theirs():
        return step(q, k, v, g, state, size**-0.5)

    best = {}
    try:
        with torch.no_grad():
            for found, wanted in zip(ours(), theirs(), strict=True):
                torch.testing.assert_close(found, wanted)
            # Other work on the machine makes times longer and never shorter, so the shortest of many turns are compared.
            for _ in range(2000):
                for run in (ours, theirs):
                    begin = time.perf_counter()
                    for _ in range(5):
                        run()
                    best[run] = min(best.get(run, float("inf")), time.perf_counter() - begin)
    finally:
        torch.set_num_threads(threads)
    assert best[ours] <= MOST * best[theirs]


def test_cpu_calls_are_taped_and_never_planned():
    assert "cpu" in plan.Device.taped
    assert "cpu" not in plan.Device.types
