"""Schema of the stored result of a study of models.

Like the result of a study of variants it holds the declaration with its digest, the provenance, every measurement with its
status, and the judged criteria. Times are in microseconds, memory in bytes, losses in nats.
"""

from __future__ import annotations

import statistics
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from onelaunch.model_studies.declare import NORM_EPS, Activity, ModelCriterion, ModelStudy
from onelaunch.workbench import stats
from onelaunch.workbench.result import CriterionStatus, Provenance, Spent, Status
from onelaunch.workbench.result.saved import Saved
from onelaunch.workbench.stored import Amount, Count, Error, Estimate, Finite, Grown, Name, Positive, Stored, Time, Words

SCHEMA = 1
"""Version of the schema."""


class Missing(Stored):
    """Status of a variant without a measurement, and the reason."""

    status: Status
    reason: Words


class Alone(Stored):
    """First steps of a variant in a process of its own, whose caches of compiled kernels are empty on a GPU."""

    task: Literal["alone"] = "alone"
    model: Name
    variant: Name
    missing: Missing | None = None
    parameters: Count = 0
    """Number of parameters."""
    build_seconds: Amount = 0.0
    """Seconds in which the model was made and moved to the device, and ``accelerate`` ran."""
    first_step_seconds: Amount = 0.0
    """Seconds of the first training step, with all compilation and autotuning."""
    empty_caches: bool = False
    """True if the process began with empty caches of compiled kernels."""
    peak_bytes: Count | None = None
    """Most bytes that PyTorch allocated in a later training step: parameters, gradients, optimizer and activations; ``None`` on a
    CPU."""
    replaced: Count = 0
    """Number of modules that ``accelerate`` replaced."""
    refused: tuple[Words, ...] = ()
    """Modules that ``accelerate`` did not replace, with the reasons."""
    fallbacks: dict[Words, Count] = Field(default_factory=dict)
    """Number of calls of replaced modules that ran the original forward, by reason."""


class Timed(Stored):
    """Times of the variants of a model in one activity, in turn in one process."""

    task: Literal["timed"] = "timed"
    model: Name
    activity: Activity
    rounds: dict[Name, tuple[Time, ...]] = Field(default_factory=dict)
    """Microseconds of a step of each round, by variant; of a token for ``decoding``."""
    again: tuple[Time, ...] = ()
    """Microseconds of the second run of the first variant in each round."""
    missing: dict[Name, Missing] = Field(default_factory=dict)

    def median(self, variant: str) -> float | None:
        """Return the median time of a variant in microseconds, or ``None``."""
        found = self.rounds.get(variant)
        return statistics.median(found) if found else None

    def noise(self) -> float:
        """Return the smallest factor that may be claimed, from the two runs of the first variant."""
        first = next(iter(self.rounds.values()))
        return stats.noise_floor(stats.ratio(self.again, first))


class GradientError(Stored):
    """Distance of a variant's gradient from that of plain PyTorch in float32."""

    error: Error
    """``||gradient - reference|| / ||reference||`` over all parameters together."""
    loss: Finite
    """Loss of the variant."""
    worst: Words
    """Parameter with the largest error of its own."""
    worst_error: Error


class Gradients(Grown, Stored):
    """Gradients of a model at its initial weights, for one sequence."""

    LATER = ("seed", "eps")

    task: Literal["gradients"] = "gradients"
    model: Name
    seed: Count = 0
    """Seed of the weights and of the sequence."""
    eps: Positive = NORM_EPS
    """Epsilon of the norms of heads' outputs, in all variants and in the reference."""
    loss: Finite | None = None
    """Loss of plain PyTorch in float32; ``None`` if it could not be computed."""
    errors: dict[Name, GradientError] = Field(default_factory=dict)
    missing: dict[Name, Missing] = Field(default_factory=dict)


class Training(Grown, Stored):
    """Training run of a variant with one seed."""

    LATER = ("index",)

    task: Literal["training"] = "training"
    model: Name
    variant: Name
    seed: Count
    control: bool = False
    """True for a run that shows how far a rounding of the weights moves the losses: the first variant once more, with the first
    seed, from weights that each differ by one rounding (``perturbation``)."""
    index: Count = 0
    """Index of the control, which seeds the signs of its roundings."""
    perturbation: Amount = 0.0
    """Relative change of each initial weight, up or down; 0 but in a control."""
    missing: Missing | None = None
    losses: tuple[Finite, ...] = ()
    """Loss of each step before it, in order."""
    seconds: Amount = 0.0
    """Seconds of all steps."""
    text: Words = ""
    """SHA-256 of the text."""

    @property
    def final(self) -> float:
        """Mean loss of the last twentieth of the steps."""
        return statistics.fmean(self.losses[-max(1, len(self.losses) // 20) :])

    @property
    def tenths(self) -> tuple[float, ...]:
        """Losses after each tenth of the steps."""
        part = len(self.losses) // 10
        return tuple(self.losses[part * each - 1] for each in range(1, 11))

    def apart(self, other: Training) -> tuple[float, ...]:
        """Return ``|loss / other's loss - 1|`` after each tenth of the steps."""
        return tuple(abs(mine / theirs - 1) for mine, theirs in zip(self.tenths, other.tenths, strict=True))


Measurement = Annotated[Alone | Timed | Gradients | Training, Field(discriminator="task")]


def _once(measurements: tuple[Measurement, ...]) -> tuple[Measurement, ...]:
    """Return measurements after a check that each task stands once."""
    keys = [key_of(each) for each in measurements]
    if twice := sorted(key for key in set(keys) if keys.count(key) > 1):
        raise ValueError(f"{' '.join(map(str, twice[0]))} stands twice")
    return measurements


Key = tuple[str, str, str, int, int]
"""Task (``control`` for a control of losses), model, variant (or activity), seed, index of the control."""


def key_of(measurement: Measurement) -> Key:
    """Return the key of the task that a measurement belongs to."""
    match measurement:
        case Alone():
            return "alone", measurement.model, measurement.variant, 0, 0
        case Timed():
            return "timed", measurement.model, measurement.activity, 0, 0
        case Gradients():
            return "gradients", measurement.model, "", measurement.seed, 0
    kind = "control" if measurement.control else "training"
    return kind, measurement.model, measurement.variant, measurement.seed, measurement.index


class ModelOutcome(Stored):
    """A declared criterion with its status and evidence."""

    criterion: ModelCriterion
    status: CriterionStatus
    evidence: Words
    value: Estimate | None = None
    """Measured value, in the unit of the bound; ``None`` if it was not measured."""


class ModelResult(Saved):
    """Result of a finished or interrupted study of models."""

    VERSIONS = (SCHEMA,)

    kind: Literal["models"] = "models"
    schema_version: Literal[1] = SCHEMA
    study: ModelStudy
    study_digest: Words
    """SHA-256 of the declaration that ran."""
    provenance: Provenance
    measurements: Annotated[tuple[Measurement, ...], AfterValidator(_once)] = ()
    outcomes: tuple[ModelOutcome, ...] = ()
    """One outcome for each criterion, in declared order."""
    notes: tuple[Words, ...] = ()
    interrupted: bool = False
    """True if tasks are left to do."""
    spent: Spent | None = None

    def find(self, *key: str | int) -> Measurement | None:
        """Return the measurement of a task by its key, whose last parts may be left out for the first one."""
        return next((each for each in self.measurements if key_of(each)[: len(key)] == key), None)

    def training(self, model: str, variant: str, seed: int) -> Training | None:
        """Return a finished training run that is no control, or ``None``."""
        found = self.find("training", model, variant, seed)
        return found if isinstance(found, Training) and not found.missing else None

    def controls(self, model: str) -> list[Training]:
        """Return the finished control runs of a model."""
        runs = [each for each in self.measurements if isinstance(each, Training) and each.control and each.model == model]
        return [each for each in runs if not each.missing]

    def inconsistency(self) -> str | None:
        """Return what does not fit together in the result, as a clause, or ``None``."""
        return _inconsistency(self)


def _inconsistency(result: ModelResult) -> str | None:
    """Return what does not fit together in a result, as a clause, or ``None``."""
    if (found := result.study.digest()) != result.study_digest:
        return f"study_digest is {result.study_digest[:12]!r}, and its study has the digest {found[:12]!r}, so it was changed"
    models = {model.name: model for model in result.study.models}
    for each in result.measurements:
        if each.model not in models:
            return f"its study has no model {each.model!r}"
        if isinstance(each, Training) and not each.missing and len(each.losses) != models[each.model].steps:
            return f"a training run of {each.model!r} has {len(each.losses)} losses, and not one for each step"
        if isinstance(each, Gradients) and each.eps != (declared := models[each.model].eps_of_gradients):
            return f"gradients of {each.model!r} were taken with an eps of {each.eps:g}, and its study declares {declared:g}"
        if isinstance(each, Timed) and len({len(each.again), *map(len, each.rounds.values())}) > 1:
            return f"the variants of {each.model!r} have different numbers of rounds in {each.activity}"
    if result.outcomes and tuple(outcome.criterion for outcome in result.outcomes) != result.study.criteria:
        return "outcomes: they are not those of the criteria of its study"
    return None
