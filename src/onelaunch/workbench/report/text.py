"""Escape strings of studies and results for each format of a report: terminal, Markdown, HTML and SVG.

Names, questions, reasons and notes of a run may come from an untrusted file. No string becomes markup (an element, link, heading
or table cell) or a control sequence of a terminal. Characters are shown literally, except that runs of whitespace become one
space, invisible characters become symbols, `` us`` after a number becomes `` µs``, and labels of plots may be cut. One exception
cannot be prevented: GitHub links e-mail addresses and names after ``@`` in a Markdown report, escaped or not. The modules of
``report`` that write a format call these functions, and so does command ``onelaunch study run``.
"""

from __future__ import annotations

import html as standard_html
import re
import unicodedata

from markupsafe import Markup

LONG = 40
"""Number of characters above which a string wraps on a page: a sentence in a wide column, a word without blanks anywhere."""

_CONTROL_PICTURES = 0x2400
"""First of the Unicode symbols for control characters: ``\\x1b`` is shown as the symbol for ESC."""

HIDDEN = frozenset({"Cc", "Cf", "Co", "Cs", "Zl", "Zp"})
"""Unicode categories of characters that are invisible, or that reorder or break the text around them."""

_MICROSECONDS = re.compile(r"(?<=\d) us\b")
"""Unit of microseconds as the sentences of older results spell it."""

_MARKDOWN_ALWAYS = re.compile(r"[\\`*<|~$]")
"""Characters that can begin markup anywhere."""

_MARKDOWN_SOMEWHERE = re.compile(
    r"(?<![^\W_])_+"  # an underscore that no letter or digit precedes
    r"|_+(?![^\W_])"  # or follows; inside a word an underscore is no emphasis
    r"|\](?=[(:\[{])"  # the end of a link's text
    r"|&(?=#?\w+;)"  # an entity
    r"|:(?=//)"  # an address that some readers make a link
    r"|(?<=\bwww)\.",
    re.IGNORECASE,
)
"""Characters that are markup only in some contexts. Elsewhere they are not escaped, so that the source stays readable."""

_MARKDOWN_START = re.compile(
    r"(?:(?P<digits>\d{1,9})(?=[.)](?:\s|$)))?"  # the number of an ordered list
    r"(?:(?<=\d)[.)]|#{1,6}(?=\s|$)|[-+](?=\s|$)|[-=]{2,}\s*$|\+{3}|>|%|:(?=[\s:])|\((?=[^)]*\)=)|\[(?=[ xX]\]))"
)
"""Characters that begin a heading, quotation, list, rule, directive, comment, target or task at the start of a line."""

_OPTION = re.compile(r"(?<![\w-])--\w[\w-]*(?: [\w.]+)?")
"""A command-line option with its value, such as ``--scale full``."""


def visible(text: str) -> str:
    """Return the text with every invisible or control character replaced by a symbol, except line breaks and tabs."""
    return text if text.isprintable() else "".join(_symbol(character) for character in text)


def one_line(text: str) -> str:
    """Return the text as one line without invisible characters, with ``µs`` for ``us`` after a number."""
    return _MICROSECONDS.sub(" µs", visible(" ".join(text.split())))


def clipped(text: str, most: int) -> str:
    """Return the text on one line of at most ``most`` characters, the rest replaced by an ellipsis."""
    line = one_line(text)
    return line if len(line) <= most else f"{line[: most - 1].rstrip()}…"


def markdown(text: str) -> str:
    """Return the text as one line that CommonMark shows as it is and without a link, in a paragraph, list or table cell.

    GitHub shows the same line, except that it links e-mail addresses and names after ``@``. It looks for these in the rendered
    text, in which no escapes are left.
    """
    escaped = _MARKDOWN_ALWAYS.sub(r"\\\g<0>", one_line(text))
    escaped = _MARKDOWN_SOMEWHERE.sub(lambda found: "".join(f"\\{mark}" for mark in found[0]), escaped)
    begins = _MARKDOWN_START.match(escaped)
    if begins:
        at = begins.end("digits") if begins["digits"] else 0
        escaped = f"{escaped[:at]}\\{escaped[at:]}"
    return re.sub(r"(#+)$", r"\\\1", escaped)  # number signs at the end of a heading would be dropped


def markdown_block(text: str) -> str:
    """Return text of several lines as a Markdown code block, whose fence is longer than every run of backticks in the text."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{visible(text)}\n{fence}"


def html(text: str) -> Markup:
    """Return the text escaped for HTML. Options such as ``--scale full`` are marked so that no line breaks inside them."""
    line = one_line(text)
    parts: list[str] = []
    end = 0
    for option in _OPTION.finditer(line):
        parts += [
            standard_html.escape(line[end : option.start()]),
            f'<span class="option">{standard_html.escape(option[0])}</span>',
        ]
        end = option.end()
    return Markup("".join([*parts, standard_html.escape(line[end:])]))  # noqa: S704 - every part is escaped


def attribute(text: str) -> str:
    """Return the text escaped for a quoted attribute of HTML or SVG."""
    return standard_html.escape(one_line(text), quote=True)


def _symbol(character: str) -> str:
    if character in "\n\t" or unicodedata.category(character) not in HIDDEN:
        return character
    if ord(character) < ord(" "):
        return chr(_CONTROL_PICTURES + ord(character))
    return "\u2421" if character == "\x7f" else "\ufffd"
