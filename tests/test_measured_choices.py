"""Tests that ``auto`` takes no variant that a committed result shows to be slower than another variant of ours.

``results/DEVICE/STUDY.json`` holds the times of a study on a device. For each of its cases, in each direction, the dispatcher
is asked as on that device, and the cold time of the variant that it takes is compared with that of our fastest correct variant.
Times count as equal up to the dispatcher's own ratio (``choice.TIE``), or up to the smallest difference that the study claims at
the case (its A/A noise) where that is larger. Variants of other projects are not compared, because ``auto`` never takes them.
Nor are variants that cannot run the call any more. Ablations (``by_name_only``) are compared: a faster one should not be one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from onelaunch import dispatch
from onelaunch.device.architectures import HOPPER_SMS
from onelaunch.device.hardware import Device
from onelaunch.dispatch import choice, measured
from onelaunch.operation import AUTO, Direction
from onelaunch.workbench.result import Cell, Result
from onelaunch.workbench.study import Shape
from tests.devices import forget, pretend

pytest.importorskip("triton", reason="without Triton, kernels refuse every call")
pytest.importorskip("numpy", reason="without NumPy, the variants of decode_step by the megakernel refuse every call")

COMMITTED = [
    path
    for path in sorted((Path(__file__).parents[1] / "results").glob("nvidia-*/*.json"))
    if "cold" in json.loads(path.read_text())["study"].get("regimes", ("cold",))
]
"""Results of studies that time calls over cold caches, which decide the choice."""


class Comparison(NamedTuple):
    """Variant that ``auto`` takes for a case of a result, and our fastest one there."""

    case: str
    taken: str
    fastest: str
    ratio: float
    """Time of the variant that is taken over that of the fastest."""
    limit: float
    """Largest ratio at which both count as equally fast."""

    @property
    def slower(self) -> bool:
        return self.ratio > self.limit


@pytest.fixture
def compared(monkeypatch):
    """Return a function that yields a :class:`Comparison` for each case of a stored result that has a time of the choice."""

    def compare(path: Path) -> list[Comparison]:
        result = Result.load(path)
        query_device = pretend(device_of(result), monkeypatch)
        return list(comparisons(result, query_device))

    yield compare
    monkeypatch.undo()
    forget()


def device_of(result: Result) -> Device:
    """Return the device of a result. Its SMs and memory are those that the package knows for its table, else an H100's."""
    facts = result.provenance
    processors, memory = measured.HOPPER_TABLES.get(facts.slug, (HOPPER_SMS, 80 << 30))
    return Device("cuda", facts.device, facts.architecture, processors, 50 << 20, memory)


def comparisons(result: Result, device: str) -> Iterator[Comparison]:
    study = result.study
    for shape in study.shapes:
        operation = study.operation_at(shape)
        for direction in study.directions_at(shape):
            query = operation.query(study.case(shape), device, grad=direction == "forward_backward")
            able = choice.able(operation, query)
            times = {
                name: time
                for name, time in times_of(result, shape, direction).items()
                if name in able and operation.variants[name].is_own and operation.variants[name].capabilities.requires is None
            }
            if times and (taken := dispatch.choose(query).name) in times:  # without a variant that can run, there is no time
                fastest = min(times, key=lambda name: times[name])
                limit = max(choice.TIE, noise_of(result, shape, direction))
                case = f"{shape.name}, {direction}"
                yield Comparison(case, taken, fastest, times[taken] / times[fastest], limit)


def times_of(result: Result, shape: Shape, direction: Direction) -> dict[str, float]:
    """Return the cold medians of the correct variants at a case in microseconds, rounded as a table stores them.

    The time of ``auto`` is that of the variant that it chose then, unless that one was timed by its own name too.
    """

    def usable(cell: Cell) -> bool:
        correct = cell.status == "ok" and cell.verdict is not None and cell.verdict.ok
        return correct and not cell.control and (cell.shape, cell.direction) == (shape.name, direction)

    cells = sorted(filter(usable, result.cells), key=lambda cell: cell.variant != AUTO)
    timings = {cell.chosen if cell.variant == AUTO else cell.variant: cell.timing("cold") for cell in cells}
    return {name: round(timing.microseconds.median, 3) for name, timing in timings.items() if timing is not None}


def noise_of(result: Result, shape: Shape, direction: Direction) -> float:
    """Return the smallest ratio that the result claims as a difference at a case, from its A/A run."""
    here = (shape.name, direction, "cold")
    return max((each.floor for each in result.noise if (each.shape, each.direction, each.regime) == here), default=1.0)


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_auto_takes_nothing_that_a_result_shows_to_be_slower(path, compared):
    found = compared(path)
    assert found, "no case has a time of the variant that auto takes"
    assert [each for each in found if each.slower] == []


def test_a_result_in_which_another_variant_is_faster_is_found(compared, tmp_path):
    """The time of ``norm_gate`` is multiplied by 1.1 at one case, at which ``auto`` takes it and ``compiled`` took as long."""
    path = next(path for path in COMMITTED if path.stem == "058-output-chain")
    stored = json.loads(path.read_text())
    mine, theirs = (
        next(
            each
            for each in stored["cells"]
            if (each["shape"], each["direction"], each["variant"]) == ("4x4096x2048", "forward", variant)
        )
        for variant in ("norm_gate", "compiled")
    )
    for timing in mine["timings"]:
        timing["rounds"] = [1.1 * each for each in timing["rounds"]]
        timing["microseconds"] |= {name: 1.1 * timing["microseconds"][name] for name in ("median", "low", "high")}
    (tmp_path / path.name).write_text(json.dumps(stored))
    (found,) = (each for each in compared(tmp_path / path.name) if each.slower)
    assert (found.case, found.taken, found.fastest) == ("4x4096x2048, forward", "norm_gate", "compiled")
    slow, fast = (
        next(each for each in cell["timings"] if each["regime"] == "cold")["microseconds"]["median"] for cell in (mine, theirs)
    )
    assert found.ratio == pytest.approx(slow / fast, abs=0.002)
