"""Report for a terminal. No string of a result becomes markup or a command to the terminal.

Commands ``onelaunch study run``, ``report`` and ``judge`` call :func:`show`.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.markdown import Markdown
from rich.padding import Padding
from rich.text import Text

from onelaunch.workbench.report.details import details
from onelaunch.workbench.report.headline import headline, unexplained
from onelaunch.workbench.report.predictions import predictions
from onelaunch.workbench.report.summary import NO_CRITERIA, NOTHING_OPEN, first_tables, summarize
from onelaunch.workbench.report.tables import STYLES, TONES, to_rich
from onelaunch.workbench.report.text import one_line, visible
from onelaunch.workbench.result import Result


def show(result: Result, console: Console, *, full: bool = False) -> None:
    """Print the first screen of a report, or the whole report if ``full`` is set."""
    console.print(render(result, console.width, full=full))


def render(result: Result, width: int, *, full: bool = False) -> Group:
    """Return the report as one group for rich, laid out for a terminal of ``width`` characters."""
    summary, head = summarize(result), headline(result)
    first, later = first_tables(summary.use)
    parts: list[RenderableType] = [
        Text.assemble((one_line(summary.name), "bold"), "  ", one_line(summary.question)),
        Text(one_line(" · ".join(summary.facts)), style="dim"),
    ]
    parts += [Text.assemble(("! ", "bold yellow"), one_line(alert)) for alert in summary.alerts]
    parts += [Text(), Text.assemble("Decision: ", (summary.decision, f"bold {STYLES[TONES.get(summary.decision, 'open')]}"))]
    parts += [Text(one_line(line)) for line in (*head.found, head.sentence, *head.elsewhere)]
    parts += _heading("What was found")
    parts += [to_rich(table, width) for table in first] or [Text("Nothing was timed.")]
    parts += _heading("Not measured or unexplained")
    left_open = (*unexplained(result, head.grounds), *summary.open)
    parts += _list(left_open or (() if summary.missing else (NOTHING_OPEN,)))
    if summary.missing:
        parts.append(to_rich(summary.missing, width))
    parts += _heading("Criteria")
    parts += _list(head.grounds)
    parts.append(to_rich(summary.criteria, width) if summary.criteria else Text(NO_CRITERIA))
    if (section := predictions(result)).tables and not full:  # the full report has it among its details
        parts += [*_heading(section.title), *(Text(one_line(line)) for line in section.text[1:])]
        parts += [to_rich(table, width) for table in section.tables]
    if later:
        parts += [*_heading("Which variant to use, continued"), *(to_rich(table, width) for table in later)]
    for section in details(result) if full else ():
        parts += _heading(section.title)
        parts += [Padding(Text(one_line(paragraph)), (0, 0, 1, 0)) for paragraph in section.text]
        parts += [to_rich(table, width) for table in section.tables]
        parts += [Markdown(visible(section.notes), hyperlinks=False)] if section.notes else []
    return Group(*parts)


def _heading(title: str) -> list[RenderableType]:
    return [Text(), Text(one_line(title), style="bold")]


def _list(lines: Sequence[str]) -> list[RenderableType]:
    from rich.table import Table as Grid

    grid = Grid.grid(padding=(0, 1))
    for line in lines:
        grid.add_row("-", Text(one_line(line)))
    return [grid] if lines else []
