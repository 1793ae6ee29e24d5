"""Tests of runs whose shapes several devices share, each with a supervised child process of its own.

On a CPU there is one device, so ``side_by_side`` lets two processes share it. The helpers are those of ``runs.py``: ``study``
declares ``toy_sum`` at the shapes ``first`` and ``second`` with the variants ``eager`` and ``parallel``. ``quick`` is a fixture
that makes runs fast in an empty folder, for every test of the file, and ``steps`` replaces functions that use the device.
``toy_case`` returns a small case of ``toy_sum``. ``at_count`` of ``rogues_timing.py`` makes a variant that
acts in a chosen call.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from pathlib import Path

import pytest

from onelaunch.errors import ArgumentError, ResultMismatch
from onelaunch.operation import Probe
from onelaunch.workbench import run as module
from onelaunch.workbench.measure import timing
from onelaunch.workbench.merging import merged, refuse_other_devices
from onelaunch.workbench.options import Part
from onelaunch.workbench.result import ProbeReport, Result
from onelaunch.workbench.run import partial_path, resolve_all
from onelaunch.workbench.running import Run
from tests.workbench.rogues_timing import at_count, registered
from tests.workbench.runs import FASTER, interrupted_at, quick, run, statuses, steps, study
from tests.workbench.toy import toy_case, toy_sum

__all__ = ["quick"]  # an automatic fixture: an empty working directory, short samples, no warm-up

if sys.platform != "linux":
    pytest.skip("the children of these tests must be forked, to know their variants", allow_module_level=True)

PATH = Path("r.json")
"""File of results, in the empty folder of each test."""


@pytest.fixture
def side_by_side(monkeypatch):
    """Let two processes share the shapes of each run."""
    monkeypatch.setattr(module, "resolve_all", lambda device: (device, device))


def supervised(declared, **more):
    """Run a study in supervised children, and return its result."""
    return run(declared, **({"in_process": False, "call_limit": 60.0, "save_to": PATH} | more))


def both_at_once():
    """Return steps with which no process measures before both do, so that neither takes over the shape of the other."""
    begun = multiprocessing.get_context("fork").Barrier(2)
    first = []

    def measure(*args, **more):
        if not first:
            first.append(begun.wait(60))
        return timing.measure(*args, **more)

    return steps(measure=measure)


def test_two_processes_measure_what_one_does(side_by_side):
    told = []
    declared = study(FASTER, directions=("forward", "forward_backward"))
    result = supervised(declared, on_progress=told.append, steps=both_at_once())
    assert not result.interrupted
    assert result.decision is not None
    both = [("first", "forward"), ("first", "forward_backward"), ("second", "forward"), ("second", "forward_backward")]
    assert list(dict.fromkeys((cell.shape, cell.direction) for cell in result.cells)) == both
    assert all(cell.status == "ok" and len(cell.timing("cold").rounds) == 3 for cell in result.cells)
    assert {(noise.shape, noise.direction) for noise in result.noise} == set(both)
    assert sum("side by side on cpu, cpu," in note for note in result.notes) == 1
    assert Result.load(PATH) == result
    assert not partial_path(PATH).exists()
    assert max(step.cases for step in told) == 4
    assert max(step.cases_done for step in told) >= 2
    assert 0 < result.spent.device_seconds < 2 * result.spent.wall_seconds


def test_a_variant_that_ends_one_process_gets_a_status_and_all_goes_on(side_by_side):
    with registered(rogue=at_count(1, lambda: os._exit(3))):
        result = supervised(study(FASTER, variants=("eager", "rogue", "parallel")))
    assert not result.interrupted
    for shape in ("first", "second"):  # each process counts the calls of its own variant
        assert statuses(result, shape) == {"eager": "ok", "rogue": "crashed", "parallel": "ok"}


def test_an_interrupted_run_keeps_both_parts_and_is_resumed_by_one_process(side_by_side, monkeypatch):
    declared = study(
        FASTER, shapes=tuple(study().shape("first").model_copy(update={"name": name}) for name in ("first", "b", "second"))
    )
    stopped = supervised(declared, steps=interrupted_at("begin"))  # first and second are of one process, b is of the other
    assert stopped.interrupted
    assert statuses(stopped) == {"eager": "ok", "parallel": "ok"}
    assert set(statuses(stopped, "second").values()) == {"interrupted"}
    monkeypatch.setattr(module, "resolve_all", resolve_all)
    spent = stopped.spent.device_seconds
    result = run(declared, save_to=PATH, resume=True)
    assert not result.interrupted
    assert result.cell("first", "eager") == stopped.cell("first", "eager")
    assert result.spent.device_seconds > spent


def test_each_shape_is_of_one_part():
    shapes = list(range(7))
    parts = [Part(index, 3).of(shapes) for index in range(3)]
    assert sorted(shape for part in parts for shape in part) == shapes
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_a_part_that_is_done_takes_over_what_others_have_not_begun(tmp_path):
    shapes = list("abcdefg")
    first, second = (Part(index, 2, tmp_path).claimed(shapes) for index in range(2))
    assert [next(first), next(second), next(second), next(second)] == ["a", "b", "d", "f"]
    assert next(second) == "g", "the last one of the other part"
    assert Part(0, 2, tmp_path).left(shapes) == ["a", "c", "e"]
    assert list(second) == ["e", "c"]
    assert not list(first)
    again = Part(1, 2, tmp_path)
    assert list(again.claimed(shapes)) == ["b", "c", "d", "e", "f", "g"], "a process that is started again goes on with its own"
    assert again.left(shapes) == ["b", "c", "d", "e", "f", "g"]


def test_a_slow_process_leaves_its_shapes_to_the_other(side_by_side, monkeypatch):
    """Each shape is measured once, most of them by the process that does not wait at its first one."""
    toy = study().shape("first")
    names = tuple("abcdefgh")
    declared = study(FASTER.model_copy(update={"at": "a"}), shapes=tuple(toy.model_copy(update={"name": name}) for name in names))
    begun = multiprocessing.get_context("fork").Array("i", 2 * len(names))

    def measure(self, shape, direction):
        begun[self.part.index * len(names) + names.index(shape.name)] += 1
        if shape.name == "a":
            deadline = time.monotonic() + 30
            while sum(begun) < len(names) and time.monotonic() < deadline:
                time.sleep(0.01)
        return before(self, shape, direction)

    before = Run.measure
    monkeypatch.setattr(Run, "measure", measure)
    result = supervised(declared)
    assert not result.interrupted
    assert list(begun)[: len(names)] == [1] + [0] * 7
    assert list(begun)[len(names) :] == [0] + [1] * 7


def test_each_variant_is_judged_on_probes_by_one_process(side_by_side, monkeypatch):
    """The first shape is of the first process, and so is the first variant; the second variant is of the other process."""
    monkeypatch.setattr(toy_sum, "listed_probes", lambda: (Probe(toy_case(T=1, name="one step")),))

    def probe(judge, operation, name, device, directions):
        return ProbeReport(passed=os.getpid())

    result = supervised(study(FASTER, variants=("eager", "parallel", "auto")), steps=steps(probe=probe))
    judges = {label: report.passed for label, report in result.probes.items()}
    assert set(judges) == {"eager", "parallel"}
    assert judges["eager"] != judges["parallel"]


@pytest.mark.parametrize("order", [1, -1])
def test_the_report_in_more_directions_is_that_of_the_run(order):
    result = run(study(FASTER), save_to=PATH)
    quick_run, judged = ProbeReport(passed=1, directions=("forward",)), ProbeReport(passed=2)
    parts = [result.model_copy(update={"probes": {"eager": each}}) for each in (quick_run, judged)]
    assert merged(parts[::order]).probes == {"eager": judged}


def test_higher_peaks_of_one_part_become_the_bounds_of_all():
    result = run(study(FASTER), save_to=PATH)
    quicker = result.ceilings.model_copy(update={"measured_at": "2027-01-01T00:00:00+00:00", "launch_seconds": 5e-7})
    plans = {
        cell.shape: cell.plan.model_copy(update={"floor_microseconds": cell.plan.floor_microseconds / 2}) for cell in result.cells
    }

    def part(shape, ceilings, planned):
        cells = [
            cell.model_copy(update={"plan": planned(cell)})
            if cell.shape == shape
            else cell.model_copy(
                update={"plan": planned(cell), "status": "interrupted", "timings": (), "verdict": None, "traffic": None}
            )
            for cell in result.cells
        ]
        return result.model_copy(update={"ceilings": ceilings, "cells": tuple(cells), "interrupted": True})

    found = merged(
        [part("first", result.ceilings, lambda cell: cell.plan), part("second", quicker, lambda cell: plans[cell.shape])]
    )
    assert found.ceilings == quicker
    assert [cell.plan for cell in found.cells] == [plans[cell.shape] for cell in found.cells]
    assert [cell.timings for cell in found.cells] == [cell.timings for cell in result.cells]
    assert not found.interrupted


def test_devices_that_differ_are_refused(prose):
    result = run(study(FASTER), save_to=PATH)
    refuse_other_devices(result, result)
    other = result.model_copy(update={"provenance": result.provenance.model_copy(update={"device": "another", "driver": "1"})})
    here = result.model_copy(update={"provenance": result.provenance.model_copy(update={"device": "one", "driver": "2"})})
    with pytest.raises(ResultMismatch) as caught:
        refuse_other_devices(here, other)
    prose([str(caught.value)])


def test_a_device_that_is_named_twice_is_refused(prose):
    with pytest.raises(ArgumentError) as caught:
        resolve_all("cpu,cpu")
    prose([str(caught.value)])


def test_several_devices_in_one_process_are_refused(side_by_side, prose):
    with pytest.raises(ArgumentError) as caught:
        run(study(FASTER))
    prose([str(caught.value)])
