"""Tests of criteria about a single variant: bytes relative to the minimum, counts, and times.

Measurements are made up by ``ladder.py``: ``ok_cell(variant, microseconds)`` is a correct one at the shape ``mega``, where any
implementation moves at least 4 MB in at least 4 us. ``outcome`` of ``test_criteria.py`` judges one criterion by measurements
(``floor``: their A/A noise floor, ``None`` without an A/A run). ``prose`` compares the evidence with tests/snapshots/prose.txt,
whose key is the node id of the test. A test fails if it does not compare one of its entries, and ``tests/test_prose.py`` if the
test or the parameter of an entry is gone.

``study`` declares a study of all variants, with ``three`` as the baseline. ``measured`` makes up a result of measurements.
"""

from __future__ import annotations

from typing import Any

import pytest

from onelaunch.workbench.decide.criteria import evaluate
from onelaunch.workbench.study import Criterion
from tests.workbench.ladder import measured, ok_cell, study
from tests.workbench.test_criteria import outcome, ratio


def least(at_most, **more: Any) -> Criterion:
    """Return the criterion on the counted bytes of ``one`` over the fewest bytes of any implementation."""
    facts: dict[str, Any] = {"name": "least", "measure": "dram_bytes_over_least", "of": "one", "at_most": at_most}
    return Criterion(**(facts | more))


def test_counted_bytes_are_compared_with_the_minimum(prose):
    met = outcome(least(1.6), ok_cell("one", 1.0, counted=6e6))
    assert met.status == "met"
    prose(met.evidence)
    assert outcome(least(1.4), ok_cell("one", 1.0, counted=6e6)).status == "missed"


def test_computed_bytes_are_not_a_count(prose):
    found = outcome(least(1.6, of="two"), ok_cell("two", 1.0))
    assert (found.status, found.values) == ("not_measured", {})
    prose(found.evidence)


def launched(at_most, **more: Any) -> Criterion:
    """Return the criterion on the counted launches of one call of ``one``."""
    facts: dict[str, Any] = {"name": "launches", "measure": "launches", "of": "one", "at_most": at_most}
    return Criterion(**(facts | more))


def test_counted_launches_are_compared_with_their_bound(prose):
    met = outcome(launched(6), ok_cell("one", 1.0, launches=6), floor=None)
    assert met.status == "met"
    prose(met.evidence)
    missed = outcome(launched(6), ok_cell("one", 1.0, launches=7))
    assert (missed.status, missed.values["mega"].median) == ("missed", 7)


@pytest.mark.parametrize(("asked", "found", "status"), [(6, 6, "met"), (6, 5, "missed"), (6, 7, "missed"), (0, 0, "met")])
def test_a_count_may_have_an_exact_bound(asked, found, status, prose):
    launches = outcome(launched(None, equals=asked), ok_cell("one", 1.0, launches=found))
    barriers = outcome(launched(None, measure="barriers", equals=asked), ok_cell("one", 1.0, barriers=found))
    assert launches.status == barriers.status == status
    prose(barriers.evidence)
    assert barriers.values["mega"].median == found
    assert outcome(launched(None, measure="barriers", equals=asked), ok_cell("one", 1.0, launches=6)).status == "not_measured"


def test_declared_launches_are_not_a_count(prose):
    found = outcome(launched(6), ok_cell("one", 1.0))  # ``one`` declares one launch
    assert (found.status, found.values) == ("not_measured", {})
    prose(found.evidence)


def over_floor(at_most, **more: Any) -> Criterion:
    """Return the criterion on the time of ``one`` over its roofline bound."""
    facts: dict[str, Any] = {"name": "floor", "measure": "time_over_floor", "of": "one", "at_most": at_most}
    return Criterion(**(facts | more))


def test_a_time_is_compared_with_its_roofline_bound(prose):
    cell = ok_cell("one", 10.0)
    floor = cell.plan.floor_microseconds
    met = outcome(over_floor(11 / floor), cell)
    assert met.status == "met"
    assert met.values["mega"].median == pytest.approx(10 / floor)
    prose(met.evidence)
    assert outcome(over_floor(10.05 / floor), cell).status == "inconclusive"  # below the bound by less than the noise
    assert outcome(over_floor(9 / floor), cell).status == "missed"
    assert outcome(over_floor(9 / floor), cell, floor=1.2).status == "inconclusive"
    assert outcome(over_floor(11 / floor), cell, floor=None).status == "inconclusive"


def test_a_time_is_compared_with_microseconds(prose):
    asked = over_floor(11.0, measure="time")
    met = outcome(asked, ok_cell("one", 10.0))
    assert (met.status, met.values["mega"].median) == ("met", 10.0)
    prose(met.evidence)
    assert outcome(asked, ok_cell("one", 10.95)).status == "inconclusive"
    assert outcome(asked, ok_cell("one", 12.0)).status == "missed"
    assert outcome(asked, ok_cell("one", 12.0), floor=1.2).status == "inconclusive"
    assert outcome(asked, ok_cell("one", 12.0, spread=0.1)).status == "inconclusive"  # 10.8 to 13.2
    assert outcome(asked, ok_cell("one", 10.0).model_copy(update={"plan": None})).status == "met", "no roofline bound is needed"


def in_regimes(cell, **times):
    """Return the measurement with a time in microseconds for each named regime, in place of its own."""
    one = cell.timings[0]
    return cell.model_copy(update={"timings": tuple(
        one.model_copy(update={
            "regime": regime, "microseconds": one.microseconds.model_copy(update={"median": time, "low": time, "high": time}),
            "rounds": (time,) * 20,
        })
        for regime, time in times.items()
    )})  # fmt: skip


def test_a_time_is_compared_with_that_of_another_regime(prose):
    """``running`` is the time of one of many consecutive steps on the device, ``served`` that through the Python loop."""
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


def test_a_measurement_without_a_roofline_bound_is_not_judged(prose):
    bare = ok_cell("one", 10.0).model_copy(update={"plan": None})
    found = outcome(over_floor(1.5), bare)
    assert (found.status, found.values) == ("not_measured", {})
    prose(found.evidence)
