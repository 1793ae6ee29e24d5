"""Base class and registry of the measures that criteria can ask for.

A measure is one class in one file, registered by :func:`register`. The base class here holds what declarations, their validation
and plans need. How a measure is read from a result and judged, and its words in reports, belong to the same class through
:class:`onelaunch.workbench.decide.measured.JudgedMeasure`. The files of ``workbench/measures`` register measures, and so may
packages of users. The other modules of ``study``, ``decide`` and ``workbench/asked.py`` look them up, and ``docs/study_keys.py``
lists them.

A criterion reads a value of ``of``, or compares ``of`` with ``over`` (by default the baseline). Each is the name of a variant or
control, or tags that stand for the fastest variant with them. Its bound is ``at_least``, ``at_most`` or ``equals``, which must
hold at ``in_at_least`` of its shapes (by default at all).
"""

from __future__ import annotations

import re
from abc import ABC
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, TypeVar

if TYPE_CHECKING:
    from onelaunch.workbench.study.declare import Criterion, Shape, Study

NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")
"""Pattern of names of measures."""


NO_MEAN_OF_COUNTS = "a count that must be exact, or may be 0, has no geometric mean"
"""Reason why the geometric mean of counts cannot be asked for."""


class Alone(NamedTuple):
    """Words for error messages of a measure that reads one variant, ``of``, and compares it with no ``over``.

    The messages refuse a criterion with an ``over``, or with a bound on the wrong side: ``at_least`` where lower is better.
    """

    held: str
    """Statement of what the value is compared with, such as ``bytes are compared with the least``."""
    bounded: str
    """Subject and verb of a statement about its bound, such as ``bytes over the least are``."""


class Measure(ABC):
    """A quantity that criteria can ask for."""

    name: ClassVar[str]
    """Name in study files and results."""
    meaning: ClassVar[str]
    """Definition for the documentation, in Markdown."""
    unit: ClassVar[str] = "x"
    """Unit that follows a number, with a leading space if it needs one: ``x`` for a ratio, ``" µs"`` for a time."""
    better: ClassVar[Literal["higher", "lower"]] = "lower"
    """Direction in which values are better."""
    alone: ClassVar[Alone | None] = None
    """Words for a measure of ``of`` alone; ``None`` for one that compares ``of`` with ``over``."""
    timed: ClassVar[bool] = False
    """True if values have rounds, an interval and a noise; others are exact numbers."""
    counted: ClassVar[bool] = False
    """True for a whole number that is counted in one call if a criterion asks for it. Only such a measure takes ``equals``."""
    needs_dram_bytes: ClassVar[bool] = False
    """True if the hardware has to count DRAM bytes where a criterion asks for the measure."""
    no_mean: ClassVar[str] = ""
    """Reason why a criterion cannot ask for the geometric mean, as a statement; empty if it can."""

    def problem(self, criterion: Criterion) -> str | None:
        """Return what is wrong with a criterion by this measure's own rules, and the remedy; ``None`` if nothing is."""
        del criterion
        return None

    def infeasibility(self, study: Study, criterion: Criterion) -> str | None:
        """Return why arithmetic alone refutes a criterion, or ``None``.

        It is refuted if so many shapes are that fewer than ``in_at_least`` (all, when left out) remain.
        """
        asked = study.asked(criterion)
        needed = criterion.in_at_least or len(asked)
        refuted = [why for each in asked if (why := self.infeasible_at(study, each.criterion, each.shape)) is not None]
        return "; ".join(refuted) if len(asked) - len(refuted) < needed else None

    def infeasible_at(self, study: Study, criterion: Criterion, shape: Shape) -> str | None:
        """Return why arithmetic alone refutes a criterion at a shape, or ``None``."""
        del study, criterion, shape
        return None

    def guarantee(self, study: Study, criterion: Criterion) -> str | None:
        """Return why no measurement can miss a criterion's bound, as a statement, or ``None``.

        The criterion then says nothing, such as one that compares a variant with itself. Its bound has to be guaranteed at
        ``in_at_least`` of its shapes, or at all when that is left out.
        """
        asked = study.asked(criterion)
        guaranteed = [why for each in asked if (why := self.guaranteed_at(study, each.criterion, each.shape)) is not None]
        return guaranteed[0] if guaranteed and len(guaranteed) >= (criterion.in_at_least or len(asked)) else None

    def guaranteed_at(self, study: Study, criterion: Criterion, shape: Shape) -> str | None:
        """Return why no measurement can miss a criterion's bound at a shape, as a statement, or ``None``.

        Subclasses extend this rule, by which a comparison of one variant with itself gives 1.
        """
        name = _compared_with_itself(study, criterion, shape)
        return f"it compares {name} with itself" if name is not None and met_by_one(criterion) else None


def _compared_with_itself(study: Study, criterion: Criterion, shape: Shape) -> str | None:
    """Return the only variant that both sides of a criterion stand for at a shape, or ``None`` if there is another."""
    if criterion.quantity.alone is not None or criterion.over_regime not in (None, criterion.regime):
        return None
    (of, here), (over, there) = study.sides(criterion, shape)
    names = study.select(of, here)
    return names[0] if here == there and len(names) == 1 and names == study.select(over, there) else None


def met_by_one(criterion: Criterion) -> bool:
    """Return whether a ratio of 1 is on the right side of a criterion's bound."""
    return criterion.at_least <= 1 if criterion.at_least is not None else (criterion.at_most or 0.0) >= 1


_MEASURES: dict[str, Measure] = {}

M = TypeVar("M", bound=type[Measure])


def register(measure: M) -> M:
    """Register one instance of a measure; for use as a decorator of its class.

    Raises:
        ValueError: The name is taken or breaks the rule, or the measure is counted but compares two variants.
    """
    if not NAME.fullmatch(measure.name):
        raise ValueError(f"a measure cannot be called {measure.name!r}: use 1 to 40 small letters, digits and '_'")
    if measure.name in _MEASURES:
        raise ValueError(f"there is a measure {measure.name!r} already; give this one another name")
    if measure.counted and measure.alone is None:
        raise ValueError(f"the measure {measure.name!r} is counted, so it must be of a single variant: set its attribute alone")
    _MEASURES[measure.name] = measure()
    return measure


def find_measure(name: str) -> Measure:
    """Return the measure with this name.

    Raises:
        KeyError: No measure has this name.
    """
    return _MEASURES[name]


def measures() -> tuple[Measure, ...]:
    """Return all measures in the order of their registration."""
    return tuple(_MEASURES.values())


def measure_names() -> tuple[str, ...]:
    """Return the names of all measures in the order of their registration."""
    return tuple(_MEASURES)
