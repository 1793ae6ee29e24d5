"""Tests of the host time of a call: how it is taken, stored, judged and reported.

``beside`` makes up a stored host time: that of a variant's calls, that of PyTorch's matrix product (``product``), which is timed
in turn with them, and their ratio. ``ladder.py`` makes up results: ``ok_cell(variant, microseconds)`` is a correct measurement,
and ``measured`` the result that holds the measurements.

``study`` declares a study of all variants, with ``three`` as the baseline.
"""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch

from onelaunch.device.hardware import Ceilings
from onelaunch.operation import find_operation
from onelaunch.workbench import stats
from onelaunch.workbench.decide.criteria import evaluate
from onelaunch.workbench.measure import host, rotation, timing
from onelaunch.workbench.measure.count import Request
from onelaunch.workbench.report import markdown
from onelaunch.workbench.result import Beside, Result
from onelaunch.workbench.run import Steps, run_study
from onelaunch.workbench.study import Criterion, Shape, Study, find_measure
from tests.workbench.ladder import measured, ok_cell, study

CPU = torch.device("cpu")
SWIGLU = find_operation("swiglu")
CASE = SWIGLU.case("float32", M=4, N=16, K=16)


@pytest.fixture
def short(monkeypatch):
    """Make few calls, since only their number and order are tested."""
    monkeypatch.setattr(host, "CALLS", 12)
    monkeypatch.setattr(host, "ROUNDS", 3)
    monkeypatch.setattr(host, "WARM_UP_CALLS", 2)


def beside(microseconds: float, ratio: float, spread: float = 0.01) -> Beside:
    around = [1 - spread, 1.0, 1 + spread]
    of, product = ([value * each for each in around] for value in (microseconds, microseconds / ratio))
    return Beside(
        microseconds=stats.estimate(of),
        product=stats.estimate(product),
        ratio=stats.estimate([ratio * each for each in around]),
    )


@pytest.mark.parametrize("direction", ["forward", "forward_backward"])
def test_calls_and_products_are_timed_in_turn(short, direction):
    found = host.host_time(SWIGLU, Request(CASE, "auto", direction), CPU)
    assert found.microseconds.samples == found.product.samples == 36
    assert found.ratio.samples == 3
    assert found.microseconds.median > 0
    assert 0.01 < found.ratio.median * found.product.median / found.microseconds.median < 100


def test_the_published_number_of_calls():
    assert host.ROUNDS * host.CALLS == 1000


def test_a_call_that_takes_longer_has_a_longer_time(short, monkeypatch):
    run = SWIGLU.get("eager").run

    def slow(call):
        time.sleep(2e-3)
        return run(call)

    monkeypatch.setattr(SWIGLU.get("eager"), "run", slow)
    assert host.host_time(SWIGLU, Request(CASE, "eager", "forward"), CPU).microseconds.median > 2000


def test_every_call_with_gradients_finds_none_of_the_last_one(monkeypatch):
    inputs = host.make_inputs(SWIGLU, CASE, CPU, 0, "forward_backward")
    with torch.enable_grad():
        prepare, call = host.call_of(SWIGLU, Request(CASE, "eager", "forward_backward"), inputs, 0)
        for _ in range(2):
            prepare()
            assert all(inputs.arguments[name].grad is None for name in inputs.differentiable)
            call()
            gradients = {name: inputs.arguments[name].grad for name in inputs.differentiable}
    expected = host.Candidate.variant(SWIGLU, "eager")
    inputs.output_gradients = host.draw_gradients(expected(host.Inputs(inputs.arguments)), CASE.dtype, 0)
    wanted = expected(inputs)
    assert gradients
    assert all(torch.equal(gradient, wanted[f"grad {name}"]) for name, gradient in gradients.items())


def test_the_device_is_awaited_between_batches_outside_of_the_times(monkeypatch):
    waits, made = [], []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: waits.append(len(made)) or time.sleep(1e-2))
    times = host._timed(lambda: None, lambda: made.append(1), 25, SimpleNamespace(type="cuda"))
    assert waits == [0, 10, 20, 25]
    assert len(times) == 25
    assert max(times) < 5e6  # nanoseconds; a wait takes 10 ms


@pytest.mark.parametrize(
    ("ratio", "spread", "status"), [(3.9, 0.01, "met"), (4.2, 0.01, "missed"), (4.0, 0.05, "inconclusive"), (4.0, 0.0, "met")]
)
def test_the_whole_interval_decides(ratio, spread, status):
    criterion = Criterion(name="cheap", measure="host_over_product", of="one", at="mega", at_most=4.0)
    cell = ok_cell("one", 10.0).model_copy(update={"beside": {"host": beside(50.0, ratio, spread)}})
    (outcome,) = evaluate(measured(study(criterion), cell), {})
    assert outcome.status == status, outcome.evidence
    assert outcome.values["mega"].median == pytest.approx(ratio)


def test_microseconds_can_be_bounded_too():
    criterion = Criterion(name="short", measure="host", of="one", at="mega", at_most=60.0)
    cell = ok_cell("one", 10.0).model_copy(update={"beside": {"host": beside(50.0, 4.0)}})
    (outcome,) = evaluate(measured(study(criterion), cell), {})
    assert outcome.status == "met"
    assert outcome.values["mega"].median == pytest.approx(50.0)


def test_without_a_host_time_nothing_is_measured():
    criterion = Criterion(name="cheap", measure="host_over_product", of="one", at="mega", at_most=4.0)
    (outcome,) = evaluate(measured(study(criterion), ok_cell("one", 10.0)), {})
    assert outcome.status == "not_measured"


def test_both_measures_keep_one_reading():
    assert find_measure("host").kept == find_measure("host_over_product").kept == "host"


def test_a_run_stores_and_reports_what_criteria_ask_for(short, tmp_path, monkeypatch):
    monkeypatch.setitem(timing.WARM_UP_SECONDS, "cpu", 0.0)
    monkeypatch.setattr(rotation, "CACHES", 0)  # two input sets instead of as many as exceed the caches
    asked = {"measure": "host_over_product", "of": "auto", "at": "tiny", "at_most": 1e6}
    declared = Study(
        name="host",
        question="How long does a call take of Python?",
        operation="swiglu",
        baseline="auto",
        variants=("auto", "eager"),
        directions=("forward", "forward_backward"),
        regimes=("eager",),
        rounds=3,
        shapes=(Shape(name="tiny", dtype="float32", scale="small", sizes={"M": 4, "N": 16, "K": 16}),),
        criteria=tuple(Criterion(name=direction, direction=direction, **asked) for direction in ("forward", "forward_backward")),
    )
    steps = Steps(ceilings=lambda _: Ceilings(1e12, {"float32": 1e13}, 1e-6, "2026-11-20T12:00:00+00:00", "made up"))
    path = tmp_path / "result.json"
    result = run_study(declared, device="cpu", save_to=path, steps=steps)
    for cell in result.cells:
        assert set(cell.beside) == ({"host"} if cell.variant == "auto" else set())
    assert len(result.noise) == 2, "an A/A run times the baseline auto in each direction"
    assert [outcome.status for outcome in result.outcomes] == ["met", "met"]
    assert Result.load(path) == result
    assert "Host time" in markdown.render(result)
