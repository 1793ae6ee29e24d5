"""Tests of criteria that compare variants: speedups, time ratios, bytes, memory, errors, and means over shapes.

Measurements are made up by ``ladder.py``. ``ok_cell(variant, microseconds)`` is a correct one at the shape ``mega``, whose
roofline bound is 4 us, in 20 rounds that vary by the fraction ``spread``. ``bad_cell`` failed. The baseline is ``three``, and
``product`` a control. ``prose`` compares the evidence with its entry in tests/snapshots/prose.txt, whose key is the node id of
the test. A test fails if it does not compare one of its entries, and ``tests/test_prose.py`` if the test or the parameter of an
entry is gone.

``MEGA`` is a shape of full scale.
"""

from __future__ import annotations

from typing import Any

import pytest

from onelaunch.workbench.decide.criteria import evaluate
from onelaunch.workbench.decide.judging import possible_gain
from onelaunch.workbench.result import Verdict
from onelaunch.workbench.study import Criterion, Shape
from onelaunch.workbench.study.plan import infeasibility
from tests.workbench.ladder import MEGA, bad_cell, measured, ok_cell, study


def outcome(criterion, *cells, floor=1.01, scale="full", refuted=None, **more):
    """Judge one criterion by these measurements.

    Args:
        criterion: The criterion.
        cells: Measurements at all shapes.
        floor: A/A noise floor, the smallest factor that may be claimed; ``None`` without an A/A run.
        scale: Scale of the run.
        refuted: Reason why arithmetic refutes the criterion, if it does.
        more: Fields of the study.
    """
    declared = study(criterion, **more)
    return evaluate(measured(declared, *cells, floor=floor, scale=scale), {criterion.name: refuted} if refuted else {})[0]


def faster(at_least: float = 1.3, **more: Any) -> Criterion:
    """Return the criterion that ``one`` is so many times as fast as the baseline; ``more`` replaces fields."""
    facts: dict[str, Any] = {"name": "faster", "measure": "speedup", "of": "one", "at_least": at_least}
    return Criterion(**(facts | more))


def ratio(at_most: float, **more: Any) -> Criterion:
    """Return the criterion that ``one`` takes at most so many times the time of ``product``; ``more`` replaces fields."""
    facts: dict[str, Any] = {"name": "near", "measure": "time_ratio", "of": "one", "over": "product", "at_most": at_most}
    return Criterion(**(facts | more))


@pytest.mark.parametrize(
    ("time", "spread", "status"),
    [
        (10.0, 0.0, "met"),  # 1.5x
        (11.3, 0.0, "met"),  # 1.327x, beyond the bound by more than the noise of 1 %
        (11.5, 0.0, "inconclusive"),  # 1.304x: beyond the bound, but by less than the noise
        (11.5, 0.1, "inconclusive"),
        (11.8, 0.0, "missed"),  # 1.27x
        (13.0, 0.15, "inconclusive"),  # 1.18x in the median, but the interval reaches to 1.36x
        (13.0, 0.05, "missed"),  # 1.1x to 1.21x
        (11.6, 0.0, "inconclusive"),  # 1.293x: on the wrong side, but by less than the noise
        (11.56, 0.1, "inconclusive"),  # 1.2976x, both sides of the bound
    ],
)
def test_a_speedup_is_met_missed_or_inconclusive(time, spread, status):
    found = outcome(faster(), ok_cell("three", 15.0), ok_cell("one", time, spread=spread))
    assert found.status == status, found.evidence


@pytest.mark.parametrize(("time", "status"), [(5.0, "met"), (5.99, "inconclusive"), (6.1, "inconclusive"), (6.2, "missed")])
def test_a_time_ratio_is_judged_from_above(time, status):
    found = outcome(ratio(3.0), ok_cell("product", 2.0), ok_cell("one", time), floor=1.02)
    assert found.status == status, found.evidence


def test_the_evidence_holds_the_numbers(prose):
    found = outcome(faster(), ok_cell("three", 15.0), ok_cell("one", 10.0))
    prose(found.evidence)
    assert found.values["mega"].median == pytest.approx(1.5)
    assert found.best_of == 1


def test_ratios_are_paired_by_round():
    """The two times vary by half, together. Their paired ratio is exact; unpaired, it would be between 0.5 and 4.5."""
    found = outcome(faster(1.4), ok_cell("three", 15.0, spread=0.5), ok_cell("one", 10.0, spread=0.5))
    assert found.status == "met"
    assert found.values["mega"].low == pytest.approx(1.5)


def test_noise_alone_prevents_a_claim():
    """This is the contradiction of the original write-up 040: 1.61x in the headline, 0.97x in its sweep.

    Nothing below 1.3 * 1.66 may be claimed.
    """
    cells = ok_cell("three", 1.61 * 10), ok_cell("one", 10.0)
    assert outcome(faster(), *cells).status == "met"
    noisy = outcome(faster(), *cells, floor=1.61 / 0.97)
    assert noisy.status == "inconclusive"
    assert "1.66" in noisy.evidence


@pytest.mark.parametrize(("spread", "reason"), [(0.0, "noise"), (0.3, "interval")])
def test_a_miss_within_the_noise_is_inconclusive_and_says_why(spread, reason):
    """A study on a busy machine has medians on the wrong side of the bound, under an A/A noise of 27.7."""
    found = outcome(faster(1.01), ok_cell("three", 5.0), ok_cell("one", 5.2, spread=spread), floor=27.7)
    assert found.status == "inconclusive", found.evidence
    assert reason in found.evidence.split("was asked: ")[1]
    slow = outcome(faster(1.01), ok_cell("three", 5.0), ok_cell("one", 25.0), floor=27.7)
    assert slow.status == "inconclusive", slow.evidence
    assert outcome(faster(1.01), ok_cell("three", 5.0), ok_cell("one", 25.0), floor=1.5).status == "missed"


def test_a_noisy_baseline_makes_nothing_infeasible():
    cells = ok_cell("three", 6.0), ok_cell("one", 5.0)
    assert outcome(faster(2.0), *cells, floor=1.2).status == "infeasible"
    assert outcome(faster(2.0), *cells, floor=1.4).status == "missed"  # 6 us could be 8.4 us, and the roofline bound is 4 us
    assert outcome(faster(2.0), *cells, floor=1.8).status == "inconclusive"
    assert outcome(faster(2.0), *cells, floor=None).status == "inconclusive"


def test_no_noise_floor_or_too_few_rounds_decide_nothing():
    cells = ok_cell("three", 15.0), ok_cell("one", 5.0)
    assert outcome(faster(), *cells, floor=None).status == "inconclusive"
    few = outcome(faster(), ok_cell("three", 15.0, rounds=2), ok_cell("one", 5.0, rounds=2))
    assert few.status == "inconclusive"
    assert "2 rounds" in few.evidence


def test_a_filter_selects_the_fastest_and_states_among_how_many():
    cells = ok_cell("three", 15.0), ok_cell("two", 12.0), ok_cell("one", 10.0), ok_cell("forward_only", 90.0)
    found = outcome(faster(of={"launches": [1, 2]}), *cells)
    assert found.status == "met"
    assert found.best_of == 3
    assert "best of 3" in found.evidence
    assert found.evidence.startswith("one is 1.5x")


def test_a_filter_of_baselines_selects_the_fastest_of_them():
    cells = ok_cell("three", 15.0), ok_cell("three_library", 14.0), ok_cell("one", 10.0)
    assert outcome(faster(of="one", over={"launches": 3}), *cells).values["mega"].median == pytest.approx(1.4)


def test_an_empty_filter_matches_every_variant(prose):
    cells = ok_cell("product", 2.0), ok_cell("three", 15.0), ok_cell("two", 5.0), ok_cell("one", 10.0)
    prose(outcome(ratio(3.0, of={}), *cells).evidence)


def test_the_fastest_is_compared_with_the_fastest_of_the_others(prose):
    """Compared with itself, its ratio would always be 1.0. Here it is 1.04, with a bound of 1.03."""
    cells = ok_cell("three", 15.0), ok_cell("two", 12.0), ok_cell("one", 10.0)
    found = outcome(ratio(1.03, of="one", over={}), *cells, floor=1.04)
    assert (found.status, found.best_of) == ("met", 2)
    prose(found.evidence)
    near = outcome(ratio(1.03, of="one", over={}), ok_cell("two", 10.05), ok_cell("one", 10.0), floor=1.04)
    assert near.status == "inconclusive"
    slower = outcome(ratio(1.03, of="two", over={}), *cells, floor=1.04)
    assert (slower.status, slower.values["mega"].median) == ("missed", pytest.approx(1.2))
    missed = outcome(faster(1.4, of="one", over={}), *cells, floor=1.01)
    assert missed.status == outcome(faster(1.4, of="one", over="two"), *cells, floor=1.01).status == "missed"
    alone = outcome(ratio(1.03, of="one", over={}), ok_cell("one", 10.0), floor=1.01)
    assert (alone.status, alone.values["mega"].median) == ("met", 1.0)


def test_tags_that_are_tuples_match_by_a_member():
    cells = ok_cell("three", 15.0), ok_cell("two", 12.0), ok_cell("one", 10.0)
    assert outcome(faster(of={"fuses": "b", "gemm": "library"}, at_least=1.2), *cells).evidence.startswith("two is 1.25x")


def test_incorrect_variants_are_not_candidates(prose):
    wrong = bad_cell("one", "incorrect", "y is off", verdict=Verdict(ok=False, problems=("y is off.",)))
    found = outcome(faster(of={"launches": [1, 2]}), ok_cell("three", 15.0), ok_cell("two", 10.0), wrong)
    assert (found.status, found.best_of) == ("met", 1)
    alone = outcome(faster(), ok_cell("three", 15.0), wrong)
    assert alone.status == "not_measured"
    prose(alone.evidence)


def test_several_variants_that_were_not_reached_are_not_listed(prose):
    cells = bad_cell("one", "interrupted", "because"), bad_cell("two", "interrupted", "because")
    found = outcome(faster(of={"launches": [1, 2]}), ok_cell("three", 15.0), *cells)
    prose(found.evidence)
    known = outcome(faster(of={"launches": [1, 2]}), ok_cell("three", 15.0), bad_cell("one", "error", "because"), cells[1])
    prose(known.evidence)


@pytest.mark.parametrize("status", ["unsupported", "not_installed", "out_of_memory", "error", "interrupted", "invalid"])
def test_a_variant_that_did_not_run_is_not_measured_with_the_reason(status):
    found = outcome(faster(), ok_cell("three", 15.0), bad_cell("one", status, "because"))
    assert found.status == "not_measured"
    assert "because" in found.evidence


def test_a_speedup_beyond_the_roofline_bound_is_infeasible(prose):
    """The roofline bound is 4 us. Relative to a baseline of 6 us, nothing can be 2x faster."""
    found = outcome(faster(2.0), ok_cell("three", 6.0), ok_cell("one", 5.0))
    assert found.status == "infeasible"
    prose(found.evidence)
    assert outcome(faster(1.4), ok_cell("three", 6.0), ok_cell("one", 5.0)).status == "missed"


def test_a_time_ratio_below_the_roofline_bound_is_infeasible(prose):
    found = outcome(ratio(1.35), ok_cell("product", 2.0), ok_cell("one", 5.0))
    assert found.status == "infeasible"
    prose(found.evidence)


def test_roofline_bounds_apply_only_to_the_cold_regime():
    result = measured(study(faster(2.0)), ok_cell("three", 6.0), ok_cell("one", 5.0))
    assert possible_gain(result, faster(2.0), "mega") == pytest.approx(1.5)
    assert possible_gain(result, faster(2.0, regime="warm"), "mega") is None


def traffic(at_least):
    """Return the criterion that the baseline moves at least so many times the DRAM bytes of ``one``."""
    return Criterion(name="traffic", measure="dram_bytes_ratio", of="one", at_least=at_least)


def test_bytes_are_judged_only_if_counted_on_both_sides(prose):
    one, three = ok_cell("one", 1.0, counted=4e6), ok_cell("three", 2.0, counted=8.4e6)
    assert outcome(traffic(2.0), three, one).status == "met"
    assert outcome(traffic(2.2), three, one).status == "missed"
    for cells in ((ok_cell("three", 2.0), one), (three, ok_cell("one", 1.0)), (ok_cell("three", 2.0), ok_cell("one", 1.0))):
        found = outcome(traffic(1.5), *cells)
        assert found.status == "not_measured"
        prose(found.evidence)
    assert found.values == {}


def test_counts_never_meet_a_criterion_that_arithmetic_refutes():
    """By arithmetic ``one`` moves half the bytes of ``three``. Counted bytes that say a third do not change that."""
    criterion = traffic(2.5)
    refuted = infeasibility(study(criterion), criterion)
    cells = ok_cell("three", 2.0, counted=12e6), ok_cell("one", 1.0, counted=4e6)
    found = outcome(criterion, *cells, refuted=refuted)
    assert found.status == "infeasible"
    assert "2.00x fewer bytes" in found.evidence
    assert "3.00x" in found.evidence


def error(at_most, of="one"):
    """Return the criterion that the norm-wise error against the oracle is at most so large."""
    return Criterion(name="correct", measure="error", of=of, at_most=at_most)


def test_errors_are_compared_with_their_bound_without_noise():
    assert outcome(error(5e-3), ok_cell("one", 1.0, error=3e-4), floor=None).status == "met"
    found = outcome(error(1e-3), ok_cell("one", 1.0, error=3e-3))
    assert found.status == "missed"
    assert "0.003 (y)" in found.evidence


def test_an_error_criterion_uses_the_worst_of_several_variants():
    cells = ok_cell("one", 1.0, error=1e-4), ok_cell("two", 9.0, error=4e-3)
    assert outcome(error(1e-3, {"launches": [1, 2]}), *cells).status == "missed"


def test_an_incorrect_variant_misses_its_error_whatever_the_number(prose):
    wrong = bad_cell("one", "incorrect", verdict=Verdict(ok=False, problems=("It changed its input x.",)))
    found = outcome(error(5e-3), wrong)
    assert found.status == "missed"
    prose(found.evidence)


def test_a_criterion_of_another_scale_is_not_measured_and_says_what_it_needs(prose):
    found = outcome(faster(), ok_cell("three", 1.0), scale="small")
    assert found.status == "met" or "mega" in found.evidence  # mega was measured, so ``one`` is what is missing, not the scale
    absent = evaluate(measured(study(faster()), scale="small"), {})[0]
    assert absent.status == "not_measured"
    prose(absent.evidence)


SWEEP = tuple(Shape(name=f"s{index}", dtype="float16", sizes=MEGA.sizes) for index in range(5))
"""Five shapes with the sizes of ``mega``, each with a roofline bound of 4 us."""


def sweep(times, needed=None, bound=1.3):
    """Judge whether ``one`` is ``bound`` times as fast in at least ``needed`` of the five shapes, by default in all.

    ``three`` takes 15 us at each and ``one`` the given times (``None``: it failed).
    """
    cells = [ok_cell("three", 15.0, of=shape) for shape in SWEEP]
    for shape, time in zip(SWEEP, times, strict=True):
        cells.append(bad_cell("one", "error", "fell", of=shape) if time is None else ok_cell("one", time, of=shape))
    return outcome(faster(bound, in_at_least=needed), *cells, shapes=SWEEP)


@pytest.mark.parametrize(
    ("times", "needed", "status"),
    [
        ((10, 10, 10, 10, 10), None, "met"),
        ((10, 10, 10, 10, 14), None, "missed"),
        ((10, 10, 10, 14, 14), 3, "met"),
        ((10, 10, 14, 14, 14), 3, "missed"),
        ((10, 10, 11.5, 14, 14), 3, "inconclusive"),
        ((10, 10, None, 14, 14), 3, "not_measured"),
        ((10, 10, 11.5, None, 14), 3, "inconclusive"),
        ((10, 10, 10, None, None), 3, "met"),
    ],
)
def test_in_at_least_counts_shapes(times, needed, status):
    found = sweep(times, needed)
    assert found.status == status, found.evidence


def test_the_evidence_of_a_sweep_names_each_shape(prose):
    found = sweep((10, 10, 14, None, 11.5), 4)
    prose(found.evidence)
    assert "s2 1.07 (missed)" in found.evidence
    assert "s4 1.3 (inconclusive: " in found.evidence
    assert set(found.values) == {"s0", "s1", "s2", "s4"}


def test_infeasible_at_too_many_shapes_is_infeasible():
    cells = [ok_cell("three", 15.0 if index < 2 else 4.5, of=shape) for index, shape in enumerate(SWEEP)]
    cells += [ok_cell("one", 4.2, of=shape) for shape in SWEEP]
    assert outcome(faster(in_at_least=3), *cells, shapes=SWEEP).status == "infeasible"
    assert outcome(faster(in_at_least=2), *cells, shapes=SWEEP).status == "met"


def test_the_evidence_of_exact_numbers_names_the_shapes_that_miss(prose):
    cells = [ok_cell("three", 1.0, of=shape, counted=8e6) for shape in SWEEP]
    cells += [ok_cell("one", 1.0, of=shape, counted=4e6 if index else 7e6) for index, shape in enumerate(SWEEP)]
    found = outcome(traffic(1.5), *cells, shapes=SWEEP)
    assert found.status == "missed"
    prose(found.evidence)


# Geometric means


def mean(times, bound=1.5, over=15.0, floor=1.01, **more):
    """Judge whether ``one`` is ``bound`` times as fast in the geometric mean; ``three`` takes ``over`` us at each shape."""
    cells = [ok_cell("three", over, of=shape) for shape in SWEEP]
    for shape, time in zip(SWEEP, times, strict=True):
        cells.append(bad_cell("one", "error", "fell", of=shape) if time is None else ok_cell("one", time, of=shape))
    return outcome(faster(bound, combine="geomean", **more), *cells, floor=floor, shapes=SWEEP)


@pytest.mark.parametrize(
    ("times", "floor", "status"),
    [
        ((5, 15, 7.5, 10, 10), 1.01, "met"),  # 3, 1, 2, 1.5, 1.5: 1.68, though one shape gains nothing
        ((10, 10, 10, 10, 10), 1.01, "inconclusive"),  # at the bound
        ((5, 15, 7.5, 10, 10), 1.2, "inconclusive"),  # beyond it by less than the noise
        ((5, 15, 7.5, 10, 10), None, "inconclusive"),
        ((15, 15, 7.5, 10, 10), 1.01, "missed"),
        ((15, 15, 7.5, 10, 10), 1.2, "inconclusive"),  # 1.35: on the wrong side by less than the noise
        ((5, 15, 7.5, 10, None), 1.01, "not_measured"),
    ],
)
def test_a_geometric_mean_is_compared_with_the_bound_as_one_number(times, floor, status):
    found = mean(times, floor=floor)
    assert found.status == status, found.evidence


def test_a_mean_needs_the_noise_of_every_shape():
    declared = study(faster(1.2, combine="geomean"), shapes=SWEEP)
    cells = [ok_cell(variant, time, of=shape) for shape in SWEEP for variant, time in (("three", 15.0), ("one", 10.0))]
    result = measured(declared, *cells)
    assert evaluate(result, {})[0].status == "met"
    assert evaluate(result.model_copy(update={"noise": result.noise[1:]}), {})[0].status == "inconclusive"


def test_the_evidence_of_a_mean_holds_the_mean_and_every_shape(prose):
    found = mean((5, 15, 7.5, 10, 10))
    prose(found.evidence)
    assert found.overall.median == pytest.approx(13.5 ** (1 / 5))
    assert found.values["s0"].median == pytest.approx(3.0)


def test_a_mean_names_the_shapes_that_it_lacks(prose):
    found = mean((5, 15, 7.5, 10, None))
    prose(found.evidence)
    assert found.overall is None
    absent = evaluate(measured(study(faster(combine="geomean"), shapes=SWEEP), scale="small"), {})[0]
    assert absent.status == "not_measured"
    prose(absent.evidence)


def test_a_mean_beyond_the_roofline_bounds_is_infeasible(prose):
    """Roofline bounds of 4 us under a baseline of 5 us allow at most 1.25x at every shape."""
    found = mean((4.5,) * 5, over=5.0)
    assert found.status == "infeasible"
    prose(found.evidence)
    assert mean((4.5,) * 5, over=5.0, bound=1.2).status == "missed"


def test_a_mean_with_a_noisy_baseline_is_not_infeasible():
    assert mean((4.5,) * 5, over=5.0, floor=1.4).status == "inconclusive"


def test_a_mean_of_exact_numbers_needs_no_noise():
    cells = [ok_cell("three", 2.0, of=shape, peak=8 << 20) for shape in SWEEP]
    cells += [ok_cell("one", 1.0, of=shape, peak=(2 << 20) << (index % 2)) for index, shape in enumerate(SWEEP)]
    asked = memory(0.4, combine="geomean")  # peak memory has no rounds: its ratio is 1/4 at three shapes and 1/2 at two
    found = outcome(asked, *cells, floor=None, shapes=SWEEP)
    assert (found.status, found.overall.samples) == ("met", 1)
    assert found.overall.median == pytest.approx((0.25**3 * 0.5**2) ** (1 / 5))
    assert outcome(memory(0.3, combine="geomean"), *cells, floor=None, shapes=SWEEP).status == "missed"


# Times at two shapes

LONG = Shape(name="long", dtype="float16", sizes={"N": 4000, "V": 1000})
"""Shape with four times the rows (N) of ``mega``."""


def at_two(at_most=1.3, per=("N",), **more: Any) -> Criterion:
    """Return the criterion on the time of ``one`` at ``long`` over that at ``mega``, each divided by its sizes in ``per``."""
    facts: dict[str, Any] = {"name": "long", "measure": "time_ratio", "of": "one", "over": "one", "at": "long", "over_at": "mega"}
    return Criterion(**(facts | {"per": per, "at_most": at_most} | more))


@pytest.mark.parametrize(("time", "status"), [(40.0, "met"), (51.9, "inconclusive"), (60.0, "missed")])
def test_times_at_two_shapes_are_compared_per_unit_of_work(time, status):
    """Four times the rows take 40 us or more, against 10 us: 1x per row or more."""
    found = outcome(at_two(), ok_cell("one", 10.0), ok_cell("one", time, of=LONG), shapes=(MEGA, LONG))
    assert found.status == status, found.evidence
    assert found.values["long"].median == pytest.approx(time / 40)


def test_the_evidence_of_two_shapes_names_both(prose):
    found = outcome(at_two(), ok_cell("one", 10.0), ok_cell("one", 40.0, of=LONG), shapes=(MEGA, LONG))
    prose(found.evidence)
    whole = outcome(at_two(5.0, per=()), ok_cell("one", 10.0), ok_cell("one", 40.0, of=LONG), shapes=(MEGA, LONG))
    assert whole.values["long"].median == pytest.approx(4.0)


def test_a_speedup_between_two_shapes_is_the_inverse_ratio():
    asked = at_two(measure="speedup", at_most=None, at_least=0.7)
    found = outcome(asked, ok_cell("one", 10.0), ok_cell("one", 50.0, of=LONG), shapes=(MEGA, LONG))
    assert (found.status, found.values["long"].median) == ("met", pytest.approx(0.8))


def test_rounds_at_two_shapes_are_not_paired():
    """The two times vary by a tenth. Only pairing rounds that were never taken together could cancel that."""
    cells = ok_cell("one", 10.0, spread=0.1), ok_cell("one", 44.0, of=LONG, spread=0.1)
    found = outcome(at_two(1.2), *cells, shapes=(MEGA, LONG))
    assert found.status == "inconclusive"
    assert found.values["long"].high > 1.3


def test_the_noise_of_the_noisier_shape_counts():
    declared = study(at_two(1.05), shapes=(MEGA, LONG))
    result = measured(declared, ok_cell("one", 10.0), ok_cell("one", 40.0, of=LONG))
    assert evaluate(result, {})[0].status == "met"
    noisy = tuple(run.model_copy(update={"floor": 1.2}) if run.shape == "mega" else run for run in result.noise)
    assert evaluate(result.model_copy(update={"noise": noisy}), {})[0].status == "inconclusive"
    assert evaluate(result.model_copy(update={"noise": result.noise[:1]}), {})[0].status == "inconclusive"


def test_a_missing_measurement_at_the_other_shape_is_named(prose):
    found = outcome(at_two(), bad_cell("one", "error", "fell"), ok_cell("one", 40.0, of=LONG), shapes=(MEGA, LONG))
    assert found.status == "not_measured"
    prose(found.evidence)


def test_a_ratio_of_two_shapes_has_a_roofline_bound(prose):
    """Four times the rows take at least 16 us, against 10 us: at least 0.4x per row."""
    found = outcome(at_two(0.35), ok_cell("one", 10.0), ok_cell("one", 20.0, of=LONG), shapes=(MEGA, LONG))
    assert found.status == "infeasible"
    prose(found.evidence)


# Memory


def memory(at_most, **more: Any) -> Criterion:
    """Return the criterion on the peak memory of ``one`` over that of the baseline."""
    facts: dict[str, Any] = {"name": "memory", "measure": "peak_memory_ratio", "of": "one", "at_most": at_most}
    return Criterion(**(facts | more))


def test_peak_memory_is_compared_with_another_variants(prose):
    cells = ok_cell("three", 2.0, peak=10 << 20), ok_cell("one", 1.0, peak=6 << 20)
    met = outcome(memory(0.6), *cells, floor=None)
    assert met.status == "met"
    prose(met.evidence)
    assert outcome(memory(0.5), *cells).status == "missed"


def test_the_memory_of_a_filter_is_that_of_the_fastest_variant(prose):
    cells = ok_cell("three", 9.0, peak=10), ok_cell("two", 2.0, peak=8), ok_cell("one", 3.0, peak=1)
    found = outcome(memory(0.6, of={"launches": [1, 2]}), *cells)
    assert (found.status, found.best_of) == ("missed", 2)
    prose(found.evidence)


@pytest.mark.parametrize(("one", "three"), [(None, 10), (10, None), (None, None)])
def test_unmeasured_memory_decides_nothing(one, three, prose):
    found = outcome(memory(0.6), ok_cell("three", 2.0, peak=three), ok_cell("one", 1.0, peak=one))
    assert (found.status, found.values) == ("not_measured", {})
    prose(found.evidence)
