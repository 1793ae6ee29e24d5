"""Criteria that hold a variant against no other: bytes over the least, counts, times."""

from __future__ import annotations

from typing import Any

import pytest

from onelaunch.workbench.decide.criteria import evaluate
from onelaunch.workbench.study import Criterion
from tests.workbench.ladder import measured, ok_cell, study
from tests.workbench.test_criteria import outcome, ratio


def least(at_most, **more: Any) -> Criterion:
    facts: dict[str, Any] = {"name": "least", "measure": "dram_bytes_over_least", "of": "one", "at_most": at_most}
    return Criterion(**(facts | more))


def test_counted_bytes_are_held_against_the_least(prose):
    met = outcome(least(1.6), ok_cell("one", 1.0, counted=6e6))
    assert met.status == "met"
    prose(met.evidence)
    assert outcome(least(1.4), ok_cell("one", 1.0, counted=6e6)).status == "missed"


def test_bytes_by_arithmetic_are_no_count_over_the_least_either(prose):
    found = outcome(least(1.6, of="two"), ok_cell("two", 1.0))
    assert (found.status, found.values) == ("not_measured", {})
    prose(found.evidence)


def launched(at_most, **more: Any) -> Criterion:
    facts: dict[str, Any] = {"name": "launches", "measure": "launches", "of": "one", "at_most": at_most}
    return Criterion(**(facts | more))


def test_counted_launches_are_held_against_their_bound(prose):
    met = outcome(launched(6), ok_cell("one", 1.0, launches=6), floor=None)
    assert met.status == "met"
    prose(met.evidence)
    missed = outcome(launched(6), ok_cell("one", 1.0, launches=7))
    assert (missed.status, missed.values["mega"].median) == ("missed", 7)


@pytest.mark.parametrize(("asked", "found", "status"), [(6, 6, "met"), (6, 5, "missed"), (6, 7, "missed"), (0, 0, "met")])
def test_what_is_counted_may_be_asked_exactly(asked, found, status, prose):
    launches = outcome(launched(None, equals=asked), ok_cell("one", 1.0, launches=found))
    barriers = outcome(launched(None, measure="barriers", equals=asked), ok_cell("one", 1.0, barriers=found))
    assert launches.status == barriers.status == status
    prose(barriers.evidence)
    assert barriers.values["mega"].median == found
    assert outcome(launched(None, measure="barriers", equals=asked), ok_cell("one", 1.0, launches=6)).status == "not_measured"


def test_declared_launches_are_no_count(prose):
    found = outcome(launched(6), ok_cell("one", 1.0))
    assert (found.status, found.values) == ("not_measured", {})
    prose(found.evidence)


def over_floor(at_most, **more: Any) -> Criterion:
    facts: dict[str, Any] = {"name": "floor", "measure": "time_over_floor", "of": "one", "at_most": at_most}
    return Criterion(**(facts | more))


def test_a_time_is_held_against_its_floor(prose):
    cell = ok_cell("one", 10.0)
    floor = cell.plan.floor_microseconds
    met = outcome(over_floor(11 / floor), cell)
    assert met.status == "met"
    assert met.values["mega"].median == pytest.approx(10 / floor)
    prose(met.evidence)
    assert outcome(over_floor(10.05 / floor), cell).status == "inconclusive"  # by less than the noise
    assert outcome(over_floor(9 / floor), cell).status == "missed"
    assert outcome(over_floor(9 / floor), cell, floor=1.2).status == "inconclusive"
    assert outcome(over_floor(11 / floor), cell, floor=None).status == "inconclusive"


def test_a_time_is_held_against_microseconds(prose):
    asked = over_floor(11.0, measure="time")
    met = outcome(asked, ok_cell("one", 10.0))
    assert (met.status, met.values["mega"].median) == ("met", 10.0)
    prose(met.evidence)
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


def test_a_time_is_held_against_another_regime(prose):
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
    prose(met.evidence)
    (alone,) = evaluate(result.model_copy(update={"noise": (noises["served"],)}), {})
    assert alone.status == "inconclusive", "both regimes need an A/A run"
    missing = cell.model_copy(update={"timings": cell.timings[1:]})
    (found,) = evaluate(result.model_copy(update={"cells": (missing,)}), {})
    assert found.status == "not_measured"
    prose(found.evidence)


def test_a_cell_without_a_floor_is_held_against_none(prose):
    bare = ok_cell("one", 10.0).model_copy(update={"plan": None})
    found = outcome(over_floor(1.5), bare)
    assert (found.status, found.values) == ("not_measured", {})
    prose(found.evidence)
