"""Judge each declared criterion: met, missed, equal, inconclusive, not measured or infeasible, in one sentence with numbers.

Times are compared round by round. A criterion on times is *met* when the whole interval of the ratio lies on the right side of
the bound and its median does so by more than the A/A noise of that shape. It is *missed* when the whole interval lies on the
wrong side and the median does so by more than the noise. It is *equal* when it asks for no loss, which is a bound of 1, the noise
is 1 %, the smallest value that is used, and the whole interval is above a loss of 1 %. Everything else is *inconclusive*, with
the reason: the interval contains the bound, or the noise is larger than the distance to it. A comparison of two times that is
not met is *infeasible* when meeting it would take a run below the roofline bound by more than the noise, given the measured time
of the other side. A criterion that arithmetic alone refutes is *infeasible* whatever was measured.

A variant that is itself the fastest is compared with the fastest of the others. Bytes count as measured only if the hardware
counted them. Memory, bytes and counts are exact numbers and are compared with the bound directly.
Host times have no A/A run: their interval alone decides.

Times at two shapes share no rounds: the ratio's interval covers everything that both intervals allow, and the larger noise of the
two applies. A geometric mean over shapes is judged in the same way, with an interval and a noise as if every shape erred in the
same direction. It is measured only if every shape is.

A criterion with ``directions`` counts a shape once in each of them that runs there. With ``most_noise`` a time counts as not
measured where the A/A noise is larger. With ``leave_out`` the shapes at which the other side cannot run are listed and left out.

A criterion reads a value of ``of``, or compares ``of`` with ``over`` (by default the baseline). Each is the name of a variant or
control, or tags that stand for the fastest variant with them. ``over_at`` gives ``over`` another shape. ``in_at_least`` is the
number of shapes at which a criterion must be met, by default all; with ``combine = "geomean"`` their geometric mean is judged
instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from onelaunch.workbench import stats
from onelaunch.workbench.decide.judging import Finding
from onelaunch.workbench.decide.measured import judged
from onelaunch.workbench.decide.words import per, selector_words
from onelaunch.workbench.result import CriterionStatus, Outcome, Result
from onelaunch.workbench.study import Asked, Criterion, Shape


def evaluate(result: Result, infeasible: Mapping[str, str]) -> tuple[Outcome, ...]:
    """Judge every criterion of the study by the result's measurements and noise.

    ``concluded`` in ``decision.py`` calls this before it decides.

    Args:
        result: The measurements. Outcomes and a decision that it already has are ignored.
        infeasible: Criteria that arithmetic alone refutes, with the reason: ``StudyPlan.infeasible``.

    Returns:
        One outcome for each criterion, in declared order.
    """
    return tuple(_outcome(result, criterion, infeasible.get(criterion.name)) for criterion in result.study.criteria)


def _outcome(result: Result, criterion: Criterion, refuted: str | None) -> Outcome:
    """Judge one criterion. ``refuted`` is the reason why arithmetic alone refutes it, if it does."""
    every = result.study.asked(criterion)
    asked = [each for each in every if not criterion.leave_out or _over_can_run(result, each)]
    findings = [replace(finding_at(result, each.criterion, each.shape), shape=each.name) for each in asked]
    if not findings:
        findings = [Finding("", "not_measured", "not measured: what it is compared with can run at none of its shapes", "")]
    mean = _mean(criterion, findings) if criterion.combine == "geomean" else None
    needed = criterion.in_at_least or len(findings)
    status = mean.status if mean else _combine([finding.status for finding in findings], needed)
    evidence = f"{mean.text}." if mean else _evidence(criterion, findings, needed)
    if left := [each.name for each in every if each not in asked]:
        evidence = f"{evidence.rstrip('.')}; left out, as {_over(criterion)} cannot run there: {', '.join(left)}."
    if refuted:
        status = "infeasible"
        measured = any(finding.value is not None for finding in findings)
        evidence = f"{refuted[:1].upper()}{refuted[1:]}" + (f"; measured: {evidence}" if measured else ".")
    names = (*result.study.variant_names(), *result.study.controls)
    return Outcome(
        criterion=criterion,
        status=status,
        evidence=evidence if evidence.startswith(names) else evidence[:1].upper() + evidence[1:],  # names stay as they are
        values={finding.shape: finding.value for finding in findings if finding.value is not None},
        overall=mean.value if mean else None,
        best_of=max((finding.best_of for finding in findings), default=1),
    )


def _combine(statuses: Sequence[CriterionStatus], needed: int) -> CriterionStatus:
    """Return a criterion's status from its statuses at each shape, of which ``needed`` must be met."""
    count = {status: statuses.count(status) for status in ("met", "missed", "equal", "inconclusive", "infeasible")}
    if count["met"] >= needed:
        return "met"
    if len(statuses) - count["infeasible"] < needed:
        return "infeasible"
    if len(statuses) - count["infeasible"] - count["missed"] < needed:
        return "missed"
    if count["met"] + count["equal"] >= needed:
        return "equal"
    return "inconclusive" if count["met"] + count["equal"] + count["inconclusive"] >= needed else "not_measured"


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
    gains = [one.gain for one in findings if one.gain is not None]
    gain = stats.geometric_mean(gains) if len(gains) == len(findings) else None
    status, why, details = judged(criterion).judge_mean(criterion, ratio, noise, gain)
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
    """Return the evidence of a criterion that is judged shape by shape."""
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
    """Return the words that come before the values, such as ``the speed of one over the baseline is``."""
    of = selector_words(criterion.of, "the fastest variant", "the fastest variant")
    over = _over(criterion)
    if criterion.over_at is not None:
        over += f" at {criterion.over_at}{per(criterion)}"
    return judged(criterion).evidence.format(of=of, over=over)


def _over(criterion: Criterion) -> str:
    """Return words for what a criterion compares with, such as ``the baseline``."""
    others = "the fastest other variant" if criterion.quantity.timed else "the fastest variant"
    return "the baseline" if criterion.over is None else selector_words(criterion.over, others, others)


def _over_can_run(result: Result, asked: Asked) -> bool:
    """Return whether a variant that a criterion compares with can run a case, or whether nothing is known of that."""
    _, (over, where) = result.study.sides(asked.criterion, asked.shape)
    names = result.study.select(over, where)
    cells = [cell for name in names if (cell := result.cell(where.name, name, asked.criterion.direction)) is not None]
    return not cells or any(cell.status != "unsupported" for cell in cells)


def finding_at(result: Result, criterion: Criterion, shape: Shape) -> Finding:
    """Judge a criterion at one shape, or say which scale it needs if the shape did not run.

    :func:`evaluate` calls this for each shape, and ``report/predictions.py`` to compare predictions with measured values.
    """
    if shape.scale != result.provenance.scale and not any(cell.shape == shape.name for cell in result.cells):
        remedy = "run on a GPU, or with --scale full" if shape.scale == "full" else "run on a CPU, or with --scale small"
        return Finding(shape.name, "not_measured", f"needs {shape.scale} scale: {remedy}", f"needs {shape.scale} scale")
    return _quiet(criterion, judged(criterion).finding(result, criterion, shape))


def _quiet(criterion: Criterion, finding: Finding) -> Finding:
    """Return a finding, as not measured if it rests on more noise than the criterion accepts."""
    if criterion.most_noise is None or finding.noise is None or finding.noise <= criterion.most_noise:
        return finding
    why = f"the A/A noise of {finding.noise:.3g} is above {criterion.most_noise:g}"
    return Finding(finding.shape, "not_measured", f"not measured: {why} at {finding.shape}", f"not measured ({why})")
