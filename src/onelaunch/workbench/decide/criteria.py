"""Judge each declared criterion: met, missed, inconclusive, not measured or infeasible, in one sentence with numbers.

Times are compared round by round. A criterion on times is *met* when the whole interval of the ratio lies on the right side of
the bound and its median does so by more than the A/A noise of that shape. It is *missed* when the whole interval lies on the
wrong side and the median does so by more than the noise. Everything else is *inconclusive*, with the reason: the interval
contains the bound, or the noise is larger than the distance to it. A criterion that is not met is *infeasible* when meeting it
would take a run below the roofline bound by more than the noise, given the measured time of the other side.

A variant that is itself the fastest is compared with the fastest of the others. Bytes count as measured only if the hardware
counted them. Memory, bytes and counts are exact numbers and are compared with the bound directly.

Times at two shapes share no rounds: the ratio's interval covers everything that both intervals allow, and the larger noise of the
two applies. A geometric mean over shapes is judged in the same way, with an interval and a noise as if every shape erred in the
same direction. It is measured only if every shape is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from onelaunch.errors import listing
from onelaunch.workbench import quantities as q
from onelaunch.workbench import stats
from onelaunch.workbench.decide.candidates import asked_of_over, compared, timing_of, why_none
from onelaunch.workbench.result import Cell, CriterionStatus, Estimate, Outcome, Result
from onelaunch.workbench.study import COUNTS, TIMES, Criterion, Selector, Shape, Study

FEWEST_ROUNDS = 3
"""Smallest number of rounds whose interval is believed."""


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
    best_of: int = 1
    noise: float | None = None
    """The smallest factor that may be claimed of a time, or ``None`` without an A/A run."""
    gain: float | None = None
    """The value of :func:`possible_gain` for a time."""


def evaluate(result: Result, infeasible: Mapping[str, str]) -> tuple[Outcome, ...]:
    """Judge every criterion of the study by the result's measurements and noise.

    Args:
        result: The measurements. Outcomes and a decision that it already has are ignored.
        infeasible: Criteria that arithmetic alone refutes, with the reason: ``StudyPlan.infeasible``.

    Returns:
        One outcome for each criterion, in declared order.
    """
    return tuple(_outcome(result, criterion, infeasible.get(criterion.name)) for criterion in result.study.criteria)


def possible_gain(result: Result, criterion: Criterion, shape: str) -> float | None:
    """Return the largest possible speed-up at a shape: the measured time of ``over`` / the roofline bound of ``of``.

    Both are divided by their share of the work if the criterion asks for that. ``None`` if either is unknown, and outside the
    cold regime, because roofline bounds are computed for cold memory.
    """
    if criterion.regime != "cold" or criterion.over_regime is not None:
        return None
    over = compared(result, criterion, result.study.shape(shape))[-1].cell
    floor = _floor(result, criterion, shape)
    timing = over.timing("cold") if over else None
    return timing.microseconds.high / floor / _share(result.study, criterion, shape) if timing and floor else None


def _outcome(result: Result, criterion: Criterion, refuted: str | None) -> Outcome:
    findings = [_finding(result, criterion, shape) for shape in result.study.shapes_of(criterion)]
    mean = _mean(criterion, findings) if criterion.combine == "geomean" else None
    needed = criterion.in_at_least or len(findings)
    status = mean.status if mean else _combine([finding.status for finding in findings], needed)
    evidence = f"{mean.text}." if mean else _evidence(criterion, findings, needed)
    if refuted:
        status = "infeasible"
        measured = any(finding.value is not None for finding in findings)
        evidence = f"{refuted[:1].upper()}{refuted[1:]}" + (f"; measured: {evidence}" if measured else ".")
    names = (*result.study.variant_names(), *result.study.controls)
    return Outcome(
        criterion=criterion,
        status=status,
        evidence=evidence if evidence.startswith(names) else evidence[:1].upper() + evidence[1:],
        values={finding.shape: finding.value for finding in findings if finding.value is not None},
        overall=mean.value if mean else None,
        best_of=max((finding.best_of for finding in findings), default=1),
    )


def _combine(statuses: Sequence[CriterionStatus], needed: int) -> CriterionStatus:
    """Return a criterion's status from its statuses at each shape, of which ``needed`` must be met."""
    count = {status: statuses.count(status) for status in ("met", "missed", "inconclusive", "infeasible")}
    if count["met"] >= needed:
        return "met"
    if len(statuses) - count["infeasible"] < needed:
        return "infeasible"
    if len(statuses) - count["infeasible"] - count["missed"] < needed:
        return "missed"
    return "inconclusive" if count["met"] + count["inconclusive"] >= needed else "not_measured"


def _mean(criterion: Criterion, findings: Sequence[Finding]) -> Finding:
    """Judge a criterion on the geometric mean over its shapes."""
    if said_of_all := _said_of_all(findings):
        return Finding("", "not_measured", said_of_all, "")
    row = ", ".join(f"{one.shape} {one.value.median:.3g}" if one.value else f"{one.shape} {one.brief}" for one in findings)
    values = [one.value for one in findings if one.value is not None]
    if len(values) < len(findings):
        measured = f"{len(values)} of {len(findings)} shapes"
        return Finding("", "not_measured", f"{_asked(criterion)} measured at {measured}, which give no mean: {row}", "")
    ratio = stats.mean_estimate(values)
    noises = [one.noise for one in findings if one.noise is not None]
    noise = stats.geometric_mean(noises) if len(noises) == len(findings) else None
    details = ""
    if criterion.measure in TIMES:
        status, why = _judge(ratio, criterion, noise)
        gains = [one.gain for one in findings if one.gain is not None]
        gain = stats.geometric_mean(gains) if len(gains) == len(findings) else None
        if status != "met" and gain is not None and _out_of_reach(criterion, gain, noise):
            status = "infeasible"
            most = f"at most {gain:.2f}x the speed" if criterion.measure == "speedup" else f"at least {1 / gain:.2f}x the time"
            why = f"{most} is possible, as the floors are"
        noted = f", A/A noise {noise:.3g}" if noise else ""
        details = f" ({ratio.low:.3g} to {ratio.high:.3g}{noted})"
    else:
        status, why = _held(criterion, ratio.median), ""
    because = f": {why}" if why else ""
    best = max(one.best_of for one in findings)
    chosen = f"; best of {best} at each shape" if best > 1 else ""
    text = (
        f"{_asked(criterion)} {ratio.median:.3g} in the geometric mean over {len(findings)} shapes{details}, "
        f"{criterion.bound} was asked{because}; {row}{chosen}"
    )
    return Finding("", status, text, "", ratio, best)


def _said_of_all(findings: Sequence[Finding]) -> str:
    """Return the reason why no shape was measured if all shapes share it, else an empty string."""
    same = all(finding.value is None for finding in findings) and len({finding.text for finding in findings}) == 1
    return findings[0].text if same else ""


def _evidence(criterion: Criterion, findings: Sequence[Finding], needed: int) -> str:
    if len(findings) == 1:
        return f"{findings[0].text}."
    if said_of_all := _said_of_all(findings):
        return f"{said_of_all}."
    met = sum(finding.status == "met" for finding in findings)
    row = ", ".join(f"{finding.shape} {finding.brief}" for finding in findings)
    best = max(finding.best_of for finding in findings)
    chosen = f"; best of {best} at each shape" if best > 1 else ""
    return f"{_asked(criterion)} {criterion.bound} at {met} of {len(findings)} shapes, {needed} needed: {row}{chosen}."


def _asked(criterion: Criterion) -> str:
    of = _selector_words(criterion.of)
    over = "the baseline" if criterion.over is None else _selector_words(criterion.over, other=criterion.measure in TIMES)
    if criterion.over_at is not None:
        over += f" at {criterion.over_at}{_per(criterion)}"
    return {
        "speedup": f"the speed of {of} over {over} is",
        "time_ratio": f"the time of {of} over that of {over} is",
        "time": f"the time of {of} in microseconds is",
        "time_over_floor": f"the time of {of} over its floor is",
        "dram_bytes_ratio": f"the bytes of {over} over those of {of} are",
        "dram_bytes_over_least": f"the bytes of {of} over the least are",
        "peak_memory_ratio": f"the peak memory of {of} over that of {over} is",
        "launches": f"the launches of {of} are",
        "barriers": f"the barriers of {of} are",
        "error": f"the error of {of} is",
    }[criterion.measure]


def _per(criterion: Criterion) -> str:
    return f" per {'*'.join(criterion.per)}" if criterion.per else ""


def _selector_words(selector: Selector, *, other: bool = False) -> str:
    if isinstance(selector, str):
        return selector
    wanted = {key: value if isinstance(value, list) else [value] for key, value in selector.items()}
    tags = ", ".join(f"{key} {' or '.join(map(str, values))}" for key, values in wanted.items())
    fastest = "the fastest other variant" if other else "the fastest variant"
    return f"{fastest} with {tags}" if tags else fastest


def _finding(result: Result, criterion: Criterion, shape: Shape) -> Finding:
    if shape.scale != result.provenance.scale and not any(cell.shape == shape.name for cell in result.cells):
        remedy = "run on a GPU, or with --scale full" if shape.scale == "full" else "run on a CPU, or with --scale small"
        return Finding(shape.name, "not_measured", f"needs {shape.scale} scale: {remedy}", f"needs {shape.scale} scale")
    if criterion.measure == "error":
        return _error(result, criterion, shape.name)
    sides = compared(result, criterion, shape)
    cells = [side.cell for side in sides if side.cell is not None]
    if len(cells) < len(sides):
        reason = "; ".join(dict.fromkeys(side.reason for side in sides if side.cell is None))
        return Finding(shape.name, "not_measured", f"not measured: {reason}", f"not measured ({reason})")
    among = max(side.among for side in sides)
    if criterion.measure in ("time", "time_over_floor"):
        return _time(result, criterion, cells[0], among)
    if criterion.measure == "dram_bytes_over_least":
        return _bytes_over_least(criterion, cells[0], among)
    if criterion.measure in COUNTS:
        return _count(criterion, cells[0], among)
    of, over = cells
    if criterion.measure == "dram_bytes_ratio":
        return _bytes(criterion, of, over, among)
    if criterion.measure == "peak_memory_ratio":
        return _memory(criterion, of, over, among)
    return _times(result, criterion, of, over, among)


def _times(result: Result, criterion: Criterion, of: Cell, over: Cell, among: int) -> Finding:
    of_time, over_time = timing_of(of, criterion), timing_of(over, asked_of_over(criterion))
    faster = criterion.measure == "speedup"
    ratio = _ratio(result.study, criterion, of, over)
    noise = _noise(result, criterion, (of.shape, over.shape))
    status, why = _judge(ratio, criterion, noise)
    gain = possible_gain(result, criterion, of.shape)
    if status != "met" and gain is not None and _out_of_reach(criterion, gain, noise):
        status = "infeasible"
        floor = _floor(result, criterion, of.shape) or 0.0
        most = f"at most {gain:.2f}x the speed" if faster else f"at least {1 / gain:.2f}x the time"
        why = f"{most} of {over.variant} is possible, as the floor is {q.time(floor)}"
    other = f" {criterion.over_regime}" if criterion.over_regime else ""
    medians = [q.time(timing.microseconds.median) for timing in (of_time, over_time)]
    relation = "is {:.3g}x as fast as" if faster else "takes {:.3g}x the time of"
    details = [
        f"{ratio.low:.3g} to {ratio.high:.3g} in {ratio.samples} rounds",
        f"{criterion.regime}: {medians[0]} against {medians[1]}{other}",
        *([f"A/A noise {noise:.3g}"] if noise else []),
        *([f"best of {among}"] if among > 1 else []),
    ]
    because = f": {why}" if why else ""
    against = f"{over.variant} at {of.shape}"
    if criterion.over_at is not None:
        against = f"{over.variant} at {over.shape}{_per(criterion)}, itself at {of.shape}"
    text = f"{of.variant} {relation.format(ratio.median)} {against} ({', '.join(details)}), {criterion.bound} was asked{because}"
    brief = f"{ratio.median:.3g}" + ("" if status == "met" else f" ({status}{because})")
    return Finding(of.shape, status, text, brief, ratio, among, noise, gain)


def _time(result: Result, criterion: Criterion, cell: Cell, among: int) -> Finding:
    """Judge the time of one variant, in microseconds or as a multiple of its roofline bound."""
    floor, time = 1.0, timing_of(cell, criterion).microseconds
    took = f"{time.median:.4g} µs"
    if criterion.measure == "time_over_floor":
        if cell.plan is None or not cell.plan.floor_microseconds:
            text = f"not measured: there is no floor of {cell.variant} at {cell.shape}"
            return Finding(cell.shape, "not_measured", text, "no floor")
        floor = cell.plan.floor_microseconds
        took = f"{time.median / floor:.3g}x its floor"
    ratio = _scaled(time, 1 / floor)
    noise = _noise(result, criterion, (cell.shape,))
    status, why = _judge(ratio, criterion, noise)
    against = f": {q.time(time.median)} against {q.time(floor)}" if criterion.measure == "time_over_floor" else ""
    details = [
        f"{ratio.low:.4g} to {ratio.high:.4g} in {ratio.samples} rounds",
        f"{criterion.regime}{against}",
        *([f"A/A noise {noise:.3g}"] if noise else []),
        *([f"best of {among}"] if among > 1 else []),
    ]
    because = f": {why}" if why else ""
    text = f"{cell.variant} takes {took} at {cell.shape} ({', '.join(details)}), {criterion.bound} was asked{because}"
    brief = f"{ratio.median:.3g}" + ("" if status == "met" else f" ({status}{because})")
    return Finding(cell.shape, status, text, brief, ratio, among, noise)


def _scaled(estimate: Estimate, factor: float) -> Estimate:
    """Return the estimate multiplied by a factor, such as one for another unit."""
    scaled = {side: factor * getattr(estimate, side) for side in ("median", "low", "high")}
    return estimate.model_copy(update=scaled)


def _ratio(study: Study, criterion: Criterion, of: Cell, over: Cell) -> Estimate:
    """Return the ratio of two times, round by round if they share rounds, each divided by its share of the work."""
    of_time, over_time = timing_of(of, criterion), timing_of(over, asked_of_over(criterion))
    share = _share(study, criterion, of.shape)
    a, b, scale = (over_time, of_time, 1 / share) if criterion.measure == "speedup" else (of_time, over_time, share)
    if criterion.over_at is None:
        return stats.ratio(a.rounds, b.rounds)
    return _scaled(stats.unpaired_ratio(a.microseconds, b.microseconds), scale)


def _share(study: Study, criterion: Criterion, shape: str) -> float:
    """Return the work at ``over_at`` over the work at ``shape``, as the product of the sizes in ``per``; 1 without ``per``."""
    (_, own), (_, other) = study.sides(criterion, study.shape(shape))
    work = [math.prod(side.sizes[name] for name in criterion.per) for side in (own, other)]
    return work[1] / work[0] if work[0] else 1.0


def _noise(result: Result, criterion: Criterion, shapes: Sequence[str]) -> float | None:
    """Return the largest noise floor of the shapes and regimes that are timed, or ``None`` if one of them has no A/A run."""
    regimes = (criterion.regime, asked_of_over(criterion).regime)
    found = [result.noise_at(shape, criterion.direction, regime) for shape in shapes for regime in regimes]
    known = [noise.floor for noise in found if noise is not None]
    return max(known) if len(known) == len(found) else None


def _judge(ratio: Estimate, criterion: Criterion, noise: float | None) -> tuple[CriterionStatus, str]:
    """Judge a ratio of times against the bound: return the status, and the reason if it is inconclusive.

    *Met* and *missed* ask for the same: the whole interval on one side of the bound, and the median beyond it by more than the
    A/A noise.
    """
    if ratio.samples < FEWEST_ROUNDS:
        return "inconclusive", f"{ratio.samples} round{'s' * (ratio.samples != 1)} give no interval"
    if noise is None:
        return "inconclusive", "without an A/A run the noise is unknown"
    bound, low, high, median = _turned(criterion, ratio)
    if low >= bound and median >= bound * noise:
        return "met", ""
    if high < bound and median < bound / noise:
        return "missed", ""
    if low < bound <= high:
        return "inconclusive", "the interval contains the bound"
    return "inconclusive", f"the A/A noise of {noise:.3g} is larger than the distance to the bound"


def _turned(criterion: Criterion, ratio: Estimate) -> tuple[float, float, float, float]:
    """Return bound, low, high and median, inverted if the bound is an upper one, so that larger is better."""
    if criterion.at_least is not None:
        return criterion.at_least, ratio.low, ratio.high, ratio.median
    bound = criterion.at_most or 1.0
    return 1 / bound, 1 / ratio.high, 1 / ratio.low, 1 / ratio.median


def _out_of_reach(criterion: Criterion, gain: float, noise: float | None) -> bool:
    """Return whether the bound lies beyond the largest possible gain by more than the A/A noise.

    The gain is computed from a measured time. Without an A/A run its noise is unknown, and nothing is out of reach.
    """
    if noise is None:
        return False
    gain *= noise
    if criterion.measure == "speedup":
        return criterion.at_least is not None and gain < criterion.at_least
    return criterion.at_most is not None and 1 / gain > criterion.at_most


def _bytes(criterion: Criterion, of: Cell, over: Cell, among: int) -> Finding:
    if of.traffic is None or over.traffic is None or not of.traffic.total:
        missing = listing(cell.variant for cell in (of, over) if cell.traffic is None or not cell.traffic.total)
        text = f"not measured: there is no traffic of {missing} at {of.shape}"
        return Finding(of.shape, "not_measured", text, "no traffic")
    value = over.traffic.total / of.traffic.total
    amounts = f"{q.size(over.traffic.total)} of {over.variant} against {q.size(of.traffic.total)} of {of.variant}"
    if {of.traffic.source, over.traffic.source} != {"ncu"}:
        text = f"not measured: no counted bytes at {of.shape}; by arithmetic {value:.2f} ({amounts}), {criterion.bound} was asked"
        return Finding(of.shape, "not_measured", text, f"{value:.2f} by arithmetic, not counted", None, among)
    chosen = f", best of {among}" if among > 1 else ""
    text = f"counted by ncu at {of.shape}: {value:.2f}x ({amounts}{chosen}), {criterion.bound} was asked"
    return _exactly(criterion, of.shape, value, text, f"{value:.2f}", among)


def _bytes_over_least(criterion: Criterion, cell: Cell, among: int) -> Finding:
    if cell.traffic is None or cell.plan is None or not cell.plan.least_bytes:
        text = f"not measured: there is no traffic of {cell.variant} at {cell.shape}"
        return Finding(cell.shape, "not_measured", text, "no traffic")
    value = cell.traffic.total / cell.plan.least_bytes
    chosen = f", best of {among}" if among > 1 else ""
    amounts = f"{q.size(cell.traffic.total)} of {cell.variant} against {q.size(cell.plan.least_bytes)} at the least{chosen}"
    if cell.traffic.source != "ncu":
        by_hand = f"by arithmetic {value:.2f} ({amounts}), {criterion.bound} was asked"
        text = f"not measured: no counted bytes at {cell.shape}; {by_hand}"
        return Finding(cell.shape, "not_measured", text, f"{value:.2f} by arithmetic, not counted", None, among)
    text = f"counted by ncu at {cell.shape}: {value:.2f}x ({amounts}), {criterion.bound} was asked"
    return _exactly(criterion, cell.shape, value, text, f"{value:.2f}", among)


def _memory(criterion: Criterion, of: Cell, over: Cell, among: int) -> Finding:
    if not of.peak_bytes or not over.peak_bytes:
        missing = listing(cell.variant for cell in (of, over) if not cell.peak_bytes)
        text = f"not measured: there is no peak memory of {missing} at {of.shape}"
        return Finding(of.shape, "not_measured", text, "not measured")
    value = of.peak_bytes / over.peak_bytes
    chosen = f", best of {among}" if among > 1 else ""
    amounts = f"{q.size(of.peak_bytes)} against {q.size(over.peak_bytes)}{chosen}"
    relation = f"takes {value:.3g}x the peak memory of"
    text = f"{of.variant} {relation} {over.variant} at {of.shape} ({amounts}), {criterion.bound} was asked"
    return _exactly(criterion, of.shape, value, text, f"{value:.3g}", among)


def _count(criterion: Criterion, cell: Cell, among: int) -> Finding:
    count = cell.count(criterion.measure)
    if count is None:
        text = f"not measured: the {criterion.measure} of {cell.variant} at {cell.shape} were not counted"
        return Finding(cell.shape, "not_measured", text, "not counted")
    what = f"launches {count} times" if criterion.measure == "launches" else f"meets {count} barriers over the grid"
    chosen = f" (best of {among})" if among > 1 else ""
    text = f"{cell.variant} {what} a call at {cell.shape}{chosen}, {criterion.bound} was asked"
    return _exactly(criterion, cell.shape, count, text, str(count), among)


def _exactly(criterion: Criterion, shape: str, value: float, text: str, brief: str, among: int = 1) -> Finding:
    """Judge a number that is exact, without an interval or noise."""
    status = _held(criterion, value)
    exact = Estimate(median=value, low=value, high=value, samples=1)
    return Finding(shape, status, text, brief if status == "met" else f"{brief} (missed)", exact, among)


def _held(criterion: Criterion, value: float) -> CriterionStatus:
    """Return whether an exact number is on the right side of the bound, as a status."""
    if criterion.equals is not None:
        return "met" if value == criterion.equals else "missed"
    enough = value >= criterion.at_least if criterion.at_least is not None else value <= (criterion.at_most or 0.0)
    return "met" if enough else "missed"


def _error(result: Result, criterion: Criterion, shape: str) -> Finding:
    """Judge the largest error of all selected variants. The fastest alone would not do: every variant has to be accurate."""
    names = result.study.select(criterion.of)
    cells = [cell for name in names if (cell := result.cell(shape, name, criterion.direction)) is not None]
    judged = [cell for cell in cells if cell.verdict is not None and (cell.verdict.components or not cell.verdict.ok)]
    if not judged:
        reason = why_none(names, cells, shape, criterion)
        return Finding(shape, "not_measured", f"not measured: {reason}", f"not measured ({reason})")
    for cell in judged:
        if cell.verdict is not None and not cell.verdict.ok:
            return Finding(shape, "missed", f"{cell.variant} is incorrect at {shape}: {cell.verdict.explain()}", "incorrect")
    errors = [(part.error, part.name, cell.variant) for cell in judged if cell.verdict for part in cell.verdict.components]
    error, part, variant = max(errors)
    text = f"the largest norm-wise error of {variant} at {shape} is {error:.2g} ({part}), at most {criterion.at_most:g} was asked"
    return _exactly(criterion, shape, error, text, f"{error:.2g}")


def _floor(result: Result, criterion: Criterion, shape: str) -> float | None:
    """Return the lowest roofline bound of the variants that ``of`` selects at a shape, in microseconds."""
    names = result.study.select(criterion.of)
    cells = (result.cell(shape, name, criterion.direction) for name in names)
    return min((cell.plan.floor_microseconds for cell in cells if cell is not None and cell.plan is not None), default=None)
