"""What became of each declared criterion: met, missed, inconclusive, not measured or infeasible, in one sentence with numbers.

Times are compared round by round. A criterion on times is *met* when the whole interval of the ratio lies beyond the bound and
its median does so by more than the A/A noise of that shape; *missed* when the whole interval lies on the other side, or the
median does by more than the noise; else *inconclusive*. It is *infeasible* when it would take a run below the floor, seen from
the measured time it compares with. Bytes count as measured only if the hardware counted both sides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from onelaunch.errors import listing
from onelaunch.workbench import stats
from onelaunch.workbench.plan import mebibytes
from onelaunch.workbench.result import Cell, CriterionStatus, Estimate, Noise, Outcome, Result, Timing
from onelaunch.workbench.study import Criterion, Selector, Shape

FEWEST_ROUNDS = 3
"""With fewer rounds there is no interval to believe."""

STATUS_WORDS = {
    "unsupported": "cannot run here",
    "not_installed": "is not installed",
    "incorrect": "is incorrect",
    "invalid": "was faster than its floor and is not believed",
    "out_of_memory": "ran out of memory",
    "error": "failed",
    "interrupted": "was interrupted",
}


@dataclass(frozen=True)
class Candidate:
    """The cell that a selector stands for at one shape."""

    cell: Cell | None
    among: int = 1
    """From how many measured cells it was chosen as the fastest."""
    reason: str = ""
    """Why there is none."""


@dataclass(frozen=True)
class Finding:
    """A criterion at one of its shapes."""

    shape: str
    status: CriterionStatus
    text: str
    """A clause with the numbers, for a criterion of one shape."""
    brief: str
    """The same in a word or two, for a row of shapes."""
    value: Estimate | None = None
    best_of: int = 1


def evaluate(result: Result, infeasible: Mapping[str, str]) -> tuple[Outcome, ...]:
    """Every criterion of the study held against the result's cells and noise.

    Args:
        result: what was measured; its outcomes and decision are not looked at.
        infeasible: criteria that arithmetic alone refutes, with the reason: ``StudyPlan.infeasible``.
    """
    return tuple(_outcome(result, criterion, infeasible.get(criterion.name)) for criterion in result.study.criteria)


def candidate(result: Result, criterion: Criterion, selector: Selector, shape: str) -> Candidate:
    """The named variant's (or control's) cell, or the fastest correct one of those that a tag filter selects."""
    names = result.study.select(selector)
    cells = [cell for name in names if (cell := result.cell(shape, name, criterion.direction)) is not None]
    timed = [cell for cell in cells if cell.status == "ok" and cell.timing(criterion.regime) is not None]
    counted = [cell for cell in cells if cell.status == "ok"] if criterion.measure == "dram_bytes_ratio" else []
    usable = timed or counted
    if not usable:
        return Candidate(None, 0, _why_none(names, cells, shape, criterion))
    return Candidate(min(usable, key=lambda cell: _median(cell, criterion)), len(usable))


def possible_gain(result: Result, criterion: Criterion, shape: str) -> float | None:
    """The most that time of ``over`` / time of ``of`` can be at a shape: the measured time of ``over`` over the floor of ``of``.

    ``None`` where that is not known, and outside the cold regime, for which floors are computed.
    """
    if criterion.regime != "cold":
        return None
    over = candidate(result, criterion, result.study.over(criterion), shape).cell
    floor = _floor(result, criterion, shape)
    timing = over.timing("cold") if over else None
    return timing.microseconds.high / floor if timing and floor else None


def microseconds(value: float) -> str:
    """A time as people read it: ``8.12 us``, ``1.38 ms``."""
    return f"{value / 1000:.3g} ms" if value >= 999.5 else f"{value:.3g} us"


def _outcome(result: Result, criterion: Criterion, refuted: str | None) -> Outcome:
    findings = [_finding(result, criterion, shape) for shape in result.study.shapes_of(criterion)]
    needed = criterion.in_at_least or len(findings)
    status = "infeasible" if refuted else _combine([finding.status for finding in findings], needed)
    evidence = _evidence(criterion, findings, needed)
    if refuted:
        measured = any(finding.value is not None for finding in findings)
        evidence = f"{refuted[:1].upper()}{refuted[1:]}" + (f"; measured: {evidence}" if measured else ".")
    names = (*result.study.variant_names(), *result.study.controls)
    return Outcome(
        criterion=criterion,
        status=status,
        evidence=evidence if evidence.startswith(names) else evidence[:1].upper() + evidence[1:],
        values={finding.shape: finding.value for finding in findings if finding.value is not None},
        best_of=max((finding.best_of for finding in findings), default=1),
    )


def _combine(statuses: Sequence[CriterionStatus], needed: int) -> CriterionStatus:
    """The criterion's status from those at its shapes, of which ``needed`` must be met."""
    count = {status: statuses.count(status) for status in ("met", "missed", "inconclusive", "infeasible")}
    if count["met"] >= needed:
        return "met"
    if len(statuses) - count["infeasible"] < needed:
        return "infeasible"
    if len(statuses) - count["infeasible"] - count["missed"] < needed:
        return "missed"
    return "inconclusive" if count["met"] + count["inconclusive"] >= needed else "not_measured"


def _evidence(criterion: Criterion, findings: Sequence[Finding], needed: int) -> str:
    if len(findings) == 1:
        return f"{findings[0].text}."
    if all(finding.value is None for finding in findings) and len({finding.text for finding in findings}) == 1:
        return f"{findings[0].text}."
    met = sum(finding.status == "met" for finding in findings)
    row = ", ".join(f"{finding.shape} {finding.brief}" for finding in findings)
    best = max(finding.best_of for finding in findings)
    chosen = f"; best of {best} at each shape" if best > 1 else ""
    return f"{_asked(criterion)} {_bound(criterion)} at {met} of {len(findings)} shapes, {needed} needed: {row}{chosen}."


def _asked(criterion: Criterion) -> str:
    of = _selector_words(criterion.of)
    over = "the baseline" if criterion.over is None else _selector_words(criterion.over)
    return {
        "speedup": f"the speed of {of} over {over} is",
        "time_ratio": f"the time of {of} over that of {over} is",
        "dram_bytes_ratio": f"the bytes of {over} over those of {of} are",
        "error": f"the error of {of} is",
    }[criterion.measure]


def _bound(criterion: Criterion) -> str:
    return f"at least {criterion.at_least:g}" if criterion.at_least is not None else f"at most {criterion.at_most:g}"


def _selector_words(selector: Selector) -> str:
    if isinstance(selector, str):
        return selector
    wanted = {key: value if isinstance(value, list) else [value] for key, value in selector.items()}
    tags = ", ".join(f"{key} {' or '.join(map(str, values))}" for key, values in wanted.items())
    return f"the fastest variant with {tags}" if tags else "the fastest variant"


def _finding(result: Result, criterion: Criterion, shape: Shape) -> Finding:
    if shape.scale != result.provenance.scale and not any(cell.shape == shape.name for cell in result.cells):
        remedy = "run on a GPU, or with --scale full" if shape.scale == "full" else "run on a CPU, or with --scale small"
        return Finding(shape.name, "not_measured", f"needs {shape.scale} scale: {remedy}", f"needs {shape.scale} scale")
    if criterion.measure == "error":
        return _error(result, criterion, shape.name)
    of = candidate(result, criterion, criterion.of, shape.name)
    over = candidate(result, criterion, result.study.over(criterion), shape.name)
    if of.cell is None or over.cell is None:
        reason = "; ".join(dict.fromkeys(side.reason for side in (of, over) if side.cell is None))
        return Finding(shape.name, "not_measured", f"not measured: {reason}", f"not measured ({reason})")
    if criterion.measure == "dram_bytes_ratio":
        return _bytes(criterion, of.cell, over.cell, max(of.among, over.among))
    return _times(result, criterion, of.cell, over.cell, max(of.among, over.among))


def _times(result: Result, criterion: Criterion, of: Cell, over: Cell, among: int) -> Finding:
    of_time, over_time = _timing(of, criterion), _timing(over, criterion)
    faster = criterion.measure == "speedup"
    ratio = stats.ratio(over_time.rounds, of_time.rounds) if faster else stats.ratio(of_time.rounds, over_time.rounds)
    noise = noise_at(result, criterion, of.shape)
    status, why = _judge(ratio, criterion, noise)
    gain = possible_gain(result, criterion, of.shape)
    if status != "met" and gain is not None and _out_of_reach(criterion, gain):
        status = "infeasible"
        floor = _floor(result, criterion, of.shape) or 0.0
        most = f"at most {gain:.2f}x the speed" if faster else f"at least {1 / gain:.2f}x the time"
        why = f"{most} of {over.variant} is possible, as the floor is {microseconds(floor)}"
    relation = "is {:.3g}x as fast as" if faster else "takes {:.3g}x the time of"
    details = [
        f"{ratio.low:.3g} to {ratio.high:.3g} in {ratio.samples} rounds",
        f"{criterion.regime}: {microseconds(of_time.microseconds.median)} against {microseconds(over_time.microseconds.median)}",
        *([f"A/A noise {noise.floor:.3g}"] if noise else []),
        *([f"best of {among}"] if among > 1 else []),
    ]
    because = f": {why}" if why else ""
    text = (
        f"{of.variant} {relation.format(ratio.median)} {over.variant} at {of.shape} ({', '.join(details)}), "
        f"{_bound(criterion)} was asked{because}"
    )
    brief = f"{ratio.median:.3g}" + ("" if status == "met" else f" ({status}{because})")
    return Finding(of.shape, status, text, brief, ratio, among)


def _judge(ratio: Estimate, criterion: Criterion, noise: Noise | None) -> tuple[CriterionStatus, str]:
    """Met, missed or inconclusive, and in the last case why."""
    if ratio.samples < FEWEST_ROUNDS:
        return "inconclusive", f"{ratio.samples} round{'s' * (ratio.samples != 1)} give no interval"
    if noise is None:
        return "inconclusive", "without an A/A run the noise is unknown"
    bound, low, high, median = _turned(criterion, ratio)
    if low >= bound and median >= bound * noise.floor:
        return "met", ""
    if high < bound or median < bound / noise.floor:
        return "missed", ""
    if low >= bound:
        return "inconclusive", f"the A/A noise of {noise.floor:.3g} is larger than the distance to the bound"
    return "inconclusive", "the interval holds the bound"


def _turned(criterion: Criterion, ratio: Estimate) -> tuple[float, float, float, float]:
    """Bound, low, high and median such that larger is better."""
    if criterion.at_least is not None:
        return criterion.at_least, ratio.low, ratio.high, ratio.median
    bound = criterion.at_most or 1.0
    return 1 / bound, 1 / ratio.high, 1 / ratio.low, 1 / ratio.median


def _out_of_reach(criterion: Criterion, gain: float) -> bool:
    """Whether the bound lies beyond the most that the floor allows."""
    if criterion.measure == "speedup":
        return criterion.at_least is not None and gain < criterion.at_least
    return criterion.at_most is not None and 1 / gain > criterion.at_most


def noise_at(result: Result, criterion: Criterion, shape: str) -> Noise | None:
    """The A/A run that a criterion's times at a shape are held against."""
    wanted = (shape, criterion.direction, criterion.regime)
    return next((noise for noise in result.noise if (noise.shape, noise.direction, noise.regime) == wanted), None)


def _bytes(criterion: Criterion, of: Cell, over: Cell, among: int) -> Finding:
    if of.traffic is None or over.traffic is None or not of.traffic.total:
        missing = listing(cell.variant for cell in (of, over) if cell.traffic is None or not cell.traffic.total)
        text = f"not measured: there is no traffic of {missing} at {of.shape}"
        return Finding(of.shape, "not_measured", text, "no traffic")
    value = over.traffic.total / of.traffic.total
    amounts = f"{mebibytes(over.traffic.total)} of {over.variant} against {mebibytes(of.traffic.total)} of {of.variant}"
    if {of.traffic.source, over.traffic.source} != {"ncu"}:
        text = (
            f"not measured: no counted bytes at {of.shape}; by arithmetic {value:.2f} ({amounts}), {_bound(criterion)} was asked"
        )
        return Finding(of.shape, "not_measured", text, f"{value:.2f} by arithmetic, not counted", None, among)
    enough = value >= criterion.at_least if criterion.at_least is not None else value <= (criterion.at_most or 0.0)
    chosen = f", best of {among}" if among > 1 else ""
    text = f"counted by ncu at {of.shape}: {value:.2f}x ({amounts}{chosen}), {_bound(criterion)} was asked"
    exact = Estimate(median=value, low=value, high=value, samples=1)
    return Finding(of.shape, "met" if enough else "missed", text, f"{value:.2f}", exact, among)


def _error(result: Result, criterion: Criterion, shape: str) -> Finding:
    """The largest error of all selected variants: accuracy is not a matter of the best."""
    names = result.study.select(criterion.of)
    cells = [cell for name in names if (cell := result.cell(shape, name, criterion.direction)) is not None]
    judged = [cell for cell in cells if cell.verdict is not None and (cell.verdict.components or not cell.verdict.ok)]
    if not judged:
        reason = _why_none(names, cells, shape, criterion)
        return Finding(shape, "not_measured", f"not measured: {reason}", f"not measured ({reason})")
    for cell in judged:
        if cell.verdict is not None and not cell.verdict.ok:
            return Finding(shape, "missed", f"{cell.variant} is incorrect at {shape}: {cell.verdict.explain()}", "incorrect")
    errors = [(part.error, part.name, cell.variant) for cell in judged if cell.verdict for part in cell.verdict.components]
    error, part, variant = max(errors)
    enough = criterion.at_most is not None and error <= criterion.at_most
    text = f"the largest norm-wise error of {variant} at {shape} is {error:.2g} ({part}), at most {criterion.at_most:g} was asked"
    exact = Estimate(median=error, low=error, high=error, samples=1)
    return Finding(shape, "met" if enough else "missed", text, f"{error:.2g}", exact)


def _floor(result: Result, criterion: Criterion, shape: str) -> float | None:
    """The floor of what ``of`` stands for at a shape, in microseconds."""
    names = result.study.select(criterion.of)
    cells = (result.cell(shape, name, criterion.direction) for name in names)
    return min((cell.plan.floor_microseconds for cell in cells if cell is not None and cell.plan is not None), default=None)


def _why_none(names: Sequence[str], cells: Sequence[Cell], shape: str, criterion: Criterion) -> str:
    if not cells:
        return f"{listing(names)} did not run at {shape}"
    reasons = []
    for cell in cells:
        if cell.status == "ok":
            reasons.append(f"{cell.variant} has no {criterion.regime} time at {shape}")
        else:
            said = f" ({cell.reason})" if cell.reason else ""
            reasons.append(f"{cell.variant} {STATUS_WORDS[cell.status]} at {shape}{said}")
    return "; ".join(reasons)


def _median(cell: Cell, criterion: Criterion) -> float:
    timing = cell.timing(criterion.regime)
    return timing.microseconds.median if timing else float("inf")


def _timing(cell: Cell, criterion: Criterion) -> Timing:
    timing = cell.timing(criterion.regime)
    if timing is None:
        raise LookupError(f"{cell.variant} has no {criterion.regime} time")
    return timing
