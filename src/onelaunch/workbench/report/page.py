"""One self-contained page: style and pictures inside, nothing is fetched, readable on a phone, light and dark."""

from __future__ import annotations

import functools
from importlib import resources

from jinja2 import Environment, Template
from markdown_it import MarkdownIt
from markupsafe import Markup

from onelaunch.workbench.report.details import details
from onelaunch.workbench.report.plots import plots
from onelaunch.workbench.report.summary import directions, summarize
from onelaunch.workbench.report.tables import TONES, Table, to_html
from onelaunch.workbench.result import Result


def render(result: Result) -> str:
    """The page as text."""
    summary = summarize(result)
    return _template().render(
        summary=summary,
        sections=details(result),
        uses=tuple(zip(directions(result), summary.use, strict=True)),
        pictures=plots(result),
        tone=TONES.get(summary.decision, "open"),
        style=Markup(_file("page.css")),  # noqa: S704  our own file
        table=_table,
        written=_written,
    )


def _table(table: Table) -> Markup:
    return Markup(to_html(table))  # noqa: S704  it escapes its texts


def _written(notes: str) -> Markup:
    """Markdown of a study's author as HTML; raw HTML stays text, pictures (they would be fetched) stay out."""
    writer = MarkdownIt("commonmark", {"html": False}).enable("table").disable("image")
    return Markup(writer.render(notes))  # noqa: S704  raw HTML is escaped


@functools.cache
def _template() -> Template:
    return Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(_file("page.html.j2"))


def _file(name: str) -> str:
    return resources.files(__package__ or "onelaunch.workbench.report").joinpath(name).read_text(encoding="utf-8")
