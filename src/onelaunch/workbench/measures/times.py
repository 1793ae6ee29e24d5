"""Measures of time. They are compared round by round, with an interval and the A/A noise.

The sentences of evidence are stored in results. They call the roofline bound *floor*, as those of committed results do; only
statuses and values are compared when a result is judged again. A criterion of a study names a measure by its ``name``. The class
attributes are explained at :class:`onelaunch.workbench.decide.measured.JudgedMeasure`.

A criterion reads a value of ``of``, or compares ``of`` with ``over`` (by default the baseline). Each is the name of a variant or
control, or tags that stand for the fastest variant with them. ``over_at`` and ``over_regime`` give ``over`` another shape or
regime. ``among`` is the number of measurements from which one was chosen as the fastest, and ``gain`` the largest speed-up that
the roofline bound (``floor_microseconds``) allows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from onelaunch.wording import listing
from onelaunch.workbench import quantities as q
from onelaunch.workbench import stats
from onelaunch.workbench.decide.judging import Finding, bound_of, judge_time, noise_of, possible_gain, scaled, share_of_work
from onelaunch.workbench.decide.measured import JudgedMeasure
from onelaunch.workbench.decide.selection import asked_of_over, timing_of
from onelaunch.workbench.decide.words import per
from onelaunch.workbench.result import Cell, CriterionStatus, Estimate, Result
from onelaunch.workbench.study import Alone, Criterion, Shape, Study, register
from onelaunch.workbench.study.measure import met_by_one

SLACK = 2.0
"""Factor from which on a bound that allows a variant to be slower than another one asks for so little that it says nothing.

Comparisons with a control, which is a part of the operation, or with another shape may allow more.
"""


class TimeMeasure(JudgedMeasure):
    """Base of measures of time."""

    timed = True

    def judge_mean(
        self, criterion: Criterion, mean: Estimate, noise: float | None, gain: float | None
    ) -> tuple[CriterionStatus, str, str]:
        status, why = judge_time(mean, criterion, noise)
        if status != "met" and gain is not None and self.out_of_reach(criterion, gain, noise):
            status, why = "infeasible", f"{self.reach(gain)} is possible, as the floors are"
        noted = f", A/A noise {noise:.3g}" if noise else ""
        return status, why, f" ({mean.low:.3g} to {mean.high:.3g}{noted})"

    def amount(self, value: Estimate) -> str:
        return q.ratio_interval(value)

    def reach(self, gain: float) -> str:
        """Return the best value that the roofline bounds allow, in words.

        ``gain`` is the largest possible speed-up over ``over``, from :func:`~onelaunch.workbench.decide.judging.possible_gain`.
        """
        return f"at least {1 / gain:.2f}x the time"

    def out_of_reach(self, criterion: Criterion, gain: float, noise: float | None) -> bool:
        """Return whether the bound lies beyond the largest possible speed-up ``gain`` by more than the A/A noise.

        The gain is computed from a measured time. Without an A/A run its noise is unknown, and no bound counts as out of reach.
        """
        return noise is not None and criterion.at_most is not None and 1 / (gain * noise) > criterion.at_most


class TwoTimes(TimeMeasure):
    """Base of measures that compare two times."""

    relation: ClassVar[str]
    """Verb and object that compare ``of`` with ``over``, with ``{:.3g}`` for the value."""

    def guaranteed_at(self, study: Study, criterion: Criterion, shape: Shape) -> str | None:
        if (why := super().guaranteed_at(study, criterion, shape)) is not None:
            return why
        (of, here), (over, there) = study.sides(criterion, shape)
        if here != there or criterion.over_regime is not None:
            return None
        mine, theirs = set(study.select(of, here)), set(study.select(over, there))
        if met_by_one(criterion) and not isinstance(of, str) and theirs and theirs < mine:
            return f"the fastest of several variants is never slower than {listing(sorted(theirs))}, which is among them"
        variants = set(study.variant_names())
        slack = 1 / criterion.at_least if criterion.at_least is not None else criterion.at_most or 0.0
        if slack >= SLACK and mine | theirs <= variants:
            said = over if isinstance(over, str) else "the variant that it is compared with"
            return f"a variant that takes {slack:.3g} times as long as {said} would meet it, so it asks for no gain"
        return None

    def ratio(self, study: Study, criterion: Criterion, of: Cell, over: Cell) -> Estimate:
        """Return the time of ``of`` over that of ``over``.

        The ratio is taken round by round if they share rounds. At two shapes each time is divided by its amount of work.
        """
        of_time, over_time = timing_of(of, criterion), timing_of(over, asked_of_over(criterion))
        if criterion.over_at is None:
            return stats.ratio(of_time.rounds, over_time.rounds)
        share = share_of_work(study, criterion, of.shape)
        return scaled(stats.unpaired_ratio(of_time.microseconds, over_time.microseconds), share)

    def judge(self, result: Result, criterion: Criterion, cells: Sequence[Cell], among: int) -> Finding:
        of, over = cells
        of_time, over_time = timing_of(of, criterion), timing_of(over, asked_of_over(criterion))
        ratio = self.ratio(result.study, criterion, of, over)
        noise = noise_of(result, criterion, (of.shape, over.shape))
        status, why = judge_time(ratio, criterion, noise)
        gain = possible_gain(result, criterion, of.shape)
        if status != "met" and gain is not None and self.out_of_reach(criterion, gain, noise):
            status = "infeasible"
            roofline = bound_of(result, criterion, of.shape) or 0.0
            why = f"{self.reach(gain)} of {over.label} is possible, as the floor is {q.time(roofline)}"
        other = f" {criterion.over_regime}" if criterion.over_regime else ""
        medians = [q.time(timing.microseconds.median) for timing in (of_time, over_time)]
        details = [
            f"{ratio.low:.3g} to {ratio.high:.3g} in {ratio.samples} rounds",
            f"{criterion.regime}: {medians[0]} against {medians[1]}{other}",
            *([f"A/A noise {noise:.3g}"] if noise else []),
            *([f"best of {among}"] if among > 1 else []),
        ]
        because = f": {why}" if why else ""
        against = f"{over.label} at {of.shape}"
        if criterion.over_at is not None:
            against = f"{over.label} at {over.shape}{per(criterion)}, itself at {of.shape}"
        found = f"{of.variant} {self.relation.format(ratio.median)} {against} ({', '.join(details)})"
        brief = f"{ratio.median:.3g}" + ("" if status == "met" else f" ({status}{because})")
        return Finding(of.shape, status, f"{found}, {criterion.bound} was asked{because}", brief, ratio, among, noise, gain)


@register
class Speedup(TwoTimes):
    """Time of ``over`` divided by the time of ``of``."""

    name = "speedup"
    meaning = "time of `over` / time of `of`"
    better = "higher"
    rank = 0
    evidence = "the speed of {of} over {over} is"
    demand = "{of} {bound} as fast as {over}"
    told = "{of} is {amount} as fast as {over}"
    relation = "is {:.3g}x as fast as"
    claims_gain = True

    def ratio(self, study: Study, criterion: Criterion, of: Cell, over: Cell) -> Estimate:
        of_time, over_time = timing_of(of, criterion), timing_of(over, asked_of_over(criterion))
        if criterion.over_at is None:
            return stats.ratio(over_time.rounds, of_time.rounds)
        share = share_of_work(study, criterion, of.shape)
        return scaled(stats.unpaired_ratio(over_time.microseconds, of_time.microseconds), 1 / share)

    def reach(self, gain: float) -> str:
        return f"at most {gain:.2f}x the speed"

    def out_of_reach(self, criterion: Criterion, gain: float, noise: float | None) -> bool:
        return noise is not None and criterion.at_least is not None and gain * noise < criterion.at_least


@register
class TimeRatio(TwoTimes):
    """Time of ``of`` divided by the time of ``over``."""

    name = "time_ratio"
    meaning = "time of `of` / time of `over`"
    rank = 1
    evidence = "the time of {of} over that of {over} is"
    demand = "{of} takes {bound} the time of {over}"
    told = "{of} takes {amount} the time of {over}"
    relation = "takes {:.3g}x the time of"


class OneTime(TimeMeasure):
    """Base of measures of one variant's time."""

    def scale(self, cell: Cell) -> float | None:
        """Return the microseconds by which the time is divided, or ``None`` if they are not known."""
        del cell
        return 1.0

    def took(self, time: Estimate, scale: float) -> str:
        """Return the time in words."""
        del scale
        return f"{time.median:.4g} µs"

    def against(self, time: Estimate, scale: float) -> str:
        """Return what the time is compared with, in words, or an empty string."""
        del time, scale
        return ""

    def judge(self, result: Result, criterion: Criterion, cells: Sequence[Cell], among: int) -> Finding:
        (cell,) = cells
        time, scale = timing_of(cell, criterion).microseconds, self.scale(cell)
        if scale is None:
            text = f"not measured: there is no floor of {cell.variant} at {cell.shape}"
            return Finding(cell.shape, "not_measured", text, "no floor")
        ratio = scaled(time, 1 / scale)
        noise = noise_of(result, criterion, (cell.shape,))
        status, why = judge_time(ratio, criterion, noise)
        details = [
            f"{ratio.low:.4g} to {ratio.high:.4g} in {ratio.samples} rounds",
            f"{criterion.regime}{self.against(time, scale)}",
            *([f"A/A noise {noise:.3g}"] if noise else []),
            *([f"best of {among}"] if among > 1 else []),
        ]
        because = f": {why}" if why else ""
        found = f"{cell.variant} takes {self.took(time, scale)} at {cell.shape} ({', '.join(details)})"
        brief = f"{ratio.median:.3g}" + ("" if status == "met" else f" ({status}{because})")
        return Finding(cell.shape, status, f"{found}, {criterion.bound} was asked{because}", brief, ratio, among, noise)


@register
class Time(OneTime):
    """Time of ``of`` in microseconds."""

    name = "time"
    meaning = "time of `of`, in microseconds"
    unit = " µs"
    alone = Alone("a time is compared with microseconds", "a time is")
    rank = 6
    evidence = "the time of {of} in microseconds is"
    demand = "{of} takes {bound}"
    told = "{of} takes {amount}"

    def amount(self, value: Estimate) -> str:
        return q.interval(value)


@register
class TimeOverFloor(OneTime):
    """Time of ``of`` divided by its roofline bound on this device."""

    name = "time_over_floor"
    meaning = "time of `of` / its roofline bound on this device"
    alone = Alone("a time is compared with its roofline bound", "a time over its roofline bound is")
    rank = 5
    evidence = "the time of {of} over its floor is"
    demand = "{of} takes {bound} its roofline bound"
    told = "{of} takes {amount} its roofline bound"

    def problem(self, criterion: Criterion) -> str | None:
        if criterion.regime == "warm":
            return "roofline bounds assume that data lies in memory, not in caches; use cold or eager as the regime"
        return None

    def infeasible_at(self, study: Study, criterion: Criterion, shape: Shape) -> str | None:
        del study
        if criterion.at_most is not None and criterion.at_most < 1:
            return f"nothing runs below its floor, the study asks for {criterion.at_most:g}x at {shape.name}"
        return None

    def scale(self, cell: Cell) -> float | None:
        return cell.plan.floor_microseconds or None if cell.plan is not None else None

    def took(self, time: Estimate, scale: float) -> str:
        return f"{time.median / scale:.3g}x its floor"

    def against(self, time: Estimate, scale: float) -> str:
        return f": {q.time(time.median)} against {q.time(scale)}"
