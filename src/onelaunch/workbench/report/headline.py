"""First lines of a report: the decision in one sentence with its strongest evidence, computed from the result.

If a run could not answer the question of its study, such as a run on a CPU of a study of GPU kernels, the report first states
what this run found. It then quotes the headline of a committed result of the same study.

The reports on the terminal, in Markdown and in HTML call :func:`headline` and :func:`unexplained`. ``tools/summarize_results.py``
stores the sentence of each committed result's headline, which ``committed.py`` reads.

``over_at`` names another shape at which a criterion's ``over`` is timed, and ``outside`` a peer outside the gate: another
project's variant that fails the verification gate, but not the tests of that project.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from onelaunch.operation import Direction
from onelaunch.wording import listing
from onelaunch.workbench import quantities as q
from onelaunch.workbench.decide.decision import excluded
from onelaunch.workbench.decide.measured import judged
from onelaunch.workbench.decide.selection import compared
from onelaunch.workbench.report.committed import committed
from onelaunch.workbench.report.summary import (
    FEW,
    cells_at,
    direction_words,
    directions,
    directions_of,
    fastest,
    main_regime,
    noise_floor,
    outside_words,
    reference,
    selector,
    shapes,
    speedup,
    valid_timing,
)
from onelaunch.workbench.report.tables import words
from onelaunch.workbench.result import Cell, Estimate, Outcome, Result
from onelaunch.workbench.study import Criterion

COUNTED = re.compile(r"(Every criterion is met|None of \d+ criteria|\d+ of \d+ criteria|Set aside: )")
"""Pattern of the sentences of a decision that only count or repeat criteria."""


@dataclass(frozen=True)
class Headline:
    """First lines of a report."""

    found: tuple[str, ...]
    """Findings on this machine, if it could not answer the study's question."""
    sentence: str
    """Sentence that says why the decision is what it is."""
    elsewhere: tuple[str, ...]
    """Headlines of committed results of the same study, if this machine could not answer its question."""
    grounds: tuple[str, ...]
    """Sentences of the decision beyond the criteria's own evidence."""


def headline(result: Result) -> Headline:
    """Return the first lines of a result's report."""
    needing = _needing_another_scale(result)
    sentence, used = _sentence(result, needing)
    answered = any(outcome.values for outcome in result.outcomes if outcome not in needing)
    return Headline(
        found=_found(result) if needing or not answered else (),
        sentence=sentence,
        elsewhere=_elsewhere(result) if needing else (),
        grounds=tuple(line for line in _grounds(result) if line != used),
    )


def counts(result: Result, leaving_out: Sequence[Outcome] = ()) -> str:
    """Return the number of criteria by status in words: ``7 of 10 criteria are met, 3 are excluded ...``.

    Outcomes in ``leaving_out`` are not counted, and then no total is given.
    """
    outcomes = [outcome for outcome in result.outcomes if outcome not in leaving_out]
    left = [outcome for outcome in outcomes if excluded(result, outcome) is None]
    by_status = Counter(outcome.status for outcome in left)
    met = by_status.pop("met", 0)
    others = [f"{_are(count)} {words(status)}" for status, count in by_status.most_common()]
    others += [f"{_are(len(outcomes) - len(left))} excluded (do not decide)"] if len(left) < len(outcomes) else []
    if leaving_out:
        return ", ".join([*([f"{_are(met)} met"] if met else []), *others])
    total = len(outcomes)
    head = f"all {total} criteria are met" if met == total > 1 else f"{met} of {total} criteria {'is' if met == 1 else 'are'} met"
    return ", ".join([head, *others])


def _clause(result: Result, outcome: Outcome) -> str:
    """Return the measured value of a criterion as a clause with its interval, or an empty string without a value."""
    criterion, values = outcome.criterion, outcome.values
    if not values:
        return ""
    measure = judged(criterion)
    of, over = _measured_one(result, outcome), selector(result.study.over(criterion)) + _outside(result, outcome)
    if outcome.overall is not None:
        amount, at = measure.amount(outcome.overall), f"in the geometric mean over {q.plural(len(values), 'shape')}"
    elif len(values) == 1:
        ((shape, value),) = values.items()
        amount, at = measure.amount(value), f"at {shape}"
    else:
        ends = [q.number(pick(value.median for value in values.values())) for pick in (min, max)]
        amount = f"{ends[0]} to {ends[1]}{measure.unit}"
        at = f"at {len(values)} shapes"
    said = measure.told.format(of=of, over=over, amount=amount)
    other = f" at {criterion.over_at}, itself" if criterion.over_at is not None else ""
    how = [directions_of(criterion), *([criterion.regime] if measure.timed else [])]
    return f"{said}{other} {at} ({', '.join(how)})"


def _outside(result: Result, outcome: Outcome) -> str:
    """Return words that follow the name of what a criterion compares with if it is a peer outside the gate at a shape."""
    if not any(cell.outside for cell in result.cells):  # a variant chosen by tags is looked up only where it is needed
        return ""
    asked = [each for each in result.study.asked(outcome.criterion) if each.name in outcome.values]
    sides = [compared(result, each.criterion, each.shape)[1:] for each in asked]
    return outside_words(side.cell for pair in sides for side in pair if side.cell is not None)


def _sentence(result: Result, needing: Sequence[Outcome]) -> tuple[str, str]:
    """Return the sentence of the decision, and the stored sentence of the decision that it repeats, if any."""
    if result.decision is None:
        return "The study ended before anything was decided.", ""
    if not result.outcomes:
        return (result.decision.because or ("No criterion was declared.",))[0], (*result.decision.because, "")[0]
    left = [outcome for outcome in result.outcomes if excluded(result, outcome) is None]
    statuses = ("met", "missed", "infeasible", "inconclusive")
    by_status = {status: [outcome for outcome in left if outcome.status == status] for status in statuses}
    kind, grounds = result.decision.kind, _grounds(result)
    # Without a missed criterion the reason to debug is a variant that is wrong or failed, and the stored decision says which.
    if kind == "debug" and not by_status["missed"] and grounds:
        return f"{grounds[0].rstrip('.')}; {counts(result)}.", grounds[0]
    if kind in ("debug", "abandon") and (failed := by_status["missed" if kind == "debug" else "infeasible"]):
        return f"{_failing(result, min(failed, key=_margin))}; {counts(result)}.", ""
    if kind == "measure_more" and needing:
        scale = "full" if result.provenance.scale == "small" else "small"
        where = "a GPU" if scale == "full" else "a CPU's shapes"
        asked = f"{len(needing)} of {q.plural(len(result.outcomes), 'criterion', 'criteria')}"
        asks = "asks" if len(needing) == 1 else "ask"
        others = counts(result, leaving_out=needing)
        return f"{asked} {asks} for {scale} scale, which needs {where}{f'; of the others, {others}' if others else ''}.", ""
    if kind == "measure_more" and by_status["inconclusive"]:
        return f"{_failing(result, min(by_status['inconclusive'], key=_margin))}; {counts(result)}.", ""
    # The decision is to proceed, or to measure more without a criterion that is inconclusive. The best met criterion is quoted.
    measured = [outcome for outcome in by_status["met"] if outcome.values]
    best = min(measured, key=lambda one: (judged(one.criterion).rank, -_margin(one)), default=None)
    said = _clause(result, best) if best else ""
    loose = kind == "measure_more" and len(by_status["met"]) == len(left) > 0  # all are met, and yet more is to be measured
    unexplained = ", but a saving that they rest on is not explained" if loose else ""
    text = "; ".join(part for part in (said, f"{counts(result)}{unexplained}.") if part)
    return (text if said.startswith(_names(result)) else text[:1].upper() + text[1:]), ""


def _failing(result: Result, outcome: Outcome) -> str:
    """Return a clause on a criterion that failed: its name, its status, the measured value and the bound."""
    said = _clause(result, outcome)
    status = "out of reach" if outcome.status == "infeasible" else words(outcome.status)
    measured = f": {said}, {outcome.criterion.bound} was asked" if said else ""
    return f"{outcome.criterion.name!r} is {status}{measured}"


def _margin(outcome: Outcome) -> float:
    """Return the factor by which the worst value of a criterion is better than its bound; below 1 it is worse.

    For a bound that must be equalled the factor is 1 if it is, else the smaller of value and bound over the larger.
    """
    values = [outcome.overall] if outcome.overall else list(outcome.values.values())
    return min((_factor(outcome.criterion, value.median) for value in values), default=0.0)


def _factor(criterion: Criterion, value: float) -> float:
    """Return the factor by which one value is better than the bound of a criterion."""
    if criterion.equals is not None:
        least, most = sorted((value, criterion.equals))
        return 1.0 if least == most else max(least, 0.0) / most
    if criterion.at_least:
        return value / criterion.at_least
    if criterion.at_most is not None and value > 0:
        return criterion.at_most / value
    return 1.0


def _measured_one(result: Result, outcome: Outcome) -> str:
    """Return the variant that a criterion judged. For a selector of tags it is the one that the evidence names, if any."""
    chosen = outcome.criterion.of
    if isinstance(chosen, str):
        return chosen
    first = outcome.evidence.partition(" ")[0]
    return first if first in _names(result) else selector(chosen)


def _names(result: Result) -> tuple[str, ...]:
    return tuple({cell.variant for cell in result.cells})


def _are(count: int) -> str:
    return f"{count} {'is' if count == 1 else 'are'}"


# Questions that this machine could not answer, and answers from others


def _needing_another_scale(result: Result) -> list[Outcome]:
    """Return the deciding criteria whose shapes are all of a scale that did not run."""
    ran = {cell.shape for cell in result.cells}
    scales = {shape.name: shape.scale for shape in result.study.shapes}

    def elsewhere(outcome: Outcome) -> bool:
        asked = [shape.name for shape in result.study.shapes_of(outcome.criterion)]
        return not ran.intersection(asked) and all(scales[name] != result.provenance.scale for name in asked)

    open_ones = [one for one in result.outcomes if one.status != "met" and excluded(result, one) is None]
    return [outcome for outcome in open_ones if elsewhere(outcome)]


def _found(result: Result) -> tuple[str, ...]:
    """Return the largest gain over the reference beyond the noise in each direction, or the reason why there is none."""
    regime = main_regime(result)
    if regime is None:
        return (_nothing_believed(result),)
    here = "CPU" if result.provenance.slug.startswith("cpu") else "GPU"
    sentences = [line for direction in directions(result) if (line := _largest_gain(result, direction))]
    if sentences:
        return (f"On this {here} {'; '.join(sentences)}.",)
    over = reference(result)
    timed = {cell.variant for cell in result.cells if not cell.control and valid_timing(cell, regime)}
    if over not in timed:
        return (f"On this {here} {over} has no valid time, so no variant is compared with it.",)
    if timed == {over}:
        return (f"On this {here} only {over} was timed ({regime}), so there is nothing to compare it with.",)
    return (f"On this {here} no variant was faster than {over} by more than the noise ({regime}).",)


def _nothing_believed(result: Result) -> str:
    """Return the sentence for a result without a valid time: nothing was timed, or all times are invalid."""
    names = list(dict.fromkeys(cell.variant for cell in result.cells if cell.timings and not cell.control))
    if not names:
        return "Nothing was timed."
    if len(names) > FEW:
        return "No time is valid: the reasons are listed below."
    return f"The {'time' if len(names) == 1 else 'times'} of {listing(names)} {'is' if len(names) == 1 else 'are'} not valid."


def _largest_gain(result: Result, direction: Direction) -> str:
    """Return a clause on the largest gain at any shape in a direction, or an empty string.

    It says ``up to`` if more than one variant or shape was compared.
    """
    regime, over_name = main_regime(result), reference(result)
    gains: list[tuple[Estimate, Cell, Cell]] = []
    rivals = 0
    for shape in shapes(result, direction):
        best, over = fastest(result, shape.name, direction), result.cell(shape.name, over_name, direction)
        others = [cell for cell in cells_at(result, shape.name, direction) if not cell.control and cell.variant != over_name]
        rivals += sum(valid_timing(cell, regime) is not None for cell in others) if valid_timing(over, regime) else 0
        gain = speedup(best, over, regime)
        if best and over and gain and gain.low > noise_floor(result, best, regime):
            gains.append((gain, best, over))
    if not gains:
        return ""
    gain, best, over = max(gains, key=lambda each: each[0].median)
    how = f"({direction_words(direction)}, {regime})"
    most = "up to " if rivals > 1 else ""
    return f"{best.variant} is {most}{q.ratio_interval(gain)} as fast as {over.label} at {best.shape} {how}"


def _elsewhere(result: Result) -> tuple[str, ...]:
    """Return a sentence for each committed result of the same study on another device."""
    lines = []
    for entry in committed(result.study.name):
        if entry.slug != result.provenance.slug:
            same = entry.study_digest == result.study_digest
            digest = f"study {entry.study_digest[:8]}" + ("" if same else ", declared differently from the study that ran here")
            source = f"{entry.date[:10]}, commit {entry.commit[:12]}, {digest}"
            lines.append(f"On {entry.device} ({source}): {entry.decision}; {entry.sentence}")
    return tuple(lines)


# Sentences of the stored decision


def _grounds(result: Result) -> list[str]:
    """Return the sentences of the stored decision without the evidence that the table of criteria shows."""
    if result.decision is None:
        return []
    sentences = []
    for line in result.decision.because:
        quoted = [outcome for outcome in result.outcomes if outcome.evidence and outcome.evidence in line]
        if quoted:
            rest = line.partition(quoted[0].evidence)[2].strip()
            sentences += [f"{quoted[0].criterion.name!r}: {rest}"] if rest and not COUNTED.match(line) else []
        elif not COUNTED.match(line):
            sentences.append(line)
    return list(dict.fromkeys(sentences))


def unexplained(result: Result, grounds: Iterable[str]) -> tuple[str, ...]:
    """Return the open questions of the stored decision that its other sentences do not mention."""
    said = tuple(grounds)
    left = result.decision.unexplained if result.decision else ()
    return tuple(line for line in left if not any(line.rstrip(".") in ground for ground in said))
