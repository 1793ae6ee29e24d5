"""The report as Markdown, and the tables that the documentation takes from committed results."""

from __future__ import annotations

from typing import Literal

from onelaunch.operation import Direction
from onelaunch.workbench.report.details import details, times_table
from onelaunch.workbench.report.headline import headline, unexplained
from onelaunch.workbench.report.summary import NO_CRITERIA, NOTHING_OPEN, directions, first_tables, summarize, use_table
from onelaunch.workbench.report.tables import to_markdown
from onelaunch.workbench.report.text import markdown as escape
from onelaunch.workbench.report.text import markdown_block
from onelaunch.workbench.result import Result

DocsTable = Literal["use", "times", "criteria", "missing", "provenance"]


def render(result: Result) -> str:
    """Return the whole report as one Markdown text, in which no text of the result is markup."""
    summary, head = summarize(result), headline(result)
    first, later = first_tables(summary.use)
    blocks = [f"# {escape(f'{summary.name}: {summary.decision}')}", escape(summary.question)]
    blocks.append(" · ".join(map(escape, summary.facts)))
    blocks += [f"> **{escape(alert)}**" for alert in summary.alerts]
    blocks.append(f"## Decision: {escape(summary.decision)}")
    blocks += map(escape, (*head.found, head.sentence, *head.elsewhere))
    blocks += ["## What was found", *(map(to_markdown, first) if first else ["Nothing was timed."])]
    blocks.append("## Not measured or unexplained")
    left_open = (*unexplained(result, head.grounds), *summary.open)
    blocks += [bullets(left_open)] if left_open else []
    blocks += [to_markdown(summary.missing)] if summary.missing else []
    blocks += [] if left_open or summary.missing else [NOTHING_OPEN]
    blocks.append("## Criteria")
    blocks += [bullets(head.grounds)] if head.grounds else []
    blocks.append(to_markdown(summary.criteria) if summary.criteria else NO_CRITERIA)
    blocks += ["## Which variant to use, continued", *map(to_markdown, later)] if later else []
    for section in details(result):
        blocks += [f"## {escape(section.title)}", *map(escape, section.text), *map(to_markdown, section.tables)]
        blocks += [markdown_block(section.notes)] if section.notes else []
    return "\n\n".join(blocks) + "\n"


def bullets(lines: tuple[str, ...]) -> str:
    """Return a Markdown list of texts."""
    return "\n".join(f"- {escape(line)}" for line in lines)


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
