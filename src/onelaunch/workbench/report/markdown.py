"""The report as Markdown, and the tables that the documentation takes from committed results."""

from __future__ import annotations

from typing import Literal

from onelaunch.operation import Direction
from onelaunch.workbench.report.details import details, times_table
from onelaunch.workbench.report.summary import directions, summarize, use_table
from onelaunch.workbench.report.tables import to_markdown
from onelaunch.workbench.result import Result

DocsTable = Literal["use", "times", "criteria", "missing", "provenance"]


def render(result: Result) -> str:
    """The whole report as one Markdown text."""
    summary = summarize(result)
    blocks = [f"# {summary.name}: {summary.decision}", summary.question, " · ".join(summary.facts)]
    blocks += [f"> **{alert}**" for alert in summary.alerts]
    blocks += [f"## Decision: {summary.decision}", bullets(summary.because)]
    blocks.append(to_markdown(summary.criteria) if summary.criteria else "No criteria were declared.")
    blocks += ["## Which variant to use", *(to_markdown(table) for table in summary.use)]
    blocks.append("## Unexplained or unmeasured")
    if summary.open:
        blocks.append(bullets(summary.open))
    if summary.missing:
        blocks.append(to_markdown(summary.missing))
    if not summary.open and not summary.missing:
        blocks.append("Nothing: every declared cell has a believed time.")
    for section in details(result):
        blocks += [f"## {section.title}", *section.text, *(to_markdown(table) for table in section.tables)]
        blocks += [section.notes] if section.notes else []
    return "\n\n".join(blocks) + "\n"


def bullets(lines: tuple[str, ...]) -> str:
    """A Markdown list."""
    return "\n".join(f"- {line}" for line in lines)


def docs_table(result: Result, which: DocsTable = "use", *, direction: Direction | None = None, shape: str | None = None) -> str:
    """Markdown tables for the documentation, made from a committed result.

    Args:
        result: what was measured.
        which: ``use`` (the variant to use at each shape), ``times`` (all variants, shape by shape), ``criteria``, ``missing``
            (what has no believed time, and why), ``provenance`` (device, versions, ceilings).
        direction: ``forward`` or ``forward_backward``; all that were measured by default. For ``use`` and ``times``.
        shape: the name of one shape, for ``times``; all by default.

    Returns:
        The tables, each under its title, ending with a line that names device, commit and date.
    """
    summary = summarize(result)
    ways = (direction,) if direction else directions(result)
    tables = {
        "use": lambda: [use_table(result, way) for way in ways],
        "times": lambda: [
            times_table(result, declared, way)
            for way in ways
            for declared in result.study.shapes
            if shape in (None, declared.name)
        ],
        "criteria": lambda: [summary.criteria] if summary.criteria else [],
        "missing": lambda: [summary.missing] if summary.missing else [],
        "provenance": lambda: list(details(result)[-1].tables),
    }[which]()
    texts = [to_markdown(table) for table in tables] or ["Nothing to show."]
    return "\n\n".join([*texts, f"*{result.study.name}: {' · '.join(summary.facts)}*"]) + "\n"
