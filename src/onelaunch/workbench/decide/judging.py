"""Compare a value with a criterion's bound: with interval and noise if it is a time, directly if it is an exact number.

The measures in ``workbench/measures`` and their base classes in ``measured.py`` call these functions, and return a
:class:`Finding` for each shape. ``criteria.py`` combines the findings of a criterion.

A criterion reads a value of ``of``, or compares ``of`` with ``over`` (by default the baseline). Each is the name of a variant or
control, or tags that stand for the fastest variant with them. ``over_at`` and ``over_regime`` give ``over`` another shape or
regime, and the product of the sizes in ``per`` is the work by which times at two shapes are divided. ``floor_microseconds`` of a
plan is the roofline bound.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from onelaunch.workbench import stats
from onelaunch.workbench.decide.selection import asked_of_over, compared
from onelaunch.workbench.result import CriterionStatus, Estimate, Result
from onelaunch.workbench.study import Criterion, Study

_FEWEST_ROUNDS = 3
"""Smallest number of rounds that give a usable interval. ``measure/timing.py`` measures as many whatever its time cap is."""


@dataclass(frozen=True)
class Finding:
    """Status of a criterion at one of its shapes, with the words for it."""

    shape: str
    status: CriterionStatus
    text: str
    """A clause with the numbers, for a criterion of one shape."""
    brief: str
    """The status in a word or two, for a row of shapes."""
    value: Estimate | None = None
    """The measured value, in the unit of the bound; ``None`` if it was not measured."""
    best_of: int = 1
    """Number of measurements from which the compared one was chosen as the fastest."""
    noise: float | None = None
    """The smallest factor that may be claimed of a time, or ``None`` without an A/A run."""
    gain: float | None = None
    """The value of :func:`possible_gain` where two times are compared, else ``None``."""


def possible_gain(result: Result, criterion: Criterion, shape: str) -> float | None:
    """Return the largest possible speed-up at a shape: the measured time of ``over`` / the roofline bound of ``of``.

    A comparison of two times that is not met is infeasible if it asks for more than this, by more than the A/A noise.

    The time is the upper end of its interval, so that the gain is not underestimated. Both are divided by their share of the work
    if the criterion asks for that. ``None`` if either is unknown, outside the cold regime, because roofline bounds are computed
    for cold memory, and for a criterion that sets ``over_regime``.
    """
    if criterion.regime != "cold" or criterion.over_regime is not None:
        return None
    over = compared(result, criterion, result.study.shape(shape))[-1].cell  # the last of the two sides, ``of`` and ``over``
    roofline = bound_of(result, criterion, shape)
    timing = over.timing("cold") if over else None
    return timing.microseconds.high / roofline / share_of_work(result.study, criterion, shape) if timing and roofline else None


def noise_of(result: Result, criterion: Criterion, shapes: Sequence[str]) -> float | None:
    """Return the largest noise floor of the shapes and regimes that are timed, or ``None`` if one of them has no A/A run."""
    regimes = (criterion.regime, asked_of_over(criterion).regime)
    found = [result.noise_at(shape, criterion.direction, regime) for shape in shapes for regime in regimes]
    known = [noise.floor for noise in found if noise is not None]
    return max(known) if len(known) == len(found) else None


def judge_time(ratio: Estimate, criterion: Criterion, noise: float | None) -> tuple[CriterionStatus, str]:
    """Judge a ratio of times against the bound: return the status, and the reason if it is equal or inconclusive.

    *Met* and *missed* ask for the same: the whole interval on one side of the bound, and the median beyond it by more than the
    A/A noise. *Equal* needs a bound of 1, an A/A noise of :data:`~onelaunch.workbench.stats.LEAST_NOISE`, and an interval without
    a loss above that noise. A gain, where there is one, is then too small or too uncertain to be claimed.
    """
    if ratio.samples < _FEWEST_ROUNDS:
        return "inconclusive", f"{ratio.samples} round{'s' * (ratio.samples != 1)} give no interval"
    if noise is None:
        return "inconclusive", "without an A/A run the noise is unknown"
    bound, low, high, median = _turned(criterion, ratio)
    if low >= bound and median >= bound * noise:
        return "met", ""
    if high < bound and median < bound / noise:
        return "missed", ""
    if bound == 1 and noise <= stats.LEAST_NOISE and 1 / noise <= low:
        if high <= noise:
            return "equal", f"the times differ by less than {noise:.3g}x, the least that is ever claimed"
        return "equal", f"there is no loss, and the gain is not surely more than {noise:.3g}x, the least that is ever claimed"
    if low < bound <= high:
        return "inconclusive", "the interval contains the bound"
    return "inconclusive", f"the A/A noise of {noise:.3g} is larger than the distance to the bound"


def _turned(criterion: Criterion, ratio: Estimate) -> tuple[float, float, float, float]:
    """Return bound, low, high and median. For an upper bound all are inverted, so that larger is better."""
    if criterion.at_least is not None:
        return criterion.at_least, ratio.low, ratio.high, ratio.median
    bound = criterion.at_most or 1.0
    return 1 / bound, 1 / ratio.high, 1 / ratio.low, 1 / ratio.median


def exactly(criterion: Criterion, shape: str, value: float, text: str, brief: str, among: int = 1) -> Finding:
    """Judge a number that is exact, without an interval or noise.

    Args:
        criterion: The criterion that is judged.
        shape: Name of the shape.
        value: The number.
        text: Clause with the number, for :attr:`Finding.text`.
        brief: The number in a word or two, for :attr:`Finding.brief`.
        among: Number of measurements from which this one was chosen as the fastest.
    """
    status = held(criterion, value)
    exact = Estimate(median=value, low=value, high=value, samples=1)
    return Finding(shape, status, text, brief if status == "met" else f"{brief} (missed)", exact, among)


def held(criterion: Criterion, value: float) -> CriterionStatus:
    """Return ``met`` if an exact number is on the right side of the bound, else ``missed``."""
    if criterion.equals is not None:
        return "met" if value == criterion.equals else "missed"
    enough = value >= criterion.at_least if criterion.at_least is not None else value <= (criterion.at_most or 0.0)
    return "met" if enough else "missed"


def share_of_work(study: Study, criterion: Criterion, shape: str) -> float:
    """Return the work at ``over_at`` over the work at ``shape``, as the product of the sizes in ``per``; 1 without ``per``."""
    (_, own), (_, other) = study.sides(criterion, study.shape(shape))
    work = [math.prod(side.sizes[name] for name in criterion.per) for side in (own, other)]
    return work[1] / work[0] if work[0] else 1.0


def bound_of(result: Result, criterion: Criterion, shape: str) -> float | None:
    """Return the lowest roofline bound of the variants that ``of`` selects at a shape, in microseconds.

    Only :func:`possible_gain` and the words for an infeasible comparison need it. ``time_over_floor`` divides by the bound of its
    own variant, which it reads from the cell.
    """
    names = result.study.select(criterion.of, result.study.shape(shape))
    cells = (result.cell(shape, name, criterion.direction) for name in names)
    return min((cell.plan.floor_microseconds for cell in cells if cell is not None and cell.plan is not None), default=None)


def scaled(estimate: Estimate, factor: float) -> Estimate:
    """Return the estimate multiplied by a factor, such as one for another unit."""
    return estimate.model_copy(update={side: factor * getattr(estimate, side) for side in ("median", "low", "high")})
