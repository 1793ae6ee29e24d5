"""What a study leaves behind: the stored schema of results, versioned.

Everything that a report, a comparison or a program reads about a finished study stands here, as plain values.
Times are in microseconds, traffic in bytes; every measured number names its regime, its sample count or its source.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from onelaunch.errors import ResultCorrupt, ResultExists, listing
from onelaunch.operation import Direction
from onelaunch.workbench.study import Criterion, Grown, Regime, Study

SCHEMA = 3
"""Version of what is stored. Older ones read as they stand: version 1 had no means over shapes, no times at two shapes, no memory
and no criteria that do not decide; version 2 no read bandwidth, no spread of the measured peaks and no written bytes."""

READABLE = (1, 2, 3)

Status = Literal["ok", "unsupported", "not_installed", "incorrect", "invalid", "out_of_memory", "error", "interrupted"]
"""``incorrect``: the verdict failed, no time was taken. ``invalid``: faster than its floor, the time is not believed."""


class Stored(BaseModel):
    """Base of all stored values: closed and unchangeable."""

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="strings")


class Estimate(Stored):
    """A median over rounds with its 95 % bootstrap interval."""

    median: float
    low: float
    high: float
    samples: int


class ComponentError(Stored):
    """How one result or gradient compares with the oracle."""

    name: str
    """``y``, ``final_state``, ``grad x``..."""
    error: float
    """Norm-wise: ||out - oracle|| / ||oracle||. NaN is stored as infinity."""
    max_error: float
    """Largest absolute difference."""
    allowed: float
    """The smaller of the dtype's cap and twice the error of plain PyTorch in the same dtype."""
    error_by_position: tuple[float, ...] = ()
    """The norm-wise error of successive parts of the sequence, first to last."""


class Verdict(Stored):
    """Whether a variant computes the operation at one case."""

    ok: bool
    components: tuple[ComponentError, ...] = ()
    problems: tuple[str, ...] = ()
    """What was wrong, in sentences; empty when ``ok``."""

    def explain(self) -> str:
        """The problems in one line, or the worst component."""
        if self.problems:
            return " ".join(self.problems)
        worst = max(self.components, key=lambda component: component.error / component.allowed, default=None)
        return f"correct; {worst.name} is nearest to its limit, {worst.error:.1e} of {worst.allowed:.1e}" if worst else "correct"


class Timing(Stored):
    """One variant's time in one regime."""

    regime: Regime
    microseconds: Estimate
    rounds: tuple[float, ...]
    """The median of each round, in the order the rounds ran: ratios between variants are taken round by round."""


class Traffic(Stored):
    """DRAM bytes of one call."""

    source: Literal["ncu", "analytic"]
    read: float
    written: float
    note: str = ""
    """How they were obtained, such as the cache control of the profiler."""

    @property
    def total(self) -> float:
        return self.read + self.written


class Plan(Grown, Stored):
    """What arithmetic says before anything runs."""

    LATER = ("written", "least_written")

    flops: int
    bytes: int
    """Fewest bytes of this way of computing."""
    least_bytes: int
    """Fewest bytes of any way of computing."""
    launches: int | None
    floor_microseconds: float
    """No variant can run below this in the cold regime."""
    planned_microseconds: float
    """This variant's own bytes, FLOPs and launches over the measured peaks."""
    written: int | None = None
    """Bytes of ``bytes`` that are written; ``None`` where the operation does not say."""
    least_written: int | None = None
    """Bytes of ``least_bytes`` that are written; ``None`` where the operation does not say."""


class Cell(Grown, Stored):
    """One variant (or control) at one shape in one direction."""

    LATER = ("launches", "barriers")

    shape: str
    direction: Direction
    variant: str
    control: bool = False
    status: Status
    reason: str = ""
    """Why the status is not ``ok``."""
    plan: Plan | None = None
    verdict: Verdict | None = None
    timings: tuple[Timing, ...] = ()
    traffic: Traffic | None = None
    peak_bytes: int | None = None
    """Most memory in use above the inputs during one call, as :class:`onelaunch.workbench.sampling.GpuSampler` measures it;
    ``None`` where it is not measured, such as on a CPU."""
    launches: int | None = None
    """Kernels, copies and fills of one call, as counted in a CUDA graph; ``None`` where no criterion asks for them."""
    barriers: int | None = None
    """Over the grid in one call, as the variant's kernel counts them; ``None`` where no criterion asks for them."""

    def timing(self, regime: Regime) -> Timing | None:
        return next((timing for timing in self.timings if timing.regime == regime), None)

    def count(self, measure: str) -> int | None:
        """What was counted of one call: its ``launches`` or ``barriers``."""
        return {"launches": self.launches, "barriers": self.barriers}[measure]


class Noise(Stored):
    """An A/A run: the baseline against itself at one shape. Its spread is the smallest difference that may be claimed."""

    shape: str
    direction: Direction
    regime: Regime
    ratio: Estimate
    floor: float
    """Differences below this factor (1.02 = 2 %) are noise."""


CriterionStatus = Literal["met", "missed", "inconclusive", "not_measured", "infeasible"]


class Outcome(Stored):
    """A declared criterion and what became of it."""

    criterion: Criterion
    status: CriterionStatus
    evidence: str
    """One sentence with the numbers."""
    values: dict[str, Estimate] = Field(default_factory=dict)
    """The measured value per shape."""
    overall: Estimate | None = None
    """Their geometric mean, where the criterion asks for it and every shape has a value."""
    best_of: int = 1
    """From how many candidates the measured one was chosen."""


class Saving(Stored):
    """The time a variant saves over the baseline, explained."""

    shape: str
    direction: Direction
    variant: str
    saved_microseconds: float
    by_bytes: float
    """Microseconds: saved bytes over the measured bandwidth."""
    by_launches: float
    """Microseconds: saved launches times the measured launch cost."""
    unexplained: float
    traffic_source: Literal["ncu", "analytic"]


DecisionKind = Literal["proceed", "debug", "abandon", "measure_more"]


class Decision(Stored):
    """What to do, and on which evidence."""

    kind: DecisionKind
    because: tuple[str, ...]
    savings: tuple[Saving, ...] = ()
    unexplained: tuple[str, ...] = ()
    """What the evidence leaves open, in sentences."""


class Provenance(Stored):
    """Where, when and with what a result was made."""

    device: str
    slug: str
    architecture: str
    driver: str
    versions: dict[str, str]
    """python, torch, triton, cuda, onelaunch, and the peers that took part."""
    commit: str
    date: str
    clocks: dict[str, float] = Field(default_factory=dict)
    """SM and memory MHz, power in watts, as sampled during the run; empty where no driver tells."""
    command: str = ""
    scale: str = ""
    rounds: int = 0


class StoredCeilings(Grown, Stored):
    """The device's measured peaks, as :class:`onelaunch.hardware.Ceilings`."""

    LATER = ("read_bytes_per_second", "spread")

    copy_bytes_per_second: float
    matrix_flops_per_second: dict[str, float]
    launch_seconds: float
    measured_at: str
    software: str
    read_bytes_per_second: float | None = None
    spread: dict[str, float] | None = None


class Result(Stored):
    """A finished, or interrupted, study."""

    schema_version: Literal[1, 2, 3] = SCHEMA
    study: Study
    study_digest: str
    """SHA-256 of the declaration: criteria cannot be moved afterwards unnoticed."""
    provenance: Provenance
    ceilings: StoredCeilings
    cells: tuple[Cell, ...]
    noise: tuple[Noise, ...] = ()
    outcomes: tuple[Outcome, ...] = ()
    decision: Decision | None = None
    notes: tuple[str, ...] = ()
    """How it was measured, in sentences: input sets, rounds, what cut them short, why nothing was counted."""
    interrupted: bool = False

    def cell(self, shape: str, variant: str, direction: Direction = "forward") -> Cell | None:
        """The cell of a variant at a shape, if there is one."""
        return next((c for c in self.cells if (c.shape, c.variant, c.direction) == (shape, variant, direction)), None)

    def noise_at(self, shape: str, direction: Direction, regime: Regime) -> Noise | None:
        """Return the A/A run at a shape in a direction and regime, or ``None`` if there was none."""
        wanted = (shape, direction, regime)
        return next((noise for noise in self.noise if (noise.shape, noise.direction, noise.regime) == wanted), None)

    def save(self, path: Path, *, force: bool = False) -> Path:
        """Write as JSON; :class:`ResultExists` rather than overwriting unless ``force``."""
        if path.exists() and not force:
            raise ResultExists(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(self.model_dump_json(indent=1) + "\n")
        partial.replace(path)
        return path

    @classmethod
    def load(cls, path: Path) -> Result:
        """Read what :meth:`save` wrote; :class:`ResultCorrupt` says what is wrong with anything else."""
        try:
            raw = json.loads(path.read_text())
        except (OSError, UnicodeDecodeError, ValueError) as error:
            raise ResultCorrupt(path, str(error)) from error
        if not isinstance(raw, dict) or raw.get("schema_version") not in READABLE:
            version = raw.get("schema_version") if isinstance(raw, dict) else None
            raise ResultCorrupt(path, f"its schema_version is {version!r}, this onelaunch reads {listing(map(str, READABLE))}")
        try:
            return cls.model_validate(raw)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise ResultCorrupt(path, f"{where}: {first['msg']}") from error
