"""Criteria that hold a variant against no other: bytes over the least, counts, times."""

from __future__ import annotations

from typing import Any

import pytest

from onelaunch.workbench import quantities as q
from onelaunch.workbench.decide.criteria import evaluate
from onelaunch.workbench.study import Criterion
from tests.workbench.ladder import measured, ok_cell, study
from tests.workbench.test_criteria import outcome, ratio


def least(at_most, **more: Any) -> Criterion:
    facts: dict[str, Any] = {"name": "least", "measure": "dram_bytes_over_least", "of": "one", "at_most": at_most}
    return Criterion(**(facts | more))


def test_counted_bytes_are_held_against_the_least():
    met = outcome(least(1.6), ok_cell("one", 1.0, counted=6e6))
    assert met.status == "met"
    assert met.evidence == (
        "Counted by ncu at mega: 1.50x (5.72 MiB of one against 3.81 MiB at the least), at most 1.6 was asked."
    )
    assert outcome(least(1.4), ok_cell("one", 1.0, counted=6e6)).status == "missed"


def test_bytes_by_arithmetic_are_no_count_over_the_least_either():
    found = outcome(least(1.6, of="two"), ok_cell("two", 1.0))
    assert (found.status, found.values) == ("not_measured", {})
    assert "no counted bytes at mega; by arithmetic 1.50 (5.72 MiB of two against 3.81 MiB at the least)" in found.evidence


def launched(at_most, **more: Any) -> Criterion:
    facts: dict[str, Any] = {"name": "launches", "measure": "launches", "of": "one", "at_most": at_most}
    return Criterion(**(facts | more))


def test_counted_launches_are_held_against_their_bound():
    met = outcome(launched(6), ok_cell("one", 1.0, launches=6), floor=None)
    assert (met.status, met.evidence) == ("met", "one launches 6 times a call at mega, at most 6 was asked.")
    missed = outcome(launched(6), ok_cell("one", 1.0, launches=7))
    assert (missed.status, missed.values["mega"].median) == ("missed", 7)


@pytest.mark.parametrize(("asked", "found", "status"), [(6, 6, "met"), (6, 5, "missed"), (6, 7, "missed"), (0, 0, "met")])
def test_what_is_counted_may_be_asked_exactly(asked, found, status):
    launches = outcome(launched(None, equals=asked), ok_cell("one", 1.0, launches=found))
    barriers = outcome(launched(None, measure="barriers", equals=asked), ok_cell("one", 1.0, barriers=found))
    assert launches.status == barriers.status == status
    assert barriers.evidence == f"one meets {found} barriers over the grid a call at mega, exactly {asked} was asked."
    assert barriers.values["mega"].median == found
    assert outcome(launched(None, measure="barriers", equals=asked), ok_cell("one", 1.0, launches=6)).status == "not_measured"


def test_declared_launches_are_no_count():
    found = outcome(launched(6), ok_cell("one", 1.0))
    assert (found.status, found.values) == ("not_measured", {})
    assert "the launches of one at mega were not counted" in found.evidence


def over_floor(at_most, **more: Any) -> Criterion:
    facts: dict[str, Any] = {"name": "floor", "measure": "time_over_floor", "of": "one", "at_most": at_most}
    return Criterion(**(facts | more))


def test_a_time_is_held_against_its_floor():
    cell = ok_cell("one", 10.0)
    floor = cell.plan.floor_microseconds
    met = outcome(over_floor(11 / floor), cell)
    assert met.status == "met"
    assert met.values["mega"].median == pytest.approx(10 / floor)
    assert met.evidence.startswith(f"one takes {10 / floor:.3g}x its floor at mega (")
    assert f"20 rounds, cold: 10.0 µs against {q.time(floor)}, A/A noise 1.01)" in met.evidence
    assert outcome(over_floor(10.05 / floor), cell).status == "inconclusive"  # by less than the noise
    assert outcome(over_floor(9 / floor), cell).status == "missed"
    assert outcome(over_floor(9 / floor), cell, floor=1.2).status == "inconclusive"
    assert outcome(over_floor(11 / floor), cell, floor=None).status == "inconclusive"


def test_a_time_is_held_against_microseconds():
    asked = over_floor(11.0, measure="time")
    met = outcome(asked, ok_cell("one", 10.0))
    assert (met.status, met.values["mega"].median) == ("met", 10.0)
    assert met.evidence == "one takes 10 µs at mega (10 to 10 in 20 rounds, cold, A/A noise 1.01), at most 11 was asked."
    assert outcome(asked, ok_cell("one", 10.95)).status == "inconclusive"
    assert outcome(asked, ok_cell("one", 12.0)).status == "missed"
    assert outcome(asked, ok_cell("one", 12.0), floor=1.2).status == "inconclusive"
    assert outcome(asked, ok_cell("one", 12.0, spread=0.1)).status == "inconclusive"  # 10.8 to 13.2
    assert outcome(asked, ok_cell("one", 10.0).model_copy(update={"plan": None})).status == "met", "no floor is needed"


def in_regimes(cell, **times):
    one = cell.timings[0]
    return cell.model_copy(update={"timings": tuple(
        one.model_copy(update={
            "regime": regime, "microseconds": one.microseconds.model_copy(update={"median": time, "low": time, "high": time}),
            "rounds": (time,) * 20,
        })
        for regime, time in times.items()
    )})  # fmt: skip


def test_a_time_is_held_against_another_regime():
    declared = {"regimes": ("cold", "running", "served")}
    criterion = ratio(1.05, over="one", regime="served", over_regime="running")
    cell = in_regimes(ok_cell("one", 10.0), running=10.0, served=10.3)
    result = measured(study(criterion, **declared), cell)
    (cold,) = result.noise
    noises = {
        name: cold.model_copy(update={"regime": name, "floor": floor}) for name, floor in (("running", 1.001), ("served", 1.01))
    }
    (met,) = evaluate(result.model_copy(update={"noise": tuple(noises.values())}), {})
    assert (met.status, met.values["mega"].median) == ("met", pytest.approx(1.03))
    assert "served: 10.3 µs against 10.0 µs running, A/A noise 1.01" in met.evidence
    (alone,) = evaluate(result.model_copy(update={"noise": (noises["served"],)}), {})
    assert alone.status == "inconclusive", "both regimes need an A/A run"
    missing = cell.model_copy(update={"timings": cell.timings[1:]})
    (found,) = evaluate(result.model_copy(update={"cells": (missing,)}), {})
    assert (found.status, "one has no running time at mega" in found.evidence) == ("not_measured", True)


def test_a_cell_without_a_floor_is_held_against_none():
    bare = ok_cell("one", 10.0).model_copy(update={"plan": None})
    found = outcome(over_floor(1.5), bare)
    assert (found.status, found.values) == ("not_measured", {})
    assert "there is no floor of one at mega" in found.evidence
