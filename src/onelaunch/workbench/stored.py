"""Base classes and types of all stored values: validated names, numbers and strings, and estimates.

The declarations of studies, their plans and their results are made of them, and :data:`FROM_A_FILE` makes their validation
strict. ``stats.py`` computes an :class:`Estimate`, and ``quantities.py`` formats it. ``measure/timing.py`` drops rounds with a
time outside of :data:`LEAST_TIME` to :data:`MOST_TIME`.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    model_serializer,
)

from onelaunch.device.hardware import SLUG
from onelaunch.wording import escaped

NAME = re.compile(r"(?! )[A-Za-z0-9 ._+*=/,():%'-]{1,80}(?<! )")
"""Pattern of names of shapes, groups, variants, controls and criteria, and of strings among a shape's options.

It allows no ``<``, ``&``, ``$``, ``;``, ``|``, backquote, double quote, backslash or control character, which could be markup on
a page or in a plot, or a command to a shell or terminal.
"""

NAME_RULE = "it must be 1 to 80 letters (A to Z), digits, spaces and . _ - + * = / , ( ) : % ', without a space at either end"

FROM_A_FILE = {"from_a_file": True}
"""Validation context in which names and strings must follow the rules: for data from files, and before a study runs."""


def check_names(value: Any, info: ValidationInfo) -> Any:
    """Return a value after a check that every string in it, keys of mappings included, follows :data:`NAME`.

    Without a validation context, as for a study or result made in Python, nothing is checked.
    """
    if not info.context:
        return value
    if isinstance(value, str) and not NAME.fullmatch(value):
        raise ValueError(NAME_RULE)
    if isinstance(value, dict):
        check_names([*value, *value.values()], info)
    elif isinstance(value, (list, tuple)):
        for each in value:
            check_names(each, info)
    return value


def _slug(text: str, info: ValidationInfo) -> str:
    if info.context and not SLUG.fullmatch(text):
        raise ValueError("it names files, so it must be 1 to 80 small letters (a to z), digits, '.', '_' and '-', with no '..'")
    return text


Slug = Annotated[str, AfterValidator(_slug)]
"""Name of a device in the names of files, such as ``nvidia-h200``."""

Name = Annotated[str, AfterValidator(check_names)]
"""Name that follows :data:`NAME`."""

Words = Annotated[str, AfterValidator(escaped)]
"""Free text, such as the error message of another package. Control characters in it become backslash escapes."""

Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
LEAST_TIME, MOST_TIME = 1e-6, 1e15
"""Smallest and largest time in microseconds: one picosecond and about thirty years. Times further apart cannot be plotted."""

Time = Annotated[float, Field(ge=LEAST_TIME, le=MOST_TIME, allow_inf_nan=False)]


def _drawable(microseconds: float) -> float:
    """Reject times so short that an axis with measured times on it could not show them; 0 stands for no bound."""
    if 0 < microseconds < 1e-12:
        raise ValueError("it must be 0 or at least 1e-12 microseconds")
    return microseconds


Bound = Annotated[float, Field(ge=0, le=MOST_TIME, allow_inf_nan=False), AfterValidator(_drawable)]
"""Microseconds of a plan. They may be 0, and plots draw them together with measured times."""

Finite = Annotated[float, Field(allow_inf_nan=False)]
Error = Annotated[float, Field(ge=0)]
"""An error against the oracle. It may be infinite."""

Count = Annotated[int, Field(ge=0, le=10**120)]
"""A number of bytes, operations, launches or rounds. The limit exceeds every product of a few 63-bit sizes."""


class Grown(BaseModel):
    """Base of stored values that have gained fields since results were published.

    A value from an older file is written with the same bytes as before.
    """

    LATER: ClassVar[tuple[str, ...]] = ()
    """Fields added after results were published. They are left out at their default, so that older digests stay valid."""

    @model_serializer(mode="wrap")
    def _without_later_defaults(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields = type(self).model_fields
        return {
            key: value
            for key, value in handler(self).items()
            if key not in self.LATER or getattr(self, key) != fields[key].get_default(call_default_factory=True)
        }


class Stored(BaseModel):
    """Base of estimates, plans and all parts of a result. They are immutable and reject unknown fields.

    Declarations have a base of their own, :class:`onelaunch.workbench.study.declare.Declared`.
    """

    # An error may be infinite, for which JSON has no number. By default pydantic would write null, which no reader takes back.
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="strings")


class Estimate(Stored):
    """A number with its interval.

    A measured time or ratio is a median over rounds with its 95 % bootstrap interval. A mean over shapes and a ratio of
    times that share no rounds take their interval from those of their parts. An exact number, such as a count, has an interval of
    width 0.
    """

    median: Error
    low: Error
    high: Error
    samples: Count
    """Number of rounds behind the median; the fewest of those of its parts; 1 for an exact number."""
