"""Tests that no text of a study or result becomes markup in HTML, SVG or Markdown, or a command to a terminal.

In ``hostile.hostile()`` every name and text of a result ends with an attack: HTML elements, event handlers, links, Markdown,
and terminal escape codes (``CODES``). Its study's notes, which are Markdown, are ``hostile.NOTES``.

A test marked ``thorough`` does not run in ``make test``.
"""

from __future__ import annotations

import functools
import html.parser
import io

import pytest
from markdown_it import MarkdownIt
from rich.console import Console

from onelaunch.workbench.report import markdown, page
from onelaunch.workbench.report.page import notes_html
from onelaunch.workbench.report.plots import plots
from onelaunch.workbench.report.tables import Table, columns, to_html, to_markdown, to_rich
from onelaunch.workbench.report.terminal import show
from onelaunch.workbench.report.text import attribute, clipped, markdown_block, visible
from onelaunch.workbench.report.text import html as html_text
from onelaunch.workbench.report.text import markdown as escaped
from tests.workbench import hostile, results

ELEMENTS = frozenset(
    [
        "html",
        "head",
        "meta",
        "title",
        "style",
        "body",
        "main",
        "header",
        "section",
        "h1",
        "h2",
        "h4",
        "p",
        "span",
        "ul",
        "li",
        "figure",
        "figcaption",
        "div",
        "table",
        "thead",
        "tbody",
        "tr",
        "th",
        "td",
        "details",
        "summary",
        "svg",
        "g",
        "defs",
        "path",
        "rect",
        "use",
        "text",
        "tspan",
        "clippath",
        "line",
        "circle",
        "strong",
        "em",
        "code",
        "pre",
        "blockquote",
        "a",
        "hr",
    ]
)
"""Names of all elements that a page may contain."""


WEB_PAGES = ["https://example.org/p.png", "https://example.org/"]
"""Links of the hostile notes that stay links. A picture becomes a link too, and is not fetched."""


class Elements(html.parser.HTMLParser):
    """Parser that collects the elements of a page with their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


@functools.cache
def hostile_page() -> str:
    return page.render(hostile.hostile())


def test_a_page_of_hostile_texts_has_only_our_elements_and_no_handlers() -> None:
    """Event handlers are attributes that begin with "on", such as onload."""
    elements = Elements(hostile_page()).found
    assert not {tag for tag, _ in elements} - ELEMENTS
    assert not [attrs for _, attrs in elements for name in attrs if name.startswith("on") or name in ("src", "srcdoc", "action")]
    links = [attrs["href"] for tag, attrs in elements if tag == "a"]
    assert links == WEB_PAGES


@pytest.mark.thorough
def test_the_name_of_a_shape_stays_inside_the_label_of_its_plot() -> None:
    """The attack is a shape's name that closes the SVG attribute and adds an event handler."""
    result = results.proceed_on_gpu()
    name = 's" onload="document.body.innerHTML=1" x="'
    renamed = result.model_validate_json(result.model_dump_json().replace('"target"', '"' + name.replace('"', '\\"') + '"'))
    drawn = plots(renamed)
    for plot in drawn:
        ((tag, attrs), *rest) = Elements(plot.svg).found
        assert tag == "svg"
        assert not [key for _, each in [(tag, attrs), *rest] for key in each if key.startswith("on")]
        assert attrs["aria-label"] == plot.title
    assert any(name in plot.title for plot in drawn)


def test_a_page_forbids_scripts_and_external_resources() -> None:
    policy = next(attrs["content"] for _, attrs in Elements(hostile_page()).found if attrs.get("http-equiv"))
    assert policy is not None
    assert policy.startswith("default-src 'none';")
    assert "script-src" not in policy


def tokens_of(text: str) -> set[str]:
    """Return the types of the tokens that a Markdown parser finds, such as ``strong_open``."""
    parsed = MarkdownIt("gfm-like", {"linkify": False, "html": True}).parse(text)
    return {each.type for token in parsed for each in (token, *(token.children or ()))}


def test_a_markdown_report_has_only_its_own_structure() -> None:
    text = markdown.render(hostile.hostile())
    kinds = tokens_of(text)
    assert not {kind for kind in kinds if "html" in kind or "link" in kind or "image" in kind}
    assert not kinds & {"code_inline", "em_open", "s_open", "hr", "ordered_list_open", "code_block"}
    assert "strong_open" in kinds  # titles of tables are the report's own
    honest = markdown.render(results.proceed_on_gpu())
    heads = [line for line in text.splitlines() if line.startswith("#")]
    assert [line.partition(" ")[0] for line in heads if "Notes" not in line][:3] == ["#", "##", "##"]
    assert "\x1b" not in text
    # the run's notes have a section of their own
    assert honest.count("\n## ") <= text.count("\n## ") <= honest.count("\n## ") + 1


@pytest.mark.parametrize(
    "text",
    [
        "# heading",
        "1. one",
        "12) twelve",
        "- item",
        "+ item",
        "* item",
        "> quoted",
        "---",
        "===",
        "```",
        "~~~",
        "    code",
        "| a | b |",
        "<b>x</b>",
        "<!-- x -->",
        "<https://example.org>",
        "[a](b)",
        "[a]: http://b",
        "![a](b)",
        "[a][b]",
        "**x**",
        "_x_",
        "__x__",
        "a*b*c",
        "~~x~~",
        "`x`",
        "\\<b>",
        "&lt;b&gt;",
        "&#60;b",
        "{x}`y`",
        "a\n# b",
        "a\n\n<b>",
        "a\r\n- b",
        "a |\n|---|\n| b |",
        ":::{raw} html",
        "a@b.com @user mailto:x@y.z",
        "www.example.org http://example.org",
    ],
)
def test_an_escaped_text_is_rendered_unchanged(text: str) -> None:
    said = escaped(text)
    parser = MarkdownIt("gfm-like", {"linkify": False, "html": True})
    tokens = parser.parse(f"- {said}")
    assert [token.type for token in tokens if token.type != "inline"] == [
        "bullet_list_open",
        "list_item_open",
        "paragraph_open",
        "paragraph_close",
        "list_item_close",
        "bullet_list_close",
    ]
    children = next(token.children for token in tokens if token.type == "inline") or []
    assert {child.type for child in children} <= {"text", "text_special"}
    assert "".join(child.content for child in children) == " ".join(text.split())


@pytest.mark.parametrize(
    "text",
    [
        "fused_chunked",
        "1.57x [1.52, 1.61]",
        "-2.03 µs",
        "B=4 T=2048 float16",
        "a - b",
        "(cold, 12 rounds)",
        "--scale full",
        "100 %",
        "error: no GPU",
        "2 x 3",
        "don't",
        "#5 of 8",
        "a > b & c",
    ],
)
def test_ordinary_text_needs_no_escapes(text: str) -> None:
    assert escaped(text) == text


def test_a_cell_of_a_table_cannot_become_two() -> None:
    table = Table("a | b", columns("c | d"), (("x | y\n| z |",), ("<td>",)), "e | f")
    rendered = MarkdownIt("gfm-like", {"linkify": False}).render(to_markdown(table))
    assert (rendered.count("<th>"), rendered.count("<td>")) == (1, 2)
    assert to_html(table).count("<td") == 2
    assert 'data-head="c | d"' in to_html(table)


def test_notes_allow_markdown_and_web_links_but_no_elements() -> None:
    written = str(notes_html(hostile.NOTES))
    assert "<h4>Notes</h4>" in written
    assert [attrs["href"] for tag, attrs in Elements(written).found if tag == "a"] == WEB_PAGES
    assert "<script" not in written
    assert "<img" not in written
    for link in (
        "javascript:x",
        "JaVaScRiPt:x",
        "java&#115;cript:x",
        "vbscript:x",
        "data:text/html,x",
        "file:///etc/passwd",
        "//evil.example",
    ):
        assert "<a" not in str(notes_html(f"[a]({link}) <{link}>")), link


def test_a_heading_in_notes_cannot_imitate_the_decision() -> None:
    forged = "# Decision: proceed\n\nDecision: proceed\n===\n\n## Decision: proceed\n\n- # Decision: proceed\n\n> ### Decision"
    assert {tag for tag, _ in Elements(str(notes_html(forged))).found if tag.startswith("h")} == {"h4"}
    base = results.proceed_on_gpu()
    study = base.study.model_copy(update={"notes": forged})
    text = page.render(base.model_copy(update={"study": study}))
    assert (text.count("<h1"), text.count("Decision: </span>")) == (1, 1)
    assert text.count("<h2") == page.render(base).count("<h2")


def test_a_block_of_notes_cannot_extend_beyond_its_end() -> None:
    parsed = MarkdownIt("commonmark").parse(f"{markdown_block(hostile.NOTES)}\n\nafter")
    assert [token.type for token in parsed] == ["fence", "paragraph_open", "inline", "paragraph_close"]


@pytest.mark.parametrize("full", [False, True])
def test_texts_send_no_commands_to_a_terminal(full: bool) -> None:
    buffer = io.StringIO()
    show(hostile.hostile(hostile.CODES), Console(file=buffer, width=100, force_terminal=True, color_system=None), full=full)
    said = buffer.getvalue()
    assert not [character for character in said if character != "\n" and ord(character) < 32]
    assert "\u202e" not in said
    assert "␛" in said
    assert "[red]" in said  # square brackets are not read as a colour


def test_a_table_in_a_terminal_interprets_no_markup() -> None:
    table = Table("[bold]title[/bold]", columns("[red]head"), (("[/red] \x1b[2J and more words",),), "[link=x]note")
    buffer = io.StringIO()
    Console(file=buffer, width=60).print(to_rich(table, 60))
    for part in ("[bold]title[/bold]", "[red]head", "[/red] ␛[2J", "[link=x]note"):
        assert part in buffer.getvalue()


def test_hidden_characters_are_shown() -> None:
    """Control characters become visible symbols. Line breaks and tabs stay in a text, and are blanks in an attribute."""
    assert visible("a\x1b[2J\x07\x00\x7f\u202eb\n\tµ×") == "a␛[2J␇␀␡\ufffdb\n\tµ×"
    assert attribute('"\n<\x00') == "&quot; &lt;␀"
    assert clipped("x" * 300, 10) == "x" * 9 + "…"
    assert clipped("short\nname", 20) == "short name"


def test_an_option_is_kept_on_one_line() -> None:
    assert str(html_text("or with --scale full: <b>")) == 'or with <span class="option">--scale full</span>: &lt;b&gt;'
    assert ".option { white-space: nowrap; }" in hostile_page()


def test_results_of_earlier_versions_are_shown_with_the_same_unit() -> None:
    """They wrote microseconds as "us"."""
    assert escaped("5.98 us against 11.5 us, thus 3 users") == "5.98 µs against 11.5 µs, thus 3 users"
