"""State of a running study: its plan, the measurements so far, and the steps that verify, time and count the rest.

The unit of work is a case, a shape in one direction; all its variants and controls are measured together. ``supervise/job.py``
makes a :class:`Run` in the process that measures, from the :class:`RunOptions` and :class:`Steps` that ``workbench/run.py`` has
made.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from onelaunch.device import hardware
from onelaunch.errors import OutputUnwritable
from onelaunch.operation import Case, Direction, Operation
from onelaunch.workbench.asked import aa_variants, cases_in, cases_of, cases_to_count, measures_of_bytes, named_for
from onelaunch.workbench.cells import Key, bounded, by_arithmetic, cell_of, key_of, unreached
from onelaunch.workbench.decide.decision import concluded
from onelaunch.workbench.decide.measured import TakenMeasure, kept_as, taken_measures
from onelaunch.workbench.measure.ahead import Groups, Place
from onelaunch.workbench.measure.checks import ExamineCall, ProbeCall
from onelaunch.workbench.measure.compiling import compile_probes
from onelaunch.workbench.measure.count import Request
from onelaunch.workbench.measure.garbage import Garbage
from onelaunch.workbench.measure.outcomes import Interrupted, Measurements
from onelaunch.workbench.measure.tuning import keep, restore
from onelaunch.workbench.options import WHOLE, Part, Progress, RunOptions
from onelaunch.workbench.probing import Probed, ReportsAtProbes, calls_ahead, code_of, still_holding, to_probe
from onelaunch.workbench.result import Cell, EarlierCommit, Noise, ProbeReport, Result, Status, StoredCeilings, Traffic, Verdict
from onelaunch.workbench.result.provenance import provenance, taken_over
from onelaunch.workbench.result.sources import variant_sources
from onelaunch.workbench.resume import changed_shapes, is_counted, refuse_others
from onelaunch.workbench.spending import Meter
from onelaunch.workbench.steps import Steps
from onelaunch.workbench.study import Shape, Study, case_name
from onelaunch.workbench.study.plan import PlannedCell, StudyPlan, plan_study
from onelaunch.workbench.verify import Judge
from onelaunch.workbench.verify.calls import status_of

_ORACLE_BYTES = {"cuda": 24 << 30, "cpu": 1 << 30}
"""Most bytes that the cached references of a run (inputs and oracle outputs) may take, by device type; see :class:`Judge`."""


@dataclass
class Run:
    """A running study: its plan and the measurements so far."""

    plan: StudyPlan
    device: torch.device
    ceilings: StoredCeilings
    options: RunOptions
    steps: Steps
    on_progress: Callable[[Progress], None]
    cells: dict[Key, Cell] = field(default_factory=dict)
    """Measurements so far."""
    noise: list[Noise] = field(default_factory=list)
    clocks: list[dict[str, float]] = field(default_factory=list)
    """Sampled clocks of each case."""
    notes: list[str] = field(default_factory=list)
    stopped: bool = False
    """True after Ctrl-C, and once the time limit is reached."""
    finished: list[tuple[Shape, Direction]] = field(default_factory=list)
    """Cases that are measured completely."""
    uncounted: list[tuple[Shape, Direction]] = field(default_factory=list)
    """Cases of a resumed run that are measured, but whose bytes, launches or barriers are still to be counted, or host times
    to be taken."""
    failures: Mapping[Key, tuple[Status, str]] = field(default_factory=dict)
    """Statuses and reasons of candidates that ended an earlier process or ran too long. They are not run again."""
    probes: dict[str, ProbeReport] = field(default_factory=dict)
    """Outcomes of the operation's probes by the variant's label, :meth:`~onelaunch.workbench.study.Study.label`."""
    examined: dict[tuple[str, Direction], Verdict] = field(default_factory=dict)
    """Verdicts of the checks that take many calls, by the variant's label, each made at its first case in a direction."""
    on_turn: Callable[..., None] = lambda *_, **__: None
    """Callback ``on_turn(shape, direction, name, control=..., step=...)`` before a candidate runs, and with no name after."""
    on_kept: Callable[[Result], None] = lambda _: None
    """Callback with the partial result, called at the beginning, after the probes of each variant, and after each case."""
    on_compiled: Callable[[Sequence[Place]], None] = lambda _: None
    """Callback with the cases whose calls processes have made, after each group of them."""
    groups: Groups = field(default_factory=lambda: Groups(0))
    """Groups of cases that processes compile before they are measured; of no processes by default."""
    meter: Meter = field(default_factory=Meter)
    """Meter of the time and money that the run takes."""
    part: Part = WHOLE
    """Part of the cases that this process probes, compiles and measures."""
    partial: Path | None = None
    """File of the partial result; ``None`` if the parent process saves it, together with other parts."""
    earlier_commits: tuple[EarlierCommit, ...] = ()
    """Measurements that were made at other commits, and taken over."""
    _at_probes: ReportsAtProbes = field(default_factory=ReportsAtProbes)
    _claimed: set[str] = field(default_factory=set)
    """Names of the shapes that this process has begun, or found finished."""

    def __post_init__(self) -> None:
        # Digests are taken now, so that files changed during the run are not taken for what ran.
        variant_sources(self.study)
        self._codes = code_of(self.study)
        self.garbage = Garbage()
        self.judge = Judge(_ORACLE_BYTES.get(self.device.type, 1 << 30), timed_up_to=self.study.timed_up_to)
        self.counted = cases_to_count(self.study, self.options.count)
        """Cases at which DRAM bytes are counted."""
        wanted = taken_measures() if self.options.count else []
        self.counts = {measure.kept: (measure, cases_of(self.study, kept_as(measure.kept))) for measure in wanted}
        """Measures that a step of its own takes, each with the cases at which a criterion asks for it."""
        self.steady = cases_in(self.study, "eager")
        """Cases at which calls from Python are timed until their noise is low, since a criterion reads these times."""
        if self.options.quick:
            self.plan = self.plan.in_first_direction()
            first = self.study.directions[0].replace("_", " and ")
            self.notes.append(
                f"No direction but {first} was measured, and each shape for {self.options.time_cap:g} s only, "
                "as in every quick run."
            )

    @property
    def study(self) -> Study:
        return self.plan.study

    def _operation(self, runnable: Sequence[PlannedCell]) -> Operation[..., Any]:
        """Return the operation of the candidates of one case."""
        return self.study.operation_at(runnable[0].shape)

    def _label(self, planned: PlannedCell) -> str:
        """Return the name under which the probes and examinations of a planned variant are kept."""
        return self.study.label(self.study.operation_at(planned.shape).name, planned.variant)

    @property
    def cases(self) -> list[tuple[Shape, Direction]]:
        """Planned cases in the order in which they run."""
        return list({(cell.shape.name, cell.direction): (cell.shape, cell.direction) for cell in self.plan.cells}.values())

    @property
    def _names(self) -> list[str]:
        """Names of the planned shapes in the order in which they run."""
        return list(dict.fromkeys(shape.name for shape, _ in self.cases))

    @property
    def mine(self) -> list[tuple[Shape, Direction]]:
        """Cases that this process compiles and measures first, in their order. Both directions of a shape are of one part."""
        names = self.part.of(self._names)
        return [case for case in self.cases if case[0].name in names]

    def _turns(self) -> Iterator[tuple[Shape, Direction]]:
        """Yield the cases that this process measures, one after the other; see :meth:`Part.claimed`."""
        for name in self.part.claimed(self._names):
            self._claimed.add(name)
            yield from [case for case in self.cases if case[0].name == name and case not in self.finished]

    def _more(self) -> bool:
        """Return whether there are cases left that this process may measure."""
        names = self.part.left(self._names)
        return any(case[0].name in names and case not in self.finished for case in self.cases)

    def resume_from(self, earlier: Result, path: Path) -> None:
        """Take over the cases that an earlier run finished, but for the shapes that are measured anew.

        Args:
            earlier: Result of the earlier run.
            path: File of that result, for messages.

        Raises:
            ResultMismatch: A fact that influences measurements differs, see :func:`refuse_others`.
        """
        commit = refuse_others(earlier, self.result(interrupted=True), path, across_commits=self.options.across_commits)
        self.take_over(earlier, anew={*self.options.anew, *changed_shapes(earlier.study, self.study)})
        done = [*self.finished, *self.uncounted]
        names = [case_name(shape.name, direction) for shape, direction in done]
        self.earlier_commits = taken_over(earlier.provenance, names, commit)
        at = ""
        if earlier.provenance.commit != commit:  # the sources of the variants that are measured now may be others
            at = f", at commit {earlier.provenance.commit}"
            left = {self._label(cell) for cell in self.plan.cells if (cell.shape, cell.direction) not in done}
            self.probes = still_holding(self.probes, self._codes, left)
        by = f"were measured by a run that ended on {earlier.provenance.date}{at}"
        self.notes = [*earlier.notes, f"{len(done)} of {len(self.cases)} shapes and directions {by}."]
        # The stored seed is that of all times, so the rest is timed with it too.
        if (seed := earlier.provenance.timing_seed) is not None:
            self.options = replace(self.options, timing_seed=seed)

    def take_over(self, earlier: Result, anew: Collection[str] = ()) -> None:
        """Take over the finished cases of an earlier result of this run, with their noise and clocks.

        Times are taken over whether or not everything that this run counts was counted. What is missing, such as after Ctrl-C in
        the profiler, is counted without measuring the times again. Shapes in ``anew`` are left out.
        """
        for case in self.cases:
            name = case[0].name, case[1]
            cells = [cell for cell in earlier.cells if (cell.shape, cell.direction) == name]
            if case[0].name in anew or any(cell.status == "interrupted" for cell in cells):
                continue
            counted = is_counted(name, cells, self.counted, self.counts)
            (self.finished if counted else self.uncounted).append(case)
            self.cells |= {(cell.shape, cell.direction, cell.variant, cell.control): cell for cell in cells}
        done = {(shape.name, direction) for shape, direction in (*self.finished, *self.uncounted)}
        self.noise = [noise for noise in earlier.noise if (noise.shape, noise.direction) in done]
        self.probes, self.earlier_commits = dict(earlier.probes), earlier.provenance.earlier
        if earlier.provenance.clocks and done:
            self.clocks.append(earlier.provenance.clocks)

    def measure_all(self) -> None:
        """Probe the variants and measure the cases that are not finished. Ctrl-C or the time limit ends the run early.

        The partial result is saved after the probes of each variant and after each case, where the time limit is looked at too.
        """
        tuning = self.options.tuning
        if tuning is not None and (note := restore(tuning, hardware.describe(str(self.device)).name)):
            self.notes.append(note)
        try:
            self.compile_ahead()
            self.probe_variants()
            self.save_partial()
            with self.garbage:
                for case in self._turns():
                    self.compile_ahead(case)
                    self.measure(*case)
                    self.save_partial()
                    self.stopped = self.options.out_of_time and self._more()
                    if self.stopped:
                        break
        except KeyboardInterrupt:
            self.stopped = True
        finally:
            if tuning is not None and (note := keep(tuning, hardware.describe(str(self.device)).name)):
                self.notes.append(note)

    def compile_ahead(self, case: tuple[Shape, Direction] | None = None) -> None:
        """Let processes compile and check the group of a case, if that is to be done; without a case the first, with probes."""
        waiting = [(case[0].name, case[1]) for case in self.mine if case not in (*self.finished, *self.uncounted)]
        group = self.groups.next(case and (case[0].name, case[1]), waiting)
        judged = self.to_judge() if self.groups.processes and case is None else ()
        cells, before = self.groups.divided([cell for cell in self.plan.cells if self._failure(cell) is None], group)
        calls = calls_ahead(self.study, cells, before, judged, self.examined, self._codes, self.device, self.groups.processes)
        if not calls:
            return
        report = lambda call, count, total: self._report(call.shape, call.direction, call.step, count, total)  # noqa: E731
        start = time.monotonic()
        made = self.steps.compile(self.study, calls, str(self.device), self.groups.processes, report, self._take)
        self.notes = self.groups.add(made, time.monotonic() - start, self.notes)
        if not (made.given_up and judged):  # else the process that follows one which ends at a probe compiles the group again
            self.on_compiled(group)

    def _take(self, call: ProbeCall | ExamineCall, found: ProbeReport | Verdict) -> None:
        """Take over what another process found in a check of a variant. A variant without the reports of all probes is judged."""
        if isinstance(found, Verdict):
            self.examined[call.label, call.direction] = found
        elif isinstance(call, ProbeCall) and (whole := self._at_probes.add(call, found)) is not None:
            self.probes[call.label] = whole
            self.save_partial()

    def to_judge(self) -> list[Probed]:
        """Return the variants that this process has yet to judge on probes, without those that ended a process."""
        asked = to_probe(self.study, self.plan.cells, self.part)
        return [each for each in asked if not each.is_in(self.probes) and not each.ended(self.failures)]

    def probe_variants(self) -> None:
        """Judge the variants on the probes of their operation, but for those that other processes have judged.

        The partial result is saved after each variant.
        """
        asked, waiting = to_probe(self.study, self.plan.cells, self.part), self.to_judge()
        for each in asked:
            if not each.is_in(self.probes) and (reasons := each.ended(self.failures)):
                self.probes[each.label] = ProbeReport(passed=0, failed=reasons)
        # A result that changes after its call is found when the variant is verified, so no probe waits for that.
        judge = Judge(_ORACLE_BYTES.get(self.device.type, 1 << 30), settle_seconds=0.0)
        if waiting:
            first = waiting[0].planned
            self._report(first.shape.name, first.direction, "compile", 0, len(waiting))
            compile_probes([(each.operation, each.planned.variant, each.directions) for each in waiting], self.device)
        for each in waiting:
            shape, direction, name, _ = key_of(each.planned)
            self._report(shape, direction, "probe", asked.index(each), len(asked))
            self.on_turn(shape, direction, name, control=False, step="probed")
            report = self.steps.probe(judge, each.operation, name, self.device, each.directions)
            self.on_turn(shape, direction, None, control=False, step="")
            self.probes[each.label] = report.model_copy(update={"code": self._codes.get(each.label, "")})
            self.save_partial()

    def measure(self, shape: Shape, direction: Direction) -> None:
        """Verify, time and count all variants and controls of one case."""
        here = [cell for cell in self.plan.cells if (cell.shape.name, cell.direction) == (shape.name, direction)]
        for planned in here:
            if planned.status is not None:
                self._store(planned, status=planned.status, reason=planned.reason)
            elif (failure := self._failure(planned)) is not None:
                self._store(planned, status=failure[0], reason=failure[1])
        runnable = [planned for planned in here if planned.status is None and self._failure(planned) is None]
        if (shape, direction) in self.uncounted:
            self._count_all(self.study.case(shape), direction, runnable)
        elif runnable:
            self._measure(self.study.case(shape), direction, runnable)
        self.finished.append((shape, direction))
        # A new judge drops the cached oracle outputs, which the next shape cannot use.
        self.judge = Judge(_ORACLE_BYTES.get(self.device.type, 1 << 30), timed_up_to=self.study.timed_up_to)
        self.garbage.end_case()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _failure(self, planned: PlannedCell) -> tuple[Status, str] | None:
        """Return the status and the reason of a candidate that must not run, or ``None``."""
        verdict = None if planned.control else self.examined.get((self._label(planned), planned.direction))
        if verdict is not None and verdict.status == "incorrect":
            return verdict.status, verdict.explain()
        return self.failures.get(key_of(planned))

    def save_partial(self) -> None:
        """Save what is finished. If that fails, such as on a full disk, the run continues, and a note says so."""
        result = self.result(interrupted=True)
        self.on_kept(result)
        if self.partial is None:
            return
        try:
            result.save(self.partial, force=True)
        except OutputUnwritable as failure:
            self.notes.append(f"The partial result could not be saved during the run: {failure}")

    def result(self, *, interrupted: bool) -> Result:
        """Return the measurements so far with outcomes and a decision. Those that are missing have the status ``interrupted``."""
        cells = [self.cells.get(key_of(planned)) or unreached(planned) for planned in self.plan.cells]
        facts = provenance(
            self.study,
            self.device,
            scale=self.plan.scale,
            rounds=self.options.rounds,
            clocks=self.clocks,
            command=self.options.command,
            timing_seed=self.options.timing_seed,
        )
        found = Result(
            study=self.study,
            study_digest=self.study.digest(),
            provenance=facts.model_copy(update={"earlier": self.earlier_commits}),
            ceilings=self.ceilings,
            cells=tuple(cells),
            noise=tuple(self.noise),
            notes=tuple(dict.fromkeys(self.notes)),
            interrupted=interrupted,
            probes=self.probes,
            spent=self.meter.spent(),
        )
        return concluded(found)

    def _measure(self, case: Case, direction: Direction, runnable: Sequence[PlannedCell]) -> None:
        """Verify and time the candidates of a case, store the measurements, and then count bytes and launches."""
        variants = [planned.variant for planned in runnable if not planned.control]
        try:
            found = self.steps.measure(
                self._operation(runnable),
                case,
                direction,
                variants=variants,
                controls=[planned.variant for planned in runnable if planned.control],
                baseline=aa_variants(self.study, self._operation(runnable), self.device.type, variants),
                regimes=self.study.regimes,
                rounds=self.options.rounds,
                device=self.device,
                floors=self._bounds(runnable),
                bounds_again=lambda: self._remeasured_bounds(runnable),
                judge=self.judge,
                time_cap_seconds=self.options.time_cap,
                timing_seed=self.options.timing_seed,
                steady_eager=(case.name, direction) in self.steady,
                examine=[
                    planned.variant
                    for planned in runnable
                    if not planned.control and (self._label(planned), direction) not in self.examined
                ],
                on_verified=self.garbage.verified,
                on_progress=lambda step, done, total: self._report(case.name, direction, step, done, total),
                on_turn=lambda name, **more: self.on_turn(case.name, direction, name, **more),
            )
        except Interrupted as stop:
            self._record(runnable, stop.measurements)
            raise
        except Exception as error:  # noqa: BLE001 - such as out of memory; the other cases are still measured
            status, reason = status_of(error)
            for planned in runnable:
                self._store(planned, status=status, reason=reason)
            return
        self._record(runnable, found)  # stored before counting, which may be interrupted
        self._count_all(case, direction, runnable)

    def _count_all(self, case: Case, direction: Direction, runnable: Sequence[PlannedCell]) -> None:
        """Count what criteria ask for at this case, into the measurements that are stored."""
        if (case.name, direction) in self.counted:
            for planned, traffic in self._count(case, direction, runnable):
                self.cells[key_of(planned)] = self.cells[key_of(planned)].model_copy(update={"traffic": traffic})
        for what, asked in self.counts.values():
            if (case.name, direction) in asked:
                self._count_measure(what, case, direction, runnable)

    def _bounds(self, runnable: Sequence[PlannedCell]) -> dict[str, float]:
        """Return the roofline bound of each variant and control in microseconds, by the latest measured peaks."""
        return {planned.variant: self._replanned(planned).plan.floor_microseconds for planned in runnable}

    def _remeasured_bounds(self, runnable: Sequence[PlannedCell]) -> dict[str, float]:
        """Measure the peaks again because a time is below its bound, and return the new bounds.

        Peaks that come out higher replace those of this result, and all plans, including those of finished cases, follow them.
        """
        current = hardware.Ceilings(**self.ceilings.model_dump())
        raised = self.steps.remeasure(str(self.device), current)
        if raised != current:
            self.ceilings = StoredCeilings(**asdict(raised))
            fresh = plan_study(self.study, self.ceilings, str(self.device), self.plan.scale)
            self.plan = fresh.in_first_direction() if self.options.quick else fresh
            for planned in self.plan.cells:
                if (cell := self.cells.get(key_of(planned))) is not None:
                    self.cells[key_of(planned)] = bounded(cell, planned.plan)
            self.notes.append(
                f"A time at {runnable[0].shape.name} was below its roofline bound, so the device's peaks were measured again. "
                "They came out higher: other work ran when they were measured first. All bounds here rest on the higher ones."
            )
        return self._bounds(runnable)

    def _replanned(self, planned: PlannedCell) -> PlannedCell:
        """Return the planned measurement with the bounds of the latest measured peaks."""
        return next(each for each in self.plan.cells if key_of(each) == key_of(planned))

    def _count(self, case: Case, direction: Direction, runnable: Sequence[PlannedCell]) -> Sequence[tuple[PlannedCell, Traffic]]:
        """Count the DRAM bytes of the measured variants and controls, the slowest last.

        Unless the option ``count`` is ``"all"``, only those whose number of launches is known, or that a criterion on bytes
        names, are counted. If the profiler runs out of time or reaches its limit of kernels, the faster ones are then counted
        already.
        """
        named = named_for(self.study, measures_of_bytes())
        ready = [
            planned
            for planned in runnable
            if self.cells[key_of(planned)].measured
            and (self.options.count == "all" or planned.plan.launches is not None or planned.variant in named)
        ]
        ready.sort(key=self._first_time)
        self._report(case.name, direction, "count", 0, len(ready))
        requests = [Request(case, planned.variant, direction, planned.control) for planned in ready]
        try:
            found = self.steps.count(self._operation(runnable), requests, device=self.device)
        except Exception as error:  # noqa: BLE001 - bytes by arithmetic remain, and the note says why
            self.notes.append(f"No DRAM bytes were counted at {case.name}: {status_of(error)[1]}")
            return ()
        return tuple(zip(ready, found, strict=True))

    def _count_measure(self, measure: TakenMeasure, case: Case, direction: Direction, runnable: Sequence[PlannedCell]) -> None:
        """Take a measure of each correct variant that a criterion on it names. A note says why that failed."""
        named = named_for(self.study, kept_as(measure.kept))
        count = self.steps.counters.get(measure.kept, measure.count)
        ready = [planned for planned in runnable if planned.variant in named and self.cells[key_of(planned)].measured]
        for planned in ready:  # one at a time, so that the parent of this process knows which one ended it
            self.on_turn(case.name, direction, planned.variant, control=planned.control, step=f"counted ({measure.kept})")
            request = Request(case, planned.variant, direction, planned.control)
            (found,) = count(self._operation(runnable), [request], device=self.device)
            self.on_turn(case.name, direction, None, control=False, step="")
            if isinstance(found, str):
                self.notes.append(measure.untaken(planned.variant, case.name, found))
            else:
                self.cells[key_of(planned)] = self.cells[key_of(planned)].taking(measure.kept, found)

    def _first_time(self, planned: PlannedCell) -> float:
        """Return the median microseconds in the first regime that was timed, by default the cold one; 0 without times."""
        times = self.cells[key_of(planned)].timings
        return times[0].microseconds.median if times else 0.0

    def _record(self, runnable: Sequence[PlannedCell], found: Measurements) -> None:
        """Store the measurements of a case as cells of the result, with their noise, clocks and notes."""
        for planned in runnable:
            outcome = found.candidates[planned.variant]
            has_times = outcome.measured or outcome.status in ("invalid", "interrupted")
            self._store(
                planned,
                status=outcome.status,
                reason=outcome.reason,
                verdict=outcome.verdict,
                timings=outcome.timings if has_times else (),
                traffic=by_arithmetic(planned.plan) if outcome.measured else None,
                peak_bytes=outcome.peak_bytes,
                chosen=outcome.chosen,
            )
            if not planned.control and planned.variant in found.examined:
                self.examined[self._label(planned), planned.direction] = found.examined[planned.variant]
        self.noise += found.noise
        if found.clocks and found.clocks not in self.clocks:
            self.clocks.append(found.clocks)
        case = f"{runnable[0].shape.name}, {runnable[0].direction.replace('_', ' and ')}"
        self.notes += [f"{case}: {note}" for note in found.notes]

    def _store(self, planned: PlannedCell, **facts: Any) -> None:
        self.cells[key_of(planned)] = cell_of(self._replanned(planned), **facts)

    def _report(self, shape: str, direction: Direction, step: str, done: int, total: int) -> None:
        names = self._claimed if self.part.claims is not None else {case[0].name for case in self.mine}
        finished = sum(shape.name in names for shape, _ in self.finished)
        self.on_progress(Progress(shape, direction, step, done, total, finished, len(self.mine)))
