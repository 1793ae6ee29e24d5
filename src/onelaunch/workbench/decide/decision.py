"""Decide what to do next from the outcomes of a study's criteria, and name the evidence.

The first of these rules that applies decides:

1. A criterion finds no usable measurement for one of its sides, and a variant of that side is incorrect, failed, or was faster
   than its roofline bound: *debug*.
2. The measured baseline is so near the roofline bound that no variant can reach a criterion's gain: *abandon*.
3. A criterion is missed although the roofline bound leaves room for it: *debug*, with the likely bottleneck named.
4. A criterion is inconclusive or not measured, or is refuted by arithmetic and was not measured either: *measure more*. A
   criterion whose two times are equal within 1 % is settled, since more rounds would not tell them apart.
5. A met speed-up is mostly explained by neither saved bytes nor saved launches, and no measured variant that differs from the
   faster one in one factor only is slower by more than the noise, so that its cause is unknown: *measure more*.
6. Otherwise, and if at least one criterion is met: *proceed*. If none is met or left to decide on: *measure more*.

Five kinds of criteria are excluded, with the reason, and never count as met:

- Criteria that arithmetic refutes, once they were measured all the same. The measured number says how near one comes. Without it
  the criterion is not excluded, because a study must not be decided on a question that it neither asked well nor measured.
- Criteria declared for small-scale shapes alone, in a full-scale run. A small-scale run excludes no criterion of full-scale
  shapes, because a study asks its question at full scale.
- Criteria that are declared not to decide.
- Criteria that are missed or infeasible, and whose part of the question is declared abandoned, with the reason.
- Criteria that no measurement can miss, such as one that compares a variant with itself.

Times are *cold*: the inputs are not in the caches. ``floor_microseconds`` of a plan is the roofline bound. Bytes have the source
``ncu`` if the hardware counted them, and ``analytic`` if they are computed. A measure has ``limited_by_time`` if a missed
criterion is explained by time, and ``claims_gain`` if a met one is a claim about fusion. ``over_at`` and ``over_regime`` compare
with another shape or regime.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import chain
from typing import Any

from onelaunch.operation import Direction
from onelaunch.wording import listing
from onelaunch.workbench import quantities as q
from onelaunch.workbench import stats
from onelaunch.workbench.decide.criteria import evaluate
from onelaunch.workbench.decide.findings import findings
from onelaunch.workbench.decide.measured import judged
from onelaunch.workbench.decide.selection import STATUS_WORDS, compared, select_cell
from onelaunch.workbench.result import Cell, Decision, DecisionKind, Outcome, Result, Saving
from onelaunch.workbench.study import Asked, Criterion, Selector, Shape
from onelaunch.workbench.study.plan import bandwidth, guarantee, infeasibilities, matrix_dtype

_MOSTLY = 0.5
"""Fraction of a time above which a part of it counts as most of it."""

_FUSION = ("launches", "backward_launches", "fuses", "separates")
"""Tags that together are one factor: the way the steps are spread over launches."""

_NO_FACTORS = ("requires", "backward", "yardstick", "usual")
"""Tags that do not describe how a variant computes; ``yardstick`` marks the PyTorch baseline, which sets the
tolerance, and ``usual`` the functions of a peer that its own layers call."""


def concluded(result: Result) -> Result:
    """Return the result with its study's criteria judged again and a new decision; earlier ones are ignored.

    ``running.py`` calls this for each result, partial ones included. Command ``onelaunch study judge`` and ``recompute.py`` call
    it with stored results.
    """
    evaluated = result.model_copy(update={"outcomes": evaluate(result, infeasibilities(result.study))})
    return evaluated.model_copy(update={"decision": decide(evaluated)})


def decide(result: Result) -> Decision:
    """Decide on a result whose criteria have been judged; a ``decision`` that it already has is ignored."""
    exclusions = {outcome.criterion.name: why for outcome in result.outcomes if (why := excluded(result, outcome)) is not None}
    deciding = [outcome for outcome in result.outcomes if outcome.criterion.name not in exclusions]
    kind, grounds = _grounds(result, deciding)
    met = [outcome for outcome in deciding if outcome.status == "met"]
    total = "Every criterion" if deciding and len(met) == len(deciding) else f"{len(met)} of {len(deciding)} criteria"
    counted = f"{total} {'is' if len(deciding) == len(met) or len(met) == 1 else 'are'} met: {listing(_quoted(met))}."
    because = [
        counted if met else f"None of {len(deciding)} criteria is met." if deciding else "No criterion is left to decide on.",
        *grounds,
        *(f"Set aside: {name!r} {why}" for name, why in exclusions.items()),  # worded as in stored results
    ]
    savings = explain_savings(result)
    return Decision(
        kind=kind,
        because=tuple(because),
        savings=savings,
        unexplained=tuple(_left_open(result, savings)),
        notes=findings(result, deciding),
    )


def explain_savings(result: Result) -> tuple[Saving, ...]:
    """Explain the time that the fastest correct variant saves over the baseline, at each shape and direction.

    A peer outside the gate (``cell.outside``) is timed but is never that variant: it failed the correctness gate, and its errors
    are within the tolerance of its own project's tests only.
    """
    savings = []
    for shape in result.study.shapes:
        for direction in result.study.directions:
            baseline = result.cell(shape.name, result.study.baseline, direction)
            rivals = [
                cell
                for cell in result.cells
                if (cell.shape, cell.direction) == (shape.name, direction)
                and not cell.control
                and _cold(cell) is not None
                and not cell.outside
            ]
            best = min(rivals, key=lambda cell: _cold(cell) or 0.0, default=None)
            if baseline is not None and best is not None and best is not baseline:
                savings += [saving] if (saving := explain(result, best, baseline)) is not None else []
    return tuple(savings)


def explain(result: Result, cell: Cell, over: Cell) -> Saving | None:
    """Split the time that one measurement saves over another into saved bytes, saved launches and the rest.

    Returns:
        The parts of the saved time, or ``None`` if no time is saved or a time is missing.
    """
    mine, theirs = _cold(cell), _cold(over)
    if mine is None or theirs is None or theirs <= mine:
        return None
    saved = theirs - mine
    counted = cell.traffic is not None and over.traffic is not None and {cell.traffic.source, over.traffic.source} == {"ncu"}
    by_bytes = 1e6 * (_bytes(over, counted=counted) - _bytes(cell, counted=counted)) / _bandwidth(result, cell, over)
    launches = [side.plan.launches if side.plan else None for side in (cell, over)]
    by_launches = 0.0
    if launches[0] is not None and launches[1] is not None:
        by_launches = 1e6 * (launches[1] - launches[0]) * result.ceilings.launch_seconds
    return Saving(
        shape=cell.shape,
        direction=cell.direction,
        variant=cell.variant,
        saved_microseconds=saved,
        by_bytes=by_bytes,
        by_launches=by_launches,
        unexplained=saved - by_bytes - by_launches,
        traffic_source="ncu" if counted else "analytic",
    )


def bottleneck(result: Result, cell: Cell) -> str:
    """Name the most likely bottleneck of a measurement's cold time, with the numbers that show it."""
    time, plan = _cold(cell), cell.plan
    if time is None or plan is None:
        return "nothing is known of its time"
    shape = result.study.shape(cell.shape)
    counted = cell.traffic is not None and cell.traffic.source == "ncu"
    rate = result.ceilings.matrix_flops_per_second.get(matrix_dtype(result.study, shape))
    needs = {
        "memory traffic": 1e6 * _bytes(cell, counted=counted) / _bandwidth(result, cell),
        "matrix products": 1e6 * plan.flops / rate if rate else 0.0,
        "launches": 1e6 * (plan.launches or 0) * result.ceilings.launch_seconds,
    }
    parts = ", ".join(f"{name} {q.time(value)}" for name, value in needs.items())
    largest = max(needs, key=lambda name: needs[name])
    if needs[largest] < _MOSTLY * time:
        return f"most likely latency or too little parallel work: of {q.time(time)}, {parts}"
    return f"most likely {largest}: of {q.time(time)}, {parts}"


def _grounds(result: Result, deciding: list[Outcome]) -> tuple[DecisionKind, list[str]]:
    """Return the decision and the sentences that lead to it, by the rules of the module's docstring.

    ``deciding`` are the outcomes of the criteria that are not excluded.
    """
    if broken := _broken(result, deciding):
        return "debug", broken
    if unreachable := [outcome for outcome in deciding if outcome.status == "infeasible" and not _refuted(outcome)]:
        return "abandon", [f"{outcome.criterion.name!r} is out of reach: {outcome.evidence}" for outcome in unreachable]
    if missed := [outcome for outcome in deciding if outcome.status == "missed"]:
        return "debug", [_missed(result, outcome) for outcome in missed]
    if unsettled := [outcome for outcome in deciding if outcome.status not in ("met", "equal")]:
        return "measure_more", _unsettled(unsettled)
    if all(outcome.status == "equal" for outcome in deciding):
        return "measure_more", ["Declare a criterion that can be met and missed.", *_unsettled(deciding)]
    if loose := list(dict.fromkeys(chain.from_iterable(_uncontrolled(result, outcome) for outcome in deciding))):
        return "measure_more", loose
    return "proceed", [f"{outcome.criterion.name!r}: {outcome.evidence}" for outcome in deciding]


def excluded(result: Result, outcome: Outcome) -> str | None:
    """Return the reason why a criterion is excluded from the decision, or ``None`` if it takes part; reports call this too."""
    criterion = outcome.criterion
    if not criterion.decides:
        return f"is {outcome.status.replace('_', ' ')} and declared not to decide: {outcome.evidence}"
    if criterion.abandoned and outcome.status in ("missed", "infeasible") and outcome.values:
        return f"is {outcome.status} and abandoned: {criterion.abandoned.rstrip('.')}. {outcome.evidence}"
    if _refuted(outcome) and outcome.values:
        return f"is infeasible and never counts as met: {outcome.evidence}"
    scales = {shape.scale for shape in result.study.shapes_of(criterion)}
    if scales == {"small"} and result.provenance.scale == "full" and outcome.status == "not_measured":
        return "is declared for small-scale shapes, which a full-scale run leaves out."
    if outcome.status in ("met", "equal", "inconclusive") and (why := guarantee(result.study, criterion)) is not None:
        return f"is vacuous and never counts as met: {why}."
    return None


def _refuted(outcome: Outcome) -> bool:
    """Return whether arithmetic alone makes the criterion infeasible. For times it takes a measured baseline too."""
    return outcome.status == "infeasible" and not outcome.criterion.quantity.timed


def _broken(result: Result, deciding: list[Outcome]) -> list[str]:
    """Describe the incorrect, invalid or failed measurements of each side that has no usable one, one sentence each."""
    sentences = []
    for outcome in deciding:
        for criterion, at, _ in result.study.asked(outcome.criterion):
            for index, (selector, shape) in enumerate(result.study.sides(criterion, at)):
                if select_cell(result, criterion, selector, shape.name, over=index > 0).cell is None:
                    sentences += [_describe(cell) for cell in _cells(result, criterion, selector, shape) if _is_broken(cell)]
    return list(dict.fromkeys(sentences))


def _is_broken(cell: Cell) -> bool:
    return cell.status in ("incorrect", "invalid", "error", "crashed", "timed_out")


def _describe(cell: Cell) -> str:
    direction = "" if cell.direction == "forward" else ", forward and backward"
    why = cell.verdict.explain() if cell.verdict is not None and not cell.verdict.ok else cell.reason
    return f"{cell.variant} {STATUS_WORDS[cell.status]} at {cell.shape}{direction}: {why or 'no reason was given'}"


def _cells(result: Result, criterion: Criterion, selector: Selector, shape: Shape) -> Iterable[Cell]:
    found = (result.cell(shape.name, name, criterion.direction) for name in result.study.select(selector, shape))
    return (cell for cell in found if cell is not None)


def _missed(result: Result, outcome: Outcome) -> str:
    """Describe a missed criterion with its worst shape: the time over its roofline bound, and the likely bottleneck."""
    criterion = outcome.criterion
    sentence = f"{criterion.name!r} is missed: {outcome.evidence}"
    if not judged(criterion).limited_by_time:
        return sentence
    for asked, shape, name in _worst_first(result, outcome):
        cell = select_cell(result, asked, asked.of, shape.name).cell
        time = _cold(cell) if cell is not None else None
        if cell is not None and cell.plan is not None and time is not None:
            above = time / cell.plan.floor_microseconds if cell.plan.floor_microseconds else 0.0
            return (
                f"{sentence} At {name} {cell.variant} is {above:.3g}x above the floor of "
                f"{q.time(cell.plan.floor_microseconds)}; {bottleneck(result, cell)}."
            )
    return sentence


def _worst_first(result: Result, outcome: Outcome) -> list[Asked]:
    """Return the shapes and directions of a criterion, beginning with the value that is worst against the bound."""
    sign = 1 if outcome.criterion.at_least is not None else -1
    worst = {name: sign * value.median for name, value in outcome.values.items()}
    return sorted(result.study.asked(outcome.criterion), key=lambda each: worst.get(each.name, math.inf))


def _unsettled(outcomes: list[Outcome]) -> list[str]:
    """Describe equal, inconclusive and unmeasured criteria. Those with the same status and evidence share a sentence."""
    grouped: dict[tuple[str, str], list[Outcome]] = {}
    for outcome in outcomes:
        status = "infeasible, and what it asks about was not measured" if _refuted(outcome) else outcome.status.replace("_", " ")
        grouped.setdefault((status, outcome.evidence), []).append(outcome)
    return [
        f"{listing(_quoted(group))} {'is' if len(group) == 1 else 'are'} {status}: {evidence}"
        for (status, evidence), group in grouped.items()
    ]


def _quoted(outcomes: Iterable[Outcome]) -> list[str]:
    return [repr(outcome.criterion.name) for outcome in outcomes]


def _uncontrolled(result: Result, outcome: Outcome) -> list[str]:
    """Describe the savings behind a met speed-up that neither bytes, launches nor a variant with one other factor explain.

    A speed-up is a claim about fusion only if the launches of both variants are known. A speed-up over a peer's library needs no
    explanation, because it claims no cause.
    """
    criterion = outcome.criterion
    if not judged(criterion).claims_gain or criterion.regime != "cold" or criterion.over_at or criterion.over_regime:
        return []
    sentences = []
    for asked, shape, name in result.study.asked(criterion):
        if name not in outcome.values:
            continue
        of, over = (side.cell for side in compared(result, asked, shape))
        if of is None or over is None or None in (_launches(result, of.variant), _launches(result, over.variant)):
            continue
        saving = explain(result, of, over)
        if saving is None or saving.unexplained <= _MOSTLY * saving.saved_microseconds or _isolated(result, of):
            continue
        # The sentence, which is stored in results, calls a variant that differs in one factor only a control.
        factors = listing(sorted(_differences(result, of.variant, over.variant))) or "none"
        sentences.append(
            f"{criterion.name!r} rests on a saving that is not understood: {_saving_words(saving, over.label)}; "
            f"{of.variant} and {over.variant} differ in {factors}, and no measured pair differs in one factor only. "
            f"Add a control that shares all but one factor with {of.variant}."
        )
    return sentences


def _isolated(result: Result, of: Cell) -> str | None:
    """Return a measured variant that differs from this one in one factor and is slower by more than the noise, or ``None``."""
    noise = result.noise_at(of.shape, of.direction, "cold")
    mine = of.timing("cold")
    for cell in result.cells:
        theirs = cell.timing("cold")
        same_case = (cell.shape, cell.direction) == (of.shape, of.direction) and not cell.control
        if not same_case or cell.status != "ok" or mine is None or theirs is None or noise is None:
            continue
        if _launches(result, cell.variant) is None or len(_differences(result, of.variant, cell.variant)) != 1:
            continue
        if stats.ratio(theirs.rounds, mine.rounds).low > noise.floor:
            return cell.variant
    return None


def _launches(result: Result, variant: str) -> int | None:
    """Return the number of launches that a variant declares, or ``None`` if it is unknown, as for controls."""
    found = result.study.find_variant(variant)
    return None if found is None else found.launches


def _differences(result: Result, one: str, other: str) -> set[str]:
    """Return the factors in which two variants differ, as their tags declare them."""
    a, b = (_factors(found.tags if (found := result.study.find_variant(name)) else {}) for name in (one, other))
    return {factor for factor in a.keys() | b.keys() if a.get(factor) != b.get(factor)}


def _factors(tags: dict[str, Any]) -> dict[str, Any]:
    """Return the factors of a variant: its tags, with those of :data:`_FUSION` as one."""
    factors = {key: value for key, value in tags.items() if key not in (*_FUSION, *_NO_FACTORS)}
    return factors | {"fusion": tuple(tags.get(key) for key in _FUSION)}


def _left_open(result: Result, savings: Iterable[Saving]) -> list[str]:
    """Describe questions that the evidence leaves open, one sentence each."""
    sentences = [
        f"{_saving_words(saving, over.label)}."
        for saving in savings
        if (over := result.cell(saving.shape, result.study.baseline, saving.direction)) is not None
        if saving.unexplained > _MOSTLY * saving.saved_microseconds and _beyond_noise(result, saving)
    ]
    if result.interrupted:
        missing = sum(cell.status == "interrupted" for cell in result.cells)
        sentences.append(f"The run was interrupted: {missing} of {len(result.cells)} measurements were not made.")
    baselines = [cell for cell in result.cells if cell.variant == result.study.baseline and not cell.control]
    if absent := [cell for cell in baselines if cell.status in ("unsupported", "not_installed")]:
        why = absent[0].reason or STATUS_WORDS[absent[0].status]
        sentences.append(f"The baseline {result.study.baseline} did not run ({why}), so no saving over it is explained.")
    if savings and all(saving.traffic_source == "analytic" for saving in savings):
        sentences.append("No DRAM bytes were counted: what bytes explain is arithmetic.")
    return sentences


def _beyond_noise(result: Result, saving: Saving) -> bool:
    """Return whether a saving, as a factor of time, is larger than the A/A noise; also true if time or noise are unknown."""
    time = next((_cold(cell) for cell in result.cells if _key(cell) == (saving.shape, saving.variant, saving.direction)), None)
    noise = result.noise_at(saving.shape, saving.direction, "cold")
    return time is None or noise is None or (time + saving.saved_microseconds) / time > noise.floor


def _key(cell: Cell) -> tuple[str, str, Direction]:
    return cell.shape, cell.variant, cell.direction


def _saving_words(saving: Saving, over: str) -> str:
    """Return a clause on a saving and the parts of it that bytes and launches explain."""
    direction = "" if saving.direction == "forward" else ", forward and backward"
    share = saving.unexplained / saving.saved_microseconds
    return (
        f"{saving.variant} saves {q.time(saving.saved_microseconds)} over {over} at {saving.shape}{direction}; saved bytes "
        f"explain {q.time(saving.by_bytes)} ({saving.traffic_source}), saved launches {q.time(saving.by_launches)}, "
        f"{q.time(saving.unexplained)} ({share:.0%}) stay unexplained"
    )


def _cold(cell: Cell) -> float | None:
    """Return the cold median of a measurement in microseconds, or ``None`` if it has none, or its times are not believed."""
    timing = cell.timing("cold")
    if timing is None or not cell.measured or not 0 < timing.microseconds.median < math.inf:
        return None
    return timing.microseconds.median


def _bandwidth(result: Result, *cells: Cell) -> float:
    """Return the bandwidth that bounds these measurements: that of copies, or of reads if all of them hardly write."""
    plans = [cell.plan for cell in cells if cell.plan is not None]
    rates = [bandwidth(plan.bytes, plan.written, result.ceilings) for plan in plans]
    return min(rates, default=result.ceilings.copy_bytes_per_second)


def _bytes(cell: Cell, *, counted: bool) -> float:
    """Return the DRAM bytes of a measurement: the counted ones, or those of its plan."""
    if counted and cell.traffic is not None:
        return cell.traffic.total
    return cell.plan.bytes if cell.plan is not None else 0.0
