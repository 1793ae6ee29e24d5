"""Markdown for the documentation, made from committed results: one section for each result, and single tables.

A section first compares the fastest variant of the operation with its rivals: other libraries' variants (peers), the study's
baseline and torch.compile. All other times, the sizes of the shapes, and the reasons for missing times follow in folded blocks.
All strings of a result are escaped, since a result may come from anywhere. When the documentation is built, ``docs/tables.py``
calls :func:`docs_section` and :func:`docs_overview`; it and ``docs/study_keys.py`` also write other tables with :func:`code` and
:func:`markdown_table`.

``floor_microseconds`` of a plan is the roofline bound. A peer outside the gate (``outside``) is another project's variant whose
errors are larger than the verification gate allows, but within the tolerance of that project's tests; others are compared with
its times.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from onelaunch.operation import Direction
from onelaunch.workbench.report.details import details, times_table
from onelaunch.workbench.report.summary import (
    directions,
    outside_words,
    peer_names,
    shapes,
    speedup,
    summarize,
    use_table,
    valid_timing,
)
from onelaunch.workbench.report.tables import to_markdown
from onelaunch.workbench.report.text import markdown
from onelaunch.workbench.result import Cell, Result
from onelaunch.workbench.study import LOOPS, Regime, Shape

DocsTable = Literal["use", "times", "criteria", "missing", "provenance"]
"""Name of a table for the documentation; :func:`docs_table` explains the five."""

NONE = "–"
"""Mark of a missing time."""

_SHOWN: tuple[Regime, ...] = ("cold", *LOOPS)
"""Regimes whose times the documentation shows, in a study that has one of them; calls from Python in another study."""

SIDE_BY_SIDE = 5
"""Largest number of shapes that are columns of one table of all variants, so that it fits a page."""

_MOST_SIZES = 9
"""Largest number of sizes and options that have columns of their own, so that the table fits a page."""

COMPILED = "compiled"
"""Name of the variant of every operation that is torch.compile of plain PyTorch."""

READING = (
    "Times are medians in µs; the smallest time at each shape is bold, controls aside. In brackets: the speed of the "
    "fastest variant of onelaunch over this one. Roofline: the roofline bound over the time of that variant; 100 % means "
    f"that it runs at the measured peaks of the device, and up to 5 % more lies within their error. {NONE}: no time; the "
    "reason is listed under “Without a time”, or the study leaves the variant out at that shape (`skip`), because it would "
    "take minutes there."
)
"""Explanation of the tables of a section."""


def docs_table(result: Result, which: DocsTable = "use", *, direction: Direction | None = None, shape: str | None = None) -> str:
    """Return Markdown tables for the documentation, made from a committed result.

    It is for pages with single tables of a result. ``docs/experiment_tables.py`` calls it for the page of the experiments.

    Args:
        result: Result to show.
        which: ``use`` (the variant to use at each shape), ``times`` (all variants, shape by shape), ``criteria``, ``missing``
            (variants without a valid time, with the reasons), or ``provenance`` (device, versions, measured peaks).
        direction: ``forward`` or ``forward_backward``, for ``use`` and ``times``; all measured directions by default.
        shape: Name of one shape, for ``times``; all shapes by default.

    Returns:
        The tables, each under its title, and a last line with device, commit and date.
    """
    summary = summarize(result)
    chosen = (direction,) if direction else directions(result)
    tables = {
        "use": lambda: [use_table(result, each) for each in chosen],
        "times": lambda: [
            times_table(result, declared, each)
            for each in chosen
            for declared in result.study.shapes
            if shape in (None, declared.name)
        ],
        "criteria": lambda: [summary.criteria] if summary.criteria else [],
        "missing": lambda: [summary.missing] if summary.missing else [],
        "provenance": lambda: list(details(result)[-1].tables),  # the provenance is the last section
    }[which]()
    texts = [to_markdown(table) for table in tables] or ["Nothing to show."]
    return "\n\n".join([*texts, f"*{markdown(result.study.name)}: {markdown(' · '.join(summary.facts))}*"]) + "\n"


def docs_section(result: Result, source: str) -> str:
    """Return the section about one result: provenance, the winners with their rivals, other tables folded, and the decision.

    Args:
        result: Result to show.
        source: Path of the stored result, relative to the repository's root.
    """
    facts = result.provenance
    known = (name for name in ("torch", "triton", "fla-core", "liger-kernel") if name in facts.versions)
    where = [
        facts.date.replace("T", " ")[:16],
        *(f"{name} {facts.versions[name]}" for name in known),
        f"driver {facts.driver or NONE}",
        f"commit {facts.commits or NONE}",
        f"{facts.rounds} rounds",
    ]
    blocks = [f"### {markdown(result.study.name)} on {markdown(facts.device)}", f"{markdown(', '.join(where))}; {code(source)}."]
    if result.interrupted:
        blocks.append("The run was interrupted; it did not reach the shapes that are missing here.")
    blocks.append(" ".join(filter(None, (_legend(result), READING))))
    shown: tuple[Regime, ...] = _SHOWN if any(regime in _SHOWN for regime in result.study.regimes) else ("eager",)
    ranges = [(direction, regime) for direction in directions(result) for regime in shown if _timed(result, direction, regime)]
    for direction, regime in ranges:
        blocks += [f"**{_title(direction, regime)}**", _winners(result, direction, regime)]
    for direction, regime in ranges:
        blocks.append(folded(f"All variants: {_title(direction, regime).lower()}", _everything(result, direction, regime)))
    blocks.append(folded("Sizes of the shapes", _sizes(result)))
    if missing := summarize(result).missing:
        heads = [column.title for column in missing.columns]
        blocks.append(folded("Without a time", [markdown_table(heads, [map(markdown, row) for row in missing.rows])]))
    if result.decision:
        first, *rest = [*result.decision.because, ""]
        blocks.append(f"Decision: **{markdown(result.decision.kind.replace('_', ' '))}**. {markdown(first)}")
        if evidence := [line for line in rest if line]:
            blocks.append(folded("The evidence", ["\n".join(f"- {markdown(line)}" for line in evidence)]))
    return "\n\n".join(blocks) + "\n"


def docs_overview(results: Iterable[Result], page: Callable[[str], str]) -> str:
    """Return one table over all results: the fastest variant's speed over peers and over torch.compile.

    Times are those of the regime ``running`` where it was timed, else cold.

    Args:
        results: Results to show.
        page: Function that returns the link to the page of an operation, by the operation's name.
    """
    rows = []
    for result in results:
        names = result.study.operation_names()
        linked = ", ".join(f"[{code(name)}]({page(name)})" for name in names)
        about = linked if len(names) == 1 else f"{markdown(result.study.name)}: {linked}"
        rows += [[about, markdown(result.provenance.device), *measured] for measured in speeds(result)]
    return markdown_table(["operation", "device", "measured", "over the fastest peer", "over torch.compile"], rows, right=(3, 4))


def speeds(result: Result) -> list[tuple[str, str, str]]:
    """Return what was measured in each direction, and the fastest variant's speed over peers and over torch.compile, in words.

    A direction without times of both sides is left out.
    """
    rows = []
    for direction in directions(result):
        regime: Regime = "running" if _timed(result, direction, "running") else "cold"
        cells, peers = _cells(result, direction, regime), peer_names(result)
        what = "one of many steps" if regime == "running" else direction.replace("_", " and ")
        rows.append((what, _gain(cells, peers, peers, regime), _gain(cells, (COMPILED,), peers, regime)))
    return [row for row in rows if row[1:] != (NONE, NONE)]


def _gain(cells: Mapping[str, Mapping[str, Cell]], names: Sequence[str], peers: Sequence[str], regime: Regime) -> str:
    """Return the geometric mean and the range of our fastest variant's speed over the fastest of ``names``.

    Ours are the variants that are neither peers nor :data:`COMPILED`; controls take no part. Only shapes at which both have times
    count.
    """
    gains, outside = [], 0
    for found in cells.values():
        entrants = {name: cell for name, cell in found.items() if not cell.control}
        ours = _fastest((cell for name, cell in entrants.items() if name not in (*peers, COMPILED) and not cell.outside), regime)
        theirs = _fastest((entrants[name] for name in names if name in entrants), regime)
        if ours and theirs and (gain := speedup(ours, theirs, regime)):
            gains.append(gain.median)
            outside += theirs.outside
    if not gains:
        return NONE
    mean = math.exp(sum(map(math.log, gains)) / len(gains))
    shape = "1 shape" if len(gains) == 1 else f"{len(gains)} shapes"
    said = f"; the peer is outside the gate at {outside}" if outside else ""
    return f"{_times(mean)} ({_times(min(gains))} to {_times(max(gains))}, {shape}{said})"


def _times(ratio: float) -> str:
    return f"{ratio:.{2 if ratio < 10 else 1}f}x"


def code(text: str) -> str:
    """Return a name as code in Markdown, also inside a table."""
    plain = " ".join(text.split()).replace("|", "\\|")
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", plain)), default=0))
    return f"{fence}{plain}{fence}" if len(fence) == 1 else f"{fence} {plain} {fence}"


def markdown_table(heads: Sequence[str], rows: Iterable[Iterable[str]], *, right: Iterable[int] = ()) -> str:
    """Return a table of Markdown cells, with the columns of the indices in ``right`` aligned to the right."""
    rules = ["---:" if index in set(right) else "---" for index in range(len(heads))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heads, rules, *rows))


def folded(title: str, blocks: Iterable[str]) -> str:
    """Return blocks of Markdown in a ``<details>`` element, which a page shows when the reader opens it."""
    return "\n\n".join([f"<details>\n<summary>{title}</summary>", *blocks, "</details>"])


def _title(direction: Direction, regime: Regime) -> str:
    return f"{direction.replace('_', ' and ').capitalize()}, {regime}"


def _timed(result: Result, direction: Direction, regime: Regime) -> bool:
    return any(valid_timing(cell, regime) for cell in result.cells if cell.direction == direction)


def _cells(result: Result, direction: Direction, regime: Regime) -> dict[str, dict[str, Cell]]:
    """Return the measurements with valid times by shape and variant, in the order of the study."""
    found: dict[str, dict[str, Cell]] = {}
    for shape in shapes(result, direction):
        cells = [cell for cell in result.cells if (cell.shape, cell.direction) == (shape.name, direction)]
        if times := {cell.variant: cell for cell in cells if valid_timing(cell, regime)}:
            found[shape.name] = times
    return found


def _time(cell: Cell, regime: Regime) -> float:
    """Return the median time of a measurement in microseconds, or infinity without one."""
    timing = cell.timing(regime)
    return timing.microseconds.median if timing else float("inf")


def _fastest(cells: Iterable[Cell], regime: Regime) -> Cell | None:
    return min(cells, key=lambda cell: _time(cell, regime), default=None)


@dataclass(frozen=True)
class _Rival:
    """Column of the table of winners: one variant, or the fastest of several peers."""

    title: str
    names: tuple[str, ...]


def _rivals(result: Result, cells: Mapping[str, Mapping[str, Cell]]) -> list[_Rival]:
    """Return the columns for the peers, the baseline and torch.compile, without those that have no times."""
    timed = {name for found in cells.values() for name in found}
    peers = tuple(name for name in peer_names(result) if name in timed)
    alone = [name for name in dict.fromkeys((result.study.baseline, COMPILED)) if name in timed and name not in peers]
    first = [_Rival(code(peers[0]) if len(peers) == 1 else "fastest peer", peers)] if peers else []
    return first + [_Rival(code(name), (name,)) for name in alone]


def _winners(result: Result, direction: Direction, regime: Regime) -> str:
    """Return the table with the fastest variant that is not a peer, at each shape, and its rivals."""
    cells = _cells(result, direction, regime)
    rivals, peers = _rivals(result, cells), peer_names(result)
    rows = []
    for shape, found in cells.items():
        entrants = {name: cell for name, cell in found.items() if not cell.control}
        best = _fastest((cell for name, cell in entrants.items() if name not in peers and not cell.outside), regime)
        least = _fastest(entrants.values(), regime)
        if best is None:
            continue
        bound = f"{100 * best.plan.floor_microseconds / _time(best, regime):.0f} %" if best.plan else NONE
        rival_cells = [_rival(rival, best, least, entrants, regime) for rival in rivals]
        rows.append([markdown(shape), code(best.variant), _number(best, least, regime), bound, *rival_cells])
    heads = ["shape", "fastest of onelaunch", "µs", "roofline", *(rival.title for rival in rivals)]
    return markdown_table(heads, rows, right=range(2, len(heads)))


def _rival(rival: _Rival, best: Cell, least: Cell | None, entrants: Mapping[str, Cell], regime: Regime) -> str:
    """Return the cell of a rival at one shape: its time, and the speed of the fastest variant over it."""
    cell = _fastest((entrants[name] for name in rival.names if name in entrants), regime)
    if cell is None:
        return NONE
    name = f"{code(cell.variant)} " if len(rival.names) > 1 else ""
    gain = speedup(best, cell, regime)
    said = [*([_times(gain.median)] if gain else []), *([cell.mark] if cell.outside else [])]
    return f"{name}{_number(cell, least, regime)}" + (f" ({', '.join(said)})" if said else "")


def _number(cell: Cell, least: Cell | None, regime: Regime) -> str:
    """Return the median in microseconds, bold if the measurement is ``least``, the fastest at its shape."""
    written = f"{_time(cell, regime):,.1f}"
    return f"**{written}**" if cell is least else written


def _everything(result: Result, direction: Direction, regime: Regime) -> list[str]:
    """Return tables of all variants and controls, :data:`SIDE_BY_SIDE` shapes each.

    Variants that are fastest somewhere come first, then peers, then the others.
    """
    cells, peers = _cells(result, direction, regime), peer_names(result)
    least = {shape: _fastest((cell for cell in found.values() if not cell.control), regime) for shape, found in cells.items()}
    wins = [cell.variant for cell in least.values() if cell]
    names = dict.fromkeys(name for found in cells.values() for name in found)
    ordered = sorted(names, key=lambda name: (-wins.count(name), name not in peers))
    tables, declared = [], list(cells)
    for start in range(0, len(declared), SIDE_BY_SIDE):
        here = declared[start : start + SIDE_BY_SIDE]
        rows = [
            [_label(name, cells), *(_number(cells[s][name], least[s], regime) if name in cells[s] else NONE for s in here)]
            for name in ordered
            if any(name in cells[s] for s in here)
        ]
        tables.append(markdown_table(["variant", *map(markdown, here)], rows, right=range(1, len(here) + 1)))
    return tables


def _label(name: str, cells: Mapping[str, Mapping[str, Cell]]) -> str:
    own = [found[name] for found in cells.values() if name in found]
    return code(name) + (" (control)" if any(cell.control for cell in own) else "") + outside_words(own)


def _measured_shapes(result: Result) -> list[Shape]:
    seen = {cell.shape for cell in result.cells}
    return [shape for shape in result.study.shapes if shape.name in seen]


def _legend(result: Result) -> str:
    """Return the sentence on the sizes in the names of shapes, such as ``4x2048``, if all names have the same meaning."""
    read = {}
    for shape in _measured_shapes(result):
        if match := re.match(r"\d+(x\d+)+", shape.name):
            read[match[0]] = _dimensions([int(number) for number in match[0].split("x")], shape.sizes)
    meanings = set(read.values())
    if len(meanings) != 1 or None in meanings:
        return "The sizes of each shape are listed below."
    (meaning,) = meanings
    names = " x ".join(meaning or ())
    return f"The numbers in a shape's name are {names}, as in {code(next(iter(read)))}; all sizes are listed below."


def _dimensions(numbers: Sequence[int], sizes: Mapping[str, int]) -> tuple[str, ...] | None:
    """Return the names of the sizes with these values, in their order, or ``None`` if a number is not among them."""
    left, found = iter(sizes.items()), []
    for number in numbers:
        name = next((name for name, size in left if size == number), None)
        if name is None:
            return None
        found.append(name)
    return tuple(found)


def _sizes(result: Result) -> list[str]:
    """Return a sentence with the sizes that all shapes share, and a table of the sizes that differ.

    With more than :data:`_MOST_SIZES` of these, as where shapes are of several operations, they stand in one column, with names.
    """
    measured = _measured_shapes(result)
    values = [
        {**shape.sizes, "dtype": shape.dtype, **{key: str(value) for key, value in shape.options.items()}} for shape in measured
    ]
    keys = dict.fromkeys(key for row in values for key in row)
    same = {key: values[0].get(key) for key in keys if len({str(row.get(key)) for row in values}) == 1} if len(values) > 1 else {}
    differ = [key for key in keys if key not in same]
    common = ", ".join(f"{key} = {value}" for key, value in same.items())
    rows = [
        [markdown(shape.name), *(markdown(str(row.get(key, NONE))) for key in differ)]
        for shape, row in zip(measured, values, strict=True)
    ]
    table = markdown_table(["shape", *map(markdown, differ)], rows)
    if len(differ) > _MOST_SIZES:
        listed = [", ".join(f"{key} = {row[key]}" for key in differ if key in row) for row in values]
        rows = [[markdown(shape.name), markdown(text)] for shape, text in zip(measured, listed, strict=True)]
        table = markdown_table(["shape", "sizes and options"], rows)
    return [f"At every shape: {markdown(common)}.", table] if common else [table]
