"""Report as one self-contained HTML page, readable on a phone, in light and dark mode.

Style and plots are inside the page, and nothing is fetched. Every string of a result is escaped: the template escapes its values,
tables and plots escape their own strings, and an author's notes become HTML without raw elements. In case any of that fails, a
content security policy forbids scripts. ``write_report`` of ``report/__init__.py`` calls :func:`render` and writes the page to
``report.html``.
"""

from __future__ import annotations

import functools
from importlib import resources

from jinja2 import Environment, Template
from markdown_it import MarkdownIt
from markdown_it.rules_core import StateCore
from markupsafe import Markup

from onelaunch.workbench.report.details import details
from onelaunch.workbench.report.headline import headline, unexplained
from onelaunch.workbench.report.plots import Plot, plots
from onelaunch.workbench.report.summary import NO_CRITERIA, NOTHING_OPEN, first_tables, summarize
from onelaunch.workbench.report.tables import TONES, Table, to_html
from onelaunch.workbench.report.text import html, one_line, visible
from onelaunch.workbench.result import Result

_NOTES_HEADING = "h4"
"""HTML element of every heading in an author's notes."""


def render(result: Result) -> str:
    """Return the page as a string."""
    summary, head = summarize(result), headline(result)
    first, later = first_tables(summary.use)
    pictures = plots(result)
    return _template().render(
        summary=summary,
        head=head,
        first=first,
        later=later,
        picture=pictures[:1],  # one plot at most stands beside the tables of the first screen; the others follow below
        pictures=pictures[1:],
        left_open=(*unexplained(result, head.grounds), *summary.open),
        sections=details(result),
        tone=TONES.get(summary.decision, "open"),
        nothing_open=NOTHING_OPEN,
        no_criteria=NO_CRITERIA,
        style=Markup(package_file("page.css")),  # noqa: S704 - our own file
        table=_table,
        drawn=_drawn,
        written=notes_html,
    )


def notes_html(notes: str) -> Markup:
    """Return an author's Markdown as HTML, with raw HTML escaped, without pictures, and with links to web pages only.

    Headings become smaller than all headings of the page, so that none can be mistaken for the decision.
    """
    writer = MarkdownIt("commonmark", {"html": False}).enable("table").disable("image")
    writer.validateLink = _is_web_page  # type: ignore[method-assign]
    writer.core.ruler.push("small_headings", _shrink_headings)
    return Markup(writer.render(visible(notes)))  # noqa: S704 - the writer escapes raw HTML


def _shrink_headings(state: StateCore) -> None:
    """Replace every heading of an author's notes by one of a level that the page's own headings do not use."""
    for token in state.tokens:
        if token.type in ("heading_open", "heading_close"):
            token.tag = _NOTES_HEADING


def _is_web_page(address: str) -> bool:
    return address.strip().lower().startswith(("https://", "http://"))


def _table(table: Table) -> Markup:
    return Markup(to_html(table))  # noqa: S704 - to_html escapes all strings


def _drawn(plot: Plot) -> Markup:
    return Markup(plot.svg)  # noqa: S704 - the SVG is serialized from a tree, which escapes all strings


@functools.cache
def _template() -> Template:
    return environment().from_string(package_file("page.html.j2"))


@functools.cache
def environment() -> Environment:
    """Return the environment of the pages' templates, which escapes every value and has the filters ``prose`` and ``line``."""
    made = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    made.filters |= {"prose": html, "line": one_line}
    return made


def package_file(name: str) -> str:
    """Return the text of a file beside this module: a template or the style of the pages."""
    return resources.files(__package__ or "onelaunch.workbench.report").joinpath(name).read_text(encoding="utf-8")
