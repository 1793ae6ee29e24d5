"""A study while it runs: what is planned, what was found so far, and the steps that verify, time and count what is left."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from onelaunch.device import hardware, peaks
from onelaunch.errors import OutputUnwritable, ResultMismatch
from onelaunch.operation import Case, Cost, Direction, Operation, find_operation
from onelaunch.workbench.decide.decision import concluded
from onelaunch.workbench.decide.measured import CountedMeasure, counted_measures
from onelaunch.workbench.measure.compiling import compile_ahead, places_to_compile
from onelaunch.workbench.measure.count import Request, analytic, count_all
from onelaunch.workbench.measure.timing import Interrupted, Measurements, below, measure
from onelaunch.workbench.result import Cell, Noise, Result, StoredCeilings, Traffic
from onelaunch.workbench.result.provenance import provenance
from onelaunch.workbench.study import Shape, Study, measures
from onelaunch.workbench.study.plan import PlannedCell, StudyPlan, plan_study
from onelaunch.workbench.verify import Judge
from onelaunch.workbench.verify.calls import status_of

QUICK_SECONDS = 3.0
"""Time cap of each shape in a quick run."""

ORACLE_BYTES = {"cuda": 24 << 30, "cpu": 1 << 30}
"""How much memory the oracle's answers may take while the variants of a shape are held against them."""


@dataclass(frozen=True)
class Progress:
    """Progress of a run."""

    shape: str
    direction: Direction
    step: str
    """``compile``, ``verify``, ``prepare``, ``time`` or ``count``."""
    done: int
    """Number of items of this step that are done at this shape and direction."""
    total: int
    place: int
    """Shapes and directions that are finished."""
    places: int


@dataclass(frozen=True)
class Steps:
    """The steps that touch the device; tests put others in their place."""

    ceilings: Callable[[str], hardware.Ceilings] = peaks.ceilings
    remeasure: Callable[[str, hardware.Ceilings], hardware.Ceilings] = peaks.remeasure
    measure: Callable[..., Measurements] = measure
    count: Callable[..., Sequence[Traffic]] = count_all
    counters: Mapping[str, Callable[..., Sequence[int | str]]] = field(default_factory=dict)
    """Functions that count in place of the measures' own, by the name of the measure."""
    compile: Callable[..., list[str]] = compile_ahead


@dataclass(frozen=True)
class Wanted:
    """Options of a run."""

    rounds: int
    time_cap: float
    """Seconds after which no new round of a shape and direction begins."""
    quick: bool = False
    """True if the study's first direction alone is measured."""
    count: bool | Literal["all"] = True
    """Switch for counting DRAM bytes, launches and barriers; see :func:`onelaunch.workbench.run.run_study`."""
    command: str = ""


@dataclass
class Run:
    """A study while it runs: what is planned, and what was found so far."""

    plan: StudyPlan
    device: torch.device
    ceilings: StoredCeilings
    wanted: Wanted
    steps: Steps
    on_progress: Callable[[Progress], None]
    cells: dict[tuple[str, Direction, str], Cell] = field(default_factory=dict)
    noise: list[Noise] = field(default_factory=list)
    clocks: list[dict[str, float]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    stopped: bool = False
    finished: list[tuple[Shape, Direction]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.judge = Judge(ORACLE_BYTES.get(self.device.type, 1 << 30))
        self.counted = _places_to_count(self.study, self.wanted.count)
        """Shapes and directions at which DRAM bytes are counted."""
        wanted = counted_measures() if self.wanted.count else []
        self.counts = {measure.name: (measure, _places_of(self.study, (measure.name,))) for measure in wanted}
        """Counted measures, each with the shapes and directions at which a criterion asks for it."""
        if self.wanted.quick:
            self.plan = self.plan.in_first_direction()
            first = self.study.directions[0].replace("_", " and ")
            self.notes.append(
                f"No direction but {first} was measured, and each shape for {QUICK_SECONDS:g} s: a quick run was asked for."
            )

    @property
    def study(self) -> Study:
        return self.plan.study

    @property
    def operation(self) -> Operation[..., Any]:
        return find_operation(self.study.operation)

    @property
    def places(self) -> list[tuple[Shape, Direction]]:
        """Shapes and directions that are planned, in the order in which they run."""
        return list({(cell.shape.name, cell.direction): (cell.shape, cell.direction) for cell in self.plan.cells}.values())

    def go_on(self, earlier: Result, path: Path) -> None:
        """Take over the shapes and directions that an interrupted run finished.

        Raises:
            ResultMismatch: it is not the same study on the same device, or not with the same software or rounds.
        """
        if differences := _differences(earlier, self.result(interrupted=True)):
            said = "; ".join(differences)
            advice = "Restore what it was measured with, or pass {force} in place of {resume} to begin again."
            raise ResultMismatch(f"{path} cannot be resumed: {said}.", advice=advice)
        for place in self.places:
            name = place[0].name, place[1]
            cells = [cell for cell in earlier.cells if (cell.shape, cell.direction) == name]
            counted = name not in self.counted or any(cell.traffic and cell.traffic.source == "ncu" for cell in cells)
            for what, (_, places) in self.counts.items():
                counted = counted and (name not in places or any(cell.count(what) is not None for cell in cells))
            if counted and all(cell.status != "interrupted" for cell in cells):
                self.finished.append(place)
                self.cells |= {(cell.shape, cell.direction, cell.variant): cell for cell in cells}
        done = {(shape.name, direction) for shape, direction in self.finished}
        self.noise = [noise for noise in earlier.noise if (noise.shape, noise.direction) in done]
        if earlier.provenance.clocks and done:
            self.clocks.append(earlier.provenance.clocks)
        begun = f"{len(done)} of {len(self.places)} shapes and directions"
        self.notes = [*earlier.notes, f"{begun} were measured by a run that ended on {earlier.provenance.date}."]

    def measure_all(self, processes: int, kept: Path) -> None:
        """Measure what is not finished, and keep what is finished in a file; Ctrl-C ends it early."""
        try:
            if processes:
                self.compile_ahead(processes)
            for place in self.places:
                if place not in self.finished:
                    self.measure(*place)
                    self.keep(kept)
        except KeyboardInterrupt:
            self.stopped = True

    def compile_ahead(self, processes: int) -> None:
        """Let other processes compile what is not finished."""
        done = {(shape.name, direction) for shape, direction in self.finished}
        cells = [cell for cell in self.plan.cells if (cell.shape.name, cell.direction) not in done]
        tell = lambda place, count, total: self._tell(place.shape, place.direction, "compile", count, total)  # noqa: E731
        places = places_to_compile(self.study, cells, processes)
        self.notes += self.steps.compile(self.study, places, str(self.device), processes, tell)

    def measure(self, shape: Shape, direction: Direction) -> None:
        """Verify, time and count everything at one shape in one direction."""
        here = [cell for cell in self.plan.cells if (cell.shape.name, cell.direction) == (shape.name, direction)]
        for planned in here:
            if planned.status is not None:
                self._keep(planned, status=planned.status, reason=planned.reason)
        able = [planned for planned in here if planned.status is None]
        if able:
            self._measure(self.study.case(shape), direction, able)
        self.finished.append((shape, direction))
        self.judge = Judge(ORACLE_BYTES.get(self.device.type, 1 << 30))  # the next shape has answers of its own
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def keep(self, path: Path) -> None:
        """Save what is finished. Where that fails the run goes on, and a note says so: the end may find room again."""
        try:
            self.result(interrupted=True).save(path, force=True)
        except OutputUnwritable as failure:
            self.notes.append(f"Finished shapes could not be saved meanwhile: {failure}")

    def result(self, *, interrupted: bool) -> Result:
        """Everything found so far, judged; what is missing is interrupted."""
        cells = [self.cells.get(_key(planned)) or _interrupted(planned) for planned in self.plan.cells]
        found = Result(
            study=self.study,
            study_digest=self.study.digest(),
            provenance=provenance(
                self.study,
                self.device,
                scale=self.plan.scale,
                rounds=self.wanted.rounds,
                clocks=self.clocks,
                command=self.wanted.command,
            ),
            ceilings=self.ceilings,
            cells=tuple(cells),
            noise=tuple(self.noise),
            notes=tuple(dict.fromkeys(self.notes)),
            interrupted=interrupted,
        )
        return concluded(found)

    def _measure(self, case: Case, direction: Direction, able: Sequence[PlannedCell]) -> None:
        variants = [planned.variant for planned in able if not planned.control]
        try:
            found = self.steps.measure(
                self.operation,
                case,
                direction,
                variants=variants,
                controls=[planned.variant for planned in able if planned.control],
                baseline=self._baselines(variants),
                regimes=self.study.regimes,
                rounds=self.wanted.rounds,
                device=self.device,
                floors=self._bounds(able),
                bounds_again=lambda: self._bounds_again(able),
                judge=self.judge,
                time_cap_seconds=self.wanted.time_cap,
                on_progress=lambda step, done, total: self._tell(case.name, direction, step, done, total),
            )
        except Interrupted as stop:
            self._take(able, stop.measurements, {})
            raise
        except Exception as error:  # noqa: BLE001 - such as memory for the inputs alone: the other shapes go on
            status, reason = status_of(error)
            for planned in able:
                self._keep(planned, status=status, reason=reason)
            return
        self._take(able, found, {})  # kept before counting, which may be interrupted
        if (case.name, direction) in self.counted:
            self._take(able, found, self._count(case, direction, able))
        for what, places in self.counts.values():
            if (case.name, direction) in places:
                self._count_calls(what, case, direction, able)

    def _bounds(self, able: Sequence[PlannedCell]) -> dict[str, float]:
        """Return the roofline bound of each variant and control, in microseconds, by the peaks as they are known now."""
        return {planned.variant: self._now(planned).plan.floor_microseconds for planned in able}

    def _bounds_again(self, able: Sequence[PlannedCell]) -> dict[str, float]:
        """Measure the peaks again, as something ran faster than they allow, and return the bounds that follow.

        Peaks that come out higher take the place of those of this result, at shapes that are finished too.
        """
        believed = hardware.Ceilings(**self.ceilings.model_dump())
        raised = self.steps.remeasure(str(self.device), believed)
        if raised != believed:
            self.ceilings = StoredCeilings(**asdict(raised))
            fresh = plan_study(self.study, self.ceilings, str(self.device), self.plan.scale)
            self.plan = fresh.in_first_direction() if self.wanted.quick else fresh
            for planned in self.plan.cells:
                if (cell := self.cells.get(_key(planned))) is not None:
                    self.cells[_key(planned)] = _bounded(cell, planned)
            self.notes.append(
                f"A time at {able[0].shape.name} was below its roofline bound, so the device's peaks were measured again. They "
                "came out higher: other work ran when they were measured first. All bounds here rest on the higher ones."
            )
        return self._bounds(able)

    def _now(self, planned: PlannedCell) -> PlannedCell:
        """Return a planned cell as the peaks that are known now bound it."""
        return next(each for each in self.plan.cells if _key(each) == _key(planned))

    def _baselines(self, variants: Sequence[str]) -> tuple[str, ...]:
        """Return the variants whose A/A run may give the noise: the study's baseline, or what a user would get here."""
        preferred = (self.study.baseline, *self.operation.defaults.get(self.device.type, ()), *variants)
        return tuple(name for name in dict.fromkeys(preferred) if name in variants)

    def _count(self, case: Case, direction: Direction, able: Sequence[PlannedCell]) -> Mapping[str, Traffic]:
        """Bytes of what is correct; the slowest last, since a profiler that gives up has then seen the rest."""
        named = _named_for(self.study, _measures_of_bytes())
        ready = [
            planned
            for planned in able
            if self.cells[_key(planned)].status == "ok"
            and (self.wanted.count == "all" or planned.plan.launches is not None or planned.variant in named)
        ]
        ready.sort(key=self._slowness)
        self._tell(case.name, direction, "count", 0, len(ready))
        requests = [Request(case, planned.variant, direction, planned.control) for planned in ready]
        try:
            found = self.steps.count(self.operation, requests, device=self.device)
        except Exception as error:  # noqa: BLE001 - whatever stops the profiler: the arithmetic stays, and the note says why
            self.notes.append(f"No DRAM bytes were counted at {case.name}: {status_of(error)[1]}")
            return {}
        return {planned.variant: traffic for planned, traffic in zip(ready, found, strict=True)}

    def _count_calls(self, what: CountedMeasure, case: Case, direction: Direction, able: Sequence[PlannedCell]) -> None:
        """Count one call of each correct variant that a criterion on the measure names; a note says why where that fails."""
        named = _named_for(self.study, (what.name,))
        count = self.steps.counters.get(what.name, what.count)
        ready = [planned for planned in able if planned.variant in named and self.cells[_key(planned)].status == "ok"]
        requests = [Request(case, planned.variant, direction, planned.control) for planned in ready]
        for planned, found in zip(ready, count(self.operation, requests, device=self.device), strict=True):
            if isinstance(found, int):
                self.cells[_key(planned)] = self.cells[_key(planned)].counted(what.name, found)
            else:
                self.notes.append(f"{what.name.capitalize()} of {planned.variant} at {case.name} were not counted: {found}")

    def _slowness(self, planned: PlannedCell) -> float:
        times = self.cells[_key(planned)].timings
        return times[0].microseconds.median if times else 0.0

    def _take(self, able: Sequence[PlannedCell], found: Measurements, traffic: Mapping[str, Traffic]) -> None:
        """Turn measurements into cells."""
        for planned in able:
            subject = found.subjects[planned.variant]
            believed = subject.status in ("ok", "invalid", "interrupted")
            counted = traffic.get(planned.variant) or _by_arithmetic(planned)
            self._keep(
                planned,
                status=subject.status,
                reason=subject.reason,
                verdict=subject.verdict,
                timings=subject.timings if believed else (),
                traffic=counted if subject.status == "ok" else None,
                peak_bytes=subject.peak_bytes,
            )
        self.noise = [noise for noise in self.noise if noise not in found.noise] + list(found.noise)
        if found.clocks and found.clocks not in self.clocks:
            self.clocks.append(found.clocks)
        place = f"{able[0].shape.name}, {able[0].direction.replace('_', ' and ')}"
        self.notes += [f"{place}: {note}" for note in found.notes]

    def _keep(self, planned: PlannedCell, **facts: Any) -> None:
        self.cells[_key(planned)] = _cell(self._now(planned), **facts)

    def _tell(self, shape: str, direction: Direction, step: str, done: int, total: int) -> None:
        self.on_progress(Progress(shape, direction, step, done, total, len(self.finished), len(self.places)))


def _differences(earlier: Result, now: Result) -> list[str]:
    """Return the facts that tell on a result and are not as they were, in clauses."""
    then, here = earlier.provenance, now.provenance
    facts = {"study": (earlier.study_digest[:12], now.study_digest[:12])}
    facts |= {name: (getattr(then, name), getattr(here, name)) for name in ("device", "driver", "commit", "scale", "rounds")}
    facts |= {package: (then.versions.get(package), here.versions.get(package)) for package in {**then.versions, **here.versions}}
    return [
        f"{what} {before or 'none'} then, {after or 'none'} now" for what, (before, after) in facts.items() if before != after
    ]


def _places_to_count(study: Study, count: bool | Literal["all"]) -> frozenset[tuple[str, Direction]]:
    if count == "all":
        return frozenset((shape.name, direction) for shape in study.shapes for direction in study.directions_at(shape))
    return _places_of(study, _measures_of_bytes()) if count else frozenset()


def _measures_of_bytes() -> list[str]:
    return [measure.name for measure in measures() if measure.needs_dram_bytes]


def _places_of(study: Study, names: Sequence[str]) -> frozenset[tuple[str, Direction]]:
    """Return the shapes and directions at which criteria of these measures are asked."""
    asked = [criterion for criterion in study.criteria if criterion.measure in names]
    return frozenset((shape.name, criterion.direction) for criterion in asked for shape in study.shapes_of(criterion))


def _named_for(study: Study, names: Sequence[str]) -> set[str]:
    """Variants and controls that criteria of these measures stand for."""
    asked = [criterion for criterion in study.criteria if criterion.measure in names]
    sides = [side for criterion in asked for shape in study.shapes_of(criterion) for side in study.sides(criterion, shape)]
    return {name for selector, _ in sides for name in study.select(selector)}


def _key(planned: PlannedCell) -> tuple[str, Direction, str]:
    return planned.shape.name, planned.direction, planned.variant


def _cell(planned: PlannedCell, **facts: Any) -> Cell:
    return Cell(
        shape=planned.shape.name,
        direction=planned.direction,
        variant=planned.variant,
        control=planned.control,
        plan=planned.plan,
        **facts,
    )


def _bounded(cell: Cell, planned: PlannedCell) -> Cell:
    """Return a finished cell with a new bound; a time that was refused is believed where it is no longer too fast."""
    changes: dict[str, Any] = {"plan": planned.plan}
    if cell.status == "invalid" and not below(cell.timing("cold"), planned.plan.floor_microseconds):
        changes |= {"status": "ok", "reason": "", "traffic": _by_arithmetic(planned)}
    return cell.model_copy(update=changes)


def _interrupted(planned: PlannedCell) -> Cell:
    """Return the cell of a measurement that was not reached."""
    if planned.status is not None:
        return _cell(planned, status=planned.status, reason=planned.reason)
    return _cell(planned, status="interrupted", reason="the run ended before it")


def _by_arithmetic(planned: PlannedCell) -> Traffic:
    return analytic(Cost(planned.plan.flops, planned.plan.bytes, planned.plan.launches, written=planned.plan.written))
