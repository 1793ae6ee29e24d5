"""Tests of the order of candidates in rounds, and of when, and where, a measurement takes more rounds."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch

from onelaunch.workbench.asked import cases_in
from onelaunch.workbench.measure import timing
from onelaunch.workbench.measure.rounds import MOST_TIMES, by_turns, is_unsteady, most_rounds, order
from onelaunch.workbench.result import Noise
from onelaunch.workbench.stored import Estimate
from onelaunch.workbench.study import Criterion
from onelaunch.workbench.study.read import load_study
from tests.workbench import toy
from tests.workbench.runs import FASTER, quick, run, steps, study

# The import of toy registers toy_sum. quick is an automatic fixture: an empty working directory, short samples, no warm-up.
__all__ = ["quick", "toy"]


@pytest.mark.parametrize(
    ("device", "regime", "floor", "unsteady"),
    [("cuda", "eager", 1.06, True), ("cuda", "eager", 1.02, False), ("cuda", "cold", 1.2, False), ("cpu", "eager", 1.2, False)],
)
def test_only_calls_from_python_on_a_gpu_get_more_rounds(device, regime, floor, unsteady):
    ratio = Estimate(median=1.0, low=1 / floor, high=floor, samples=5)
    noise = Noise(shape="one", direction="forward", regime=regime, ratio=ratio, floor=floor)
    assert is_unsteady([noise], torch.device(device)) == unsteady


@pytest.mark.parametrize(("steady", "times"), [(True, MOST_TIMES), (False, 1)])
def test_more_rounds_are_taken_only_if_they_are_to_be_steady(steady, times):
    assert most_rounds(12, steady_eager=steady) == 12 * times


def eager(**more):
    """Return a criterion on eager times of ``parallel`` at the shape ``first``; ``more`` replaces or adds keys."""
    facts = {"name": "eager", "measure": "speedup", "of": "parallel", "at": "first", "regime": "eager", "at_least": 1.0}
    return Criterion(**(facts | more))


@pytest.mark.parametrize(
    ("criteria", "cases"),
    [
        ([], set()),
        ([FASTER], set()),
        ([eager()], {("first", "forward")}),
        ([eager(at=None)], {("first", "forward"), ("second", "forward")}),
        ([eager(direction="forward_backward")], {("first", "forward_backward")}),
        ([eager(directions=("forward", "forward_backward"))], {("first", "forward"), ("first", "forward_backward")}),
        ([FASTER, eager(at="second")], {("second", "forward")}),
        ([eager(regime="cold", over_regime="eager")], {("first", "forward")}),
        ([eager(over_regime="cold")], {("first", "forward")}),
        ([eager(over="parallel", over_at="second")], {("first", "forward"), ("second", "forward")}),
        ([eager(measure="time", at_least=None, at_most=9.0)], {("first", "forward")}),
        ([eager(measure="peak_memory_ratio", of={}, at_least=None, at_most=1.0)], {("first", "forward")}),
    ],
)
def test_eager_times_are_to_be_steady_where_a_criterion_reads_them(criteria, cases):
    assert cases_in(study(*criteria, directions=("forward", "forward_backward")), "eager") == cases


@pytest.mark.parametrize(("name", "asked"), [("040-linear-rnn", False), ("dual-gemm-swiglu", False), ("everyday-calls", True)])
def test_only_studies_that_ask_for_eager_times_need_them_steady(name, asked, pytestconfig):
    assert bool(cases_in(load_study(pytestconfig.rootpath / "studies" / f"{name}.toml"), "eager")) == asked


def test_a_run_asks_for_steady_times_at_the_cases_of_the_criteria(quick):
    asked = {}

    def measured(operation, case, direction, *, steady_eager, **given):
        asked[case.name, direction] = steady_eager
        return timing.measure(operation, case, direction, steady_eager=steady_eager, **given)

    run(study(eager(at="second")), steps=steps(measure=measured))
    assert asked == {("first", "forward"): False, ("second", "forward"): True}


def test_parts_of_samples_are_taken_by_turns():
    """Every second time backwards; a sample with fewer parts ends earlier, and one without any has no value."""
    log = []

    def parts(name, count):
        for index in range(count):
            log.append(name)
            yield 10.0 * count if index == count - 1 else None

    found = by_turns({name: parts(name, count) for name, count in (("a", 3), ("b", 2), ("c", 0), ("d", 3))})
    assert "".join(log) == "abd" + "dba" + "ad"
    assert found == {"a": 30.0, "b": 20.0, "c": None, "d": 30.0}


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_every_candidate_takes_every_position_equally_often(count):
    names = tuple("abcdefgh"[:count])
    rounds = [order(names, index) for index in range(2 * count)]
    assert all(sorted(one) == list(names) for one in rounds)
    for place in range(count):
        assert Counter(one[place] for one in rounds) == dict.fromkeys(names, 2)


def test_each_candidate_also_precedes_those_that_it_follows():
    pairs = Counter(pair for index in range(6) for pair in itertools.pairwise(order("abc", index)))
    assert all(pairs[pair] == pairs[pair[::-1]] for pair in pairs)
