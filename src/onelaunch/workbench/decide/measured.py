"""Base classes of measures that results are judged by: how they are read, counted and judged, and their words in reports.

The measures in ``workbench/measures`` derive from them. Criteria, decisions and reports find a criterion's measure by
:func:`judged`. ``running.py`` finds the measures that it takes by :func:`taken_measures` and :func:`kept_as`, and reports find
those that are counted. A criterion reads a value of ``of``, or compares ``of`` with ``over`` (by default the baseline). Each is
the name of a variant or control, or tags that stand for the fastest variant with them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from onelaunch.operation import Operation
from onelaunch.workbench import quantities as q
from onelaunch.workbench.decide.judging import Finding, exactly, held
from onelaunch.workbench.decide.selection import compared
from onelaunch.workbench.measure.count import Request
from onelaunch.workbench.result import Beside, Cell, CriterionStatus, Estimate, Result
from onelaunch.workbench.study import Alone, Criterion, Measure, Shape, measures
from onelaunch.workbench.study.measure import NO_MEAN_OF_COUNTS


class JudgedMeasure(Measure):
    """A measure that can be read from a result and judged.

    The three texts are templates with ``{of}`` and ``{over}``, the words for the two sides.
    """

    rank: ClassVar[int] = 100
    """Place among the measures in the order in which a headline quotes them, the lowest first."""
    evidence: ClassVar[str]
    """Beginning of a row of values over shapes, such as ``the speed of {of} over {over} is``."""
    demand: ClassVar[str]
    """Statement of what a criterion asks for, with ``{bound}`` for the bound and its unit."""
    told: ClassVar[str]
    """Statement of what was measured, with ``{amount}`` for the value and its unit."""
    limited_by_time: ClassVar[bool] = True
    """True if a missed criterion is explained by the candidate's time over its roofline bound and its likely bottleneck."""
    claims_gain: ClassVar[bool] = False
    """True if a met criterion is a claim about fusion, so that the time that it rests on has to be explained."""

    @abstractmethod
    def judge(self, result: Result, criterion: Criterion, cells: Sequence[Cell], among: int) -> Finding:
        """Read the value of the chosen cells, of ``of`` and, if the measure compares two, of ``over``, and judge it.

        Args:
            result: The measurements.
            criterion: The criterion that is judged.
            cells: The cells that its selectors stand for at one shape.
            among: Number of measurements from which they were chosen as the fastest.
        """

    def finding(self, result: Result, criterion: Criterion, shape: Shape) -> Finding:
        """Judge a criterion at one of its shapes that ran."""
        sides = compared(result, criterion, shape)
        cells = [side.cell for side in sides if side.cell is not None]
        if len(cells) < len(sides):
            reason = "; ".join(dict.fromkeys(side.reason for side in sides if side.cell is None))
            return Finding(shape.name, "not_measured", f"not measured: {reason}", f"not measured ({reason})")
        return self.judge(result, criterion, cells, max(side.among for side in sides))

    def judge_mean(
        self, criterion: Criterion, mean: Estimate, noise: float | None, gain: float | None
    ) -> tuple[CriterionStatus, str, str]:
        """Judge the geometric mean over shapes: return the status, the reason if it needs one, and details of the value.

        Args:
            criterion: The criterion that is judged.
            mean: The mean of the values.
            noise: The mean of the noise floors, or ``None`` if a shape has none.
            gain: The mean of the possible gains, or ``None`` if a shape has none.
        """
        del noise, gain
        return held(criterion, mean.median), "", ""

    def amount(self, value: Estimate) -> str:
        """Return a value with its unit, as a headline quotes it."""
        return f"{q.number(value.median)}{self.unit}"


class TakenMeasure(JudgedMeasure):
    """A quantity of one variant that a step of its own takes where a criterion asks for it, after times are measured."""

    limited_by_time = False

    def untaken(self, variant: str, shape: str, why: str) -> str:
        """Return the sentence on a variant of which nothing could be taken at a shape."""
        return f"{self.kept.capitalize()} of {variant} at {shape} were not counted: {why}"

    @property
    def kept(self) -> str:
        """Name under which a measurement keeps what is taken. Measures that read one thing in two ways share it."""
        return self.name

    @abstractmethod
    def count(
        self, operation: Operation[..., Any], requests: Sequence[Request], *, device: torch.device
    ) -> Sequence[int | Beside | str]:
        """Count or time for each request, in their order, or return why it could not be done."""


class CountedMeasure(TakenMeasure):
    """A whole number that is counted in one call, where a criterion asks for it. It needs a name, words and :meth:`count`."""

    unit = ""
    counted = True
    no_mean = NO_MEAN_OF_COUNTS
    noun: ClassVar[str]
    """Singular of what is counted, such as ``barrier``."""
    does: ClassVar[str]
    """Verb and object of a statement of the count, with ``{count}``, such as ``launches {count} times``."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if does := cls.__dict__.get("does"):
            words = {
                "demand": f"{{of}} {does.format(count='{bound}')} a call",
                "told": f"{{of}} {does.format(count='{amount}')} a call",
                "evidence": f"the {cls.name} of {{of}} are",
                "alone": Alone(f"{cls.name} are counted", f"a number of {cls.name} is"),
            }
            for key in words.keys() - cls.__dict__.keys():  # words that the class defines itself take precedence
                setattr(cls, key, words[key])

    def judge(self, result: Result, criterion: Criterion, cells: Sequence[Cell], among: int) -> Finding:
        del result
        (cell,) = cells
        count = cell.count(self.name)
        if count is None:
            text = f"not measured: the {self.name} of {cell.variant} at {cell.shape} were not counted"
            return Finding(cell.shape, "not_measured", text, "not counted")
        chosen = f" (best of {among})" if among > 1 else ""
        does = self.does.format(count=count)
        text = f"{cell.variant} {does} a call at {cell.shape}{chosen}, {criterion.bound} was asked"
        return exactly(criterion, cell.shape, count, text, str(count), among)


def counted_measures() -> list[CountedMeasure]:
    """Return the registered measures that are counted."""
    return [measure for measure in measures() if isinstance(measure, CountedMeasure)]


def taken_measures() -> list[TakenMeasure]:
    """Return the registered measures that a step of their own takes, one for each name that measurements keep."""
    found = [measure for measure in measures() if isinstance(measure, TakenMeasure)]
    # Reversed twice, so that of the measures that share a name the one that was registered first stays.
    return list({measure.kept: measure for measure in reversed(found)}.values())[::-1]


def kept_as(kept: str) -> list[str]:
    """Return the names of the registered measures that read what measurements keep under a name."""
    return [measure.name for measure in measures() if isinstance(measure, TakenMeasure) and measure.kept == kept]


def judged(criterion: Criterion) -> JudgedMeasure:
    """Return the measure of a criterion."""
    measure = criterion.quantity
    if not isinstance(measure, JudgedMeasure):
        raise TypeError(f"the measure {measure.name!r} says nothing about how it is judged; derive it from JudgedMeasure")
    return measure
