"""Time several subjects together, fairly: verified first, interleaved, with an A/A run, verified again afterwards.

Regimes (see :data:`onelaunch.workbench.result.Regime`) are timed in every round, subjects in rotating and reversed order, so that
what drifts (clocks, temperature, a neighbour) falls on all alike. Ratios between subjects are to be taken round by round.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from onelaunch.operation import Case, Control, Direction, Loop, Operation
from onelaunch.workbench import stats
from onelaunch.workbench.measure.clocks import Clocks
from onelaunch.workbench.measure.sampling import Rotation, Sampler, make_sampler, rotate
from onelaunch.workbench.result import Noise, Regime, Status, Timing, Verdict
from onelaunch.workbench.study import LOOPS
from onelaunch.workbench.study.plan import missing_package
from onelaunch.workbench.verify import Judge, judge_answer
from onelaunch.workbench.verify.calls import Callee, status_of
from onelaunch.workbench.verify.truth import Truth

AGAIN = " again"
"""Ends the hidden name of the baseline's second copy, whose ratio to the first is the noise."""

ALL_REGIMES: tuple[Regime, ...] = ("cold", "warm", "eager")

LEAST_ROUNDS = 3
"""Rounds that are measured even when the time is up: fewer give no interval."""

WARM_UP_SECONDS = {"cuda": 1.0, "cpu": 0.2}
"""Seconds of mixed load before the first round, so that clocks and temperature have settled."""

BELOW_FLOOR = 0.95
"""Share of its roofline bound below which a time is not believed."""

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and how much there is."""


@dataclass
class Subject:
    """One variant or control, and what became of it."""

    name: str
    control: bool = False
    status: Status = "ok"
    reason: str = ""
    verdict: Verdict | None = None
    timings: tuple[Timing, ...] = ()
    peak_bytes: int | None = None


@dataclass
class Measurements:
    """Measurements of one case in one direction."""

    subjects: dict[str, Subject]
    noise: tuple[Noise, ...] = ()
    clocks: dict[str, float] = field(default_factory=dict)
    """Medians over the rounds, as :attr:`onelaunch.workbench.result.Provenance.clocks`."""
    notes: tuple[str, ...] = ()
    """How it was measured, in sentences: input sets, rounds, what cut it short."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during :func:`measure`; ``measurements`` hold the rounds that were finished, with status ``interrupted``."""

    def __init__(self, measurements: Measurements) -> None:
        super().__init__("interrupted while measuring")
        self.measurements = measurements


def measure(
    operation: Operation[..., Any],
    case: Case,
    direction: Direction = "forward",
    *,
    variants: Sequence[str],
    controls: Sequence[str] = (),
    baseline: str | Sequence[str] | None = None,
    regimes: Sequence[Regime] = ALL_REGIMES,
    rounds: int = 20,
    device: torch.device | str = "cpu",
    seed: int = 0,
    floors: Mapping[str, float] | None = None,
    bounds_again: Callable[[], Mapping[str, float]] | None = None,
    judge: Judge | None = None,
    time_cap_seconds: float = 60.0,
    on_progress: Progress | None = None,
) -> Measurements:
    """Verify, time and verify again several variants and controls of one operation at one case.

    Args:
        operation: what is computed.
        case: at which sizes, dtype and options.
        direction: ``"forward_backward"`` times the call and the gradients of all its differentiable inputs together.
        variants: names; one that cannot run, is wrong or raises is recorded with its status, and the others go on.
        controls: names of the operation's controls, timed beside the variants.
        baseline: the variant that is timed twice for the A/A run, of several the first that is correct; in the order of
            ``variants`` by default.
        regimes: which; those of steps in a row where the operation has such loops, forward and of variants alone.
        rounds: how many samples of each subject and regime.
        device: where.
        seed: of the inputs.
        floors: per name, the roofline bound: microseconds below which a cold time cannot be. Such a time becomes ``invalid``.
        bounds_again: called where a cold time is below its bound, before it becomes ``invalid``: measures the device's peaks
            again and returns the bounds that follow from them.
        judge: keeps the oracle's answers; pass the same one for every measurement of a study.
        time_cap_seconds: no new round begins after this (at least three are measured).
        on_progress: is told how far it is.

    Raises:
        Interrupted: on Ctrl-C, with the finished rounds.
        UnknownVariant: no variant of that name.
    """
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
    )
    for name in variants:
        session.add(name, Callee.variant(operation, name), None)
    for name in controls:
        session.add(name, Callee.control(operation, operation.controls[name]), operation.controls[name])
    try:
        session.verify()
        session.prepare()
        session.take_rounds(rounds, time_cap_seconds)
        session.verify_again()
        session.release()  # peaks are measured with buffers of their own
        return session.measurements(floors or {}, bounds_again)
    except KeyboardInterrupt:
        session.interrupt()
        raise Interrupted(session.measurements(floors or {})) from None
    finally:
        session.release()


@dataclass
class _Entry:
    """A subject while it is measured."""

    subject: Subject
    callee: Callee
    part: Control | None
    hidden: bool = False
    sampler: Sampler | None = None
    loops: dict[Regime, Loop] = field(default_factory=dict)
    rounds: dict[Regime, list[float]] = field(default_factory=dict)

    @property
    def runs(self) -> bool:
        return self.subject.status == "ok"

    def fail(self, error: Exception) -> None:
        self.subject.status, self.subject.reason = status_of(error)
        self.release()

    def release(self) -> None:
        """Free its memory."""
        self.sampler, self.loops = None, {}


@dataclass
class _Session:
    """The steps of :func:`measure`; what earlier steps and rounds found stays when a later one is interrupted."""

    operation: Operation[..., Any]
    case: Case
    direction: Direction
    baselines: tuple[str, ...]
    regimes: tuple[Regime, ...]
    device: torch.device
    seed: int
    judge: Judge
    progress: Progress
    entries: dict[str, _Entry] = field(default_factory=dict)
    clocks: Clocks = field(init=False)
    notes: list[str] = field(default_factory=list)
    steady: str | None = None
    """The variant of the A/A run."""

    def __post_init__(self) -> None:
        self.clocks = Clocks(self.device)

    def add(self, name: str, callee: Callee, part: Control | None) -> None:
        self.entries[name] = _Entry(Subject(name, control=part is not None), callee, part)

    def verify(self) -> None:
        """No time without a passing verdict."""
        torch.compiler.reset()  # else compiled variants stop being compiled after a few cases, and say so only in a log
        for done, entry in enumerate(list(self.entries.values())):
            self.progress("verify", done, len(self.entries))
            subject = entry.subject
            subject.status, subject.reason = self._can_run(entry)
            if not entry.runs:
                continue
            try:
                subject.verdict = self._verdict(entry)
            except Exception as error:  # noqa: BLE001 - whatever a variant raises is its result
                entry.fail(error)
                continue
            if not subject.verdict.ok:
                subject.status, subject.reason = "incorrect", subject.verdict.explain()

    def prepare(self) -> None:
        """Make the rotated inputs, compile, warm up and capture."""
        ready = [entry for entry in self.entries.values() if entry.runs]
        if not ready:
            return
        rotations: dict[Control | None, Rotation] = {}
        for done, entry in enumerate(ready):
            self.progress("prepare", done, len(ready))
            try:
                self._prepare(entry, rotations)
            except Exception as error:  # noqa: BLE001 - see above
                entry.fail(error)
        running = [name for name in self.baselines if name in self.entries and self.entries[name].runs]
        if running:
            self.steady = running[0]
            if self.steady != self.baselines[0]:
                self.notes.append(f"The A/A run is of {self.steady}: {self.baselines[0]} has no time here.")
            main = self.entries[self.steady]
            again = _Entry(Subject(self.steady + AGAIN), main.callee, main.part, hidden=True)
            try:
                self._prepare(again, rotations)
            except Exception as error:  # noqa: BLE001 - without it there is no noise floor, which the notes say
                self.notes.append(f"No A/A run: {status_of(error)[1]}.")
            else:
                self.entries[again.subject.name] = again
        self.notes += [f"{rotation.note}." for part, rotation in rotations.items() if part is None]

    def take_rounds(self, rounds: int, time_cap_seconds: float) -> None:
        """Samples of all subjects in all regimes, round by round."""
        self._warm_up()
        start = time.perf_counter()
        for index in range(rounds):
            if index >= LEAST_ROUNDS and time.perf_counter() - start > time_cap_seconds:
                self.notes.append(f"Stopped by the time cap of {time_cap_seconds:g} s after {index} of {rounds} rounds.")
                break
            self.progress("time", index, rounds)
            taken = [
                (name, regime, sample)
                for regime in self.regimes
                for name in order(tuple(name for name, entry in self.entries.items() if entry.runs), index)
                if (sample := self._sample(self.entries[name], regime)) is not None
            ]
            for name, regime, sample in taken:  # only whole rounds: ratios are taken round by round
                self.entries[name].rounds.setdefault(regime, []).append(sample)
            self.clocks.sample()

    def verify_again(self) -> None:
        """The outputs of the timed calls must still pass."""
        for entry in self.entries.values():
            if not entry.runs or entry.sampler is None:
                continue
            truth = self._truth(entry)
            try:
                verdicts = [
                    (regime, judge_answer(truth, answer))
                    for regime in self.regimes
                    if regime not in LOOPS and regime not in entry.sampler.refused
                    for answer in entry.sampler.answers(regime)
                ]
                said = ((regime, loop.problem()) for regime, loop in entry.loops.items() if regime in entry.rounds)
                problem = next(((regime, why) for regime, why in said if why is not None), None)
            except Exception as error:  # noqa: BLE001 - see above
                entry.fail(error)
                continue
            if wrong := next(((regime, verdict) for regime, verdict in verdicts if not verdict.ok), None):
                entry.subject.status = "incorrect"
                entry.subject.reason = f"The outputs of the timed calls ({wrong[0]}) do not pass: {wrong[1].explain()}"
                entry.subject.verdict = wrong[1]
            elif problem is not None:
                entry.subject.status = "incorrect"
                entry.subject.reason = f"The steps that were timed ({problem[0]}) are wrong: {problem[1]}"
            elif entry.sampler.refused:
                entry.subject.status, entry.subject.reason = next(iter(entry.sampler.refused.values()))

    def interrupt(self) -> None:
        for entry in self.entries.values():
            if entry.runs:
                count = max(map(len, entry.rounds.values()), default=0)
                entry.subject.status, entry.subject.reason = "interrupted", f"interrupted after {count} rounds"

    def release(self) -> None:
        """Give the memory of inputs, outputs and graphs back: what comes next (a larger shape, a profiled process) needs it."""
        for entry in self.entries.values():
            entry.release()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def measurements(
        self, floors: Mapping[str, float], bounds_again: Callable[[], Mapping[str, float]] | None = None
    ) -> Measurements:
        """Return everything found so far as plain values; a cold time is held against a bound twice before it is refused."""
        for entry in self.entries.values():
            entry.subject.timings = tuple(
                Timing(regime=regime, microseconds=stats.estimate(samples), rounds=tuple(samples))
                for regime, samples in entry.rounds.items()
            )
        subjects = [entry.subject for entry in self.entries.values()]
        if bounds_again is not None and any(_too_fast(each, floors.get(each.name, 0.0)) for each in subjects):
            floors = bounds_again()
        for subject in subjects:
            _believe(subject, floors.get(subject.name, 0.0), again=bounds_again is not None)
        shown = {name: entry.subject for name, entry in self.entries.items() if not entry.hidden}
        return Measurements(shown, self._noise(), self.clocks.medians(), tuple(self.notes))

    def _noise(self) -> tuple[Noise, ...]:
        if self.steady is None or self.steady + AGAIN not in self.entries:
            return ()
        again, main = self.entries[self.steady + AGAIN], self.entries[self.steady]
        both = [regime for regime in again.rounds if regime in main.rounds]
        ratios = {regime: stats.ratio(again.rounds[regime], main.rounds[regime]) for regime in both}
        return tuple(
            Noise(shape=str(self.case), direction=self.direction, regime=regime, ratio=ratio, floor=stats.noise_floor(ratio))
            for regime, ratio in ratios.items()
        )

    def _can_run(self, entry: _Entry) -> tuple[Status, str]:
        if entry.part is not None:
            return "ok", ""
        variant = self.operation.get(entry.subject.name)
        if (needed := missing_package(variant)) is not None:
            return "not_installed", f"needs the package {needed}, which is not installed"
        query = self.operation.query(self.case, str(self.device), grad=self.direction == "forward_backward")
        reason = variant.why_not(query)
        return ("ok", "") if reason is None else ("unsupported", reason)

    def _verdict(self, entry: _Entry) -> Verdict:
        place = {"device": self.device, "directions": (self.direction,), "seed": self.seed}
        if entry.part is not None:
            return self.judge.judge_control(self.operation, self.case, entry.part.name, **place)
        return self.judge.judge(self.operation, self.case, variant=entry.subject.name, **place)

    def _truth(self, entry: _Entry) -> Truth:
        return self.judge.truth(
            self.operation, self.case, device=self.device, direction=self.direction, seed=self.seed, control=entry.part
        )

    def _prepare(self, entry: _Entry, rotations: dict[Control | None, Rotation]) -> None:
        if entry.part not in rotations:
            rotations[entry.part] = rotate(self._truth(entry), self.device)
        entry.sampler = make_sampler(entry.callee, rotations[entry.part], self.device)
        entry.sampler.prepare([regime for regime in self.regimes if regime not in LOOPS])
        entry.subject.peak_bytes = entry.sampler.peak_bytes
        if entry.part is None and self.direction == "forward":
            variant, arguments = self.operation.get(entry.callee.name), rotations[entry.part].sets[0].arguments
            makers = {regime: self.operation.loops[regime] for regime in self.regimes if regime in LOOPS}
            entry.loops = {regime: make(variant, arguments) for regime, make in makers.items()}

    def _warm_up(self) -> None:
        """Mixed load; a subject that fails here fails."""
        end = time.perf_counter() + WARM_UP_SECONDS[self.device.type]
        while any(entry.runs for entry in self.entries.values()):
            for entry in self.entries.values():
                for regime in self.regimes:
                    if entry.runs:
                        self._sample(entry, regime)
                    if time.perf_counter() > end:
                        return

    def _sample(self, entry: _Entry, regime: Regime) -> float | None:
        if entry.sampler is None or regime in entry.sampler.refused:
            return None
        try:
            if regime in LOOPS:
                return 1e6 * entry.loops[regime].seconds() if regime in entry.loops else None
            return entry.sampler.sample(regime)
        except Exception as error:  # noqa: BLE001 - see above
            entry.fail(error)
            return None


def order(names: Sequence[str], index: int) -> tuple[str, ...]:
    """The order of a round: rotated by one every other round, every other round reversed."""
    if not names:
        return ()
    start = (index // 2) % len(names)
    rotated = (*names[start:], *names[:start])
    return rotated[::-1] if index % 2 else rotated


def below(timing: Timing | None, bound_microseconds: float) -> bool:
    """Return whether a time is so far below its roofline bound that it is not believed."""
    return timing is not None and timing.microseconds.median < BELOW_FLOOR * bound_microseconds


def _cold(subject: Subject) -> Timing | None:
    return next((timing for timing in subject.timings if timing.regime == "cold"), None)


def _too_fast(subject: Subject, bound_microseconds: float) -> bool:
    return subject.status == "ok" and below(_cold(subject), bound_microseconds)


def _believe(subject: Subject, bound_microseconds: float, *, again: bool) -> None:
    """Refuse a cold time well below its bound: it is no time but a mistake, of the variant or of the peaks."""
    cold = _cold(subject)
    if cold is None or not _too_fast(subject, bound_microseconds):
        return
    subject.status = "invalid"
    peaks = "the device's peaks were measured too low" + (", and again when this time was seen" if again else "")
    subject.reason = (
        f"{cold.microseconds.median:.2f} µs is below its roofline bound of {bound_microseconds:.2f} µs: less was done than must "
        f"be, or {peaks}. Where other work ran on the device, end it and measure the peaks with onelaunch doctor --refresh"
    )
