"""Helpers shared by the tests of runs: toy studies whose steps tests can replace."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from onelaunch.device.hardware import Ceilings
from onelaunch.workbench import run as module
from onelaunch.workbench.measure import sampling, timing
from onelaunch.workbench.result import Traffic
from onelaunch.workbench.run import Steps, run_study
from onelaunch.workbench.study import Criterion, Shape, Study

SLOW_LIGHT = Ceilings(1e12, {"float32": 1e13, "float16": 1e13}, 1e-6, "2026-11-20T12:00:00+00:00", "made up")


FASTER = Criterion(name="faster", measure="speedup", of="parallel", at="first", at_least=1.01)


FEWER = Criterion(name="fewer bytes", measure="dram_bytes_ratio", of="parallel", at="first", at_least=1.2)


def steps(**others: Any) -> Steps:
    facts: dict[str, Any] = {"ceilings": lambda device: SLOW_LIGHT, "remeasure": lambda device, believed: believed}
    return Steps(**(facts | others))


def study(*criteria: Criterion, **more: Any) -> Study:
    shapes = tuple(
        Shape(name=name, dtype="float32", scale="small", sizes={"B": 2, "T": 24, "V": 8}) for name in ("first", "second")
    )
    facts: dict[str, Any] = {
        "name": "toy-study",
        "question": "Does it run?",
        "operation": "toy_sum",
        "baseline": "eager",
        "variants": ("eager", "parallel"),
        "shapes": shapes,
        "rounds": 3,
    }
    return Study(**(facts | more), criteria=criteria)


def run(declared: Study, **more: Any) -> Any:
    facts: dict[str, Any] = {"device": "cpu", "steps": steps()}
    return run_study(declared, **(facts | more))


def statuses(result, shape="first", direction="forward"):
    return {cell.variant: cell.status for cell in result.cells if (cell.shape, cell.direction) == (shape, direction)}


def interrupted_at(call, shape="second"):
    """Raise KeyboardInterrupt when a shape begins (``call`` "begin"), or within it, after its first measurement."""

    def measure(operation, case, *args, **more):
        if case.name != shape:
            return timing.measure(operation, case, *args, **more)
        if call == "begin":
            raise KeyboardInterrupt
        ticks = itertools.count()

        def progress(step, done, total):
            if step == "time" and next(ticks) == 2:
                raise KeyboardInterrupt

        return timing.measure(operation, case, *args, **(more | {"on_progress": progress}))

    return steps(measure=measure)


def counting(asked, *, fail=False):
    def count(operation, requests, *, device):
        asked.append([(request.case.name, request.direction, request.variant, request.control) for request in requests])
        if fail:
            raise RuntimeError("no counters here")
        return [Traffic(source="ncu", read=2000.0 if request.variant == "eager" else 1000.0, written=0.0) for request in requests]

    return steps(count=count)


@pytest.fixture(autouse=True)
def quick(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(timing.WARM_UP_SECONDS, "cpu", 0.0)
    monkeypatch.setattr(sampling, "CACHES", 0)  # the inputs are so tiny that 30 000 sets would be rotated
    monkeypatch.setattr(sampling, "CPU_SAMPLE_SECONDS", 1e-4)
    monkeypatch.setattr(module, "TIME_CAP_SECONDS", {"small": 2.0, "full": 2.0})
