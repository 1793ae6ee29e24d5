"""Tests of runs of a study that count bytes, launches and barriers.

The helpers are those of ``runs.py``. ``study`` declares ``toy_sum`` at the shapes ``first`` and ``second``, with the baseline
``eager`` (an unknown number of launches) and ``parallel``; ``run`` runs it. ``steps(count=...)`` replaces the counter of DRAM
bytes, and ``steps(counters=...)`` those of other measures. ``counting(asked)`` counts 2000 bytes for ``eager``, 1000 for
others, and appends to ``asked`` for each call its list of requests (shape, direction, variant, control). ``FEWER`` asks for the
bytes of ``eager`` over those of ``parallel`` at ``first``. ``prose`` compares a text with tests/snapshots/prose.txt, whose key
is the node id of the test. A test fails if it does not compare one of its entries, and ``tests/test_prose.py`` if the test or
the parameter of an entry is gone.

``quick`` is a fixture that makes runs fast in an empty folder, for every test of the file. ``FASTER`` asks that ``parallel`` is
faster. ``statuses`` returns the status of each variant at a shape.
"""

from __future__ import annotations

import pytest

from onelaunch.workbench.study import Criterion
from tests.workbench import toy  # noqa: F401 - registers toy_sum
from tests.workbench.runs import FASTER, FEWER, counting, quick, run, statuses, steps, study

__all__ = ["quick"]  # an automatic fixture: an empty working directory, short samples, no warm-up


FEW = Criterion(name="few launches", measure="launches", of="parallel", at="first", at_most=6)


def test_bytes_that_were_not_counted_yet_are_counted_on_resuming():
    """Ctrl-C was pressed when counting began, after the times of the first shape."""
    asked = []

    def stop(*_, **__):
        raise KeyboardInterrupt

    run(study(FEWER), steps=steps(count=stop))
    result = run(study(FEWER), resume=True, steps=counting(asked))
    assert len(asked) == 1
    assert result.outcomes[0].status == "met"


def test_bytes_are_counted_if_a_criterion_needs_them():
    asked = []
    result = run(study(FEWER, controls=("product",), directions=("forward", "forward_backward")), steps=counting(asked))
    (requests,) = asked
    assert {request[:2] for request in requests} == {("first", "forward")}  # where the criterion asks for bytes
    assert {request[2:] for request in requests} == {("eager", False), ("parallel", False), ("product", True)}
    times = [result.cell("first", request[2]).timings[0].microseconds.median for request in requests]
    assert times == sorted(times)  # the slowest comes last
    assert result.cell("first", "eager").traffic.source == "ncu"
    assert result.cell("second", "eager").traffic.source == "analytic"
    assert result.outcomes[0].status == "met"
    assert result.outcomes[0].values["first"].median == 2.0


def test_bytes_over_the_minimum_are_counted_only_for_the_named_variants():
    asked = []
    least = Criterion(name="least", measure="dram_bytes_over_least", of="parallel", at="first", at_most=1.6)
    result = run(study(least, baseline="eager"), steps=counting(asked))
    assert asked == [[("first", "forward", "parallel", False)]]
    assert result.outcomes[0].values["first"].median == pytest.approx(1000 / result.cell("first", "parallel").plan.least_bytes)


def test_loops_of_unknown_length_are_counted_only_if_a_criterion_names_them():
    asked = []
    # ``eager`` is such a loop. With the control in its place, the criterion does not name it.
    over_control = FEWER.model_copy(update={"over": "product"})
    run(study(over_control, controls=("product",)), steps=counting(asked))
    assert [request[2] for request in asked[0]] in (["product", "parallel"], ["parallel", "product"])
    asked.clear()
    run(study(over_control, controls=("product",)), steps=counting(asked), count="all", force=True)
    assert {request[2] for request in asked[0]} == {"product", "parallel", "eager"}


def test_counting_can_be_enabled_for_all_or_disabled():
    asked = []
    run(study(FEWER), steps=counting(asked), count=False)
    assert asked == []
    run(study(), steps=counting(asked), count="all", force=True)
    assert len(asked) == 2  # once for each shape


def test_failing_counters_leave_computed_bytes_and_a_note(prose):
    result = run(study(FEWER), steps=counting([], fail=True))
    assert result.cell("first", "eager").traffic.source == "analytic"
    prose([note for note in result.notes if "RuntimeError: no counters here" in note])
    assert result.outcomes[0].status == "not_measured"


def test_launches_are_counted_for_the_variants_of_a_criterion():
    asked = []

    def launches(operation, requests, *, device):
        asked.extend((request.case.name, request.direction, request.variant) for request in requests)
        return [5 for _ in requests]

    result = run(study(FEW, directions=("forward", "forward_backward")), steps=steps(counters={"launches": launches}))
    assert asked == [("first", "forward", "parallel")]
    assert result.cell("first", "parallel").launches == 5
    assert result.cell("first", "eager").launches is None
    assert result.cell("first", "parallel").timings
    assert result.outcomes[0].status == "met"
    asked.clear()
    run(study(FEW), steps=steps(counters={"launches": launches}), count=False, force=True)
    assert asked == []


def test_barriers_are_counted_if_a_criterion_needs_them():
    asked = []

    def barriers(operation, requests, *, device):
        asked.extend((request.case.name, request.variant) for request in requests)
        return [3 for _ in requests]

    criterion = Criterion(name="barriers", measure="barriers", of="parallel", at="first", equals=3)
    result = run(study(criterion), steps=steps(counters={"barriers": barriers}))
    assert asked == [("first", "parallel")]
    cell = result.cell("first", "parallel")
    assert (cell.barriers, cell.launches, result.outcomes[0].status) == (3, None, "met")
    assert result.cell("second", "parallel").barriers is None
    unasked = result.cell("first", "eager").model_dump()
    assert "barriers" not in unasked, "results without the count are stored unchanged"


def test_launches_that_cannot_be_counted_leave_a_note(prose):
    result = run(study(FEW))
    assert result.outcomes[0].status == "not_measured"
    prose([note for note in result.notes if "parallel" in note])


def test_ctrl_c_while_counting_keeps_the_times():
    def count(*_, **__):
        raise KeyboardInterrupt

    result = run(study(FEWER, FASTER), steps=steps(count=count))
    assert result.interrupted
    assert result.cell("first", "parallel").status == "ok"
    assert result.cell("first", "parallel").timing("cold") is not None
    assert set(statuses(result, "second").values()) == {"interrupted"}
