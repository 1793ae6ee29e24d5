"""Report as Markdown.

``write_report`` of ``report/__init__.py`` calls :func:`render` and writes the text to ``report.md``.
"""

from __future__ import annotations

from onelaunch.workbench.report.details import details
from onelaunch.workbench.report.headline import headline, unexplained
from onelaunch.workbench.report.summary import NO_CRITERIA, NOTHING_OPEN, first_tables, summarize
from onelaunch.workbench.report.tables import to_markdown
from onelaunch.workbench.report.text import markdown as escape
from onelaunch.workbench.report.text import markdown_block
from onelaunch.workbench.result import Result


def render(result: Result) -> str:
    """Return the whole report as Markdown, in which no string of the result becomes markup."""
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
    blocks += [_bullets(left_open)] if left_open else []
    blocks += [to_markdown(summary.missing)] if summary.missing else []
    blocks += [] if left_open or summary.missing else [NOTHING_OPEN]
    blocks.append("## Criteria")
    blocks += [_bullets(head.grounds)] if head.grounds else []
    blocks.append(to_markdown(summary.criteria) if summary.criteria else NO_CRITERIA)
    blocks += ["## Which variant to use, continued", *map(to_markdown, later)] if later else []
    for section in details(result):
        blocks += [f"## {escape(section.title)}", *map(escape, section.text), *map(to_markdown, section.tables)]
        blocks += [markdown_block(section.notes)] if section.notes else []
    return "\n\n".join(blocks) + "\n"


def _bullets(lines: tuple[str, ...]) -> str:
    """Return lines of plain text as a Markdown list."""
    return "\n".join(f"- {escape(line)}" for line in lines)
