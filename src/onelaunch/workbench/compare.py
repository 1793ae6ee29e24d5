"""Two results of one study held against each other: what changed beyond the noise of both.

Rounds of different runs cannot be paired, so a ratio's interval is made of both runs' intervals: from one's low over the other's
high to the reverse. A difference is claimed only when that whole interval lies beyond both runs' A/A noise floors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from onelaunch.operation import Direction
from onelaunch.workbench.result import Cell, CriterionStatus, DecisionKind, Estimate, Regime, Result
from onelaunch.workbench.stats import unpaired_ratio

Change = Literal["SAME", "FASTER", "SLOWER", "AMBIGUOUS"]
"""Of the second result against the first. AMBIGUOUS: the interval is too wide for any of the others."""

LEAST_MEMORY = 1.01
"""Peak memory is counted, not timed: it has no noise but the rounding of the allocator."""

LEAST_NOISE = 1.01
"""Where a result has no A/A run of a shape, differences below this are noise all the same, and nothing is claimed as changed."""


@dataclass(frozen=True)
class TimeChange:
    """One variant's time in one regime, in both results."""

    shape: str
    direction: Direction
    variant: str
    regime: Regime
    change: Change
    ratio: Estimate
    """Time in the second result over time in the first, with the interval that both leave; ``samples`` of the smaller."""
    noise: float
    """The larger of both noise floors; infinite where one of them has no A/A run there."""
    before: float
    """Microseconds in the first result."""
    after: float


@dataclass(frozen=True)
class MemoryChange:
    """One variant's peak memory in both results, where it differs by more than the allocator's rounding."""

    shape: str
    direction: Direction
    variant: str
    before: int
    """Bytes in the first result."""
    after: int


@dataclass(frozen=True)
class StatusChange:
    """A cell whose status is another one now."""

    shape: str
    direction: Direction
    variant: str
    before: str
    after: str
    reason: str
    """Why it is not ``ok``, in the result where it is not."""


@dataclass(frozen=True)
class OutcomeChange:
    """A criterion whose status is another one now; ``None`` where a result does not have it."""

    criterion: str
    before: CriterionStatus | None
    after: CriterionStatus | None


@dataclass(frozen=True)
class Comparison:
    """What changed from the first result to the second."""

    times: tuple[TimeChange, ...]
    memory: tuple[MemoryChange, ...]
    statuses: tuple[StatusChange, ...]
    outcomes: tuple[OutcomeChange, ...]
    decision: tuple[DecisionKind | None, DecisionKind | None] | None
    """Both decisions where they differ, else ``None``."""
    provenance: dict[str, tuple[str, str]]
    """Device, driver, versions, commit... where they differ; the date and the command aside."""
    only_first: tuple[str, ...]
    """Cells of the first result alone, as ``variant at shape, direction``."""
    only_second: tuple[str, ...]
    declarations: tuple[str, ...]
    """What the two declarations disagree on, in sentences; empty when both results are of one and the same declaration."""

    def count(self, change: Change) -> int:
        """How many times changed that way."""
        return sum(time.change == change for time in self.times)


def compare(a: Result, b: Result) -> Comparison:
    """What changed from ``a`` to ``b``. Results of different studies or devices may be compared; the differences are named."""
    first, second = _by_place(a), _by_place(b)
    shared = [place for place in first if place in second]
    return Comparison(
        times=tuple(change for place in shared for change in _times(a, b, first[place], second[place])),
        memory=tuple(change for place in shared if (change := _memory(first[place], second[place])) is not None),
        statuses=tuple(_status(first[place], second[place]) for place in shared if first[place].status != second[place].status),
        outcomes=_outcomes(a, b),
        decision=_decision(a, b),
        provenance=_provenance(a, b),
        only_first=tuple(_name(cell) for place, cell in first.items() if place not in second),
        only_second=tuple(_name(cell) for place, cell in second.items() if place not in first),
        declarations=tuple(_declarations(a, b)),
    )


def classify(ratio: Estimate, noise: float) -> Change:
    """A ratio (second over first) against the noise floor: never forced where the interval does not decide."""
    if ratio.high < 1 / noise:
        return "FASTER"
    if ratio.low > noise:
        return "SLOWER"
    if 1 / noise <= ratio.low and ratio.high <= noise:
        return "SAME"
    return "AMBIGUOUS"


Place = tuple[str, Direction, str]


def _by_place(result: Result) -> dict[Place, Cell]:
    return {(cell.shape, cell.direction, cell.variant): cell for cell in result.cells}


def _times(a: Result, b: Result, before: Cell, after: Cell) -> list[TimeChange]:
    if before.status != "ok" or after.status != "ok":
        return []
    changes = []
    for earlier in before.timings:
        later = after.timing(earlier.regime)
        if later is None:
            continue
        ratio = unpaired_ratio(later.microseconds, earlier.microseconds)
        floors = [_noise(result, before, earlier.regime) for result in (a, b)]
        known = [floor for floor in floors if floor is not None]
        noise = max(LEAST_NOISE, *known) if len(known) == len(floors) else float("inf")
        changes.append(
            TimeChange(
                shape=before.shape,
                direction=before.direction,
                variant=before.variant,
                regime=earlier.regime,
                change=classify(ratio, noise) if known == floors else "AMBIGUOUS",
                ratio=ratio,
                noise=noise,
                before=earlier.microseconds.median,
                after=later.microseconds.median,
            )
        )
    return changes


def _memory(before: Cell, after: Cell) -> MemoryChange | None:
    if before.status != "ok" or after.status != "ok" or not before.peak_bytes or not after.peak_bytes:
        return None
    if 1 / LEAST_MEMORY <= after.peak_bytes / before.peak_bytes <= LEAST_MEMORY:
        return None
    return MemoryChange(before.shape, before.direction, before.variant, before.peak_bytes, after.peak_bytes)


def _noise(result: Result, cell: Cell, regime: Regime) -> float | None:
    place = (cell.shape, cell.direction, regime)
    return next((noise.floor for noise in result.noise if (noise.shape, noise.direction, noise.regime) == place), None)


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
    one, other = a.provenance, b.provenance
    facts = {
        name: (str(getattr(one, name)), str(getattr(other, name)))
        for name in ("device", "architecture", "driver", "commit", "scale", "rounds")
    }
    for name in dict.fromkeys((*one.versions, *other.versions)):
        facts[name] = (one.versions.get(name, "none"), other.versions.get(name, "none"))
    return {name: pair for name, pair in facts.items() if pair[0] != pair[1]}


def _declarations(a: Result, b: Result) -> list[str]:
    if a.study_digest == b.study_digest:
        return []
    sentences = [f"The declarations differ (digests {a.study_digest[:12]} and {b.study_digest[:12]})."]
    one, other = a.study.model_dump(), b.study.model_dump()
    for key in ("shapes", "criteria"):
        earlier, later = ({entry["name"]: entry for entry in declared[key]} for declared in (one, other))
        for name in dict.fromkeys((*earlier, *later)):
            if name not in later:
                sentences.append(f"{key}: {name!r} is in the first only.")
            elif name not in earlier:
                sentences.append(f"{key}: {name!r} is in the second only.")
            elif earlier[name] != later[name]:
                one_side, other_side = earlier[name], later[name]
                fields = dict.fromkeys((*one_side, *other_side))  # a key at its default may be left out
                changed = ", ".join(field for field in fields if one_side.get(field) != other_side.get(field))
                sentences.append(f"{key}: {name!r} differs in {changed}.")
    sentences += [f"{key} differ." for key in one if key not in ("shapes", "criteria") and one[key] != other[key]]
    return sentences


def _name(cell: Cell) -> str:
    return f"{cell.variant} at {cell.shape}, {cell.direction.replace('_', ' and ')}"
