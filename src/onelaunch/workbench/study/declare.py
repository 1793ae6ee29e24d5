"""Declaration of a study: its operation, shapes, variants and baseline, and the criteria of success.

The docstrings of the fields are the text of the tables of keys in the documentation (``docs/study_keys.py``). Checks of names,
dtypes and prose run only with a validation context, :data:`onelaunch.workbench.stored.FROM_A_FILE`: for data from files, and
before a study runs. ``read.py`` makes a :class:`Study` from a file, and every later step reads it.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from onelaunch.operation import AUTO, Case, Direction, Operation, Variant, find_operation
from onelaunch.wording import UNSAFE
from onelaunch.workbench.stored import Grown, check_names
from onelaunch.workbench.study.measure import Measure, find_measure, measure_names

_FILE_NAME = re.compile(r"(?!.*\.\.)[A-Za-z0-9][A-Za-z0-9._-]{0,79}")
"""Pattern of names of studies. Files and folders are named after studies."""

_FILE_NAME_RULE = "it names files, so it must be 1 to 80 letters (A to Z), digits, '.', '_' and '-', with no '..'"

LARGEST_SIZE = 2**63 - 1
"""Largest size of a shape: PyTorch's sizes are signed 64-bit integers."""


def _check_file_name(value: str, info: ValidationInfo) -> str:
    """Return a name after a check, for data from a file, that it follows :data:`_FILE_NAME`."""
    if info.context and not _FILE_NAME.fullmatch(value):
        raise ValueError(_FILE_NAME_RULE)
    return value


def _check_prose(value: str, info: ValidationInfo) -> str:
    """Return a string of several lines after a check, for data from a file, that it holds no control characters."""
    if info.context and UNSAFE.search(value):
        raise ValueError("it must hold no control characters except line breaks and tabs")
    return value


def _check_sizes(value: dict[str, int]) -> dict[str, int]:
    """Return sizes after a check that a tensor can have them."""
    for name, size in value.items():
        if not 0 <= size <= LARGEST_SIZE:
            raise ValueError(f"{name} must be an integer from 0 to {LARGEST_SIZE}, the largest size of a tensor")
    return value


def _check_dtype(value: str, info: ValidationInfo) -> str:
    """Return the name of a dtype after a check, for data from a file, that studies know it."""
    if info.context and value not in ("float16", "bfloat16", "float32"):
        raise ValueError("it must be float16, bfloat16 or float32")
    return value


def _check_bound(value: float | None) -> float | None:
    """Return a bound after a check that it is a number above 0, or the integer 0, which ``equals`` may ask for."""
    if value is not None and not (0 < value < math.inf or (type(value) is int and value == 0)):
        raise ValueError("it must be a number above 0")
    return value


Scale = Literal["small", "full"]
"""``small`` shapes suit a machine without a GPU, ``full`` ones need a GPU."""

Regime = Literal["cold", "warm", "eager", "running", "served"]
"""Regime of a timing.

- ``cold``: The inputs rotate through sets that together exceed three last-level caches, as far as memory allows; on a GPU
  the calls are replayed from a CUDA graph.
- ``warm``: The same inputs are used again and again.
- ``eager``: Calls of the public function from Python, including checks and dispatch.
- ``running``, for operations that are steps, such as ``decode_step``: one of many consecutive steps, each on the state that the
  previous one left on the device. Nothing is copied to the host.
- ``served``, for operations that are steps: one of many consecutive steps through the public loop, by the host's clock.
"""

LOOPS: tuple[Regime, ...] = ("running", "served")
"""Regimes of many consecutive steps. The operation provides the loop that runs them: :class:`onelaunch.operation.Loop`."""


def _check_measure(value: Any) -> Any:
    """Return the name of a measure after a check that it is registered."""
    if not isinstance(value, str) or value not in measure_names():
        # Words as pydantic's own for a Literal, which the names cannot be: packages register more measures.
        *most, last = map(repr, measure_names())
        raise PydanticCustomError("literal_error", "Input should be {expected}", {"expected": f"{', '.join(most)} or {last}"})
    return value


MeasureName = Annotated[str, BeforeValidator(_check_measure)]
"""Name of a registered measure."""


class Declared(Grown):
    """Base of everything that a study file declares. An unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Shape(Declared):
    """One size of the operation, with the input maker's options that differ from their defaults."""

    LATER = ("directions", "operation", "groups")

    name: str
    """Name of the shape in criteria, results and reports; each shape of a study has its own."""
    dtype: str = "float16"
    """Dtype of the inputs, as PyTorch names it."""
    scale: Scale = "full"
    """Scale of the shape. Without ``--scale`` a run takes the ``small`` shapes on a CPU, the ``full`` ones on a GPU."""
    sizes: dict[str, int]
    """Sizes of the operation, all of them. In the file each stands in the shape's table under its own name."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the operation's input maker that differ from their defaults, such as a decay per head or packed lengths. In the
    file each stands in the shape's table under its own name."""
    skip: tuple[str, ...] = ()
    """Variants and controls left out at this shape, such as a loop over time that would take minutes; the report says so."""
    directions: tuple[Direction, ...] = ()
    """Directions of the study that run at this shape; all of the study's when empty."""
    operation: str = ""
    """Operation that is called at this shape; the study's when empty. Its sizes and options are then those of the table."""
    groups: tuple[str, ...] = ()
    """Names of groups that the shape belongs to. Where a criterion names shapes, a group's name stands for all of its shapes."""

    _names = field_validator("name", "sizes", "options", "skip", "operation", "groups")(check_names)
    _sizes = field_validator("sizes")(_check_sizes)
    _dtype = field_validator("dtype")(_check_dtype)


SHAPE_KEYS = ("name", "dtype", "scale", "skip", "directions", "operation", "groups")
"""Keys of a shape's table in addition to the operation's sizes and options."""


Selector = str | dict[str, Any]
"""A variant or control by name, or the fastest of the variants whose tags match: ``{launches = 1}``, ``{launches = [1, 2]}``;
``{}`` matches every variant."""


class Criterion(Declared):
    """One condition of success.

    ``measure`` names the quantity that is judged, one of :func:`onelaunch.workbench.study.measures`. ``over`` is the study's
    baseline by default. If ``over`` stands for the fastest variant, and that is ``of`` itself, times are compared with the
    fastest of the others. If a selector stands for the fastest variant, bytes, memory and counts are those of the fastest variant
    too.
    """

    LATER = (
        "combine",
        "over_at",
        "per",
        "decides",
        "over_regime",
        "equals",
        "directions",
        "most_noise",
        "leave_out",
        "abandoned",
    )

    name: str
    """Name of the criterion in results and reports; each criterion of a study has its own."""
    measure: MeasureName
    """Quantity that is judged: the name of one of the registered measures."""
    of: Selector
    """Variant that is judged: a variant or control by name, or a table of tags, which stands for the fastest of the variants that
    have these tags. An empty table stands for the fastest of all."""
    over: Selector | None = None
    """Variant that ``of`` is compared with, given like ``of``; the study's baseline when left out."""
    at: str | tuple[str, ...] | None = None
    """Shapes at which the criterion is judged: a name or a list of names, of shapes and of groups. All full-scale shapes when
    left out, or all shapes of a study that has no full-scale shape."""
    in_at_least: int | None = None
    """Number of these shapes at which the bound must hold; all of them when left out."""
    combine: Literal["each", "geomean"] = "each"
    """``each``: the bound holds shape by shape. ``geomean``: it holds for the geometric mean over the shapes."""
    over_at: str | None = None
    """Shape at which ``over`` is timed, where it is another one than that of ``of``."""
    per: tuple[str, ...] = ()
    """With ``over_at``: sizes by whose product both times are divided; ``["B", "T"]`` gives the time per token."""
    decides: bool = True
    """Switch for taking part in the decision. A criterion that takes no part is judged and shown all the same, such as a claim of
    a write-up that is recorded for its lesson."""
    direction: Direction = "forward"
    """Direction that is judged: the forward pass alone, or the forward and backward passes together."""
    directions: tuple[Direction, ...] = ()
    """Directions that are judged in place of ``direction``: every shape counts once in each of them that runs there."""
    regime: Regime = "cold"
    """Regime in which ``of`` is timed."""
    over_regime: Regime | None = None
    """Regime in which ``over`` is timed, where it is another one, such as ``served`` steps over the same steps ``running``."""
    at_least: float | None = None
    """Lower bound. A criterion has exactly one of ``at_least``, ``at_most`` and ``equals``."""
    at_most: float | None = None
    """Upper bound."""
    equals: int | None = None
    """Exact number, for counted measures such as ``launches`` and ``barriers``."""
    most_noise: float | None = None
    """Largest A/A noise, as a factor such as 1.05, at which a time counts. With more noise it counts as not measured."""
    leave_out: bool = False
    """Switch for leaving out, and listing, the shapes at which no variant of ``over`` can run, whatever package is installed."""

    abandoned: str = ""
    """Reason why this part of the question is abandoned once its bound was missed: the designs that were measured, and the
    arithmetic or the measurement that leaves no room. A missed or infeasible criterion with a reason takes no part in the
    decision, which quotes it; one that is met or not measured does."""

    _names = field_validator("name", "of", "over", "at", "over_at", "per")(check_names)
    _bounds = field_validator("at_least", "at_most", "equals", "most_noise")(_check_bound)

    @model_validator(mode="after")
    def _one_bound(self) -> Criterion:
        if [self.at_least, self.at_most, self.equals].count(None) != 2:
            raise ValueError(f"criterion {self.name!r} needs exactly one of at_least, at_most and equals")
        return self

    @property
    def quantity(self) -> Measure:
        """The registered measure of this criterion."""
        return find_measure(self.measure)

    @property
    def all_directions(self) -> tuple[Direction, ...]:
        """The directions that are judged: ``directions``, or ``direction`` alone."""
        return self.directions or (self.direction,)

    def in_direction(self, direction: Direction) -> Criterion:
        """Return the criterion as it is judged in one of its directions; itself if it has no others."""
        return self.model_copy(update={"direction": direction, "directions": ()}) if self.directions else self

    @property
    def bound(self) -> str:
        """The bound in words, such as ``at least 1.3``."""
        if self.equals is not None:
            return f"exactly {self.equals}"
        return f"at least {self.at_least:g}" if self.at_least is not None else f"at most {self.at_most:g}"


class Prediction(Declared):
    """A value that somebody expects, declared before the study runs.

    The report shows it beside what was measured. A prediction decides nothing, and nothing is counted for it.
    """

    by: str
    """Author or source of the prediction, such as a write-up, a person or a cost model."""
    measure: MeasureName
    """Quantity that is predicted: the name of one of the registered measures."""
    of: Selector
    """Variant that the prediction is about, given like the ``of`` of a criterion."""
    over: Selector | None = None
    """Variant that ``of`` is compared with, given like ``of``; the study's baseline when left out."""
    at: str | tuple[str, ...] | None = None
    """Shapes that the prediction is about: a name or a list of names, of shapes and of groups. All full-scale shapes when left
    out, or all shapes of a study that has no full-scale shape."""
    direction: Direction = "forward"
    """Direction that the prediction is about."""
    regime: Regime = "cold"
    """Regime of a predicted time."""
    value: float
    """Predicted value, in the unit of the measure."""
    why: str
    """Reason for which this value is expected, in a sentence."""

    _names = field_validator("of", "over", "at")(check_names)
    _prose = field_validator("by", "why")(_check_prose)
    _number = field_validator("value")(_check_bound)

    def criterion(self) -> Criterion:
        """Return a criterion that asks for the predicted value, by which measured values are found. It decides nothing."""
        higher = find_measure(self.measure).better == "higher"
        return Criterion(
            name=f"predicted by {self.by}",
            measure=self.measure,
            of=self.of,
            over=self.over,
            at=self.at,
            direction=self.direction,
            regime=self.regime,
            decides=False,
            at_least=self.value if higher else None,
            at_most=None if higher else self.value,
        )


class Asked(NamedTuple):
    """A criterion at one of its shapes, in one of its directions."""

    criterion: Criterion
    """The criterion with this direction alone."""
    shape: Shape
    name: str
    """Key of the value in :attr:`onelaunch.workbench.result.Outcome.values`, and its name in sentences."""


def case_name(shape: str, direction: Direction) -> str:
    """Return the name of a shape in a direction, for a criterion that looks at several directions."""
    return shape if direction == "forward" else f"{shape}, {direction.replace('_', ' and ')}"


class Study(Declared):
    """A declared study."""

    LATER = ("predictions", "timed_up_to")

    name: str
    """Name of the study; its results and reports are named after it."""
    question: str
    """Question that the study answers, in a sentence; the report shows it with the decision."""
    operation: str
    """Name of the operation whose variants are compared. A shape may name another one."""
    baseline: str
    """Variant that the others are compared with. It is also run against itself (A/A), which gives the noise."""
    variants: tuple[str, ...] = ()
    """Variants that take part; all of the operation's when empty. The baseline always takes part. ``auto`` is the dispatcher's
    choice: the result stores which variant it chose at each shape. At shapes of several operations each takes the variants that
    it has."""
    controls: tuple[str, ...] = ()
    """Controls that are timed together with the variants: parts of the operation, such as its matrix product alone."""
    directions: tuple[Direction, ...] = ("forward",)
    """Directions that are measured: the forward pass alone, the forward and backward passes together, or each of them."""
    regimes: tuple[Regime, ...] = ("cold", "warm", "eager")
    """Regimes in which variants are timed."""
    rounds: int = Field(default=20, ge=3)
    """Rounds in which the variants take turns; medians and intervals are taken over them."""
    shapes: tuple[Shape, ...] = Field(min_length=1)
    """Shapes at which variants are measured, each a table of its own."""
    criteria: tuple[Criterion, ...] = ()
    """Criteria that the decision rests on, each a table of its own."""
    predictions: tuple[Prediction, ...] = ()
    """Values that somebody expects, each a table of its own; the report shows them beside what was measured."""
    timed_up_to: dict[str, float] = Field(default_factory=dict)
    """Norm-wise errors by the names of variants of other projects: one whose results are wrong by no more is timed all the same,
    for others to be compared with, and marked as an incorrect peer. It is never the fastest variant of anything."""
    notes: str = ""
    """Notes for the reader, in Markdown, such as what an earlier write-up reported; never used as a measurement."""

    _file_name = field_validator("name")(_check_file_name)
    _names = field_validator("operation", "baseline", "variants", "controls")(check_names)
    _prose = field_validator("question", "notes")(_check_prose)

    def digest(self) -> str:
        """Return the SHA-256 over the declaration as JSON, in hexadecimal digits."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()

    def shape(self, name: str) -> Shape:
        return next(shape for shape in self.shapes if shape.name == name)

    def directions_at(self, shape: Shape) -> tuple[Direction, ...]:
        """Return the directions that run at a shape, in the study's order."""
        return tuple(direction for direction in self.directions if not shape.directions or direction in shape.directions)

    def operation_names(self) -> tuple[str, ...]:
        """Return the names of all operations of the study, its own first."""
        return tuple(dict.fromkeys((self.operation, *(shape.operation for shape in self.shapes if shape.operation))))

    def operations(self) -> tuple[Operation[..., Any], ...]:
        """Return all operations of the study, its own first."""
        return tuple(map(find_operation, self.operation_names()))

    def operation_at(self, shape: Shape) -> Operation[..., Any]:
        """Return the operation that is called at a shape."""
        return find_operation(shape.operation or self.operation)

    def case(self, shape: Shape) -> Case:
        """Return the operation's case for a shape."""
        return self.operation_at(shape).case(shape.dtype, name=shape.name, **shape.sizes, **shape.options)

    def variant_names(self) -> tuple[str, ...]:
        """Return the variants that take part at any shape, the baseline first; ``auto`` is among them if it takes part."""
        names = self.variants or tuple(name for each in self.operations() for name in each.variants)
        return tuple(dict.fromkeys((self.baseline, *names)))

    def variants_at(self, shape: Shape) -> tuple[str, ...]:
        """Return the variants that take part at a shape, the baseline first: those that its operation has, and ``auto``."""
        names = self.variant_names()
        if len(self.operation_names()) == 1:
            return names  # a name that the operation lacks is an error of its own
        return tuple(name for name in names if name == AUTO or name in self.operation_at(shape).variants)

    def registered(self) -> tuple[tuple[str, Variant], ...]:
        """Return the variants whose code a run of the study can reach, each with its label.

        They are those that take part and, if ``auto`` does, those that the dispatcher may choose.
        """
        found = []
        for owner in self.operations():
            names = [name for name in self.variant_names() if name != AUTO]
            several = len(self.operation_names()) > 1
            variants = [owner.get(name) for name in names if not several or name in owner.variants]
            if AUTO in self.variant_names():
                variants += [each for each in owner.variants.values() if each.capabilities.automatic and each.name not in names]
            found += [(self.label(owner.name, variant.name), variant) for variant in variants]
        return tuple(found)

    def find_variant(self, name: str) -> Variant | None:
        """Return the variant of a name, of the first operation that has it; ``None`` for ``auto`` and for controls."""
        return next((owner.variants[name] for owner in self.operations() if name in owner.variants), None)

    def label(self, operation: str, name: str) -> str:
        """Return the name of a variant, with that of its operation in a study of several: ``fla``, or ``gla.fla``."""
        return name if len(self.operation_names()) == 1 else f"{operation}.{name}"

    def select(self, selector: Selector, shape: Shape | None = None) -> tuple[str, ...]:
        """Return the names of the variants, or of the one control, that a selector stands for.

        Args:
            selector: A name, or a table of tags. ``auto`` has no tags, so that only its name selects it.
            shape: Shape at which the variants take part; by default those of any shape are returned.
        """
        if isinstance(selector, str):
            return (selector,)
        owners = self.operations() if shape is None else (self.operation_at(shape),)
        names = self.variant_names() if shape is None else self.variants_at(shape)
        several = len(self.operation_names()) > 1
        return tuple(
            name
            for name in names
            if name != AUTO
            and any(_matches(owner.get(name), selector) for owner in owners if not several or name in owner.variants)
        )

    def over(self, criterion: Criterion) -> Selector:
        """Return the variant that a criterion compares with: its own ``over``, or the study's baseline."""
        return self.baseline if criterion.over is None else criterion.over

    def sides(self, criterion: Criterion, shape: Shape) -> tuple[tuple[Selector, Shape], ...]:
        """Return the sides of a criterion at one of its shapes, ``of`` and ``over``, each with its own shape.

        A measure of ``of`` alone, such as ``time``, has one side.
        """
        if criterion.quantity.alone is not None:
            return ((criterion.of, shape),)
        other = shape if criterion.over_at is None else self.shape(criterion.over_at)
        return (criterion.of, shape), (self.over(criterion), other)

    def shapes_of(self, criterion: Criterion) -> tuple[Shape, ...]:
        """Return the shapes at which a criterion is judged, those of a group in the declared order."""
        if criterion.at is None:
            return self.at_scale("full") or self.shapes
        groups = self.groups()
        found = [each for name in members(criterion.at) for each in groups.get(name) or (self.shape(name),)]
        return tuple({shape.name: shape for shape in found}.values())

    def groups(self) -> dict[str, tuple[Shape, ...]]:
        """Return the shapes of each group by the group's name."""
        names = dict.fromkeys(group for shape in self.shapes for group in shape.groups)
        return {name: tuple(shape for shape in self.shapes if name in shape.groups) for name in names}

    def asked(self, criterion: Criterion) -> tuple[Asked, ...]:
        """Return the shapes and directions at which a criterion is judged.

        A criterion with ``directions`` is judged at each shape in those of them that run there.
        """
        if not criterion.directions:
            return tuple(Asked(criterion, shape, shape.name) for shape in self.shapes_of(criterion))
        return tuple(
            Asked(criterion.in_direction(direction), shape, case_name(shape.name, direction))
            for shape in self.shapes_of(criterion)
            for direction in criterion.directions
            if direction in self.directions_at(shape)
        )

    def at_scale(self, scale: Scale) -> tuple[Shape, ...]:
        """Return the shapes of one scale, in the declared order."""
        return tuple(shape for shape in self.shapes if shape.scale == scale)


def members(value: Any) -> Sequence[Any]:
    """Return a list or tuple unchanged, and any other value as a tuple of one."""
    return value if isinstance(value, (list, tuple)) else (value,)


def _matches(variant: Variant, selector: Mapping[str, Any]) -> bool:
    """Return whether a variant has every wanted tag with one of the wanted values. A tag that is a tuple has all its members."""
    return all(
        key in variant.tags and any(value in members(variant.tags[key]) for value in members(wanted))
        for key, wanted in selector.items()
    )
