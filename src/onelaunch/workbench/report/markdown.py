"""The report as Markdown."""

from __future__ import annotations

from onelaunch.workbench.report.details import details
from onelaunch.workbench.report.summary import summarize
from onelaunch.workbench.report.tables import to_markdown
from onelaunch.workbench.result import Result


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
