"""A study as it is declared, before it runs: which operation, shapes and variants, against what, and what would count as success."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Any, Literal


from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from onelaunch.errors import OneLaunchError, StudyError, UnknownStudy, did_you_mean, listing
from onelaunch.operation import Case, Direction, find_operation

Scale = Literal["small", "full"]
"""``small`` shapes suit a machine without a GPU, ``full`` ones need a GPU."""

Measure = Literal["speedup", "time_ratio", "dram_bytes_ratio", "error"]


class Declared(BaseModel):
    """Base of what a study file declares: a misspelt key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Shape(Declared):
    """One size of the operation, with the input maker's options that differ from their defaults."""

    name: str
    dtype: str = "float16"
    scale: Scale = "full"
    sizes: dict[str, int]
    options: dict[str, Any] = Field(default_factory=dict)


Selector = str | dict[str, Any]
"""A variant or control by name, or the fastest of the variants whose tags match: ``{launches = 1}``, ``{launches = [1, 2]}``."""


class Criterion(Declared):
    """One condition of success.

    ``speedup``: time of ``over`` / time of ``of``. ``time_ratio``: time of ``of`` / time of ``over``. ``dram_bytes_ratio``: bytes of
    ``over`` / bytes of ``of``. ``error``: the largest norm-wise error of ``of``. ``over`` is the study's baseline by default.
    """

    name: str
    measure: Measure
    of: Selector
    over: Selector | None = None
    at: str | tuple[str, ...] | None = None
    """Shape names; all full-scale shapes by default."""
    in_at_least: int | None = None
    """At how many of them it must hold; at all by default."""
    direction: Direction = "forward"
    regime: Literal["cold", "warm", "eager"] = "cold"
    at_least: float | None = None
    at_most: float | None = None

    @model_validator(mode="after")
    def _one_bound(self) -> Criterion:
        if (self.at_least is None) == (self.at_most is None):
            raise ValueError(f"criterion {self.name!r} needs exactly one of at_least and at_most")
        return self


class Study(Declared):
    """A declared study."""

    name: str
    question: str
    operation: str
    baseline: str
    variants: tuple[str, ...] = ()
    """Names; all of the operation's when empty."""
    controls: tuple[str, ...] = ()
    directions: tuple[Direction, ...] = ("forward",)
    regimes: tuple[Literal["cold", "warm", "eager"], ...] = ("cold", "warm", "eager")
    rounds: int = Field(default=20, ge=3)
    shapes: tuple[Shape, ...] = Field(min_length=1)
    criteria: tuple[Criterion, ...] = ()
    notes: str = ""
    """What the original write-up reported, for the reader; never used as a measurement."""

    def digest(self) -> str:
        """SHA-256 over the declaration."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()

    def shape(self, name: str) -> Shape:
        return next(shape for shape in self.shapes if shape.name == name)

    def case(self, shape: Shape) -> Case:
        """The operation's case for a shape."""
        return find_operation(self.operation).case(shape.dtype, name=shape.name, **shape.sizes, **shape.options)

    def variant_names(self) -> tuple[str, ...]:
        """The variants that take part, the baseline first."""
        names = self.variants or tuple(find_operation(self.operation).variants)
        return (self.baseline, *(name for name in names if name != self.baseline))
