"""Time several candidates (variants and controls) together, so that their times can be compared.

Each candidate is verified first. It is timed on other contents than were verified, from a seed of their own, and outputs of a
last sample are verified again. Every round times all candidates in all regimes (:data:`onelaunch.workbench.result.Regime`). Their
order rotates and reverses from round to round, so that a drift of clocks or temperature, or other work on the machine, affects
all of them alike. Ratios between candidates are to be taken round by round. The baseline takes part twice; the ratio of its two
copies (A/A run) is the noise. ``workbench/running.py`` calls :func:`measure` once for each case in each
direction, and :func:`new_seed` once for each run.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch

from onelaunch.dispatch.choice import choose
from onelaunch.errors import ArgumentError
from onelaunch.operation import AUTO, Case, Control, Direction, Operation
from onelaunch.workbench import stats
from onelaunch.workbench.measure.clocks import Clocks
from onelaunch.workbench.measure.entry import RAISED, Entry
from onelaunch.workbench.measure.outcomes import CandidateResult, Interrupted, Measurements, invalidate, too_fast
from onelaunch.workbench.measure.rotation import Rotation, rotate
from onelaunch.workbench.measure.rounds import by_turns, is_unsteady, most_rounds, order, stopped
from onelaunch.workbench.measure.sampling import make_sampler
from onelaunch.workbench.result import Noise, Regime, Status, Timing, Verdict
from onelaunch.workbench.stored import LEAST_TIME, MOST_TIME
from onelaunch.workbench.study import LOOPS
from onelaunch.workbench.study.plan import missing_package, variant_for
from onelaunch.workbench.verify import Judge, judge_outputs
from onelaunch.workbench.verify.calls import Candidate, Inputs, make_inputs
from onelaunch.workbench.verify.reference import Reference
from onelaunch.workbench.verify.repeated import examine_once
from onelaunch.workbench.verify.trivial import trivial_passes

Kind = Literal["variant", "control", "again"]
"""Kind of a candidate. ``again`` is the second copy of the baseline, whose ratio to the first is the noise."""

Key = tuple[str, Kind]
"""Name and kind of a candidate, which tell it from all others: the second copy of the baseline has the name of the first."""

_ALL_REGIMES: tuple[Regime, ...] = ("cold", "warm", "eager")
"""Regimes that every operation has. Those of :data:`LOOPS` time many consecutive steps, and need a loop of the operation."""

LEAST_ROUNDS = 3
"""Number of rounds that are measured even if the time cap is reached, because ``decide/judging.py`` accepts no fewer."""

WARM_UP_SECONDS = {"cuda": 1.0, "cpu": 0.2}
"""Seconds by device type for which all candidates run before the first round, so that clocks and temperature settle."""

Progress = Callable[[str, int, int], None]
"""Callback for progress: the name of the step, the number of its items that are done, and the number of all its items."""

Turn = Callable[..., None]
"""Callback ``turn(name, control=..., step=...)`` before a candidate runs, and with ``None`` for its name when it has returned. A
parent process learns from it which candidate was running when the process ended."""


def new_seed() -> int:
    """Return a random seed for the contents of timed inputs. It differs from 0, with which variants are verified."""
    return 1 + secrets.randbelow(2**31 - 1)


def measure(
    operation: Operation[..., Any],
    case: Case,
    direction: Direction = "forward",
    *,
    variants: Sequence[str],
    controls: Sequence[str] = (),
    baseline: str | Sequence[str] | None = None,
    regimes: Sequence[Regime] = _ALL_REGIMES,
    rounds: int = 20,
    device: torch.device | str = "cpu",
    seed: int = 0,
    timing_seed: int | None = None,
    floors: Mapping[str, float] | None = None,
    bounds_again: Callable[[], Mapping[str, float]] | None = None,
    judge: Judge | None = None,
    time_cap_seconds: float = 60.0,
    steady_eager: bool = True,
    examine: Collection[str] = (),
    on_verified: Callable[[], None] = lambda: None,
    on_progress: Progress | None = None,
    on_turn: Turn | None = None,
) -> Measurements:
    """Verify, time and verify again several variants and controls of one operation at one case.

    Args:
        operation: Operation to measure.
        case: Sizes, dtype and options.
        direction: ``"forward_backward"`` times the call and the gradients of all its differentiable inputs together.
        variants: Names of the variants, and ``auto`` for the dispatcher's choice, whose name is stored. One that cannot run, is
            incorrect or raises is recorded with its status; the others continue.
        controls: Names of the operation's controls that are timed in the same rounds.
        baseline: Variant that is timed twice for the A/A run. Of several the first that has times is taken. By default they are
            tried in the order of ``variants``.
        regimes: Regimes to time. Those of :data:`LOOPS` are timed only forward and only for variants; the operation must have a
            loop for each.
        rounds: Number of samples of each candidate and regime.
        device: Device to run on.
        seed: Seed of the inputs on which the candidates are verified before they are timed.
        timing_seed: Seed of the inputs that are timed and on which the last sample is verified; by default a random one, so that
            no variant can be made for it. Pass the one of a stored result to repeat its inputs.
        floors: Roofline bounds in microseconds by name. A cold time well below its bound becomes ``invalid``.
        bounds_again: Function that measures the device's peaks again and returns the new bounds. It is called when a cold time is
            well below its bound, before the time becomes ``invalid``.
        judge: Judge whose cache of oracle outputs is used. Pass the same one for every measurement of a study.
        time_cap_seconds: Seconds after which no new round begins. Three rounds are always measured.
        steady_eager: Whether more rounds of calls from Python follow on a GPU while their A/A noise is high, see
            :func:`~onelaunch.workbench.measure.rounds.most_rounds`. A study asks for them where a criterion reads such times.
        examine: Names of the variants that are also examined by :func:`~onelaunch.workbench.verify.repeated.examine_once`, which
            takes many calls. One that fails is incorrect.
        on_verified: Callback once all candidates are verified and examined.
        on_progress: Callback for the progress.
        on_turn: Callback before each candidate runs and when it has returned, see :data:`Turn`.

    Raises:
        ArgumentError: A control has the name of a variant that is measured with it.
        Interrupted: Ctrl-C was pressed. Holds the finished rounds.
        UnknownVariant: A variant is not known.
    """
    if both := sorted(set(variants) & set(controls)):
        raise ArgumentError(
            f"{both[0]!r} is a variant and a control of {operation.name}, so its times would be ambiguous; rename one."
        )
    session = _Session(
        operation=operation,
        case=case,
        direction=direction,
        baselines=(baseline,) if isinstance(baseline, str) else tuple(baseline or variants),
        regimes=tuple(regimes),
        device=torch.device(device),
        seed=seed,
        judge=judge or Judge(),
        progress=on_progress or (lambda *_: None),
        timing_seed=new_seed() if timing_seed is None else timing_seed,
        turn=on_turn or (lambda *_, **__: None),
        examine=frozenset(examine),
    )
    for name in variants:
        session.add(name, Candidate.variant(operation, name), None)
    for name in controls:
        session.add(name, Candidate.control(operation, operation.controls[name]), operation.controls[name])
    try:
        session.verify()
        on_verified()
        session.prepare()
        session.take_rounds(rounds, time_cap_seconds, most_rounds(rounds, steady_eager=steady_eager))
        session.verify_again()
        session.release()  # measuring the peaks again needs memory for buffers of its own
        return session.measurements(floors or {}, bounds_again)
    except KeyboardInterrupt:
        session.interrupt()
        raise Interrupted(session.measurements(floors or {})) from None
    finally:
        session.release()


@dataclass
class _Session:
    """Steps of :func:`measure`. The findings of earlier steps and rounds stay if a later one is interrupted."""

    operation: Operation[..., Any]
    case: Case
    direction: Direction
    baselines: tuple[str, ...]
    regimes: tuple[Regime, ...]
    device: torch.device
    seed: int
    judge: Judge
    progress: Progress
    timing_seed: int
    turn: Turn
    examine: frozenset[str] = frozenset()
    examined: dict[str, Verdict] = field(default_factory=dict)
    entries: dict[Key, Entry] = field(default_factory=dict)
    clocks: Clocks = field(init=False)
    notes: list[str] = field(default_factory=list)
    aa_variant: str | None = None
    """Name of the variant of the A/A run; ``None`` before it is chosen, or if no variant can be timed."""

    def __post_init__(self) -> None:
        self.clocks = Clocks(self.device)

    def add(self, name: str, candidate: Candidate, control: Control | None) -> None:
        kind: Kind = "variant" if control is None else "control"
        self.entries[name, kind] = Entry(CandidateResult(name, control=control is not None), candidate, control)

    @contextmanager
    def running(self, entry: Entry, step: str) -> Iterator[None]:
        """Tell the caller which candidate runs inside of the block. What an exception of it means is told by its status."""
        self.turn(entry.candidate.name, control=entry.control is not None, step=step)
        try:
            yield
        except RAISED as error:
            entry.fail(error)
        finally:
            self.turn(None, control=False, step=step)

    def verify(self) -> None:
        """Judge every candidate. One that does not pass is not timed, unless it is a peer outside the gate."""
        torch.compiler.reset()  # or torch.compile, after a few cases, silently runs its variants uncompiled
        for done, entry in enumerate(list(self.entries.values())):
            self.progress("verify", done, len(self.entries))
            result = entry.result
            result.status, result.reason = self._can_run(entry)
            if not entry.runs:
                continue
            try:
                self._reference(entry, self.seed)  # computed first, because the oracle's time is not the candidate's
            except Exception as error:  # noqa: BLE001 - such as out of memory; smaller controls may still fit
                entry.fail(error)
                continue
            with self.running(entry, "verified"):
                if result.name == AUTO:
                    result.chosen = self._chosen(self._reference(entry, self.seed).inputs)
                result.verdict = self._verdict(entry)
            if entry.runs and result.verdict is not None and not result.verdict.ok:
                entry.misses(result.verdict)
            if entry.runs and entry.control is None and entry.candidate.name in self.examine:
                self.progress("examine", done, len(self.entries))
                self._examine(entry)
        self._note_what_the_case_cannot_tell()
        self.judge.make_room(self.device)  # other contents are timed than were verified

    def _examine(self, entry: Entry) -> None:
        """Make the checks of a variant that take many calls."""
        name = entry.candidate.name
        with self.running(entry, "examined"):
            self.examined[name] = verdict = examine_once(
                self.judge,
                self.operation,
                self.case,
                variant=name,
                device=self.device,
                directions=(self.direction,),
                seed=self.seed,
            )
            self.notes += [f"{name}: {note}" for note in verdict.notes]
            if not verdict.ok:
                entry.misses(verdict)

    def _note_what_the_case_cannot_tell(self) -> None:
        """Note which outputs of this case a trivial result would pass too."""
        first = next((entry for entry in self.entries.values() if entry.runs and entry.control is None), None)
        if first is not None:
            try:
                self.notes += trivial_passes(self._reference(first, self.seed))
            except torch.OutOfMemoryError:
                self.notes.append("Trivial results were not tried at this case, for lack of memory.")

    def prepare(self) -> None:
        """Make the rotated inputs, then compile, warm up and capture each candidate, and the A/A copy of the baseline."""
        ready = [entry for entry in self.entries.values() if entry.runs]
        if not ready:
            return
        rotations: dict[Control | None, Rotation] = {}
        for done, entry in enumerate(ready):
            self.progress("prepare", done, len(ready))
            try:
                self._prepare(entry, rotations)
            except RAISED as error:  # of the oracle or the allocation of inputs; those of the candidate are recorded already
                entry.fail(error)
        names = [name for name in self.baselines if (name, "variant") in self.entries]
        running = [name for name in names if self.entries[name, "variant"].runs]
        if running:
            self.aa_variant = running[0]
            if self.aa_variant != self.baselines[0]:
                self.notes.append(f"The A/A run is of {self.aa_variant}: {self.baselines[0]} has no time here.")
            main = self.entries[self.aa_variant, "variant"]
            again = Entry(CandidateResult(self.aa_variant, chosen=main.result.chosen), main.candidate, main.control, hidden=True)
            try:
                self._prepare(again, rotations)
            except RAISED as error:
                again.fail(error)
            if again.runs:
                self.entries[self.aa_variant, "again"] = again
            else:  # a measurement without a noise floor is still of use
                self.notes.append(f"No A/A run: {again.result.reason}.")
        self.notes += [f"{rotation.note}." for control, rotation in rotations.items() if control is None]
        shown = [(name, entry.sampler) for (name, kind), entry in self.entries.items() if kind != "again"]
        self.notes += [f"{name}: {sampler.note}" for name, sampler in shown if sampler is not None and sampler.note]

    def take_rounds(self, rounds: int, time_cap_seconds: float, most: int) -> None:
        """Take samples of all candidates in all regimes, round by round, until the time cap.

        Up to ``most`` rounds of calls from Python follow while their A/A noise is high.
        """
        self._warm_up()
        for entry in self.entries.values():
            entry.seconds = 0.0
        start = time.perf_counter()
        for index in range(rounds):
            if index >= LEAST_ROUNDS and time.perf_counter() - start > time_cap_seconds:
                self.notes.append(stopped(self.entries.values(), len(self.regimes), time_cap_seconds, index, rounds))
                break
            self.progress("time", index, rounds)
            self._take_round(index, self.regimes)
            self.clocks.sample()
        for index in range(rounds, most):
            if not is_unsteady(self._noise(), self.device) or time.perf_counter() - start > time_cap_seconds:
                break
            self._take_round(index, ("eager",))
        for entry in self.entries.values():
            if entry.runs and not entry.rounds and entry.sampler is not None and not entry.sampler.refused:
                entry.result.status, entry.result.reason = "error", "the clock went backwards in every round"

    def _take_round(self, index: int, regimes: Sequence[Regime]) -> None:
        """Take a sample of every candidate in each of these regimes, and keep them unless a clock went backwards."""
        taken: list[tuple[Key, Regime, float]] = []
        for regime in regimes:
            keys = order(tuple(key for key, entry in self.entries.items() if entry.runs), index)
            if regime == "eager":
                found = by_turns({key: self._parts(self.entries[key]) for key in keys})
            else:
                found = {key: self._sample(self.entries[key], regime) for key in keys}
            taken += [(key, regime, sample) for key, sample in found.items() if sample is not None]
        if backwards := [(key, regime) for key, regime, sample in taken if not LEAST_TIME <= sample <= MOST_TIME]:
            (name, _), regime = backwards[0]
            self.notes.append(
                f"The clock went backwards in round {index + 1}, while {name} was timed ({regime}). It is left out."
            )
            return
        for key, regime, sample in taken:  # an interrupted round is dropped, since ratios are taken round by round
            self.entries[key].rounds.setdefault(regime, []).append(sample)

    def verify_again(self) -> None:
        """Judge outputs of a last sample on new contents. A candidate whose outputs do not pass becomes ``incorrect``.

        A peer whose errors are within the tolerance of its own tests becomes a peer outside the gate instead.
        """
        for entry in self.entries.values():
            if not entry.runs or entry.sampler is None:
                continue
            reference = self._reference(entry, self.timing_seed)
            verdicts, problem = [], None
            with self.running(entry, "verified again"):
                verdicts = [
                    (regime, judge_outputs(reference, outputs, *self.judge.tolerances_of(self.operation, entry.result.name)))
                    for regime in self.regimes
                    if regime not in LOOPS and regime not in entry.sampler.refused
                    for outputs in entry.sampler.outputs(regime)
                ]
                loop_problems = ((regime, loop.problem()) for regime, loop in entry.loops.items() if regime in entry.rounds)
                problem = next(((regime, why) for regime, why in loop_problems if why is not None), None)
            if not entry.runs or entry.sampler is None:
                continue
            if failed := [each for each in verdicts if not each[1].ok]:
                regime, verdict = min(failed, key=lambda each: each[1].outside)  # an incorrect one, if there is any
                entry.misses(verdict, f"The outputs of the timed calls ({regime}) do not pass: ")
                entry.result.verdict = entry.result.verdict if verdict.outside else verdict
            if not entry.runs:
                continue
            if problem is not None:
                entry.result.status = "incorrect"
                entry.result.reason = f"The steps that were timed ({problem[0]}) are wrong: {problem[1]}"
            elif entry.sampler.refused:
                entry.result.status, entry.result.reason = next(iter(entry.sampler.refused.values()))
        for (name, kind), again in self.entries.items():
            if kind == "again":
                self.entries[name, "variant"].share_blame_of(again)

    def interrupt(self) -> None:
        """Mark every running candidate as interrupted, with the number of its finished rounds."""
        for entry in self.entries.values():
            if entry.runs:
                count = max(map(len, entry.rounds.values()), default=0)
                entry.result.status, entry.result.reason = "interrupted", f"interrupted after {count} rounds"

    def release(self) -> None:
        """Free the memory of inputs, outputs and graphs for the next step, such as a larger shape or a profiled process."""
        for entry in self.entries.values():
            entry.release()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def measurements(
        self, floors: Mapping[str, float], bounds_again: Callable[[], Mapping[str, float]] | None = None
    ) -> Measurements:
        """Return the findings so far as plain values.

        A cold time well below its bound is first compared with bounds from newly measured peaks, if ``bounds_again`` is given.
        Only then does it become ``invalid``.
        """
        for entry in self.entries.values():
            entry.result.timings = tuple(
                Timing(regime=regime, microseconds=stats.estimate(samples), rounds=tuple(samples))
                for regime, samples in entry.rounds.items()
            )
        results = [entry.result for entry in self.entries.values() if not entry.hidden]
        if bounds_again is not None and any(too_fast(each, floors.get(each.name, 0.0)) for each in results):
            floors = bounds_again()
        for result in results:
            invalidate(result, floors.get(result.name, 0.0), again=bounds_again is not None)
        shown = {name: entry.result for (name, _), entry in self.entries.items() if not entry.hidden}
        return Measurements(shown, self._noise(), self.clocks.medians(), tuple(self.notes), self.examined)

    def _noise(self) -> tuple[Noise, ...]:
        """Return the A/A noise of each regime in which both copies of the baseline have times."""
        if self.aa_variant is None or (self.aa_variant, "again") not in self.entries:
            return ()
        again, main = self.entries[self.aa_variant, "again"], self.entries[self.aa_variant, "variant"]
        both = [regime for regime in again.rounds if regime in main.rounds]
        ratios = {regime: stats.ratio(again.rounds[regime], main.rounds[regime]) for regime in both}
        return tuple(
            Noise(shape=str(self.case), direction=self.direction, regime=regime, ratio=ratio, floor=stats.noise_floor(ratio))
            for regime, ratio in ratios.items()
        )

    def _can_run(self, entry: Entry) -> tuple[Status, str]:
        """Return the status ``ok``, or the status and the reason why a candidate cannot run here."""
        if entry.control is not None:
            return "ok", ""
        query = self.operation.query(self.case, str(self.device), grad=self.direction == "forward_backward")
        variant, reason = variant_for(self.operation, entry.result.name, query)
        if variant is not None and (needed := missing_package(variant)) is not None:
            return "not_installed", f"needs the package {needed}, which is not installed"
        return ("ok", "") if reason is None else ("unsupported", reason)

    def _chosen(self, inputs: Inputs) -> str:
        """Return the variant that the dispatcher chooses for a call with these inputs."""
        with torch.set_grad_enabled(bool(inputs.differentiable)):
            return choose(self.operation.bind(**inputs.arguments).query()).name

    def _verdict(self, entry: Entry) -> Verdict:
        options = {"device": self.device, "directions": (self.direction,), "seed": self.seed}
        if entry.control is not None:
            return self.judge.judge_control(self.operation, self.case, entry.control.name, **options)
        return self.judge.judge(self.operation, self.case, variant=entry.result.name, **options)

    def _reference(self, entry: Entry, seed: int) -> Reference:
        return self.judge.reference(
            self.operation, self.case, device=self.device, direction=self.direction, seed=seed, control=entry.control
        )

    def _prepare(self, entry: Entry, rotations: dict[Control | None, Rotation]) -> None:
        """Make the sampler of a candidate and, for variants, the loops of consecutive steps."""
        if entry.control not in rotations:
            reference = self._reference(entry, self.timing_seed)
            other = make_inputs(self.operation, self.case, self.device, self.timing_seed + 1, self.direction)
            sharing = [each for each in self.entries.values() if each.runs and each.control is entry.control]
            copies = len(sharing) + (entry.control is None)  # of the baseline there will be a second one
            rotations[entry.control] = rotate(reference, self.device, other, self.timing_seed, copies)
        rotation = rotations[entry.control]
        with self.running(entry, "prepared"):
            entry.sampler = make_sampler(entry.candidate, rotation, self.device)
            entry.sampler.prepare([regime for regime in self.regimes if regime not in LOOPS])
            entry.result.peak_bytes = entry.sampler.peak_bytes
            if entry.control is None and self.direction == "forward":
                variant = self.operation.get(entry.result.chosen or entry.candidate.name)
                arguments = rotation.sets[0].arguments
                makers = {regime: self.operation.loops[regime] for regime in self.regimes if regime in LOOPS}
                entry.loops = {regime: make(variant, arguments) for regime, make in makers.items()}

    def _warm_up(self) -> None:
        """Run all candidates in turn for :data:`WARM_UP_SECONDS`. One that raises is not timed."""
        start = time.perf_counter()
        end = start + WARM_UP_SECONDS[self.device.type]
        while any(entry.runs for entry in self.entries.values()):
            for entry in self.entries.values():
                for regime in self.regimes:
                    if entry.runs:
                        self._sample(entry, regime)
                    if not start <= time.perf_counter() <= end:  # a clock that goes backwards must not keep it here
                        return

    def _parts(self, entry: Entry) -> Iterator[float | None]:
        """Yield what :meth:`Sampler.parts` yields for calls from Python; end early if the candidate fails."""
        if entry.sampler is None or "eager" in entry.sampler.refused:
            return
        parts, done = entry.sampler.parts("eager"), object()
        while True:
            start, part = time.perf_counter(), done
            with self.running(entry, "timed (eager)"):
                part = next(parts, done)
            entry.seconds += time.perf_counter() - start
            if part is done:
                return
            yield cast("float | None", part)

    def _sample(self, entry: Entry, regime: Regime) -> float | None:
        """Return one sample in microseconds, or ``None`` if the candidate cannot be timed in this regime."""
        if entry.sampler is None or regime in entry.sampler.refused:
            return None
        start, sample = time.perf_counter(), None
        with self.running(entry, f"timed ({regime})"):
            if regime not in LOOPS:
                sample = entry.sampler.sample(regime)
            elif regime in entry.loops:
                sample = 1e6 * entry.loops[regime].seconds()
        entry.seconds += time.perf_counter() - start
        return sample
