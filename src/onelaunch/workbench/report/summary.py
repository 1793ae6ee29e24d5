"""What a report says, as plain values: made once from a result, then only spelt by the terminal, Markdown and HTML.

The first screen answers three questions: what was asked and decided, on which evidence; which variant to use where; what stays
unexplained or unmeasured. The details follow (:mod:`onelaunch.workbench.report.details`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from onelaunch.operation import DIRECTIONS, Direction
from onelaunch.workbench import quantities as q
from onelaunch.workbench.report.tables import Table, columns, words
from onelaunch.workbench.result import Cell, Estimate, Outcome, Regime, Result, Timing
from onelaunch.workbench.stats import ratio
from onelaunch.workbench.study import LOOPS, TIMES, Criterion, Selector, Shape, Study

REGIMES: tuple[Regime, ...] = ("cold", "warm", "eager")
"""In the order of preference for comparing variants."""

FEW = 4
"""Longer lists than this are not for a first screen."""


@dataclass(frozen=True)
class Section:
    """A part of the report after its first screen."""

    title: str
    text: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()
    notes: str = ""
    """Markdown that the study's author wrote."""
    folded: bool = False
    """Long: a page shows it when asked to."""


@dataclass(frozen=True)
class Summary:
    """The first screen."""

    name: str
    question: str
    decision: str
    """``proceed``, ``debug``, ``abandon``, ``measure more`` or ``not decided``."""
    because: tuple[str, ...]
    facts: tuple[str, ...]
    """On what, when and how it was measured."""
    alerts: tuple[str, ...]
    """What a reader must know before believing anything."""
    criteria: Table | None
    use: tuple[Table, ...]
    missing: Table | None
    """Every variant that has no believed time somewhere, with the reason."""
    open: tuple[str, ...]


def summarize(result: Result) -> Summary:
    """The first screen of a result."""
    decision = result.decision
    return Summary(
        name=result.study.name,
        question=result.study.question,
        decision=words(decision.kind) if decision else "not decided",
        because=decision.because if decision else ("The study ended before anything was decided.",),
        facts=_facts(result),
        alerts=_alerts(result),
        criteria=_criteria(result),
        use=_once([use_table(result, direction) for direction in directions(result)]),
        missing=_missing(result),
        open=_open(result),
    )


# What other parts of the report ask of a result


def directions(result: Result) -> tuple[Direction, ...]:
    """The directions that have cells, forward first."""
    return tuple(name for name in DIRECTIONS if any(cell.direction == name for cell in result.cells))


def shapes(result: Result, direction: Direction) -> tuple[Shape, ...]:
    """The declared shapes that have cells in a direction, in the order of the study."""
    seen = {cell.shape for cell in result.cells if cell.direction == direction}
    return tuple(shape for shape in result.study.shapes if shape.name in seen)


def cells_at(result: Result, shape: str, direction: Direction) -> tuple[Cell, ...]:
    """All cells of one shape in one direction, controls included."""
    return tuple(cell for cell in result.cells if (cell.shape, cell.direction) == (shape, direction))


def regimes(result: Result) -> tuple[Regime, ...]:
    """Those that a table of times has a column for: cold, warm, eager, and of steps in a row those that the study declares."""
    return (*REGIMES, *(regime for regime in LOOPS if regime in result.study.regimes))


def main_regime(result: Result) -> Regime | None:
    """The regime in which variants are compared: the first of cold, warm, eager that was measured."""
    measured = {timing.regime for cell in result.cells if cell.status == "ok" for timing in cell.timings}
    return next((regime for regime in REGIMES if regime in measured), None)


def believed(cell: Cell | None, regime: Regime | None) -> Timing | None:
    """The time of a cell in a regime, if there is one to be believed."""
    return cell.timing(regime) if cell and cell.status == "ok" and regime else None


def speedup(cell: Cell | None, over: Cell | None, regime: Regime | None) -> Estimate | None:
    """How many times as fast a cell is as another, from ratios taken round by round."""
    ours, theirs = believed(cell, regime), believed(over, regime)
    return ratio(theirs.rounds, ours.rounds) if ours and theirs and cell is not over else None


def times_floor(cell: Cell, regime: Regime | None) -> float | None:
    """A cell's time over the floor of its shape."""
    timing = believed(cell, regime)
    return timing.microseconds.median / cell.plan.floor_microseconds if timing and cell.plan else None


def way(direction: str) -> str:
    """``forward + backward``."""
    return direction.replace("_", " + ")


def sizes(shape: Shape) -> str:
    """``B=4 T=2048 D=256 V=64 float16``, with the options that differ from their defaults."""
    parts = [f"{key}={value}" for key, value in (*shape.sizes.items(), *shape.options.items())]
    return " ".join([*parts, shape.dtype])


def selector(chosen: Selector) -> str:
    """``fused_chunked``, or ``the fastest with launches 1 or 2``."""
    if isinstance(chosen, str):
        return chosen
    tags = (f"{key} {' or '.join(map(str, value)) if isinstance(value, list) else value}" for key, value in chosen.items())
    return f"the fastest with {', '.join(tags)}" if chosen else "the fastest variant"


def asked(criterion: Criterion, study: Study) -> str:
    """What a criterion demands, in words."""
    of, over = selector(criterion.of), selector(study.over(criterion))
    if criterion.over_at is not None:
        over += f" at {criterion.over_at}" + (f" per {'*'.join(criterion.per)}" if criterion.per else "")
    bound = criterion.bound
    what = {
        "speedup": f"{of} {bound}x as fast as {over}",
        "time_ratio": f"{of} takes {bound}x the time of {over}",
        "time": f"{of} takes {bound} µs",
        "time_over_floor": f"{of} takes {bound}x its floor",
        "dram_bytes_ratio": f"DRAM bytes of {over} {bound}x those of {of}",
        "dram_bytes_over_least": f"DRAM bytes of {of} {bound}x the least",
        "peak_memory_ratio": f"{of} takes {bound}x the peak memory of {over}",
        "launches": f"{of} launches {bound} times a call",
        "barriers": f"{of} meets {bound} barriers over the grid a call",
        "error": f"norm-wise error of {of} {bound}",
    }[criterion.measure]
    regime = f", {criterion.regime}" if criterion.measure in TIMES else ""
    regime += f" over {criterion.over_regime}" if criterion.over_regime else ""
    aside = "" if criterion.decides else "; decides nothing"
    return f"{what} {_asked_at(criterion, study)} ({way(criterion.direction)}{regime}{aside})"


def reference(result: Result) -> str:
    """What speeds are taken over: the study's baseline, or where that was timed nowhere, the first variant that was."""
    timed = dict.fromkeys(cell.variant for cell in result.cells if cell.status == "ok" and cell.timings and not cell.control)
    return result.study.baseline if result.study.baseline in timed else next(iter(timed), result.study.baseline)


def use_table(result: Result, direction: Direction) -> Table:
    """Which variant to use at which shape, and how sure that is."""
    regime = main_regime(result)
    over_name = reference(result)
    rows, counts = [], []
    for shape in shapes(result, direction):
        cells = {cell.variant: cell for cell in cells_at(result, shape.name, direction) if not cell.control}
        timed = {name: timing.microseconds for name, cell in cells.items() if (timing := believed(cell, regime))}
        if not timed:
            rows.append((shape.name, sizes(shape), "none was timed", q.NONE, q.NONE, q.NONE))
            continue
        name = min(timed, key=lambda name: timed[name].median)
        best, time, over = cells[name], timed[name], cells.get(over_name)
        counts.append(time.samples)
        gain, distance = speedup(best, over, regime), times_floor(best, regime)
        rows.append(
            (
                shape.name,
                sizes(shape),
                " or ".join([name, *_as_good(result, best, [cells[other] for other in timed], regime)]),
                q.interval(time),
                "the reference" if best is over else q.ratio_interval(gain) if gain else q.NONE,
                q.ratio(distance) if distance else q.NONE,
            )
        )
    how = f"{regime}, median [95 % interval] of {q.span(counts)} rounds" if regime else "nothing was timed"
    return Table(
        f"{way(direction).capitalize()}: {how}",
        columns("shape", "?sizes", "use", ">time", ">speed", ">/ floor"),
        tuple(rows),
        f"Speed: over {over_name}{_instead(result)}. Floor: least bytes and FLOPs at the measured ceilings. "
        "A second name is as good within the noise.",
    )


# The parts of the first screen


def _instead(result: Result) -> str:
    """Why the reference is not the declared baseline, when it is not."""
    return "" if reference(result) == result.study.baseline else f", as the baseline {result.study.baseline} was not timed"


def _once(tables: list[Table]) -> tuple[Table, ...]:
    """Tables that share a note show it under the last."""
    return (*(replace(table, note="") for table in tables[:-1]), *tables[-1:])


def _facts(result: Result) -> tuple[str, ...]:
    facts = result.provenance
    scale = f"{facts.scale} scale, " if facts.scale else ""
    return (
        f"{facts.device} ({facts.architecture})",
        f"{scale}{q.plural(facts.rounds, 'round')}",
        facts.date.replace("T", " ")[:16],
        f"onelaunch {facts.versions.get('onelaunch', '?')} at {facts.commit or 'an unknown commit'}",
    )


def _alerts(result: Result) -> tuple[str, ...]:
    alerts = []
    if result.interrupted:
        done = sum(cell.status != "interrupted" for cell in result.cells)
        alerts.append(
            f"Interrupted: {done} of {len(result.cells)} cells were reached; the decision rests on those alone. "
            "What is missing is listed below."
        )
    wrong = sorted({cell.variant for cell in result.cells if cell.status in ("incorrect", "invalid")})
    if wrong:
        alerts.append(f"Not to be used: {', '.join(wrong)} gave wrong results or times that cannot be; see below.")
    if result.study.digest() != result.study_digest:
        alerts.append("The study stored here is not the one that ran: its digest differs, its criteria may have moved.")
    return tuple(alerts)


def _criteria(result: Result) -> Table | None:
    judged = {outcome.criterion.name: outcome for outcome in result.outcomes}
    if not result.study.criteria:
        return None
    return Table(
        "",
        columns("criterion", "status", "?asked", "evidence"),
        tuple(_criterion(criterion, judged.get(criterion.name), result) for criterion in result.study.criteria),
    )


def _criterion(criterion: Criterion, outcome: Outcome | None, result: Result) -> tuple[str, ...]:
    demand = asked(criterion, result.study)
    if outcome is None:
        return (criterion.name, "not measured", demand, "The study ended before this was judged.")
    chosen = f" Best of {outcome.best_of} candidates." if outcome.best_of > 1 else ""
    return (criterion.name, words(outcome.status), demand, outcome.evidence + chosen)


def _missing(result: Result) -> Table | None:
    groups: dict[tuple[str, str, str], list[Cell]] = {}
    for cell in result.cells:
        if cell.status != "ok":
            groups.setdefault((cell.variant, words(cell.status), _reason(cell)), []).append(cell)
    if not groups:
        return None
    together: dict[tuple[str, str, str], list[str]] = {}
    for (variant, status, reason), cells in groups.items():
        together.setdefault((status, _where(cells, result), reason), []).append(variant)
    rows = tuple((", ".join(variants), status, where, reason) for (status, where, reason), variants in together.items())
    return Table("", columns("variant", "status", "where", "reason"), rows)


def _reason(cell: Cell) -> str:
    """Why a cell has no believed time: its reason, and what the verdict adds to it."""
    problems = cell.verdict.explain() if cell.verdict and not cell.verdict.ok else ""
    parts = [part for part in (cell.reason, problems) if part]
    if len(parts) == 2 and (parts[0] in parts[1] or parts[1] in parts[0]):
        parts = [max(parts, key=len)]
    return ": ".join(part.rstrip(".") for part in parts) or "no reason was recorded"


def _where(cells: Sequence[Cell], result: Result) -> str:
    """``all 8 shapes, forward``."""
    named = []
    for direction in directions(result):
        here = [cell.shape for cell in cells if cell.direction == direction]
        if not here:
            continue
        total = len(shapes(result, direction))
        at = ("both shapes" if total == 2 else f"all {total} shapes") if len(here) == total > 1 else ", ".join(here)
        named.append((at, way(direction)))
    if len(directions(result)) == 1:
        return named[0][0]
    if len({at for at, _ in named}) == 1 and len(named) == len(directions(result)):
        return f"{named[0][0]}, both directions"
    return "; ".join(f"{at}, {direction}" for at, direction in named)


def _open(result: Result) -> tuple[str, ...]:
    lines = list(result.decision.unexplained) if result.decision else []
    for status in ("inconclusive", "not_measured", "infeasible"):
        names = [outcome.criterion.name for outcome in result.outcomes if outcome.status == status]
        if names:
            which = ", ".join(names) if len(names) <= FEW else f"{len(names)} of {len(result.outcomes)}, listed above"
            lines.append(f"{'Criterion' if len(names) == 1 else 'Criteria'} {words(status)}: {which}.")
    lines += _uncounted(result)
    if main_regime(result) and not result.noise:
        lines.append("No A/A run: the smallest difference that may be claimed here is not known.")
    lines += _notes(result)
    never = [regime for regime in result.study.regimes if regime not in _regimes_timed(result)]
    if never and main_regime(result):
        lines.append(f"Regimes declared and not measured: {', '.join(never)}.")
    return tuple(lines)


def _notes(result: Result) -> list[str]:
    """What the run noted as not measured, as far as a first screen can bear it."""
    missed = [note for note in result.notes if re.search(r"(^|: )(No |Stopped )", note)]
    if len(missed) <= FEW:
        return missed
    return [*missed[: FEW - 1], f"The run noted {len(missed) - FEW + 1} more such things; see its notes."]


def _uncounted(result: Result) -> list[str]:
    timed = [cell for cell in result.cells if cell.status == "ok" and not cell.control]
    counted = {cell.shape for cell in timed if cell.traffic and cell.traffic.source == "ncu"}
    everywhere = {cell.shape for cell in timed}
    if not timed or counted == everywhere:
        return []
    if not counted and result.decision and result.decision.savings:
        return []  # the decision says so itself
    if not counted:
        return ["DRAM bytes were counted nowhere: all traffic is arithmetic."]
    names = [shape.name for shape in result.study.shapes if shape.name in counted]
    return [f"DRAM bytes were counted at {', '.join(names)} alone ({len(counted)} of {q.plural(len(everywhere), 'shape')})."]


def _regimes_timed(result: Result) -> set[str]:
    return {timing.regime for cell in result.cells for timing in cell.timings}


def _as_good(result: Result, best: Cell, timed: Iterable[Cell], regime: Regime | None) -> list[str]:
    """Variants whose time differs from the best one's by no more than the noise."""
    floor = next((n.floor for n in result.noise if (n.shape, n.direction, n.regime) == (best.shape, best.direction, regime)), 1.0)
    gains = {cell.variant: speedup(best, cell, regime) for cell in timed if cell is not best}
    return [name for name, gain in gains.items() if gain and gain.low <= floor]


def _asked_at(criterion: Criterion, study: Study) -> str:
    names = [shape.name for shape in study.shapes_of(criterion)]
    where = ", ".join(names)
    if criterion.at is None:
        where = f"every {'full-scale ' if study.at_scale('full') else ''}shape"
    if criterion.combine == "geomean":
        return f"in the geometric mean over {where}"
    if criterion.in_at_least is None:
        return f"at {where}"
    return f"at {criterion.in_at_least} or more of the {len(names)} shapes {', '.join(names)}"
