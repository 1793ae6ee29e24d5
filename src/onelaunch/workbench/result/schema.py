"""Versioned schema of stored results.

Reports, comparisons and programs read these plain values and nothing else about a finished study. Times are in microseconds,
traffic in bytes. Every measured number has its regime, its number of samples or its source. ``LATER`` names the fields of a class
that were added after results were published; :class:`~onelaunch.workbench.stored.Grown` leaves them out at their default.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Literal

from pydantic import Field, model_validator

from onelaunch.operation import Direction
from onelaunch.workbench.result.consistency import inconsistency
from onelaunch.workbench.result.facts import Provenance, Spent, StoredCeilings
from onelaunch.workbench.result.saved import Saved
from onelaunch.workbench.stored import (
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
    Stored,
    Time,
    Words,
)
from onelaunch.workbench.study import Criterion, Regime, Study
from onelaunch.workbench.study.plan import Plan

SCHEMA = 3
"""Version of the schema. Results of older versions can be read without conversion.

Version 1 had no means over shapes, no times at two shapes, no memory, and no criteria that do not decide. Version 2 had no read
bandwidth, no spread of the measured peaks, and no written bytes.
"""

READABLE = (1, 2, 3)
"""Versions that can be read."""

Status = Literal[
    "ok",
    "peer_outside_the_gate",
    "unsupported",
    "not_installed",
    "incorrect",
    "invalid",
    "out_of_memory",
    "error",
    "crashed",
    "timed_out",
    "interrupted",
]
"""Status of a measurement.

``peer_outside_the_gate``: The verdict failed, but the errors of this variant of another project are within the tolerance of that
project's tests, or within the study's ``timed_up_to``, in which case it is called an incorrect peer. Its times are used only as
those that other variants are compared with.
``unsupported``: The variant cannot run this case here, or the study leaves it out. ``not_installed``: It needs a missing package.
``incorrect``: The verdict failed, and no time is used. ``invalid``: The cold time is over 5 % below the roofline bound, and no
time is used. ``error``: It raised. ``crashed``: The process that measured it ended, by an exit or by a signal, such as one sent
for lack of memory. ``timed_out``: It ran longer than the limit of a call. ``interrupted``: The run ended before the measurement
was complete.
"""

OUTSIDE: Status = "peer_outside_the_gate"
"""Status of a measurement of a peer outside the gate."""

MEASURED: tuple[Status, ...] = ("ok", OUTSIDE)
"""Statuses of measurements whose times and counts are believed."""

_OWN_COUNTS = ("launches", "barriers")
"""Counted measures that have a field of their own in :class:`Cell`."""


class ComponentError(Stored):
    """Error of one output or gradient against the oracle."""

    name: Words
    """Name of the output or gradient, such as ``y``, ``final_state`` or ``grad x``."""
    error: Error
    """Norm-wise error ||out - oracle|| / ||oracle||. NaN is stored as infinity."""
    max_error: Error
    """Largest absolute difference."""
    allowed: Positive
    """Largest allowed ``error``: twice the error of plain PyTorch in the same dtype plus 2^-21, or the error that the operation
    states for this result if that is larger, but at most the dtype's cap."""
    error_by_position: tuple[Error, ...] = ()
    """Norm-wise errors of successive parts of the sequence, first to last."""


class Verdict(Grown, Stored):
    """Verdict on whether a variant computes the operation at one case."""

    LATER = ("notes", "own_tolerance", "timed_up_to")

    ok: bool
    components: tuple[ComponentError, ...] = ()
    problems: tuple[Words, ...] = ()
    """Problems in sentences; empty when ``ok``."""
    notes: tuple[Words, ...] = ()
    """Limits of the verdict, in sentences, such as that only the dtype's cap was asked."""
    own_tolerance: Positive | None = None
    """Tolerance of the tests of the peer's own project if it fails the gate and passes with this tolerance, else ``None``."""
    timed_up_to: Positive | None = None
    """Error up to which the study times this incorrect peer (its key of this name), if nothing but such errors is wrong."""

    @property
    def outside(self) -> bool:
        """True for a peer outside the gate: nothing is wrong but errors that its own tests allow, or up to which it is timed."""
        return not self.ok and (self.own_tolerance is not None or self.timed_up_to is not None)

    @property
    def status(self) -> Status:
        """Status of a measurement with this verdict that nothing else ends."""
        return "ok" if self.ok else OUTSIDE if self.outside else "incorrect"

    def explain(self) -> str:
        """Return the problems in one line, or the output that is nearest to its limit if there are none."""
        if self.outside:
            if self.own_tolerance is None:
                return f"{' '.join(self.problems)} It is incorrect; the study times it up to an error of {self.timed_up_to:g}."
            return f"{' '.join(self.problems)} The tests of its own project allow {self.own_tolerance:g}."
        if self.problems:
            return " ".join(self.problems)
        worst = max(self.components, key=lambda component: component.error / component.allowed, default=None)
        return f"correct; {worst.name} is nearest to its limit, {worst.error:.1e} of {worst.allowed:.1e}" if worst else "correct"


class ProbeReport(Grown, Stored):
    """Outcome of judging a variant on the probes of its operation (edge cases), each in the directions that were measured."""

    LATER = ("directions", "code")

    passed: Count
    """Number of calls that were judged correct."""
    refused: Count = 0
    """Number of calls that the variant or the contract refused with a reason."""
    failed: tuple[Words, ...] = ()
    """One sentence for each call that was wrong or raised an error; it begins with the name of the probe."""
    directions: tuple[Direction, ...] = ("forward", "forward_backward")
    """Directions that were asked for. Older results, which do not say so, asked for both."""
    code: str = ""
    """Digest of the code of the variant and of all that judges it on probes; empty if it is not known, as in older results."""

    @property
    def met(self) -> bool:
        """True if no call failed and at least one was judged correct: a variant that refuses everything has shown nothing."""
        return self.passed > 0 and not self.failed


class Timing(Stored):
    """Time of one variant in one regime."""

    regime: Regime
    microseconds: Estimate
    """Median over the rounds with its interval."""
    rounds: tuple[Time, ...] = Field(min_length=1)
    """Microseconds of each round, in the order of the rounds. Ratios between variants are taken round by round."""

    @model_validator(mode="after")
    def _is_a_time(self) -> Timing:
        _check_positive(self.microseconds, "microseconds")
        if not LEAST_TIME <= self.microseconds.low <= self.microseconds.high <= MOST_TIME:
            raise ValueError(f"microseconds must lie between {LEAST_TIME:g} and {MOST_TIME:g}")
        return self


class Traffic(Stored):
    """DRAM bytes of one call."""

    source: Literal["ncu", "analytic"]
    """``ncu``: counted by the hardware. ``analytic``: the fewest bytes that the call must move, computed by arithmetic."""
    read: Amount
    written: Amount
    note: Words = ""
    """Note on how the bytes were obtained, such as the number of calls and the cache control of the profiler."""

    @property
    def total(self) -> float:
        return self.read + self.written


class Beside(Stored):
    """Host times of a variant's calls and of PyTorch's matrix product, taken in turn in one process.

    Their ratio depends little on the CPU and its clocks.
    """

    microseconds: Estimate
    """Median over all calls of the variant, in microseconds."""
    product: Estimate
    """Median over all calls of PyTorch's matrix product, in microseconds."""
    ratio: Estimate
    """Time of the variant over that of the product, from ratios taken round by round."""

    @model_validator(mode="after")
    def _are_times(self) -> Beside:
        for name in ("microseconds", "product", "ratio"):
            _check_positive(getattr(self, name), name)
        return self


class Cell(Grown, Stored):
    """Measurement of one variant or control at one shape in one direction."""

    LATER = ("launches", "barriers", "counts", "chosen", "beside")

    shape: Name
    direction: Direction
    variant: Name
    """Name of the variant, or of the control if ``control`` is set."""
    control: bool = False
    """True for a part of the operation, such as its matrix product alone, which is timed for comparison."""
    status: Status
    reason: Words = ""
    """Reason why the status is not ``ok``."""
    plan: Plan | None = None
    verdict: Verdict | None = None
    timings: tuple[Timing, ...] = ()
    traffic: Traffic | None = None
    peak_bytes: Count | None = None
    """Peak memory of one call in bytes, without the inputs, as measured by
    :class:`~onelaunch.workbench.measure.sampling.GpuSampler`; ``None`` if it is not measured, such as on a CPU."""
    launches: Count | None = None
    """Number of kernels, copies and fills of one call, counted in a CUDA graph; ``None`` if not counted, such as without a
    criterion that asks for it."""
    barriers: Count | None = None
    """Number of grid barriers of one call, counted by the variant's kernel; ``None`` if not counted, like ``launches``."""
    counts: dict[Name, Count] = Field(default_factory=dict)
    """Other counts of one call, by the name of the measure that a criterion asks for."""
    chosen: Name = ""
    """Variant that the dispatcher chose here, where ``variant`` is ``auto``; else empty."""
    beside: dict[Name, Beside] = Field(default_factory=dict)
    """Times beside those of PyTorch's matrix product, by the name of the measure that a criterion asks for, such as ``host``."""

    @property
    def measured(self) -> bool:
        """True if its times and counts are believed: the variant is correct, or a peer outside the gate."""
        return self.status in MEASURED

    @property
    def outside(self) -> bool:
        """True for a peer outside the gate."""
        return self.status == OUTSIDE

    @property
    def label(self) -> str:
        """Name of the variant in sentences and tables, which says if it is a peer outside the gate."""
        return f"{self.variant} ({self.mark})" if self.mark else self.variant

    @property
    def mark(self) -> str:
        """Words for a peer outside the gate, which tell those that their own tests allow from incorrect ones; else nothing."""
        if not self.outside:
            return ""
        return "incorrect peer" if self.wrong_peer else "peer outside the gate"

    @property
    def wrong_peer(self) -> bool:
        """True for a peer outside the gate that its own tests refuse too; its times count in no mean."""
        return self.outside and self.verdict is not None and self.verdict.own_tolerance is None

    def timing(self, regime: Regime) -> Timing | None:
        return next((timing for timing in self.timings if timing.regime == regime), None)

    def count(self, measure: str) -> int | None:
        """Return the count of one call for a measure, or ``None``."""
        return getattr(self, measure) if measure in _OWN_COUNTS else self.counts.get(measure)

    def has(self, measure: str) -> bool:
        """Return whether the measurement holds what a step of its own takes for a measure: a count, or times."""
        return measure in self.beside or self.count(measure) is not None

    def taking(self, measure: str, found: int | Beside) -> Cell:
        """Return a copy of the measurement with what a step of its own found for a measure."""
        if isinstance(found, Beside):
            return self.model_copy(update={"beside": {**self.beside, measure: found}})
        return self.counted(measure, found)

    def counted(self, measure: str, count: int) -> Cell:
        """Return a copy of the measurement with the count of one call for a measure."""
        changes = {measure: count} if measure in _OWN_COUNTS else {"counts": {**self.counts, measure: count}}
        return self.model_copy(update=changes)


class Noise(Stored):
    """Noise of one case and regime, from an A/A run: the baseline timed against itself, or another variant if it has no time."""

    shape: Name
    direction: Direction
    regime: Regime
    ratio: Estimate
    """Time of the second copy over that of the first."""
    floor: Positive
    """Smallest factor that may be claimed: differences below it (1.02 = 2 %) are noise."""

    @model_validator(mode="after")
    def _is_a_ratio(self) -> Noise:
        _check_positive(self.ratio, "ratio")
        return self


CriterionStatus = Literal["met", "missed", "equal", "inconclusive", "not_measured", "infeasible"]
"""Status of a criterion.

``equal``: The bound asks that one side be no slower, and both take the same time within 1 %, with no more noise. It does not
count as met. ``inconclusive``: The interval or the noise allows neither *met* nor *missed*. ``infeasible``: Arithmetic or the
roofline bound refutes it.
"""


class Outcome(Stored):
    """A declared criterion with its status and evidence."""

    criterion: Criterion
    status: CriterionStatus
    evidence: Words
    """Evidence in one sentence with the numbers."""
    values: dict[Name, Estimate] = Field(default_factory=dict)
    """Measured values by shape; in a criterion of several directions by :func:`onelaunch.workbench.study.case_name`."""
    overall: Estimate | None = None
    """Geometric mean of the values, if the criterion asks for it and every shape has a value."""
    best_of: Count = 1
    """Number of variants from which the judged one was chosen as the fastest."""


class Saving(Stored):
    """Explanation of the time that a variant saves over the baseline."""

    shape: Name
    direction: Direction
    variant: Name
    saved_microseconds: Finite
    by_bytes: Finite
    """Microseconds explained by saved bytes, at the measured bandwidth."""
    by_launches: Finite
    """Microseconds explained by saved launches, at the measured time of a launch."""
    unexplained: Finite
    """Microseconds that neither explains."""
    traffic_source: Literal["ncu", "analytic"]


DecisionKind = Literal["proceed", "debug", "abandon", "measure_more"]
"""Kind of a decision, chosen by the rules in :mod:`onelaunch.workbench.decide.decision`."""


class Decision(Grown, Stored):
    """Decision on what to do next, with its evidence."""

    LATER = ("notes",)

    kind: DecisionKind
    because: tuple[Words, ...]
    """Evidence in sentences, beginning with the number of criteria that are met."""
    savings: tuple[Saving, ...] = ()
    unexplained: tuple[Words, ...] = ()
    """Questions that the evidence leaves open, in sentences."""
    notes: tuple[Words, ...] = ()
    """Facts that limit what the decision means, in sentences, such as a variant of another maker that is faster than the
    baseline; they decide nothing."""


@dataclass(frozen=True)
class _Same:
    """Cells of a result as a key that equals only itself: comparing hundreds of cells would take longer than a search."""

    cells: tuple[Cell, ...]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.cells is other.cells

    def __hash__(self) -> int:
        return id(self.cells)


@functools.lru_cache(maxsize=4)
def _cells_by_name(same: _Same) -> dict[tuple[str, str, Direction], Cell]:
    """Return the first measurement of each shape, variant and direction. Criteria look up thousands after each case."""
    return {(cell.shape, cell.variant, cell.direction): cell for cell in reversed(same.cells)}


class Result(Saved):
    """Result of a finished or interrupted study."""

    LATER = ("probes", "spent")
    VERSIONS = READABLE

    schema_version: Literal[1, 2, 3] = SCHEMA
    study: Study
    study_digest: Words
    """SHA-256 of the declaration that ran. A file in which ``study`` has another one is refused."""
    provenance: Provenance
    ceilings: StoredCeilings
    cells: tuple[Cell, ...]
    noise: tuple[Noise, ...] = ()
    outcomes: tuple[Outcome, ...] = ()
    """One outcome for each criterion of the study, in declared order."""
    decision: Decision | None = None
    notes: tuple[Words, ...] = ()
    """Sentences on how it was measured: input sets, rounds, why a case stopped early, why nothing was counted."""
    interrupted: bool = False
    """True if the run ended early, and in the partial result that is saved during a run."""
    probes: dict[Name, ProbeReport] = Field(default_factory=dict)
    """Outcomes of the operation's probes by variant, named as in the provenance. Empty in results of older versions, and for an
    operation without probes."""
    spent: Spent | None = None
    """Time, and perhaps money, that the run took; ``None`` in results of older versions."""

    def cell(self, shape: str, variant: str, direction: Direction = "forward") -> Cell | None:
        """Return the measurement of a variant or control at a shape, or ``None``."""
        return _cells_by_name(_Same(self.cells)).get((shape, variant, direction))

    def noise_at(self, shape: str, direction: Direction, regime: Regime) -> Noise | None:
        """Return the A/A run at a shape in a direction and regime, or ``None`` if there was none."""
        wanted = (shape, direction, regime)
        return next((noise for noise in self.noise if (noise.shape, noise.direction, noise.regime) == wanted), None)

    def inconsistency(self) -> str | None:
        """Return what does not fit together in the result, as a clause, or ``None``."""
        return inconsistency(self)


def _check_positive(estimate: Estimate, what: str) -> None:
    if not 0 < estimate.low <= estimate.median <= estimate.high < math.inf or estimate.samples < 1:
        raise ValueError(f"{what} must be finite numbers above 0 with low <= median <= high, of at least one sample")
