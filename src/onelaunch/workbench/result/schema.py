"""The stored schema of results, versioned.

Everything that a report, a comparison or a program reads about a finished study stands here, as plain values.
Times are in microseconds, traffic in bytes; every measured number names its regime, its sample count or its source.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError, model_validator

from onelaunch.errors import ResultCorrupt, ResultExists, ResultMissing, ResultTooNew
from onelaunch.operation import Direction
from onelaunch.wording import in_a_line, listing, shown
from onelaunch.workbench.files import read_text, write_text
from onelaunch.workbench.stored import (
    FROM_A_FILE,
    LEAST_TIME,
    MOST_TIME,
    Amount,
    Count,
    Error,
    Estimate,
    Finite,
    Grown,
    Name,
    Positive,
    Slug,
    Stored,
    Time,
    Words,
)
from onelaunch.workbench.study import Criterion, Regime, Study, members
from onelaunch.workbench.study.plan import Plan

SCHEMA = 3
"""Version of what is stored. Older ones read as they stand: version 1 had no means over shapes, no times at two shapes, no memory
and no criteria that do not decide; version 2 no read bandwidth, no spread of the measured peaks and no written bytes."""

READABLE = (1, 2, 3)


Status = Literal["ok", "unsupported", "not_installed", "incorrect", "invalid", "out_of_memory", "error", "interrupted"]
"""``incorrect``: the verdict failed, no time was taken. ``invalid``: faster than its floor, the time is not believed."""


OWN_COUNTS = ("launches", "barriers")
"""Counted measures for which a cell has a field of its own."""


class ComponentError(Stored):
    """How one result or gradient compares with the oracle."""

    name: Words
    """``y``, ``final_state``, ``grad x``..."""
    error: Error
    """Norm-wise: ||out - oracle|| / ||oracle||. NaN is stored as infinity."""
    max_error: Error
    """Largest absolute difference."""
    allowed: Positive
    """The smaller of the dtype's cap and twice the error of plain PyTorch in the same dtype."""
    error_by_position: tuple[Error, ...] = ()
    """The norm-wise error of successive parts of the sequence, first to last."""


class Verdict(Stored):
    """Verdict on whether a variant computes the operation at one case."""

    ok: bool
    components: tuple[ComponentError, ...] = ()
    problems: tuple[Words, ...] = ()
    """Problems in sentences; empty when ``ok``."""

    def explain(self) -> str:
        """Return the problems in one line, or the worst component."""
        if self.problems:
            return " ".join(self.problems)
        worst = max(self.components, key=lambda component: component.error / component.allowed, default=None)
        return f"correct; {worst.name} is nearest to its limit, {worst.error:.1e} of {worst.allowed:.1e}" if worst else "correct"


class Timing(Stored):
    """One variant's time in one regime."""

    regime: Regime
    microseconds: Estimate
    rounds: tuple[Time, ...] = Field(min_length=1)
    """The median of each round, in the order the rounds ran: ratios between variants are taken round by round."""

    @model_validator(mode="after")
    def _is_a_time(self) -> Timing:
        _check_positive(self.microseconds, "microseconds")
        if not LEAST_TIME <= self.microseconds.low <= self.microseconds.high <= MOST_TIME:
            raise ValueError(f"microseconds must lie between {LEAST_TIME:g} and {MOST_TIME:g}")
        return self


class Traffic(Stored):
    """DRAM bytes of one call."""

    source: Literal["ncu", "analytic"]
    read: Amount
    written: Amount
    note: Words = ""
    """How they were obtained, such as the cache control of the profiler."""

    @property
    def total(self) -> float:
        return self.read + self.written


class Cell(Grown, Stored):
    """One variant (or control) at one shape in one direction."""

    LATER = ("launches", "barriers", "counts")

    shape: Name
    direction: Direction
    variant: Name
    control: bool = False
    status: Status
    reason: Words = ""
    """Why the status is not ``ok``."""
    plan: Plan | None = None
    verdict: Verdict | None = None
    timings: tuple[Timing, ...] = ()
    traffic: Traffic | None = None
    peak_bytes: Count | None = None
    """Most memory in use above the inputs during one call, as :class:`~onelaunch.workbench.measure.sampling.GpuSampler` measures
    it; ``None`` where it is not measured, such as on a CPU."""
    launches: Count | None = None
    """Kernels, copies and fills of one call, as counted in a CUDA graph; ``None`` where no criterion asks for them."""
    barriers: Count | None = None
    """Barriers over the grid in one call, as the variant's kernel counts them; ``None`` where no criterion asks for them."""
    counts: dict[Name, Count] = Field(default_factory=dict)
    """Other counts of one call by the name of their measure, where a criterion asks for them."""

    def timing(self, regime: Regime) -> Timing | None:
        return next((timing for timing in self.timings if timing.regime == regime), None)

    def count(self, measure: str) -> int | None:
        """Return what was counted of one call for a measure, or ``None``."""
        return getattr(self, measure) if measure in OWN_COUNTS else self.counts.get(measure)

    def counted(self, measure: str, count: int) -> Cell:
        """Return the cell with what was counted of one call for a measure."""
        changes = {measure: count} if measure in OWN_COUNTS else {"counts": {**self.counts, measure: count}}
        return self.model_copy(update=changes)


class Noise(Stored):
    """An A/A run: the baseline against itself at one shape. Its spread is the smallest difference that may be claimed."""

    shape: Name
    direction: Direction
    regime: Regime
    ratio: Estimate
    floor: Positive
    """Differences below this factor (1.02 = 2 %) are noise."""

    @model_validator(mode="after")
    def _is_a_ratio(self) -> Noise:
        _check_positive(self.ratio, "ratio")
        return self


CriterionStatus = Literal["met", "missed", "inconclusive", "not_measured", "infeasible"]


class Outcome(Stored):
    """A declared criterion and what became of it."""

    criterion: Criterion
    status: CriterionStatus
    evidence: Words
    """One sentence with the numbers."""
    values: dict[Name, Estimate] = Field(default_factory=dict)
    """The measured value per shape."""
    overall: Estimate | None = None
    """Geometric mean of the values, where the criterion asks for it and every shape has a value."""
    best_of: Count = 1
    """From how many candidates the measured one was chosen."""


class Saving(Stored):
    """The time a variant saves over the baseline, explained."""

    shape: Name
    direction: Direction
    variant: Name
    saved_microseconds: Finite
    by_bytes: Finite
    """Microseconds: saved bytes over the measured bandwidth."""
    by_launches: Finite
    """Microseconds: saved launches times the measured launch cost."""
    unexplained: Finite
    traffic_source: Literal["ncu", "analytic"]


DecisionKind = Literal["proceed", "debug", "abandon", "measure_more"]


class Decision(Stored):
    """Decision on what to do, and the evidence it rests on."""

    kind: DecisionKind
    because: tuple[Words, ...]
    savings: tuple[Saving, ...] = ()
    unexplained: tuple[Words, ...] = ()
    """Questions that the evidence leaves open, in sentences."""


class Provenance(Stored):
    """Provenance of a result: device, time, software and command."""

    device: Words
    slug: Slug
    architecture: Words
    driver: Words
    versions: dict[Words, Words]
    """python, torch, triton, cuda, onelaunch, and the peers that took part."""
    commit: Words
    date: Words
    clocks: dict[Words, Amount] = Field(default_factory=dict)
    """SM and memory MHz, power in watts, as sampled during the run; empty where no driver tells."""
    command: Words = ""
    scale: Words = ""
    rounds: Count = 0


class StoredCeilings(Grown, Stored):
    """The device's measured peaks, as :class:`onelaunch.device.hardware.Ceilings`."""

    LATER = ("read_bytes_per_second", "spread")

    copy_bytes_per_second: Positive
    matrix_flops_per_second: dict[Words, Positive]
    launch_seconds: Positive
    measured_at: Words
    software: Words
    read_bytes_per_second: Positive | None = None
    spread: dict[Words, Amount] | None = None


class Result(Stored):
    """A finished, or interrupted, study."""

    schema_version: Literal[1, 2, 3] = SCHEMA
    study: Study
    study_digest: Words
    """SHA-256 of the declaration: criteria cannot be moved afterwards unnoticed."""
    provenance: Provenance
    ceilings: StoredCeilings
    cells: tuple[Cell, ...]
    noise: tuple[Noise, ...] = ()
    outcomes: tuple[Outcome, ...] = ()
    decision: Decision | None = None
    notes: tuple[Words, ...] = ()
    """How it was measured, in sentences: input sets, rounds, what cut them short, why nothing was counted."""
    interrupted: bool = False

    def cell(self, shape: str, variant: str, direction: Direction = "forward") -> Cell | None:
        """Return the cell of a variant at a shape, if there is one."""
        return next((c for c in self.cells if (c.shape, c.variant, c.direction) == (shape, variant, direction)), None)

    def noise_at(self, shape: str, direction: Direction, regime: Regime) -> Noise | None:
        """Return the A/A run at a shape in a direction and regime, or ``None`` if there was none."""
        wanted = (shape, direction, regime)
        return next((noise for noise in self.noise if (noise.shape, noise.direction, noise.regime) == wanted), None)

    def stored(self) -> str:
        """Return the JSON that :meth:`save` writes."""
        return self.model_dump_json(indent=1) + "\n"

    def save(self, path: Path, *, force: bool = False) -> Path:
        """Write as JSON, whole or not at all.

        Raises:
            ResultExists: the file is there already, and ``force`` is off.
            OutputUnwritable: the file cannot be written.
        """
        if path.exists() and not force:
            raise ResultExists(path)
        write_text(path, self.stored())
        return path

    @classmethod
    def load(cls, path: Path) -> Result:
        """Read what :meth:`save` wrote.

        Raises:
            ResultMissing: there is no such file.
            ResultTooNew: a newer onelaunch wrote it.
            ResultCorrupt: the file is something else, or damaged; says where.
        """
        try:
            raw = json.loads(read_text(path))
        except FileNotFoundError:
            raise ResultMissing(path) from None
        except (OSError, ValueError, RecursionError) as error:
            raise ResultCorrupt(path, in_a_line(error)) from error
        version = raw.get("schema_version") if isinstance(raw, dict) else None
        if type(version) is int and version > SCHEMA:
            raise ResultTooNew(path, schema=version, newest=SCHEMA)
        if type(version) is not int or version not in READABLE:
            said = f"its schema_version is {shown(version)}, this onelaunch reads {listing(map(str, READABLE))}"
            raise ResultCorrupt(path, said)
        try:
            found = cls.model_validate(raw, context=FROM_A_FILE)
        except ValidationError as error:
            first = error.errors(include_context=False)[0]
            where = ".".join(str(part) for part in first["loc"])[:200]
            raise ResultCorrupt(path, f"{where}: {first['msg']} (it is {shown(first['input'])})") from error
        except RecursionError as error:
            raise ResultCorrupt(path, "it is nested too deeply") from error
        if (problem := _undeclared(found) or _repeated(found)) is not None:
            raise ResultCorrupt(path, problem)
        return found


def _check_positive(estimate: Estimate, what: str) -> None:
    if not 0 < estimate.low <= estimate.median <= estimate.high < math.inf or estimate.samples < 1:
        raise ValueError(f"{what} must be finite numbers above 0 with low <= median <= high, of at least one sample")


def _undeclared(result: Result) -> str | None:
    """Return what a result says of shapes that its study does not declare, or declares twice; ``None`` where all is well."""
    declared = {shape.name for shape in result.study.shapes}
    named = [measured.shape for measured in (*result.cells, *result.noise)]
    named += [shape for outcome in result.outcomes for shape in outcome.values]
    named += [saving.shape for saving in (result.decision.savings if result.decision else ())]
    for criterion in (*result.study.criteria, *(outcome.criterion for outcome in result.outcomes)):
        named += [] if criterion.at is None else members(criterion.at)
        named += [] if criterion.over_at is None else [criterion.over_at]
    if unknown := sorted(set(named) - declared):
        return f"its study has no shape {unknown[0]!r}"
    return "two shapes of its study have one name" if len(declared) < len(result.study.shapes) else None


def _repeated(result: Result) -> str | None:
    """Return which measurement a result holds twice, so that readers could not tell which one counts; ``None`` where none is."""
    places = Counter((cell.shape, cell.direction, cell.variant, cell.control) for cell in result.cells)
    twice = next((place for place, count in places.items() if count > 1), None)
    if twice is not None:
        shape, direction, variant, control = twice
        return f"cells: {'the control ' if control else ''}{variant!r} stands twice at {shape!r}, {direction}"
    for cell in result.cells:
        if len({timing.regime for timing in cell.timings}) < len(cell.timings):
            return f"cells: {cell.variant!r} has two times of one regime at {cell.shape!r}, {cell.direction}"
    return None
