"""Schema of the stored result of a study of ranks. Times are in microseconds."""

from __future__ import annotations

import statistics
from typing import Literal

from pydantic import Field

from onelaunch.rank_studies.declare import Direction, RankCriterion, RankStudy, Regime
from onelaunch.workbench.result import CriterionStatus, Provenance
from onelaunch.workbench.result.saved import Saved
from onelaunch.workbench.stored import Count, Error, Estimate, Name, Stored, Time, Words

SCHEMA = 1
"""Version of the schema."""


class Measured(Stored):
    """Times and differences of a shape in one direction and regime on a number of ranks."""

    shape: Name
    direction: Direction
    regime: Regime
    ranks: Count
    one: tuple[Time, ...] = ()
    """Microseconds of the call on the first rank's GPU alone, of each round."""
    sliced: tuple[Time, ...] = ()
    """Microseconds of the call over all ranks, of each round: those of the slowest rank."""
    differences: dict[Name, Error] = Field(default_factory=dict)
    """Norm-wise differences of outputs and gradients from those of one GPU, by name; the largest of all ranks."""
    exchange: Words = ""
    """Kinds of exchanges in the call over all ranks: stores to peers, or the group's collective and the reason for it. Empty in
    results from before it was recorded."""
    missing: Words = ""
    """Reason why nothing was measured."""
    provenance: Provenance
    """Run that measured it: every number of ranks is a run of its own."""

    @property
    def key(self) -> tuple[str, str, str, int]:
        """Shape, direction, regime and number of ranks."""
        return self.shape, self.direction, self.regime, self.ranks

    def medians(self) -> tuple[float, float]:
        """Return the median times on one GPU and over all ranks."""
        return statistics.median(self.one), statistics.median(self.sliced)


class RankOutcome(Stored):
    """A declared criterion with its status and evidence."""

    criterion: RankCriterion
    status: CriterionStatus
    evidence: Words
    value: Estimate | None = None
    """Measured value, in the unit of the bound; ``None`` if it was not measured."""


class RankResult(Saved):
    """Result of a study of ranks, of all runs so far."""

    VERSIONS = (SCHEMA,)

    kind: Literal["ranks"] = "ranks"
    schema_version: Literal[1] = SCHEMA
    study: RankStudy
    study_digest: Words
    """SHA-256 of the declaration that ran."""
    measurements: tuple[Measured, ...] = ()
    outcomes: tuple[RankOutcome, ...] = ()
    """One outcome for each criterion, in declared order."""

    def find(self, *key: str | int) -> Measured | None:
        """Return the measurement with a key, see :attr:`Measured.key`."""
        return next((each for each in self.measurements if each.key == key), None)

    def inconsistency(self) -> str | None:
        """Return what does not fit together in the result, as a clause, or ``None``."""
        if (found := self.study.digest()) != self.study_digest:
            return f"study_digest is {self.study_digest[:12]!r}, and its study has the digest {found[:12]!r}, so it was changed"
        keys = [each.key for each in self.measurements]
        if len(set(keys)) < len(keys):
            return "a measurement stands twice"
        if any(len(each.one) != len(each.sliced) for each in self.measurements):
            return "a measurement has different numbers of rounds"
        if self.outcomes and tuple(outcome.criterion for outcome in self.outcomes) != self.study.criteria:
            return "outcomes: they are not those of the criteria of its study"
        return None
