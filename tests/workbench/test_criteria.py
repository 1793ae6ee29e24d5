from __future__ import annotations

from typing import Any

import pytest

from onelaunch.workbench.criteria import evaluate, possible_gain
from onelaunch.workbench.plan import infeasibility
from onelaunch.workbench.result import Verdict
from onelaunch.workbench.study import Criterion, Shape
from tests.workbench.ladder import MEGA, bad_cell, measured, ok_cell, study


def outcome(criterion, *cells, floor=1.01, scale="full", refuted=None, **more):
    declared = study(criterion, **more)
    return evaluate(measured(declared, *cells, floor=floor, scale=scale), {criterion.name: refuted} if refuted else {})[0]


def faster(at_least: float = 1.3, **more: Any) -> Criterion:
    facts: dict[str, Any] = {"name": "faster", "measure": "speedup", "of": "one", "at_least": at_least}
    return Criterion(**(facts | more))


def ratio(at_most: float, **more: Any) -> Criterion:
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
        (13.0, 0.15, "missed"),  # wide, but its median lies on the other side by more than the noise
        (11.56, 0.1, "inconclusive"),  # 1.2976x, both sides of the bound
    ],
)
def test_a_speedup_is_met_missed_or_inconclusive(time, spread, status):
    found = outcome(faster(), ok_cell("three", 15.0), ok_cell("one", time, spread=spread))
    assert found.status == status, found.evidence


@pytest.mark.parametrize(("time", "status"), [(5.0, "met"), (5.99, "inconclusive"), (6.1, "missed")])
def test_a_time_ratio_is_judged_from_above(time, status):
    found = outcome(ratio(3.0), ok_cell("product", 2.0), ok_cell("one", time), floor=1.02)
    assert found.status == status, found.evidence


def test_the_evidence_holds_the_numbers():
    found = outcome(faster(), ok_cell("three", 15.0), ok_cell("one", 10.0))
    assert found.evidence == (
        "one is 1.5x as fast as three at mega (1.5 to 1.5 in 20 rounds, cold: 10 us against 15 us, A/A noise 1.01), "
        "at least 1.3 was asked."
    )
    assert found.values["mega"].median == pytest.approx(1.5)
    assert found.best_of == 1


def test_ratios_are_taken_round_by_round():
    """Both swing by half together: paired, their ratio is exact; unpaired, it would be anything from 0.5 to 4.5."""
    found = outcome(faster(1.4), ok_cell("three", 15.0, spread=0.5), ok_cell("one", 10.0, spread=0.5))
    assert found.status == "met"
    assert found.values["mega"].low == pytest.approx(1.5)


def test_noise_alone_forbids_a_claim():
    """The write-up's contradiction: 1.61x in the headline, 0.97x in its sweep. Nothing below 1.3 * 1.66 may be claimed."""
    cells = ok_cell("three", 1.61 * 10), ok_cell("one", 10.0)
    assert outcome(faster(), *cells).status == "met"
    noisy = outcome(faster(), *cells, floor=1.61 / 0.97)
    assert noisy.status == "inconclusive"
    assert "1.66" in noisy.evidence


def test_no_noise_floor_or_too_few_rounds_decide_nothing():
    cells = ok_cell("three", 15.0), ok_cell("one", 5.0)
    assert outcome(faster(), *cells, floor=None).status == "inconclusive"
    few = outcome(faster(), ok_cell("three", 15.0, rounds=2), ok_cell("one", 5.0, rounds=2))
    assert few.status == "inconclusive"
    assert "2 rounds" in few.evidence


def test_a_filter_stands_for_the_fastest_and_says_among_how_many():
    cells = ok_cell("three", 15.0), ok_cell("two", 12.0), ok_cell("one", 10.0), ok_cell("forward_only", 90.0)
    found = outcome(faster(of={"launches": [1, 2]}), *cells)
    assert found.status == "met"
    assert found.best_of == 3
    assert "best of 3" in found.evidence
    assert found.evidence.startswith("one is 1.5x")


def test_a_filter_over_others_compares_with_the_fastest_of_them():
    cells = ok_cell("three", 15.0), ok_cell("three_library", 14.0), ok_cell("one", 10.0)
    assert outcome(faster(of="one", over={"launches": 3}), *cells).values["mega"].median == pytest.approx(1.4)


def test_every_variant_by_an_empty_filter():
    cells = ok_cell("product", 2.0), ok_cell("three", 15.0), ok_cell("two", 5.0), ok_cell("one", 10.0)
    assert outcome(ratio(3.0, of={}), *cells).evidence.startswith("two takes 2.5x the time of product")


def test_tags_that_are_tuples_match_by_a_member():
    cells = ok_cell("three", 15.0), ok_cell("two", 12.0), ok_cell("one", 10.0)
    assert outcome(faster(of={"fuses": "b", "gemm": "library"}, at_least=1.2), *cells).evidence.startswith("two is 1.25x")


def test_incorrect_variants_are_no_candidates():
    wrong = bad_cell("one", "incorrect", "y is off", verdict=Verdict(ok=False, problems=("y is off.",)))
    found = outcome(faster(of={"launches": [1, 2]}), ok_cell("three", 15.0), ok_cell("two", 10.0), wrong)
    assert (found.status, found.best_of) == ("met", 1)
    alone = outcome(faster(), ok_cell("three", 15.0), wrong)
    assert alone.status == "not_measured"
    assert "one is incorrect at mega (y is off)" in alone.evidence


@pytest.mark.parametrize("status", ["unsupported", "not_installed", "out_of_memory", "error", "interrupted", "invalid"])
def test_what_did_not_run_is_not_measured_with_the_reason(status):
    found = outcome(faster(), ok_cell("three", 15.0), bad_cell("one", status, "because"))
    assert found.status == "not_measured"
    assert "because" in found.evidence


def test_a_speedup_beyond_the_floor_is_infeasible_once_the_baseline_is_measured():
    """The floor is 4 us: over a baseline of 6 us nothing can be 2x."""
    found = outcome(faster(2.0), ok_cell("three", 6.0), ok_cell("one", 5.0))
    assert found.status == "infeasible"
    assert "at most 1.50x the speed of three is possible, as the floor is 4 us" in found.evidence
    assert outcome(faster(1.4), ok_cell("three", 6.0), ok_cell("one", 5.0)).status == "missed"


def test_a_time_ratio_below_the_floor_is_infeasible():
    found = outcome(ratio(1.35), ok_cell("product", 2.0), ok_cell("one", 5.0))
    assert found.status == "infeasible"
    assert "at least 2.00x the time of product is possible" in found.evidence


def test_floors_are_computed_for_the_cold_regime_alone():
    result = measured(study(faster(2.0)), ok_cell("three", 6.0), ok_cell("one", 5.0))
    assert possible_gain(result, faster(2.0), "mega") == pytest.approx(1.5)
    assert possible_gain(result, faster(2.0, regime="warm"), "mega") is None


def traffic(at_least):
    return Criterion(name="traffic", measure="dram_bytes_ratio", of="one", at_least=at_least)


def test_bytes_count_only_when_both_sides_were_counted():
    one, three = ok_cell("one", 1.0, counted=4e6), ok_cell("three", 2.0, counted=8.4e6)
    assert outcome(traffic(2.0), three, one).status == "met"
    assert outcome(traffic(2.2), three, one).status == "missed"
    for cells in ((ok_cell("three", 2.0), one), (three, ok_cell("one", 1.0)), (ok_cell("three", 2.0), ok_cell("one", 1.0))):
        found = outcome(traffic(1.5), *cells)
        assert found.status == "not_measured"
        assert "no counted bytes" in found.evidence
    assert "by arithmetic 2.00 (7.6 MiB of three against 3.8 MiB of one)" in found.evidence
    assert found.values == {}


def test_what_arithmetic_refutes_is_never_met_even_if_counted_so():
    criterion = traffic(2.5)
    refuted = infeasibility(study(criterion), criterion)
    cells = ok_cell("three", 2.0, counted=12e6), ok_cell("one", 1.0, counted=4e6)
    found = outcome(criterion, *cells, refuted=refuted)
    assert found.status == "infeasible"
    assert "2.00x fewer bytes" in found.evidence
    assert "3.00x" in found.evidence


def error(at_most, of="one"):
    return Criterion(name="correct", measure="error", of=of, at_most=at_most)


def test_errors_are_held_against_their_bound_without_noise():
    assert outcome(error(5e-3), ok_cell("one", 1.0, error=3e-4), floor=None).status == "met"
    found = outcome(error(1e-3), ok_cell("one", 1.0, error=3e-3))
    assert found.status == "missed"
    assert "0.003 (y)" in found.evidence


def test_the_worst_of_several_variants_counts_for_an_error():
    cells = ok_cell("one", 1.0, error=1e-4), ok_cell("two", 9.0, error=4e-3)
    assert outcome(error(1e-3, {"launches": [1, 2]}), *cells).status == "missed"


def test_an_incorrect_variant_misses_its_error_whatever_the_number():
    wrong = bad_cell("one", "incorrect", verdict=Verdict(ok=False, problems=("It changed its input x.",)))
    found = outcome(error(5e-3), wrong)
    assert found.status == "missed"
    assert "It changed its input x." in found.evidence


def test_a_criterion_of_another_scale_is_not_measured_and_says_what_it_needs():
    found = outcome(faster(), ok_cell("three", 1.0), scale="small")
    assert found.status == "met" or "mega" in found.evidence  # cells of the shape are there: they count
    absent = evaluate(measured(study(faster()), scale="small"), {})[0]
    assert absent.status == "not_measured"
    assert absent.evidence == "Needs full scale: run on a GPU, or with --scale full."


SWEEP = tuple(Shape(name=f"s{index}", dtype="float16", sizes=MEGA.sizes) for index in range(5))


def sweep(times, needed=None, bound=1.3):
    """`three` takes 15 us at each of five shapes, `one` takes the given times (None: it failed)."""
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


def test_a_row_of_shapes_says_each_one():
    found = sweep((10, 10, 14, None, 11.5), 4)
    assert found.evidence.startswith(
        "The speed of one over the baseline is at least 1.3 at 2 of 5 shapes, 4 needed: s0 1.5, s1 1.5, "
    )
    assert "s2 1.07 (missed)" in found.evidence
    assert "s3 not measured (one failed at s3 (fell))" in found.evidence
    assert "s4 1.3 (inconclusive: " in found.evidence
    assert set(found.values) == {"s0", "s1", "s2", "s4"}


def test_out_of_reach_at_too_many_shapes_is_infeasible():
    cells = [ok_cell("three", 15.0 if index < 2 else 4.5, of=shape) for index, shape in enumerate(SWEEP)]
    cells += [ok_cell("one", 4.2, of=shape) for shape in SWEEP]
    assert outcome(faster(in_at_least=3), *cells, shapes=SWEEP).status == "infeasible"
    assert outcome(faster(in_at_least=2), *cells, shapes=SWEEP).status == "met"
