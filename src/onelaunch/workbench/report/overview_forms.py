"""Forms of an overview of many results: for a terminal, as Markdown, and as one self-contained HTML page.

``cli/study/report.py`` calls :func:`render_terminal` and :func:`write_overview`. As in a report on one result, every string of a
result is escaped, the page fetches nothing, and its content security policy forbids scripts.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

from jinja2 import Template
from markupsafe import Markup
from rich.console import Group, RenderableType
from rich.text import Text

from onelaunch.workbench.files import write_text
from onelaunch.workbench.report.documents import markdown_table
from onelaunch.workbench.report.overview import Entry, Overview
from onelaunch.workbench.report.page import environment, package_file
from onelaunch.workbench.report.tables import STYLES, TONES, Table, to_html, to_markdown, to_rich
from onelaunch.workbench.report.text import markdown as escape
from onelaunch.workbench.report.text import one_line

NAMES = {"markdown": "report.md", "html": "report.html"}
"""File names of an overview by kind, those of the report on one result."""

NOTHING = "There is no result here. A run writes results/DEVICE/STUDY.json."
"""Text in place of the table of results."""

NO_PREDICTIONS = "No study of these results declares predictions."
"""Text in place of the table of predictions."""


def _sections(overview: Overview) -> tuple[tuple[str, Table], ...]:
    """Return the tables after the first one, with their headings. Only predictions are named where there are none."""
    sections = (
        ("Speed over other libraries", overview.speeds()),
        ("Predictions", overview.predictions()),
        ("Files left out", overview.left_out()),
    )
    return tuple((title, table) for title, table in sections if table.rows or (title == "Predictions" and overview.entries))


# Terminal


def render_terminal(overview: Overview, width: int) -> Group:
    """Return the overview as one group for rich, laid out for a terminal of ``width`` characters."""
    parts: list[RenderableType] = [
        Text(one_line(overview.title), style="bold"),
        Text(one_line(" · ".join(overview.facts)), style="dim"),
        Text(),
    ]
    for entry in overview.entries:
        parts += [*_lines(entry), Text()]
    if not overview.entries:
        parts += [Text(NOTHING), Text()]
    for title, table in _sections(overview):
        parts += [Text(title, style="bold"), to_rich(table, width) if table.rows else Text(NO_PREDICTIONS), Text()]
    return Group(*parts[:-1])


def _lines(entry: Entry) -> list[Text]:
    """Return an entry as lines: a table with sentences would have columns of one word on a narrow terminal."""
    tone = STYLES[TONES.get(entry.decision, "open")]
    facts = (entry.date[:10], f"commit {entry.commit or 'unknown'}", entry.versions, entry.file)
    return [
        Text.assemble((one_line(f"{entry.study} on {entry.device}:"), "bold"), " ", (one_line(entry.decision), f"bold {tone}")),
        Text(one_line(entry.found)),
        *(Text.assemble(("! ", "bold yellow"), one_line(mark.sentence)) for mark in entry.marks),
        Text(one_line(" · ".join(filter(None, facts))), style="dim"),
    ]


# Markdown


def render_markdown(overview: Overview) -> str:
    """Return the overview as Markdown, in which no string of a result becomes markup."""
    blocks = [f"# {escape(overview.title)}", " · ".join(map(escape, overview.facts))]
    table = overview.results()
    rows = [
        [f"[{escape(first)}]({_address(entry, 'markdown')})" if entry.report else escape(first), *map(escape, rest)]
        for entry, (first, *rest) in zip(overview.entries, table.rows, strict=True)
    ]
    blocks.append(markdown_table([column.title for column in table.columns], rows) if rows else NOTHING)
    for title, section in _sections(overview):
        blocks += [f"## {title}", to_markdown(section) if section.rows else NO_PREDICTIONS]
    for entry in overview.entries:
        blocks += [f"## {escape(f'{entry.study} on {entry.device}: {entry.decision}')}", escape(entry.question)]
        blocks += [escape(entry.found), *(f"> {escape(mark.sentence)}" for mark in entry.marks)]
        blocks.append(escape(" · ".join(_facts(entry))))
        blocks += map(to_markdown, entry.tables)
    return "\n\n".join(blocks) + "\n"


def _facts(entry: Entry) -> tuple[str, ...]:
    commit = f"commit {entry.commit}" if entry.commit else "commit unknown"
    facts = (entry.date.replace("T", " ")[:16], commit, entry.versions, entry.file)
    return tuple(filter(None, facts))


def _address(entry: Entry, kind: str) -> str:
    """Return the address of a result's own report, relative to the page of the overview."""
    return quote(f"{entry.report}/{NAMES[kind]}", errors="surrogateescape")


# HTML


def render_html(overview: Overview) -> str:
    """Return the overview as one HTML page."""
    return _template().render(
        overview=overview,
        columns=overview.results().columns,
        rows=tuple(zip(overview.entries, overview.results().rows, strict=True)),
        sections=_sections(overview),
        tones=TONES,
        facts=_facts,
        address=lambda entry: _address(entry, "html"),
        nothing=NOTHING,
        no_predictions=NO_PREDICTIONS,
        style=Markup(package_file("page.css")),  # noqa: S704 - our own file
        table=lambda table: Markup(to_html(table)),  # noqa: S704 - to_html escapes all strings
    )


@functools.cache
def _template() -> Template:
    return environment().from_string(package_file("overview.html.j2"))


def write_overview(overview: Overview, folder: Path) -> dict[str, Path]:
    """Write ``report.md`` and ``report.html`` on all results into a folder.

    Returns:
        Paths of the files by kind: ``markdown``, ``html``.

    Raises:
        OutputUnwritable: A file cannot be written. Each file is written atomically.
    """
    texts = {"markdown": render_markdown(overview), "html": render_html(overview)}
    for kind, text in texts.items():
        write_text(folder / NAMES[kind], text)
    return {kind: folder / name for kind, name in NAMES.items()}


def with_reports(overview: Overview, folders: dict[str, str]) -> Overview:
    """Return the overview with links to the results' own reports, by the names of their files."""
    entries = tuple(replace(entry, report=folders.get(entry.file, "")) for entry in overview.entries)
    return replace(overview, entries=entries)
