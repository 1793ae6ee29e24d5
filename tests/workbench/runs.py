"""Helpers shared by the tests of runs: a study of ``toy_sum`` at two tiny shapes, and steps of a run that tests can replace.

``toy_sum`` is registered by the import of ``tests/workbench/toy.py``, which is left to the test modules. Tests of findings, of
sources, of peers outside the gate and of supervised runs use the helpers too, and ``tests/cli/conftest.py`` calls
:func:`spare_children`.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest

from onelaunch.device.hardware import Ceilings
from onelaunch.operation.sources import distributions
from onelaunch.workbench import run as module
from onelaunch.workbench.measure import rotation, sampling, timing
from onelaunch.workbench.result import Traffic, provenance, sources
from onelaunch.workbench.run import Steps, run_study
from onelaunch.workbench.study import Criterion, Shape, Study

SLOW_LIGHT = Ceilings(1e12, {"float32": 1e13, "float16": 1e13}, 1e-6, "2026-11-20T12:00:00+00:00", "made up")
"""Made-up peaks (1 TB/s, 10 TFLOP/s, 1 us a launch), so high that no measured time is below its roofline bound."""

FASTER = Criterion(name="faster", measure="speedup", of="parallel", at="first", at_least=1.01)
"""Criterion that ``parallel`` is faster than the baseline ``eager``."""

FEWER = Criterion(name="fewer bytes", measure="dram_bytes_ratio", of="parallel", at="first", at_least=1.2)
"""Criterion that ``eager`` moves at least 1.2 times the DRAM bytes of ``parallel``. Counters are needed to judge it."""


def steps(**others: Any) -> Steps:
    """Return the steps of a run with made-up peaks, which are not measured again; ``others`` replaces further steps."""
    facts: dict[str, Any] = {"ceilings": lambda device: SLOW_LIGHT, "remeasure": lambda device, believed: believed}
    return Steps(**(facts | others))


def slow_light(device: str) -> Ceilings:
    """Return the made-up peaks. Unlike the steps of :func:`steps`, this function can be sent to another process."""
    del device
    return SLOW_LIGHT


def study(*criteria: Criterion, **more: Any) -> Study:
    """Return a small-scale study of ``toy_sum`` at the equal shapes ``first`` and ``second``; ``more`` replaces fields."""
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
    """Run a study on the CPU and return its result. It is saved below the working directory if ``more`` names no path."""
    facts: dict[str, Any] = {"device": "cpu", "steps": steps()}
    return run_study(declared, **(facts | more))


def statuses(result, shape="first", direction="forward"):
    """Return the status of each variant and control at a shape."""
    return {cell.variant: cell.status for cell in result.cells if (cell.shape, cell.direction) == (shape, direction)}


def interrupted_at(call, shape="second"):
    """Return steps with Ctrl-C when the shape begins (``call`` is "begin"), or within it, while its rounds are timed."""

    def measure(operation, case, *args, **more):
        if case.name != shape:
            return timing.measure(operation, case, *args, **more)
        if call == "begin":
            raise KeyboardInterrupt
        ticks = itertools.count()

        def progress(step, done, total):
            if step == "time" and next(ticks) == 2:  # the third report, after two of the three rounds
                raise KeyboardInterrupt

        return timing.measure(operation, case, *args, **(more | {"on_progress": progress}))

    return steps(measure=measure)


def counting(asked, *, fail=False):
    """Return steps whose counter of DRAM bytes counts 2000 bytes for ``eager`` and 1000 for all others, or raises.

    Args:
        asked: List to which each call of the counter appends the list of its requests: (shape, direction, variant, control).
        fail: Whether the counter raises.
    """

    def count(operation, requests, *, device):
        asked.append([(request.case.name, request.direction, request.variant, request.control) for request in requests])
        if fail:
            raise RuntimeError("no counters here")
        return [Traffic(source="ncu", read=2000.0 if request.variant == "eager" else 1000.0, written=0.0) for request in requests]

    return steps(count=count)


commit = functools.cache(provenance.commit)
"""Return the commit of the package, for which Git is started once per process."""


def spare_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do once in this process what each run of a study, or each forked child that measures it, would do for a second."""
    import torch._dynamo  # noqa: F401

    distributions()
    sources.package_digest()
    monkeypatch.setenv("ONELAUNCH_COMMIT", commit())


@pytest.fixture(autouse=True)
def quick(tmp_path, monkeypatch):
    """Work in an empty folder, with two input sets, short samples and no warm-up.

    A module that imports this fixture applies it to all of its tests.
    """
    spare_children(monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(timing.WARM_UP_SECONDS, "cpu", 0.0)
    monkeypatch.setattr(rotation, "CACHES", 0)  # the inputs are so tiny that thousands of sets would be rotated
    monkeypatch.setattr(sampling, "CPU_SAMPLE_SECONDS", 1e-4)
    monkeypatch.setattr(module, "TIME_CAP_SECONDS", {"small": 2.0, "full": 2.0})
