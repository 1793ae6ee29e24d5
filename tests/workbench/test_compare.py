"""Tests of the comparison of results: changes are claimed only beyond the noise within and between runs.

Noise is a factor: 1.02 means that times differ by up to 2 % without a cause. The noise within a run is its A/A noise floor
(``floor``). The noise between runs is estimated from repeated runs on one side. The results are made up by ``ladder.py``:
``ok_cell(variant, microseconds)`` is a correct measurement at the shape ``MEGA``, ``bad_cell`` a failed one. ``prose`` and
``prose.raises`` compare wording with the test's entries in ``tests/snapshots/prose.txt``. A test fails if it does not compare
one of its entries, and ``tests/test_prose.py`` if the test or the parameter of an entry is gone.

``TINY`` is a shape of small scale. ``study`` declares a study of all variants, with ``three`` as the baseline.
"""

from __future__ import annotations

import math

import pytest

from onelaunch.errors import ResultMismatch
from onelaunch.workbench.decide.compare import classify, compare
from onelaunch.workbench.decide.criteria import evaluate
from onelaunch.workbench.decide.decision import decide
from onelaunch.workbench.result import Estimate
from onelaunch.workbench.study import Criterion
from tests.workbench.ladder import MEGA, TINY, bad_cell, measured, ok_cell, study

FASTER = Criterion(name="faster", measure="speedup", of="one", at="mega", at_least=1.3)


ERROR = Criterion(name="exact", measure="error", of="one", at="mega", at_most=1e-3)


def judged(declared, *cells, **more):
    """Return a result with judged criteria and a decision."""
    result = measured(declared, *cells, **more)
    result = result.model_copy(update={"outcomes": evaluate(result, {})})
    return result.model_copy(update={"decision": decide(result)})


def estimate(low, median, high):
    return Estimate(median=median, low=low, high=high, samples=20)


# Low end, median and high end of the time after the change over the time before; the noise is 1.02.
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


def test_times_are_called_equal_only_within_the_smaller_noise():
    """Large noise between runs forbids claiming a change. It does not make a difference of 1.2x disappear."""
    assert classify(estimate(1.19, 1.2, 1.21), 1.5, within=1.02) == "AMBIGUOUS"
    assert classify(estimate(0.99, 1.0, 1.01), 1.5, within=1.02) == "SAME"


def runs(*times, commit="abc1234", floor: float | None = 1.01, spread=0.0, **facts):
    """Return one run per time of the variant ``one``, each with its own date, all of one commit.

    Without ``commit`` it is the same one in every call, so that two calls make runs of the same code. ``facts`` replaces fields
    of the provenance.
    """
    found = []
    for index, time in enumerate(times):
        result = measured(study(), ok_cell("one", time, spread=spread), floor=floor)
        made = {"commit": commit, "date": f"2026-11-2{index}T12:00:00+00:00"} | facts
        found.append(result.model_copy(update={"provenance": result.provenance.model_copy(update=made)}))
    return found


def changed(before, after):
    """Return the change of the one time that both sides hold."""
    (time,) = compare(before, after).times
    return time


@pytest.mark.parametrize(("before", "after", "change", "ratio"), [
    (10.0, 8.0, "FASTER", 0.8), (8.0, 10.0, "SLOWER", 1.25), (10.0, 10.05, "SAME", 1.005),
])  # fmt: skip
def test_times_of_repeated_runs_are_compared(before, after, change, ratio):
    found = compare(runs(before, before), runs(after, after, commit="def5678"))
    (time,) = found.times
    assert (time.change, time.variant, time.regime, time.runs) == (change, "one", "cold", (2, 2))
    assert (time.before, time.after) == (pytest.approx(before), pytest.approx(after))
    assert time.ratio.median == pytest.approx(ratio)
    assert found.count(change) == 1
    assert found.runs == (2, 2)


def test_one_run_on_each_side_claims_no_change():
    """The noise between runs is then unknown, whatever the A/A noise within them."""
    for before, after in ((10.0, 8.0), (8.0, 10.0), (10.0, 28.7)):
        time = changed(runs(before)[0], runs(after, commit="def5678")[0])
        assert (time.change, time.between, time.runs) == ("UNREPEATED", None, (1, 1))
    assert changed(runs(10.0)[0], runs(10.05, commit="def5678")[0]).change == "SAME"


def test_scattered_repeats_do_not_support_a_smaller_change():
    """Runs of one commit took 7 and 13 us. A change from 10 to 18.5 us, as was once observed, cannot be claimed."""
    time = changed(runs(7.0, 13.0), runs(18.0, 19.0, commit="def5678"))
    assert time.change == "AMBIGUOUS"
    assert time.noise == time.between > 2
    steady = changed(runs(10.0, 10.1), runs(18.0, 18.5, commit="def5678"))
    assert steady.change == "SLOWER"
    assert 1.01 < steady.between < 1.15


def test_repeats_of_one_side_also_bound_the_other_but_support_less():
    one_sided = changed(runs(10.0, 10.1, 9.9), runs(15.0, commit="def5678")[0])
    both = changed(runs(10.0, 10.1, 9.9), runs(15.0, 15.1, 14.9, commit="def5678"))
    assert (one_sided.change, both.change) == ("SLOWER", "SLOWER")
    assert one_sided.between > both.between


def test_runs_of_one_commit_measure_the_noise_between_runs():
    """The two runs of one commit differ by 1.85x. That is noise and no change."""
    found = compare(runs(10.0)[0], runs(10.0, 18.5)[1])
    (time,) = found.times
    assert found.same_code
    assert time.change == "AMBIGUOUS"
    assert time.noise == pytest.approx(1.85)
    assert not compare(runs(10.0)[0], runs(10.0, commit="def5678")[0]).same_code


@pytest.mark.parametrize("commit", ["", "abc1234-dirty"])
def test_an_ambiguous_commit_does_not_identify_code(commit):
    found = compare(runs(10.0, commit=commit)[0], runs(10.0, 18.5, commit=commit)[1])
    assert not found.same_code
    assert found.times[0].change == "UNREPEATED"


def test_two_devices_need_repeats_on_both_sides():
    first = runs(10.0, 10.1, 9.9)
    other = runs(15.0, 15.1, device="Another GPU")
    assert changed(first, other[0]).change == "UNREPEATED"
    found = compare(first, other)
    assert found.times[0].change == "SLOWER"
    assert not found.same_device
    assert compare(*runs(10.0, 11.0)).same_device


def test_the_interval_covers_both_runs_uncertainty():
    wide = changed(runs(10.0, 10.0, spread=0.2), runs(9.0, 9.0, spread=0.2, commit="def5678"))
    assert wide.change == "AMBIGUOUS"
    assert wide.ratio.low < 0.8 < 1.2 < wide.ratio.high


def test_the_noisier_run_decides_what_may_be_claimed():
    quiet, noisy = runs(10.0, 10.0), runs(8.0, 8.0, floor=1.5, commit="def5678")
    for time in (changed(quiet, noisy), changed(noisy, quiet)):
        assert time.noise == 1.5
        assert time.change == "SAME"  # 1.25x, within the noise


def test_without_an_a_a_run_no_change_is_claimed():
    time = changed(runs(10.0, 10.0, floor=None), runs(1.0, 1.0, commit="def5678"))
    assert time.change == "AMBIGUOUS"
    assert math.isinf(time.noise)


def test_a_run_without_a_time_is_left_out():
    first = runs(10.0, 10.1)
    failed = first[1].model_copy(update={"cells": (bad_cell("one", "error", "it fell"),)})
    assert changed([first[0], failed], runs(15.0, 15.1, commit="def5678")).runs == (1, 2)
    assert compare([failed, first[0]], runs(15.0, commit="def5678")).times == ()


@pytest.mark.parametrize("facts", [{"commit": "def5678"}, {"versions": {"torch": "2.13.0"}}, {"device": "Another GPU"}])
def test_runs_of_different_code_are_not_repeats(facts, prose):
    (other,) = runs(10.0, **facts)
    with prose.raises(ResultMismatch) as refused:
        compare([runs(10.0)[0], other], runs(12.0)[0])
    # The message holds the end of the differing value, such as f678 or 3.0.
    assert str(next(iter(facts.values()))).strip("{}")[-4:].strip("'") in str(refused.value)
    (wider,) = runs(10.0)
    wider = wider.model_copy(update={"study_digest": "0" * 64})  # a run of another declaration
    with prose.raises(ResultMismatch):
        compare([runs(10.0)[0], wider], runs(12.0)[0])


def test_one_run_given_twice_is_not_a_repeat(prose):
    (one,) = runs(10.0)
    with prose.raises(ResultMismatch):
        compare([one, one], runs(12.0)[0])
    with prose.raises(ResultMismatch):
        compare([], one)


BIG = MEGA.model_copy(update={"sizes": {"N": 2000, "V": 1000}})
"""Shape that has the name of :data:`MEGA` and twice its rows."""


@pytest.mark.parametrize(("shape", "reason"), [
    (BIG, "sizes differ: N=1000 and N=2000"),
    (MEGA.model_copy(update={"dtype": "bfloat16"}), "dtypes differ: float16 and bfloat16"),
    (MEGA.model_copy(update={"options": {"masked": True}}), "options differ: no masked and masked=True"),
])  # fmt: skip
def test_two_cases_of_one_name_are_not_compared(shape, reason):
    """The studies declare ``mega`` as different cases, so that a longer time is not a slowdown."""
    first = measured(study(), ok_cell("one", 10.0, peak=1000), ok_cell("one", 1.0, of=TINY))
    second = measured(study(shapes=(shape, TINY)), ok_cell("one", 28.9, of=shape, peak=3000), ok_cell("one", 1.0, of=TINY))
    found = compare(first, second)
    assert [(each.shape, each.reason) for each in found.incomparable] == [("mega", reason)]
    assert [time.shape for time in found.times] == ["tiny"]
    assert (found.memory, found.only_first, found.only_second) == ((), (), ())


def test_shapes_of_two_operations_are_not_compared():
    first = measured(study(), ok_cell("one", 10.0))
    second = first.model_copy(update={"study": first.study.model_copy(update={"operation": "other"})})
    (each,) = [each for each in compare(first, second).incomparable if each.shape == "mega"]
    assert "ladder" in each.reason
    assert compare(first, second).times == ()


@pytest.mark.parametrize("which", ["low", "median", "high"])
@pytest.mark.parametrize("time", [0.0, math.nan, math.inf, -1.0])
def test_invalid_times_are_not_compared(time, which):
    (result,) = runs(10.0)
    (cell,) = result.cells
    (timing,) = cell.timings
    broken = timing.model_copy(update={"microseconds": timing.microseconds.model_copy(update={which: time})})
    bad = result.model_copy(update={"cells": (cell.model_copy(update={"timings": (broken,)}),)})
    assert compare(bad, result).times == ()


def test_one_run_cannot_stand_on_both_sides(prose):
    first, second = runs(10.0, 10.1)
    for sides in ((first, first), (first, [second, first]), ([first, second], second)):
        with prose.raises(ResultMismatch):
            compare(*sides)
    again = judged(study(FASTER), ok_cell("three", 10.0), ok_cell("one", 5.0))
    assert compare(again.model_copy(update={"outcomes": (), "decision": None}), again).outcomes  # the same run, judged again


def test_a_repeated_run_with_the_same_times_has_not_changed():
    result = judged(study(FASTER), ok_cell("three", 10.0), ok_cell("one", 5.0))
    facts = result.provenance.model_copy(update={"date": "2026-11-24T00:00:00+00:00"})
    found = compare(result, result.model_copy(update={"provenance": facts}))
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
    """Peaks in bytes; ``None`` is not measured. A difference of up to 1 % counts as rounding."""

    def result(*peaks):
        names = ("one", "two", "three")
        return measured(study(), *(ok_cell(name, 5.0, peak=peak) for name, peak in zip(names, peaks, strict=True)))

    found = compare(result(1000, 1000, None), result(1005, 500, 500))
    (change,) = found.memory
    assert (change.variant, change.shape, change.before, change.after) == ("two", "mega", 1000, 500)


def test_measurements_in_only_one_result_are_named(prose):
    found = compare(
        measured(study(), ok_cell("one", 5.0), ok_cell("two", 6.0)),
        measured(study(), ok_cell("one", 5.0), ok_cell("one", 5.0, direction="forward_backward")),
    )
    ((first,), (second,)) = found.only_first, found.only_second
    prose(first)
    prose(second)


def test_other_differences_are_named():
    one = measured(study(), ok_cell("one", 5.0))
    facts = one.provenance.model_copy(update={"driver": "2.0", "versions": {"torch": "2.13.0"}, "date": "later"})
    found = compare(one, one.model_copy(update={"provenance": facts}))
    assert found.provenance == {"driver": ("1.0", "2.0"), "torch": ("2.11.0", "2.13.0"), "triton": ("3.6.0", "none")}


def test_other_declarations_are_named_down_to_the_criterion(prose):
    moved = FASTER.model_copy(update={"at_least": 1.1})
    tiny = TINY.model_copy(update={"dtype": "float16"})
    found = compare(measured(study(FASTER)), measured(study(moved, shapes=(tiny,), rounds=7)))
    assert len(found.declarations) == 5  # digests, mega left out, tiny's dtype, the criterion's bound, rounds
    prose(found.declarations)


def test_a_key_in_only_one_declaration_is_a_difference(prose):
    lesson = FASTER.model_copy(update={"decides": False})  # a key that declarations leave out at its default
    for pair in ((FASTER, lesson), (lesson, FASTER)):
        found = compare(*(measured(study(criterion)) for criterion in pair))
        prose(found.declarations)


def test_criteria_that_are_moved_or_dropped_beside_an_old_digest_are_named(prose):
    """The digest is stored beside the declaration, and stays when somebody edits the criteria. No change was reported then."""
    both = judged(study(FASTER, ERROR), ok_cell("three", 10.0), ok_cell("one", 5.0))
    moved = study(FASTER.model_copy(update={"at_least": 1.1}), ERROR)
    for edited in (moved, study(ERROR)):
        found = compare(both, both.model_copy(update={"study": edited, "notes": ("edited",)}))
        prose(found.declarations, mask={"[0-9a-f]{12}": "<digest>"})
    dropped = both.model_copy(update={"outcomes": both.outcomes[1:]})
    prose(compare(both, dropped).declarations)
    assert compare(both, dropped).outcomes
