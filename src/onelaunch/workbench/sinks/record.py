"""Content of a result that is sent to sinks, as plain names, numbers and strings.

Names of numbers are paths, such as ``time_us/forward/cold/target/semi_fused``, by which the pages of sinks group their charts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from onelaunch.workbench.decide.predictions import compared_predictions
from onelaunch.workbench.report.markdown import render
from onelaunch.workbench.report.summary import main_regime, over_roofline, reference, speedup
from onelaunch.workbench.result import Cell, Result


@dataclass(frozen=True)
class Record:
    """Content of one result."""

    study: str
    """Name of the study."""
    run: str
    """Name of the run: the device and the end of the run, such as ``nvidia-h200 2026-11-26T15:20:00+00:00``."""
    question: str
    """Question of the study."""
    facts: dict[str, str]
    """Device, software, digest of the study, decision and so on, by name."""
    numbers: dict[str, float]
    """Finite numbers by their paths: medians of times, speeds, errors, counts, criteria, predictions, and the time spent."""
    series: dict[str, tuple[float, ...]]
    """Microseconds of each round by their paths, in the order of the rounds."""
    tags: tuple[str, ...]
    """Words to find the run by: decision, device, scale, and ``interrupted``."""
    report: str
    """Report in Markdown."""
    files: tuple[Path, ...] = ()
    """Files of the result and of its report."""
    interrupted: bool = False
    """True if the run ended early."""


def record_of(result: Result, files: tuple[Path, ...] = ()) -> Record:
    """Return the content of a result, with the files that hold it."""
    facts = result.provenance
    decision = result.decision.kind if result.decision else "not decided"
    tags = (decision, facts.slug, *([facts.scale] if facts.scale else []), *(["interrupted"] if result.interrupted else []))
    numbers = dict(_numbers(result))
    return Record(
        study=result.study.name,
        run=f"{facts.slug} {facts.date}",
        question=result.study.question,
        facts={
            "study": result.study.name,
            "operation": result.study.operation,
            "baseline": result.study.baseline,
            "study_digest": result.study_digest,
            "decision": decision,
            "device": facts.device,
            "architecture": facts.architecture,
            "driver": facts.driver,
            "commit": facts.commit,
            "date": facts.date,
            "scale": facts.scale,
            "rounds": str(facts.rounds),
            **{f"version.{name}": version for name, version in facts.versions.items()},
        },
        numbers={name: value for name, value in numbers.items() if math.isfinite(value)},
        series={
            path("rounds_us", cell.direction, timing.regime, cell.shape, cell.variant): timing.rounds
            for cell in result.cells
            if cell.measured
            for timing in cell.timings
        },
        tags=tags,
        report=render(result),
        files=files,
        interrupted=result.interrupted,
    )


def path(*parts: str) -> str:
    """Return the path of a number. A slash in a name would add a level, so it becomes a colon."""
    return "/".join(part.replace("/", ":") for part in parts)


def _numbers(result: Result) -> Iterator[tuple[str, float]]:
    """Yield all numbers of a result with their paths, those that are not finite included."""
    for outcome in result.outcomes:
        for name, value in outcome.values.items():
            yield path("criteria", outcome.criterion.name, name), value.median
    yield "criteria_met", float(sum(outcome.status == "met" for outcome in result.outcomes))
    yield "criteria_declared", float(len(result.outcomes))
    for index, found in enumerate(compared_predictions(result)):
        if found.ratio is not None:
            yield path("measured_over_predicted", f"{index} {found.prediction.measure}", found.shape), found.ratio
    if (spent := result.spent) is not None:
        yield "spent/wall_seconds", spent.wall_seconds
        yield "spent/device_seconds", spent.device_seconds
        if spent.cost is not None:
            yield "spent/cost", spent.cost
    for noise in result.noise:
        yield path("noise", noise.direction, noise.regime, noise.shape), noise.floor
    for cell in result.cells:
        if cell.measured:
            yield from _numbers_of(result, cell)


def _numbers_of(result: Result, cell: Cell) -> Iterator[tuple[str, float]]:
    """Yield the numbers of one measurement with their paths."""
    where = (cell.direction, cell.shape, cell.variant)
    for timing in cell.timings:
        yield path("time_us", cell.direction, timing.regime, cell.shape, cell.variant), timing.microseconds.median
    regime = main_regime(result)
    if (gain := speedup(cell, result.cell(cell.shape, reference(result), cell.direction), regime)) is not None:
        yield path("speedup", *where), gain.median
    if (distance := over_roofline(cell, regime)) is not None:
        yield path("time_over_bound", *where), distance
    if cell.verdict is not None and cell.verdict.components:
        yield path("error_over_allowed", *where), max(each.error / each.allowed for each in cell.verdict.components)
    if cell.traffic is not None and cell.traffic.source == "ncu":
        yield path("dram_bytes", *where), cell.traffic.total
    if cell.peak_bytes is not None:
        yield path("peak_bytes", *where), float(cell.peak_bytes)
    if cell.launches is not None:
        yield path("launches", *where), float(cell.launches)
