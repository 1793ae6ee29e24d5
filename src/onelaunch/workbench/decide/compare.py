"""Compare two results, or two sides of repeated runs: which times changed, and what else differs.

A change of a time is claimed only if the whole interval of the ratio lies beyond the noise within runs and the noise between
runs; with one run on each side, none is.

- The interval covers every ratio that both sides' intervals allow, from one's low over the other's high to the reverse, because
  rounds of different runs cannot be paired.
- Noise within a run is measured by A/A runs. The largest noise floor of the results that are compared counts.
- Noise between runs of the same code (other clocks, other addresses, another process) is often larger, and no single run can show
  it. It is estimated from repeated runs by :func:`onelaunch.workbench.stats.noise_between_runs`. If both sides are of the same
  code, all their runs are repeats, and the noise is the largest median over the smallest.

With one run of different code on each side the noise between runs is unknown: a difference beyond the noise within a run is then
listed as *unrepeated*. Between two devices a claim needs repeats on both sides, because each has a noise of its own. It then says
which device is faster, not what the code changed.

One run cannot stand on both sides. Shapes of one name whose sizes, dtype or options differ are not compared.

Command ``onelaunch study compare`` calls :func:`compare`, and before it the two functions that check the results. It prints a
:class:`Comparison`, except its ``decision`` and the ``runs`` and ``between`` of its times, which only tests read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from onelaunch.errors import ResultMismatch
from onelaunch.operation import Direction
from onelaunch.wording import listing
from onelaunch.workbench import stats
from onelaunch.workbench.decide.declarations import declaration_differences
from onelaunch.workbench.result import Cell, CriterionStatus, DecisionKind, Estimate, Regime, Result
from onelaunch.workbench.study import Shape, Study

Change = Literal["SAME", "FASTER", "SLOWER", "UNREPEATED", "AMBIGUOUS"]
"""Change of a time from the first side to the second.

UNREPEATED: it differs by more than the noise within a run, and the noise between runs is unknown. AMBIGUOUS: the interval is too
wide for any of the others, or the difference is within the noise between runs.
"""

_LEAST_MEMORY = 1.01
"""Smallest factor of peak memory that is listed. Memory is counted, so the allocator's rounding is its only noise."""

_LEAST_NOISE = 1.01
"""Smallest noise floor of a comparison, even if A/A runs agree better."""


@dataclass(frozen=True)
class TimeChange:
    """Times of one variant in one regime on both sides."""

    shape: str
    direction: Direction
    variant: str
    regime: Regime
    change: Change
    ratio: Estimate
    """Time on the second side over time on the first, with the interval that both allow. ``samples`` is the smaller of theirs."""
    noise: float
    """Largest factor that noise explains, within runs and between them; infinite if a result has no A/A run."""
    before: float
    """Microseconds on the first side: the median, or the geometric mean of several runs' medians."""
    after: float
    """Microseconds on the second side, taken in the same way."""
    runs: tuple[int, int] = (1, 1)
    """Number of runs with this time on each side."""
    between: float | None = None
    """The largest factor that noise between runs explains, or ``None`` where it is unknown."""
    outside: bool = False
    """True if the variant is a peer outside the gate on a side."""


@dataclass(frozen=True)
class MemoryChange:
    """Peak memory of one variant in both results, where it differs by more than the allocator's rounding."""

    shape: str
    direction: Direction
    variant: str
    before: int
    """Bytes in the first result."""
    after: int
    """Bytes in the second result."""


@dataclass(frozen=True)
class StatusChange:
    """Measurement whose status differs between the results."""

    shape: str
    direction: Direction
    variant: str
    before: str
    after: str
    reason: str
    """Reason that the second result gives, or that of the first if the second gives none."""


@dataclass(frozen=True)
class OutcomeChange:
    """Criterion whose status differs between the results; ``None`` for a result that does not declare it."""

    criterion: str
    before: CriterionStatus | None
    after: CriterionStatus | None


@dataclass(frozen=True)
class Incomparable:
    """A shape name under which the two studies declare different cases."""

    shape: str
    reason: str
    """The difference, such as ``sizes differ: T=64 and T=128``."""


@dataclass(frozen=True)
class Comparison:
    """Differences between two sides. Everything except times is read from the first result of each side."""

    times: tuple[TimeChange, ...]
    memory: tuple[MemoryChange, ...]
    statuses: tuple[StatusChange, ...]
    outcomes: tuple[OutcomeChange, ...]
    decision: tuple[DecisionKind | None, DecisionKind | None] | None
    """The first and the second decision if they differ, else ``None``."""
    provenance: dict[str, tuple[str, str]]
    """Device, driver, versions, commit and other facts that differ; the date and the command are left out."""
    only_first: tuple[str, ...]
    """Measurements of the first result alone, as ``variant at shape, direction``."""
    only_second: tuple[str, ...]
    declarations: tuple[str, ...]
    """Differences between the two declarations, in sentences; empty when both results are of the same declaration."""
    incomparable: tuple[Incomparable, ...] = ()
    """Shapes that are left out because one name stands for two cases."""
    runs: tuple[int, int] = (1, 1)
    """Number of results on each side."""
    same_code: bool = False
    """True if both sides are runs of the same code, so that their differences are noise between runs."""
    same_device: bool = True
    """True if both sides ran on devices of the same name."""

    def count(self, change: Change) -> int:
        """Return the number of times that changed in this way."""
        return sum(time.change == change for time in self.times)


def compare(a: Result | Sequence[Result], b: Result | Sequence[Result]) -> Comparison:
    """Compare two sides, each one result or several repeated runs of the same code.

    Results of different studies or devices may be compared; the differences are named.

    Args:
        a: The first side: a result, or repeated runs of the same declaration, device, driver, versions and commit.
        b: The second side, likewise. Two or more runs on a side show the noise between runs, without which no change of a time is
            claimed; alternate the runs of both sides, so that a machine that warms up or gets busy hits both.

    Returns:
        The comparison. Times are those of all runs; statuses, memory, criteria and decisions those of the first run of each side.

    Raises:
        ResultMismatch: Runs of one side are not of the same code, or one run is given twice, on a side or on both.
    """
    firsts, seconds = _side(a, "first"), _side(b, "second")
    for index, run in enumerate(seconds):
        for position, other in enumerate(firsts):
            require_two_runs(other, run, (f"Result {index + 1} of the second side", f"result {position + 1} of the first"))
    one, other = firsts[0], seconds[0]
    incomparable = _incomparable(one.study, other.study)
    first, second = _by_key(one), _by_key(other)
    left_out = {each.shape for each in incomparable}
    shared = [key for key in first if key in second and key[0] not in left_out]
    times = _Times(firsts, seconds)
    return Comparison(
        times=tuple(change for key in shared for change in times.at(key)),
        memory=tuple(change for key in shared if (change := _memory(first[key], second[key])) is not None),
        statuses=tuple(_status(first[key], second[key]) for key in shared if first[key].status != second[key].status),
        outcomes=_outcomes(one, other),
        decision=_decision(one, other),
        provenance=_provenance(one, other),
        only_first=tuple(_name(cell) for key, cell in first.items() if key not in second),
        only_second=tuple(_name(cell) for key, cell in second.items() if key not in first),
        declarations=tuple(declaration_differences(one, other)),
        incomparable=incomparable,
        runs=(len(firsts), len(seconds)),
        same_code=times.same_code,
        same_device=times.same_device,
    )


def require_repeat(run: Result, of: Result, names: tuple[str, str]) -> None:
    """Check that a result is a repeated run of the same code as another result.

    Args:
        run: The result that may serve as a repeat.
        of: The result that it would repeat.
        names: Names of the two in messages, such as their files.

    Raises:
        ResultMismatch: The declaration, device, driver, versions or commit differ, or both are the same run.
    """
    if differing := _code_differences(run, of):
        facts = "; ".join(f"{name}: {mine or 'none'} against {theirs or 'none'}" for name, (mine, theirs) in differing.items())
        raise ResultMismatch(
            f"{names[0]} is not a repeated run of {names[1]}: they differ in {facts}. A repeat has the same declaration, device, "
            "driver, versions and commit; leave this result out, or compare it as the other side."
        )
    if run.provenance.date == of.provenance.date and run.cells == of.cells:
        raise _same_run(names)


def require_two_runs(first: Result, second: Result, names: tuple[str, str]) -> None:
    """Check that two results, one of each side of a comparison, are not the same, such as one file given twice.

    A result and the same run judged again by other criteria are two results.

    Args:
        first: A result of the first side.
        second: A result of the second side.
        names: Names of the two in messages, such as their files.

    Raises:
        ResultMismatch: Both are the same.
    """
    if first == second:
        raise _same_run(names)


def _same_run(names: tuple[str, str]) -> ResultMismatch:
    return ResultMismatch(
        f"{names[0]} is the same run as {names[1]}, which shows nothing about the noise between runs. Run the study again into "
        "another file, and pass that file instead."
    )


def classify(ratio: Estimate, noise: float, within: float | None = None) -> Change:
    """Classify a ratio (second side over first); an interval that does not decide is AMBIGUOUS.

    Args:
        ratio: The ratio of times with its interval.
        noise: The factor beyond which a change is claimed.
        within: The factor within which two times are the same; ``noise`` if not given.
    """
    within = noise if within is None else within
    if ratio.high < 1 / noise:
        return "FASTER"
    if ratio.low > noise:
        return "SLOWER"
    if 1 / within <= ratio.low and ratio.high <= within:
        return "SAME"
    return "AMBIGUOUS"


Key = tuple[str, Direction, str]
"""Key of a measurement: shape, direction and variant."""


class _Times:
    """Times of two sides, compared measurement by measurement, with the noise within and between their runs."""

    def __init__(self, firsts: Sequence[Result], seconds: Sequence[Result]) -> None:
        self.sides = (firsts, seconds)
        one, other = firsts[0], seconds[0]
        self.same_device = one.provenance.device == other.provenance.device
        commit = one.provenance.commit
        known = bool(commit) and not commit.endswith("-dirty")  # a checkout with changes may hold other code than its commit
        self.same_code = known and not _code_differences(one, other)

    def at(self, key: Key) -> list[TimeChange]:
        """Compare the times of one variant at one shape and direction, regime by regime."""
        shape, direction, variant = key
        ok_cells = [_ok_cells(runs, key) for runs in self.sides]
        if not all(cells and cells[0][0] is runs[0] for cells, runs in zip(ok_cells, self.sides, strict=True)):
            return []  # the first result of a side has no such time
        _, first_cell = ok_cells[0][0]
        changes = []
        for regime in (timing.regime for timing in first_cell.timings):
            timed = [_timed(cells, regime) for cells in ok_cells]
            if not all(timed):
                continue
            before, after = (stats.mean_estimate([time for _, time in side]) for side in timed)
            ratio = stats.unpaired_ratio(after, before)
            within = _noise_within((run for side in timed for run, _ in side), shape, direction, regime)
            between = self._between(*([time.median for _, time in side] for side in timed))
            noise = max(within, between or 1.0)
            changes.append(
                TimeChange(
                    shape=shape,
                    direction=direction,
                    variant=variant,
                    regime=regime,
                    change=self._change(ratio, within, between),
                    ratio=ratio,
                    noise=noise,
                    before=before.median,
                    after=after.median,
                    runs=(len(timed[0]), len(timed[1])),
                    between=between,
                    outside=any(cell.outside for cells in ok_cells for _, cell in cells),
                )
            )
        return changes

    def _between(self, before: Sequence[float], after: Sequence[float]) -> float | None:
        """Return the noise between runs, from the medians of the runs of each side."""
        if self.same_code:
            return max(*before, *after) / min(*before, *after)
        if not self.same_device and min(len(before), len(after)) < 2:
            return None
        return stats.noise_between_runs(before, after)

    def _change(self, ratio: Estimate, within: float, between: float | None) -> Change:
        """Classify a ratio by the noise within and between runs."""
        if math.isinf(within):
            return "AMBIGUOUS"
        change = classify(ratio, max(within, between or 1.0), within)
        if change not in ("FASTER", "SLOWER"):
            return change
        if self.same_code:
            return "AMBIGUOUS"  # the difference is noise between runs; only rounding puts it beyond that noise
        return "UNREPEATED" if between is None else change


def _ok_cells(runs: Sequence[Result], key: Key) -> list[tuple[Result, Cell]]:
    """Return the runs in which the times of a measurement are believed, each with the measurement."""
    shape, direction, variant = key
    found = ((run, run.cell(shape, variant, direction)) for run in runs)
    return [(run, cell) for run, cell in found if cell is not None and cell.measured]


def _timed(cells: Iterable[tuple[Result, Cell]], regime: Regime) -> list[tuple[Result, Estimate]]:
    """Return the runs that have a time in a regime, each with the time."""
    found = ((run, cell.timing(regime)) for run, cell in cells)
    times = [(run, timing.microseconds) for run, timing in found if timing is not None]
    return [(run, time) for run, time in times if _is_time(time)]


def _is_time(time: Estimate) -> bool:
    """Return whether all numbers of a stored time are positive and finite, so that ratios of them exist."""
    return all(0 < value < math.inf for value in (time.low, time.median, time.high))


def _noise_within(runs: Iterable[Result], shape: str, direction: Direction, regime: Regime) -> float:
    """Return the largest A/A noise floor of the runs, infinite if one of them has none."""
    found = [run.noise_at(shape, direction, regime) for run in runs]
    return max(_LEAST_NOISE, *(noise.floor if noise is not None and noise.floor > 0 else math.inf for noise in found))


def _side(results: Result | Sequence[Result], which: str) -> list[Result]:
    """Return a side's results as a list, after checking that they are repeats of the first."""
    runs = [results] if isinstance(results, Result) else list(results)
    if not runs:
        raise ResultMismatch(f"The {which} side has no result. Pass at least one.")
    for index, run in enumerate(runs):
        for earlier, other in enumerate(runs[:index]):
            require_repeat(run, other, (f"Result {index + 1} of the {which} side", f"its result {earlier + 1}"))
    return runs


def _code_differences(one: Result, other: Result) -> dict[str, tuple[str, str]]:
    """Return the differences that show that two results are not runs of the same code on the same kind of device."""
    facts = {
        name: (str(getattr(one.provenance, name)), str(getattr(other.provenance, name)))
        for name in ("device", "architecture", "driver", "commit")
    }
    facts["declaration"] = (one.study_digest[:12], other.study_digest[:12])
    facts |= _versions(one, other)
    return {name: pair for name, pair in facts.items() if pair[0] != pair[1]}


def _versions(one: Result, other: Result) -> dict[str, tuple[str, str]]:
    mine, theirs = one.provenance.versions, other.provenance.versions
    return {name: (mine.get(name, "none"), theirs.get(name, "none")) for name in dict.fromkeys((*mine, *theirs))}


def _incomparable(one: Study, other: Study) -> tuple[Incomparable, ...]:
    """Return the shapes that both studies name, but declare as different cases."""
    theirs = {shape.name: shape for shape in other.shapes}
    found = []
    for shape in one.shapes:
        if shape.name not in theirs:
            continue
        reasons = _case_differences(shape, theirs[shape.name])
        called = shape.operation or one.operation, theirs[shape.name].operation or other.operation
        if called[0] != called[1]:
            reasons = [f"operations differ: {called[0]} and {called[1]}"]
        if reasons:
            found.append(Incomparable(shape.name, "; ".join(reasons)))
    return tuple(found)


def _case_differences(one: Shape, other: Shape) -> list[str]:
    """Return a clause for each difference between the dtypes, sizes and options of two shapes."""
    reasons = [f"dtypes differ: {one.dtype} and {other.dtype}"] if one.dtype != other.dtype else []
    for what, mine, theirs in (("sizes", one.sizes, other.sizes), ("options", one.options, other.options)):
        names = [name for name in dict.fromkeys((*mine, *theirs)) if mine.get(name) != theirs.get(name)]
        if names:
            reasons.append(f"{what} differ: {_values(mine, names)} and {_values(theirs, names)}")
    return reasons


def _values(given: dict[str, Any], names: Iterable[str]) -> str:
    return listing(f"{name}={given[name]}" if name in given else f"no {name}" for name in names)


def _by_key(result: Result) -> dict[Key, Cell]:
    """Return the measurements of a result by shape, direction and variant."""
    return {(cell.shape, cell.direction, cell.variant): cell for cell in result.cells}


def _memory(before: Cell, after: Cell) -> MemoryChange | None:
    """Return the change of peak memory, or ``None`` if it is within :data:`_LEAST_MEMORY` or not measured."""
    if not before.measured or not after.measured or not before.peak_bytes or not after.peak_bytes:
        return None
    if 1 / _LEAST_MEMORY <= after.peak_bytes / before.peak_bytes <= _LEAST_MEMORY:
        return None
    return MemoryChange(before.shape, before.direction, before.variant, before.peak_bytes, after.peak_bytes)


def _status(before: Cell, after: Cell) -> StatusChange:
    return StatusChange(
        shape=before.shape,
        direction=before.direction,
        variant=before.variant,
        before=before.status,
        after=after.status,
        reason=after.reason or before.reason,
    )


def _outcomes(a: Result, b: Result) -> tuple[OutcomeChange, ...]:
    """Return the criteria whose status differs, including those that only one result declares."""
    first = {outcome.criterion.name: outcome.status for outcome in a.outcomes}
    second = {outcome.criterion.name: outcome.status for outcome in b.outcomes}
    return tuple(
        OutcomeChange(name, first.get(name), second.get(name))
        for name in dict.fromkeys((*first, *second))
        if first.get(name) != second.get(name)
    )


def _decision(a: Result, b: Result) -> tuple[DecisionKind | None, DecisionKind | None] | None:
    kinds = (a.decision.kind if a.decision else None, b.decision.kind if b.decision else None)
    return kinds if kinds[0] != kinds[1] else None


def _provenance(a: Result, b: Result) -> dict[str, tuple[str, str]]:
    """Return the facts of the provenance that differ, by name."""
    one, other = a.provenance, b.provenance
    facts = {
        name: (str(getattr(one, name)), str(getattr(other, name)))
        for name in ("device", "architecture", "driver", "commit", "scale", "rounds")
    }
    facts |= _versions(a, b)
    return {name: pair for name, pair in facts.items() if pair[0] != pair[1]}


def _name(cell: Cell) -> str:
    return f"{cell.variant} at {cell.shape}, {cell.direction.replace('_', ' and ')}"
