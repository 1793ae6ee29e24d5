"""The first screen of a report for a terminal."""

from __future__ import annotations

from rich.console import Console, Group, RenderableType
from rich.markdown import Markdown
from rich.padding import Padding
from rich.text import Text

from onelaunch.workbench.report.details import details
from onelaunch.workbench.report.summary import summarize
from onelaunch.workbench.report.tables import STYLES, TONES, to_rich
from onelaunch.workbench.result import Result


def show(result: Result, console: Console, *, full: bool = False) -> None:
    """Print the first screen, or with ``full`` the whole report."""
    console.print(render(result, console.width, full=full))


def render(result: Result, width: int, *, full: bool = False) -> Group:
    """The report as one thing that rich prints on a terminal of that many columns."""
    summary = summarize(result)
    parts: list[RenderableType] = [
        Text.assemble((summary.name, "bold"), "  ", summary.question),
        Text(" · ".join(summary.facts), style="dim"),
    ]
    parts += [Text.assemble(("! ", "bold yellow"), alert) for alert in summary.alerts]
    parts += [Text(), Text.assemble("Decision: ", (summary.decision, f"bold {STYLES[TONES.get(summary.decision, 'open')]}"))]
    parts += _list(summary.because)
    if summary.criteria:
        parts.append(to_rich(summary.criteria, width))
    parts += _heading("Which variant to use")
    parts += [to_rich(table, width) for table in summary.use]
    parts += _heading("Unexplained or unmeasured")
    parts += _list(summary.open or (() if summary.missing else ("Nothing: every declared cell has a believed time.",)))
    if summary.missing:
        parts.append(to_rich(summary.missing, width))
    for section in details(result) if full else ():
        parts += _heading(section.title)
        parts += [Padding(Text(paragraph), (0, 0, 1, 0)) for paragraph in section.text]
        parts += [to_rich(table, width) for table in section.tables]
        parts += [Markdown(section.notes)] if section.notes else []
    return Group(*parts)


def _heading(title: str) -> list[RenderableType]:
    return [Text(), Text(title, style="bold")]


def _list(lines: tuple[str, ...]) -> list[RenderableType]:
    from rich.table import Table as Grid

    grid = Grid.grid(padding=(0, 1))
    for line in lines:
        grid.add_row("-", Text(line))
    return [grid] if lines else []
