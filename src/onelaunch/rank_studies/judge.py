"""Judge the criteria of a study of ranks, and show its measurements beside its predictions."""

from __future__ import annotations

from collections.abc import Iterator

from onelaunch.rank_studies.declare import RankCriterion
from onelaunch.rank_studies.result import Measured, RankOutcome, RankResult
from onelaunch.workbench import quantities as q
from onelaunch.workbench import stats
from onelaunch.workbench.result import CriterionStatus
from onelaunch.workbench.stored import Estimate


def judged(result: RankResult) -> RankResult:
    """Return the result with an outcome for each criterion."""
    return result.model_copy(update={"outcomes": tuple(_judge(result, each) for each in result.study.criteria)})


def _judge(result: RankResult, criterion: RankCriterion) -> RankOutcome:
    """Judge one criterion."""
    found = result.find(criterion.shape, criterion.direction, criterion.regime, criterion.ranks)
    if found is None or found.missing:
        why = found.missing if found else f"{criterion.shape} did not run on {criterion.ranks} ranks"
        return RankOutcome(criterion=criterion, status="not_measured", evidence=why)
    if criterion.measure == "speedup":
        return _speedup(found, criterion)
    name, worst = max(found.differences.items(), key=lambda each: each[1])
    value = Estimate(median=worst, low=worst, high=worst, samples=1)
    status: CriterionStatus = "met" if worst <= (criterion.at_most or 0.0) else "missed"
    evidence = f"{name} is {worst:.2e} off the result of one GPU, {criterion.bound} was asked"
    return RankOutcome(criterion=criterion, status=status, evidence=evidence, value=value)


def _speedup(found: Measured, criterion: RankCriterion) -> RankOutcome:
    """Judge a speedup with the interval of its rounds."""
    ratio, bound = stats.ratio(found.one, found.sliced), criterion.at_least or 0.0
    status: CriterionStatus = "met" if ratio.low >= bound else "missed" if ratio.high < bound else "inconclusive"
    one, sliced = map(q.time, found.medians())
    interval = f"{ratio.low:.3g} to {ratio.high:.3g} in {ratio.samples} rounds"
    evidence = f"{criterion.ranks} ranks are {ratio.median:.3g}x as fast as one ({interval}, {sliced} against {one})"
    return RankOutcome(criterion=criterion, status=status, evidence=f"{evidence}, {criterion.bound} was asked", value=ratio)


def lines(result: RankResult) -> Iterator[str]:
    """Yield the lines of a report: measurements with predictions, then criteria."""
    predicted = {(each.shape, each.direction, each.regime, each.ranks): each.value for each in result.study.predictions}
    for each in result.measurements:
        name = f"{each.shape}, {each.direction}, {each.regime}, {each.ranks} ranks"
        if each.missing:
            yield f"{name}: not measured: {each.missing}"
            continue
        one, sliced = each.medians()
        expected = f" (predicted {predicted[each.key]:g}x)" if each.key in predicted else ""
        worst = max(each.differences.values(), default=0.0)
        exchange = f", exchange: {each.exchange}" if each.exchange else ""
        yield f"{name}: {q.time(sliced)}, one GPU {q.time(one)}, {one / sliced:.3g}x{expected}, difference {worst:.1e}{exchange}"
    for outcome in result.outcomes:
        yield f"{outcome.status.replace('_', ' ')}: {outcome.criterion.name}: {outcome.evidence}"
