"""Declaration of a study of whole models, and its reader.

The studies of :mod:`onelaunch.workbench.study` compare variants of an operation. Here whole models are compared: as their
library computes them, and accelerated by onelaunch. Criteria are declared before anything runs, and results hold a digest of the
declaration.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from onelaunch.workbench.stored import Name, Positive, check_names
from onelaunch.workbench.study.declare import Declared, Scale
from onelaunch.workbench.study.kinds import find_declared

Size = Annotated[int, Field(ge=1, le=2**31 - 1)]

Kind = Literal["gla", "llama"]
"""Architecture of a model.

- ``gla``: ``GLAForCausalLM`` of fla, or the same model made of layers of :mod:`onelaunch.nn`.
- ``llama``: ``LlamaForCausalLM`` of transformers with random weights.
"""

VARIANTS: dict[Kind, tuple[str, ...]] = {"gla": ("fla", "accelerated", "layers"), "llama": ("transformers", "accelerated")}
"""Variants of each architecture. The first is the library's own model and the baseline.

``accelerated`` is the library's model after ``onelaunch.accelerate(model)``. ``layers`` is made of layers of onelaunch; it alone
runs without the library.
"""

Activity = Literal["training", "forward", "decoding"]
"""Activity that is timed.

- ``training``: A whole training step: forward and backward pass, AdamW, gradients set to ``None``.
- ``forward``: A forward pass without gradients, from token ids to logits.
- ``decoding``: A step of greedy decoding at batch 1 with the library's cache; the time of one token.
"""


NORM_EPS = 1e-6
"""Epsilon of all norms where nothing else is declared, the default of fla's ``GLAConfig``."""


class LanguageModel(Declared):
    """A language model, and what is measured of it."""

    LATER = ("controls", "gradient_seeds", "gradient_eps")

    SELECTING: ClassVar[tuple[str, ...]] = ("activities", "seeds", "controls", "gradient_seeds", "gradient_eps")
    """Fields that say which tasks there are, and those whose value is stored in each measurement that depends on it.

    A measurement that was taken with the same values of all other fields can be taken over; one of gradients, if its stored
    epsilon is the declared one too.
    """

    name: Name
    """Name in criteria, results and reports; each model of a study has its own."""
    kind: Kind
    scale: Scale = "full"
    """Scale: ``small`` models suit a machine without a GPU. A run takes the models of one scale."""
    width: Size
    """Channels of the hidden states."""
    heads: Size
    layers: Size
    vocabulary: Size
    batch: Size
    """Sequences of a step."""
    length: Size
    """Tokens of a sequence."""
    precision: Literal["bfloat16", "autocast", "float32"] = "bfloat16"
    """``bfloat16``: all parameters are bfloat16, without autocast. ``autocast``: float32 parameters, and autocast to bfloat16."""
    variants: tuple[str, ...] = ()
    """Variants that take part, the baseline first; all of the architecture's when empty."""
    activities: tuple[Activity, ...] = ("training",)
    """Activities that are timed, all variants in turn."""
    steps: int = Field(default=0, ge=0)
    """Steps of a training run on the source text of Python's standard library; 0 for no run. Only for ``gla``."""
    seeds: tuple[int, ...] = (0,)
    """Seeds of the training runs: of the initial weights and of the batches."""
    controls: int = Field(default=1, ge=1, le=16)
    """Control runs of the losses: the first variant once more with the first seed, from weights that each differ by one rounding.
    Each has random signs of its own. Only with ``steps``."""
    rate: Positive = 1e-3
    """Learning rate of AdamW after 20 steps of warm-up."""
    gradient_length: int = Field(default=0, ge=0)
    """Tokens of the sequence whose gradient is compared with plain PyTorch in float32; 0 for none. Only for ``gla``."""
    gradient_seeds: int = Field(default=1, ge=1, le=16)
    """Seeds, from 0 on, of the weights and sequences whose gradients are compared."""
    gradient_eps: Positive | None = None
    """Epsilon of the norms of heads' outputs in the comparison of gradients alone, in all variants and in the reference;
    :data:`NORM_EPS` when left out. All other norms, and all other measurements, have :data:`NORM_EPS`. Only with
    ``gradient_length``."""
    kv_heads: Size | None = None
    """Heads of keys and values of a ``llama``; ``heads`` when left out."""
    intermediate: Size | None = None
    """Channels of the MLP of a ``llama``; four times the width when left out."""

    _names = field_validator("variants")(check_names)

    @model_validator(mode="after")
    def _fits(self) -> LanguageModel:
        if unknown := set(self.variants) - set(VARIANTS[self.kind]):
            raise ValueError(f"a {self.kind} has no variant {min(unknown)!r}; it has {', '.join(VARIANTS[self.kind])}")
        if self.kind != "gla" and (self.steps or self.gradient_length):
            raise ValueError("steps and gradient_length are for the kind gla alone")
        if self.kind == "gla" and "decoding" in self.activities:
            raise ValueError("decoding is for the kind llama alone")
        if self.gradient_eps is not None and not self.gradient_length:
            raise ValueError("gradient_eps is for models with gradient_length alone")
        if self.steps % 10:
            raise ValueError("steps must be a multiple of 10, since losses are compared at each tenth")
        return self

    def as_measured(self) -> LanguageModel:
        """Return the declaration without :attr:`SELECTING`, on which every measurement depends."""
        fields = type(self).model_fields
        return self.model_copy(update={name: fields[name].get_default() for name in self.SELECTING})

    @property
    def names(self) -> tuple[str, ...]:
        """The variants that take part."""
        return self.variants or VARIANTS[self.kind]

    @property
    def eps_of_gradients(self) -> float:
        """Epsilon of the norms of heads' outputs in the comparison of gradients."""
        return NORM_EPS if self.gradient_eps is None else self.gradient_eps

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.batch * self.length


Measure = Literal[
    "speedup",
    "peak_memory_ratio",
    "first_step_seconds",
    "loss_distance",
    "loss_distance_over_control",
    "final_loss_ratio",
    "gradient_error_ratio",
]
"""Quantity that a criterion asks for.

- ``speedup``: time of ``over`` / time of ``of``, in an activity.
- ``peak_memory_ratio``: peak memory of a training step of ``of`` / that of ``over``, parameters and optimizer included.
- ``first_step_seconds``: seconds of the first training step of ``of`` in a new process with empty caches of compiled kernels.
- ``loss_distance``: largest ``|loss of of / loss of over - 1|`` after each tenth of the training run, over all seeds.
- ``loss_distance_over_control``: ``loss_distance`` / the largest such distance between two of these runs of the model's baseline:
  its first run and all its controls. It needs at least two controls.
- ``final_loss_ratio``: mean loss in the last twentieth of the training run of ``of`` / that of ``over``, means over the seeds.
- ``gradient_error_ratio``: error of the whole gradient of ``of`` / that of ``over``, both against plain PyTorch in float32; over
  several seeds the geometric mean of the seeds' ratios.
"""

ALONE: tuple[Measure, ...] = ("first_step_seconds",)
"""Measures of ``of`` alone."""

NOISY: tuple[Measure, ...] = ("speedup", "gradient_error_ratio")
"""Measures with an interval, whose criteria may have ``within_noise``."""


class ModelCriterion(Declared):
    """One condition of success."""

    name: Name
    measure: Measure
    model: Name
    """Model that is judged."""
    of: Name = "accelerated"
    """Variant that is judged."""
    over: Name | None = None
    """Variant that ``of`` is compared with; the model's baseline when left out."""
    activity: Activity = "training"
    """Activity whose times are compared."""
    at_least: Positive | None = None
    """Lower bound. A criterion has exactly one of ``at_least`` and ``at_most``."""
    at_most: Positive | None = None
    """Upper bound."""
    within_noise: bool = False
    """Switch for taking a value that misses its bound by no more than the noise as met.

    *Never slower* is ``at_least = 1.0`` with this switch. The noise of a speed-up is its A/A noise, and at most
    :data:`~onelaunch.model_studies.judge.MOST_SPEEDUP_NOISE`. A ``gradient_error_ratio`` needs several seeds; its noise is the
    upper end of the mean's 95 % interval over the mean, and at most :data:`~onelaunch.model_studies.judge.MOST_GRADIENT_NOISE`.
    """

    @model_validator(mode="after")
    def _one_bound(self) -> ModelCriterion:
        if [self.at_least, self.at_most].count(None) != 1:
            raise ValueError(f"criterion {self.name!r} needs exactly one of at_least and at_most")
        if (self.at_least is not None) != (self.measure == "speedup"):
            raise ValueError(f"criterion {self.name!r}: a speedup has a bound at_least, and every other measure one at_most")
        if self.within_noise and self.measure not in NOISY:
            raise ValueError(f"criterion {self.name!r}: within_noise is for {' and '.join(NOISY)} alone")
        return self

    @property
    def bound(self) -> str:
        """The bound in words, such as ``at least 1.45``."""
        return f"at least {self.at_least:g}" if self.at_least is not None else f"at most {self.at_most:g}"


class ModelStudy(Declared):
    """A declared study of models."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,79}$")]
    """Name of the study; its result is named after it."""
    question: str
    rounds: int = Field(default=10, ge=3)
    """Rounds of timing. In each round every variant runs once, the baseline twice, in rotating order."""
    models: tuple[LanguageModel, ...] = Field(min_length=1)
    criteria: tuple[ModelCriterion, ...] = ()

    @model_validator(mode="after")
    def _names_fit(self) -> ModelStudy:
        names = [model.name for model in self.models]
        if len(set(names)) < len(names):
            raise ValueError("two models have one name")
        if len({each.name for each in self.criteria}) < len(self.criteria):
            raise ValueError("two criteria have one name")
        for each in self.criteria:
            model = next((model for model in self.models if model.name == each.model), None)
            if model is None:
                raise ValueError(f"criterion {each.name!r}: there is no model {each.model!r}")
            for variant in filter(None, (each.of, each.over)):
                if variant not in model.names:
                    raise ValueError(f"criterion {each.name!r}: {model.name!r} has no variant {variant!r}")
            if each.measure == "speedup" and each.activity not in model.activities:
                raise ValueError(f"criterion {each.name!r}: {each.activity} of {model.name!r} is not timed")
            if each.measure == "gradient_error_ratio" and each.within_noise and model.gradient_seeds < 2:
                raise ValueError(f"criterion {each.name!r}: within_noise needs several gradient_seeds of {model.name!r}")
        return self

    def model(self, name: str) -> LanguageModel:
        """Return a model by its name."""
        return next(model for model in self.models if model.name == name)

    def at_scale(self, scale: Scale) -> tuple[LanguageModel, ...]:
        """Return the models of one scale, in the declared order."""
        return tuple(model for model in self.models if model.scale == scale)

    def over(self, criterion: ModelCriterion) -> str:
        """Return the variant that a criterion compares with."""
        return criterion.over or self.model(criterion.model).names[0]

    def digest(self) -> str:
        """Return the SHA-256 of the declaration."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()


def find_model_study(name_or_path: str) -> ModelStudy:
    """Return a study of models, by its name or by the path of its file.

    Raises:
        UnknownStudy: No study of models has this name.
        StudyError: The file cannot be read or is wrong. The message names the key.
    """
    return find_declared("models", ModelStudy, name_or_path)
