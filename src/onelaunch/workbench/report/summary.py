"""Content of a report as plain values, which the terminal, Markdown and HTML only format.

The first screen answers three questions: what was asked and decided (:mod:`onelaunch.workbench.report.headline`), which variant
to use at which shape, and what was not measured or stays unexplained. The criteria and the details
(:mod:`onelaunch.workbench.report.details`) follow. The other modules of ``report`` query results by the functions here, such as
for the fastest variant or a valid time. The commands of ``onelaunch study`` take words for directions, criteria and sizes from
it.

A peer outside the gate (``outside``) is another project's variant whose errors are larger than the verification gate allows, but
within the tolerance of that project's tests; others are compared with its times. ``floor_microseconds`` of a plan is the roofline
bound. Bytes have the source ``ncu`` if the hardware counted them, and ``analytic`` if they are computed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from onelaunch.errors import OneLaunchError
from onelaunch.operation import DIRECTIONS, Direction
from onelaunch.workbench import quantities as q
from onelaunch.workbench.decide.decision import excluded
from onelaunch.workbench.decide.measured import judged
from onelaunch.workbench.decide.recompute import differences, recompute
from onelaunch.workbench.decide.words import per, selector_words
from onelaunch.workbench.report.tables import Table, columns, words
from onelaunch.workbench.result import Cell, Estimate, Outcome, Regime, Result, Timing
from onelaunch.workbench.stats import ratio
from onelaunch.workbench.study import LOOPS, Criterion, Selector, Shape, Study, members

REGIMES: tuple[Regime, ...] = ("cold", "warm", "eager")
"""Regimes of single calls, in the order of preference for comparing variants."""

_FIRST_ROWS = 8
"""Largest number of table rows on the first screen if they are of several directions."""

NO_CRITERIA = "No criteria were declared."
"""Text in place of the table of criteria."""

NOTHING_OPEN = "Nothing: every declared variant has a valid time at every shape."
"""Text in place of the list of what was not measured or stays unexplained."""

FEW = 4
"""Largest number of items of a list on the first screen."""


@dataclass(frozen=True)
class Section:
    """A part of the report after its first screen."""

    title: str
    text: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()
    notes: str = ""
    """Notes of the study's author, in Markdown."""
    folded: bool = False
    """True for a long section, which a page shows only when the reader opens it."""


@dataclass(frozen=True)
class Summary:
    """Content of the first screen."""

    name: str
    question: str
    decision: str
    """``proceed``, ``debug``, ``abandon``, ``measure more`` or ``not decided``."""
    facts: tuple[str, ...]
    """Device, scale, rounds, date and version, as short phrases."""
    alerts: tuple[str, ...]
    """Warnings about the whole result, in sentences."""
    criteria: Table | None
    use: tuple[Table, ...]
    """Tables of the variant to use at each shape, one for each direction."""
    missing: Table | None
    """Variants without a valid time at some shape, with the reasons."""
    open: tuple[str, ...]
    """Other things that were not measured, and facts that limit what the decision means, in sentences."""


def summarize(result: Result) -> Summary:
    """Return the content of the first screen, except the sentences of :mod:`onelaunch.workbench.report.headline`."""
    decision = result.decision
    again = recompute(result)
    return Summary(
        name=result.study.name,
        question=result.study.question,
        decision=words(decision.kind) if decision else "not decided",
        facts=_facts(result),
        alerts=_alerts(result, again),
        criteria=_criteria(result),
        use=tuple(use_table(result, direction) for direction in directions(result)),
        missing=_missing(result),
        open=(*_limits(result, again), *_open(result)),
    )


def first_tables(tables: tuple[Table, ...]) -> tuple[tuple[Table, ...], tuple[Table, ...]]:
    """Split tables into those of the first screen and the others.

    All are on the first screen if they have at most :data:`_FIRST_ROWS` rows together, else only the first. In each group only
    the last table keeps its note, which is the same for all.
    """
    few = sum(len(table.rows) for table in tables) <= _FIRST_ROWS
    first = len(tables) if few else 1
    return _note_once(tables[:first]), _note_once(tables[first:])


def _note_once(tables: tuple[Table, ...]) -> tuple[Table, ...]:
    """Return the tables with the note of the last one only."""
    return (*(replace(table, note="") for table in tables[:-1]), *tables[-1:])


# Queries of a result that all parts of the report use


def directions(result: Result) -> tuple[Direction, ...]:
    """Return the directions that have measurements, forward first."""
    return tuple(name for name in DIRECTIONS if any(cell.direction == name for cell in result.cells))


def shapes(result: Result, direction: Direction) -> tuple[Shape, ...]:
    """Return the declared shapes that have measurements in a direction, in the order of the study."""
    seen = {cell.shape for cell in result.cells if cell.direction == direction}
    return tuple(shape for shape in result.study.shapes if shape.name in seen)


def cells_at(result: Result, shape: str, direction: Direction) -> tuple[Cell, ...]:
    """Return all measurements of one shape in one direction, including controls."""
    return tuple(cell for cell in result.cells if (cell.shape, cell.direction) == (shape, direction))


def regimes(result: Result) -> tuple[Regime, ...]:
    """Return the columns of a table of times: cold, warm, eager, and the regimes of consecutive steps that are declared."""
    return (*REGIMES, *(regime for regime in LOOPS if regime in result.study.regimes))


def main_regime(result: Result) -> Regime | None:
    """Return the regime in which variants are compared: the first of cold, warm, eager that was measured."""
    measured = {timing.regime for cell in result.cells if cell.measured for timing in cell.timings}
    return next((regime for regime in REGIMES if regime in measured), None)


def valid_timing(cell: Cell | None, regime: Regime | None) -> Timing | None:
    """Return a measurement's timing in a regime if it is valid; otherwise ``None``.

    It is above 0 and finite, of a correct variant or of a peer outside the gate.
    """
    timing = cell.timing(regime) if cell and cell.measured and regime else None
    if timing is None or not timing.rounds:
        return None
    return timing if all(0 < value < math.inf for value in (timing.microseconds.median, *timing.rounds)) else None


def speedup(cell: Cell | None, over: Cell | None, regime: Regime | None) -> Estimate | None:
    """Return the speed of a measurement over another, from ratios taken round by round; ``None`` without two valid times."""
    ours, theirs = valid_timing(cell, regime), valid_timing(over, regime)
    return ratio(theirs.rounds, ours.rounds) if ours and theirs and cell is not over else None


def over_roofline(cell: Cell, regime: Regime | None) -> float | None:
    """Return a measurement's time over the roofline bound, or ``None`` if the bound is 0 or not known."""
    timing = valid_timing(cell, regime)
    bound = cell.plan.floor_microseconds if cell.plan else 0.0
    return timing.microseconds.median / bound if timing and bound > 0 else None


def fastest(result: Result, shape: str, direction: Direction) -> Cell | None:
    """Return the measurement of the fastest correct variant in the regime in which variants are compared."""
    regime = main_regime(result)
    timed = {
        timing.microseconds.median: cell
        for cell in reversed(cells_at(result, shape, direction))  # so that of equal times the first variant is taken
        if not cell.control and not cell.outside and (timing := valid_timing(cell, regime))
    }
    return timed[min(timed)] if timed else None


def noise_floor(result: Result, cell: Cell, regime: Regime | None) -> float:
    """Return the smallest factor that may be claimed at a measurement's shape, or 1 without an A/A run."""
    noise = result.noise_at(cell.shape, cell.direction, regime) if regime is not None else None
    return noise.floor if noise is not None else 1.0


def peer_names(result: Result) -> tuple[str, ...]:
    """Return the names of the variants that belong to another library; none if the operation is not installed here."""
    try:
        names = dict.fromkeys((*result.study.variant_names(), *(cell.variant for cell in result.cells)))
        known = {name: result.study.find_variant(name) for name in names}
    except OneLaunchError:
        return ()
    return tuple(name for name, variant in known.items() if variant is not None and variant.capabilities.requires)


def direction_words(direction: str) -> str:
    """Return a direction in words, such as ``forward + backward``."""
    return direction.replace("_", " + ")


def called(cell: Cell) -> str:
    """Return the name of a measurement's variant, with the dispatcher's choice behind ``auto``: ``auto (fused)``."""
    more = "control" if cell.control else cell.chosen
    return f"{cell.variant} ({more})" if more else cell.variant


def directions_of(criterion: Criterion) -> str:
    """Return the directions of a criterion in words, such as ``forward and forward + backward``."""
    return " and ".join(map(direction_words, criterion.all_directions))


def sizes(shape: Shape) -> str:
    """Return sizes, options and dtype in words, such as ``B=4 T=2048 D=256 V=64 float16``.

    An operation that is not the study's comes first.
    """
    parts = [f"{key}={value}" for key, value in (*shape.sizes.items(), *shape.options.items())]
    return " ".join([*([shape.operation] if shape.operation else []), *parts, shape.dtype])


def selector(chosen: Selector) -> str:
    """Return a selector in words: ``fused_chunked``, or ``the fastest with launches 1 or 2``."""
    return selector_words(chosen, "the fastest", "the fastest variant")


def asked(criterion: Criterion, study: Study) -> str:
    """Return what a criterion asks for, in words."""
    of, over = selector(criterion.of), selector(study.over(criterion))
    if criterion.over_at is not None:
        over += f" at {criterion.over_at}{per(criterion)}"
    measure = judged(criterion)
    what = measure.demand.format(of=of, over=over, bound=f"{criterion.bound}{measure.unit}")
    regime = f", {criterion.regime}" if measure.timed else ""
    regime += f" over {criterion.over_regime}" if criterion.over_regime else ""
    noise = f", A/A noise at most {criterion.most_noise:g}" if criterion.most_noise is not None else ""
    no_decision = "" if criterion.decides else "; decides nothing"
    return f"{what} {_asked_at(criterion, study)} ({directions_of(criterion)}{regime}{noise}{no_decision})"


def reference(result: Result) -> str:
    """Return the variant over which speeds are taken: the study's baseline, or another one if the baseline has no time.

    The baseline may be a peer outside the gate. Otherwise the first correct variant that was timed is taken; if there is none,
    the baseline.
    """
    timed = [cell for cell in result.cells if cell.measured and cell.timings and not cell.control]
    if any(cell.variant == result.study.baseline for cell in timed):
        return result.study.baseline
    return next((cell.variant for cell in timed if not cell.outside), result.study.baseline)


def outside_words(cells: Iterable[Cell]) -> str:
    """Return words that follow the name of a variant which is a peer outside the gate at some of the cells; else nothing."""
    marks = sorted({cell.mark for cell in cells if cell.outside})
    return f" ({', '.join(marks)})" if marks else ""


def _reference_words(result: Result) -> str:
    """Return the name of the reference, which says if it is a peer outside the gate."""
    name = reference(result)
    return name + outside_words(cell for cell in result.cells if cell.variant == name and not cell.control)


def use_table(result: Result, direction: Direction) -> Table:
    """Return the table of the variant to use at each shape, with its interval and its rivals within the noise."""
    regime = main_regime(result)
    over_name = reference(result)
    rows, counts = [], []
    for shape in shapes(result, direction):
        best = fastest(result, shape.name, direction)
        time = valid_timing(best, regime)
        if best is None or time is None:
            rows.append((shape.name, sizes(shape), "none was timed", q.NONE, q.NONE, q.NONE))
            continue
        over = result.cell(shape.name, over_name, direction)
        counts.append(time.microseconds.samples)
        gain, distance = speedup(best, over, regime), over_roofline(best, regime)
        rows.append(
            (
                shape.name,
                sizes(shape),
                " or ".join([called(best), *_as_good(result, best, regime)]),
                q.interval(time.microseconds),
                "the reference" if best is over else q.ratio_interval(gain) if gain else q.NONE,
                q.ratio(distance) if distance else q.NONE,
            )
        )
    how = f"{regime}, median [95 % interval] of {q.span(counts)} rounds" if regime else "nothing was timed"
    return Table(
        f"{direction_words(direction).capitalize()}: {how}",
        columns("shape", "?sizes", "use", ">time", ">speed", ">/ bound"),
        tuple(rows),
        f"Speed is over {_reference_words(result)}{_instead(result)}. The bound is the roofline bound: the fewest bytes and FLOPs"
        " at the measured peaks. A second name means that its time differs by no more than the noise.",
    )


# The parts of the first screen


def _instead(result: Result) -> str:
    """Return a clause on why the reference is not the declared baseline, or an empty string if it is."""
    return "" if reference(result) == result.study.baseline else f", as the baseline {result.study.baseline} was not timed"


def _facts(result: Result) -> tuple[str, ...]:
    """Return device, scale, rounds, date and version as short phrases."""
    facts = result.provenance
    scale = f"{facts.scale} scale, " if facts.scale else ""
    return (
        f"{facts.device} ({facts.architecture})",
        f"{scale}{q.plural(facts.rounds, 'round')}",
        facts.date.replace("T", " ")[:16],
        f"onelaunch {facts.versions.get('onelaunch', '?')} at {_short(facts.commits) or 'an unknown commit'}",
        *_spent(result),
    )


def _spent(result: Result) -> tuple[str, ...]:
    """Return wall time, device time and cost in one short phrase, or nothing where they were not stored."""
    if (spent := result.spent) is None:
        return ()
    cost = "" if spent.cost is None else f", cost {q.money(spent.cost)}"
    return (f"took {q.duration(spent.wall_seconds)} ({q.duration(spent.device_seconds)} of the device{cost})",)


def _short(commit: str) -> str:
    """Return a commit with the first 12 digits of its hash, which ``ONELAUNCH_COMMIT`` may give in full."""
    return re.sub(r"\b([0-9a-f]{12})[0-9a-f]{28}\b", r"\1", commit)


def _alerts(result: Result, again: Result | str) -> tuple[str, ...]:
    """Return warnings about a decision that the measurements contradict, an interrupted run, wrong variants and changed criteria.

    A file with changed criteria is refused when it is read, so that only a result made in Python meets the last warning.

    ``again`` is the result judged and decided again, or the reason why that is not possible.
    """
    alerts = [] if isinstance(again, str) else list(differences(result, again))
    if result.interrupted:
        done = sum(cell.status != "interrupted" for cell in result.cells)
        alerts.append(
            f"Interrupted: {done} of {len(result.cells)} measurements were reached, and the decision rests on those alone. "
            "The missing ones are listed below."
        )
    wrong = sorted({cell.variant for cell in result.cells if cell.status in ("incorrect", "invalid")})
    if wrong:
        alerts.append(f"Do not use {', '.join(wrong)}: outputs were wrong, or times were below the roofline bound; see below.")
    if result.study.digest() != result.study_digest:
        alerts.append("The study stored here is not the one that ran: its digest differs, so its criteria may have been changed.")
    return tuple(alerts)


def _limits(result: Result, again: Result | str) -> tuple[str, ...]:
    """Return the facts that limit what the decision means; the stored ones if the decision cannot be recomputed."""
    if isinstance(again, str):
        stored = result.decision.notes if result.decision else ()
        return (*stored, f"The stored decision was not compared with the measurements: {again}")
    return again.decision.notes if again.decision else ()


def _criteria(result: Result) -> Table | None:
    outcomes = {outcome.criterion.name: outcome for outcome in result.outcomes}
    if not result.study.criteria:
        return None
    rows = [_criterion(criterion, outcomes.get(criterion.name), result) for criterion in result.study.criteria]
    rows.sort(key=lambda row: row[1].endswith("(excluded)"))  # criteria that decide come first
    return Table("", columns("criterion", "status", "?asked", "evidence"), tuple(rows))


def _criterion(criterion: Criterion, outcome: Outcome | None, result: Result) -> tuple[str, ...]:
    """Return the row of a criterion: name, status, demand and evidence."""
    demand = asked(criterion, result.study)
    if outcome is None:
        return (criterion.name, "not measured", demand, "The study ended before this was judged.")
    evidence = outcome.evidence
    if outcome.best_of > 1 and "best of" not in evidence:
        evidence += f" Best of {outcome.best_of} candidates."
    why_not = excluded(result, outcome)
    if why_not is None:
        return (criterion.name, words(outcome.status), demand, evidence)
    reason = why_not.replace(outcome.evidence, "").rstrip(" :.").removeprefix("is ")
    return (criterion.name, f"{words(outcome.status)} (excluded)", demand, f"{reason[:1].upper()}{reason[1:]}. {evidence}")


def _missing(result: Result) -> Table | None:
    """Return the table of measurements without a valid time. Those with the same reason share a row."""
    groups: dict[tuple[str, str, str], list[Cell]] = {}
    for cell in result.cells:
        if not cell.measured:
            groups.setdefault((cell.variant, words(cell.status), _reason(cell)), []).append(cell)
    if not groups:
        return None
    together: dict[tuple[str, str, str], list[str]] = {}
    for (variant, status, reason), cells in groups.items():
        together.setdefault((status, _where(cells, result), reason), []).append(variant)
    rows = tuple((", ".join(variants), status, where, reason) for (status, where, reason), variants in together.items())
    return Table("", columns("variant", "status", "where", "reason"), rows)


def _reason(cell: Cell) -> str:
    """Return why a measurement has no valid time: its reason, and the problems of the verdict."""
    problems = cell.verdict.explain() if cell.verdict and not cell.verdict.ok else ""
    parts = [part for part in (cell.reason, problems) if part]
    if len(parts) == 2 and (parts[0] in parts[1] or parts[1] in parts[0]):
        parts = [max(parts, key=len)]
    return ": ".join(part.rstrip(".") for part in parts) or "no reason was recorded"


def _where(cells: Sequence[Cell], result: Result) -> str:
    """Return the shapes and directions of measurements in words, such as ``all 8 shapes, forward``."""
    named = []
    for direction in directions(result):
        here = [cell.shape for cell in cells if cell.direction == direction]
        if not here:
            continue
        total = len(shapes(result, direction))
        at = ("both shapes" if total == 2 else f"all {total} shapes") if len(here) == total > 1 else ", ".join(here)
        named.append((at, direction_words(direction)))
    if len(directions(result)) == 1:
        return named[0][0]
    if len({at for at, _ in named}) == 1 and len(named) == len(directions(result)):
        return f"{named[0][0]}, both directions"
    return "; ".join(f"{at}, {direction}" for at, direction in named)


def _open(result: Result) -> tuple[str, ...]:
    lines: list[str] = []
    lines += _uncounted(result)
    if main_regime(result) and not result.noise:
        lines.append("No A/A run: the smallest difference that may be claimed here is not known.")
    lines += _notes(result)
    for variant, failed in ((name, report.failed) for name, report in result.probes.items() if report.failed):
        names = ", ".join(dict.fromkeys(re.split("[,:]", each)[0] for each in failed[:FEW]))
        lines.append(f"{variant} failed {q.plural(len(failed), 'probe')} (edge cases), so it cannot be adopted: {names}.")
    never = [regime for regime in result.study.regimes if regime not in _regimes_timed(result)]
    if never and main_regime(result):
        lines.append(f"Regimes declared and not measured: {', '.join(never)}.")
    return tuple(lines)


def _notes(result: Result) -> list[str]:
    """Return the run's notes on what was not measured, at most :data:`FEW`.

    These notes begin with ``No`` or ``Stopped``, after the name of the case if they have one.
    """
    missed = [note for note in result.notes if re.search(r"(^|: )(No |Stopped )", note)]
    if len(missed) <= FEW:
        return missed
    return [*missed[: FEW - 1], f"The run has {len(missed) - FEW + 1} more notes of this kind; see the notes of the run."]


def _uncounted(result: Result) -> list[str]:
    """Return a sentence on the shapes at which no DRAM bytes were counted, if any."""
    timed = [cell for cell in result.cells if cell.measured and not cell.control]
    counted = {cell.shape for cell in timed if cell.traffic and cell.traffic.source == "ncu"}
    everywhere = {cell.shape for cell in timed}
    if not timed or counted == everywhere:
        return []
    if not counted and result.decision and result.decision.savings:
        return []  # the decision has a sentence on this
    if not counted:
        return ["DRAM bytes were counted nowhere: all traffic is arithmetic."]
    names = [shape.name for shape in result.study.shapes if shape.name in counted]
    return [f"DRAM bytes were counted at {', '.join(names)} alone ({len(counted)} of {q.plural(len(everywhere), 'shape')})."]


def _regimes_timed(result: Result) -> set[str]:
    return {timing.regime for cell in result.cells for timing in cell.timings}


def _as_good(result: Result, best: Cell, regime: Regime | None) -> list[str]:
    """Return the variants whose time differs from the best one's by no more than the noise."""
    noise = noise_floor(result, best, regime)
    here = cells_at(result, best.shape, best.direction)
    others = [cell for cell in here if not cell.control and not cell.outside and cell is not best]
    gains = {cell.variant: speedup(best, cell, regime) for cell in others}
    return [name for name, gain in gains.items() if gain and gain.low <= noise]


def _asked_at(criterion: Criterion, study: Study) -> str:
    """Return the shapes of a criterion in words."""
    at = [shape.name for shape in study.shapes_of(criterion)] if criterion.at is None else criterion.at
    groups = study.groups()
    names = [f"the {len(groups[name])} shapes of {name}" if name in groups else name for name in members(at)]
    where = ", ".join(names)
    if criterion.at is None:
        where = f"every {'full-scale ' if study.at_scale('full') else ''}shape"
    if criterion.combine == "geomean":
        return f"in the geometric mean over {where}"
    if criterion.in_at_least is None:
        return f"at {where}"
    return f"at {criterion.in_at_least} or more of the {len(study.shapes_of(criterion))} shapes {', '.join(names)}"
