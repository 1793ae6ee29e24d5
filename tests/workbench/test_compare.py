from __future__ import annotations

import math

import pytest

from onelaunch.workbench.compare import classify, compare
from onelaunch.workbench.criteria import evaluate
from onelaunch.workbench.decision import decide
from onelaunch.workbench.result import Estimate
from onelaunch.workbench.study import Criterion
from tests.workbench.ladder import MEGA, TINY, bad_cell, measured, ok_cell, study

FASTER = Criterion(name="faster", measure="speedup", of="one", at="mega", at_least=1.3)


def judged(declared, *cells, **more):
    result = measured(declared, *cells, **more)
    result = result.model_copy(update={"outcomes": evaluate(result, {})})
    return result.model_copy(update={"decision": decide(result)})


def estimate(low, median, high):
    return Estimate(median=median, low=low, high=high, samples=20)


@pytest.mark.parametrize(("interval", "change"), [
    ((0.80, 0.82, 0.84), "FASTER"),
    ((1.10, 1.12, 1.14), "SLOWER"),
    ((0.99, 1.00, 1.01), "SAME"),
    ((0.90, 0.94, 0.99), "AMBIGUOUS"),  # partly within the noise
    ((0.90, 1.00, 1.10), "AMBIGUOUS"),
    ((1.01, 1.03, 1.05), "AMBIGUOUS"),
])  # fmt: skip
def test_a_change_is_claimed_only_beyond_the_noise(interval, change):
    assert classify(estimate(*interval), 1.02) == change


@pytest.mark.parametrize(("before", "after", "change", "ratio"), [
    (10.0, 8.0, "FASTER", 0.8), (8.0, 10.0, "SLOWER", 1.25), (10.0, 10.05, "SAME", 1.005),
])  # fmt: skip
def test_times_are_held_against_each_other(before, after, change, ratio):
    found = compare(measured(study(), ok_cell("one", before)), measured(study(), ok_cell("one", after)))
    (time,) = found.times
    assert (time.change, time.before, time.after, time.variant, time.regime) == (change, before, after, "one", "cold")
    assert time.ratio.median == pytest.approx(ratio)
    assert found.count(change) == 1


def test_the_interval_holds_what_both_runs_leave_open():
    wide = compare(measured(study(), ok_cell("one", 10.0, spread=0.2)), measured(study(), ok_cell("one", 9.0, spread=0.2))).times[
        0
    ]
    assert wide.change == "AMBIGUOUS"
    assert wide.ratio.low < 0.8 < 1.2 < wide.ratio.high


def test_the_noisier_run_decides_what_may_be_claimed():
    quiet, noisy = measured(study(), ok_cell("one", 10.0)), measured(study(), ok_cell("one", 8.0), floor=1.5)
    assert compare(quiet, noisy).times[0].change != "FASTER"
    assert compare(quiet, noisy).times[0].noise == 1.5
    assert compare(noisy, quiet).times[0].noise == 1.5


def test_without_an_a_a_run_nothing_is_claimed():
    found = compare(measured(study(), ok_cell("one", 10.0), floor=None), measured(study(), ok_cell("one", 1.0)))
    assert found.times[0].change == "AMBIGUOUS"
    assert math.isinf(found.times[0].noise)


def test_the_same_result_has_not_changed():
    result = judged(study(FASTER), ok_cell("three", 10.0), ok_cell("one", 5.0))
    found = compare(result, result)
    assert {time.change for time in found.times} == {"SAME"}
    assert (found.statuses, found.outcomes, found.decision, found.provenance) == ((), (), None, {})
    assert (found.only_first, found.only_second, found.declarations) == ((), (), ())


def test_statuses_outcomes_and_the_decision_are_compared():
    good = judged(study(FASTER), ok_cell("three", 10.0), ok_cell("one", 5.0))
    bad = judged(study(FASTER), ok_cell("three", 10.0), bad_cell("one", "error", "it fell"))
    found = compare(good, bad)
    (change,) = found.statuses
    assert (change.variant, change.before, change.after, change.reason) == ("one", "ok", "error", "it fell")
    (outcome,) = found.outcomes
    assert (outcome.criterion, outcome.before, outcome.after) == ("faster", "met", "not_measured")
    assert found.decision == ("proceed", "debug")
    assert [time.variant for time in found.times] == ["three"]


def test_peak_memory_is_compared_beyond_the_rounding_of_the_allocator():
    def result(*peaks):
        names = ("one", "two", "three")
        return measured(study(), *(ok_cell(name, 5.0, peak=peak) for name, peak in zip(names, peaks, strict=True)))

    found = compare(result(1000, 1000, None), result(1005, 500, 500))
    (change,) = found.memory
    assert (change.variant, change.shape, change.before, change.after) == ("two", "mega", 1000, 500)


def test_cells_of_one_result_alone_are_named():
    found = compare(
        measured(study(), ok_cell("one", 5.0), ok_cell("two", 6.0)),
        measured(study(), ok_cell("one", 5.0), ok_cell("one", 5.0, direction="forward_backward")),
    )
    assert found.only_first == ("two at mega, forward",)
    assert found.only_second == ("one at mega, forward and backward",)


def test_what_else_differs_is_named():
    one = measured(study(), ok_cell("one", 5.0))
    facts = one.provenance.model_copy(update={"driver": "2.0", "versions": {"torch": "2.13.0"}, "date": "later"})
    found = compare(one, one.model_copy(update={"provenance": facts}))
    assert found.provenance == {"driver": ("1.0", "2.0"), "torch": ("2.11.0", "2.13.0"), "triton": ("3.6.0", "none")}


def test_other_declarations_are_named_down_to_the_criterion():
    moved = FASTER.model_copy(update={"at_least": 1.1})
    tiny = TINY.model_copy(update={"dtype": "float16"})
    found = compare(measured(study(FASTER)), measured(study(moved, shapes=(tiny,), rounds=7)))
    assert found.declarations[0].startswith("The declarations differ (digests ")
    assert "criteria: 'faster' differs in at_least." in found.declarations
    assert "shapes: 'tiny' differs in dtype." in found.declarations
    assert f"shapes: {MEGA.name!r} is in the first only." in found.declarations
    assert "rounds differ." in found.declarations


def test_a_key_that_only_one_declaration_has_is_a_difference():
    lesson = FASTER.model_copy(update={"decides": False})
    for pair in ((FASTER, lesson), (lesson, FASTER)):
        found = compare(*(measured(study(criterion)) for criterion in pair))
        assert "criteria: 'faster' differs in decides." in found.declarations
