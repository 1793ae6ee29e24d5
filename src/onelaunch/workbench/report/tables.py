"""Tables as plain values, and their rendering as Markdown, HTML and for a terminal.

Reports and the commands of ``onelaunch`` make and print such tables.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from onelaunch.workbench.report.text import LONG, attribute, html, one_line
from onelaunch.workbench.report.text import markdown as _markdown

if TYPE_CHECKING:
    import rich.table

Tone = Literal["good", "bad", "open", "quiet"]
"""Meaning of a status word, which determines its colour."""

TONES: Mapping[str, Tone] = {
    "proceed": "good",
    "met": "good",
    "ok": "good",
    "correct": "good",
    "faster": "good",
    "feasible": "good",
    "runs": "good",
    "debug": "bad",
    "abandon": "bad",
    "missed": "bad",
    "incorrect": "bad",
    "invalid": "bad",
    "error": "bad",
    "crashed": "bad",
    "timed out": "bad",
    "slower": "bad",
    "missing": "bad",
    "measure more": "open",
    "inconclusive": "open",
    "equal": "quiet",
    "infeasible": "open",
    "interrupted": "open",
    "peer outside the gate": "open",
    "differs": "open",
    "ambiguous": "open",
    "not decided": "open",
    "out of memory": "open",
    "not measured": "quiet",
    "unsupported": "quiet",
    "not installed": "quiet",
    "cannot run": "quiet",
    "same": "quiet",
    "met (excluded)": "quiet",
    "missed (excluded)": "quiet",
    "inconclusive (excluded)": "quiet",
    "equal (excluded)": "quiet",
    "not measured (excluded)": "quiet",
    "infeasible (excluded)": "quiet",
}
"""Tone of each status word. Colour never carries information that the word does not."""

STYLES: Mapping[Tone, str] = {"good": "green", "bad": "red", "open": "yellow", "quiet": "dim"}
"""Style of each tone in a terminal."""

ROOMY = 100
"""Width of a terminal, in characters, from which on optional columns are shown."""


@dataclass(frozen=True)
class Column:
    """Heading and layout of a column."""

    title: str
    right: bool = False
    """True for a column of numbers, which are aligned to the right."""
    optional: bool = False
    """True for a column that narrow terminals leave out."""


@dataclass(frozen=True)
class Table:
    """Table of strings with a title, and a note on what a reader must know about all rows."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


def columns(*titles: str) -> tuple[Column, ...]:
    """Return columns from titles. The prefix ``>`` aligns a column to the right, ``?`` makes it optional, ``?>`` does both.

    An optional column is left out where there is little room, such as on a phone.
    """
    return tuple(Column(title.lstrip("?>"), ">" in title[:2], title.startswith("?")) for title in titles)


def words(status: str) -> str:
    """Return a stored status with spaces: ``not measured`` for ``not_measured``."""
    return status.replace("_", " ")


def to_markdown(table: Table, *, title: bool = True) -> str:
    """Return a Markdown table whose columns are aligned in the source too."""
    heads = [_markdown(column.title) for column in table.columns]
    rows = [[_markdown(text) for text in row] for row in table.rows]
    widths = [max(3, *(len(row[index]) for row in [heads, *rows])) for index in range(len(heads))]
    lines = [_markdown_row(heads, widths, table.columns)]
    rules = ["-" * (width - 1) + (":" if column.right else "-") for width, column in zip(widths, table.columns, strict=True)]
    lines.append(_markdown_row(rules, widths, table.columns))
    lines += [_markdown_row(row, widths, table.columns) for row in rows]
    head = [f"**{_markdown(table.title)}**", ""] if title and table.title else []
    note = ["", _markdown(table.note)] if table.note else []
    return "\n".join(head + lines + note)


def to_html(table: Table) -> str:
    """Return an HTML table.

    On a narrow screen a table with sentences stacks its cells under their headings, a table of numbers scrolls sideways, and
    optional columns are hidden.
    """
    stacks = ' class="stacks"' if any(len(text) > LONG for row in table.rows for text in row) else ""
    parts = ['<figure class="table">']
    if table.title:
        parts.append(f"<figcaption>{html(table.title)}</figcaption>")
    parts.append(f'<div class="scroll" tabindex="0"><table{stacks}><thead><tr>')
    parts += [f"<th{_html_class(column)}>{html(column.title)}</th>" for column in table.columns]
    parts.append("</tr></thead><tbody>")
    for row in table.rows:
        parts.append(f"<tr>{''.join(map(_html_cell, row, table.columns))}</tr>")
    parts.append("</tbody></table></div>")
    if table.note:
        parts.append(f'<p class="note">{html(table.note)}</p>')
    return "\n".join([*parts, "</figure>"])


def to_rich(table: Table, width: int) -> rich.table.Table:
    """Return a table for a terminal of ``width`` characters."""
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    table = _plain(table)
    shown = [index for index, column in enumerate(table.columns) if width >= ROOMY or not column.optional]
    drawn = RichTable(
        title=Text(table.title) if table.title else None,
        title_justify="left",
        title_style="italic",
        caption=Text(table.note) if table.note else None,
        caption_justify="left",
        caption_style="dim",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    whole = _fits(table, shown, width)
    longest = {} if not whole else {index: _longest_word(table, index) for index in shown}
    for index in shown:
        column = table.columns[index]
        right = column.right
        drawn.add_column(
            Text(column.title),
            justify="right" if right else "left",
            no_wrap=right and whole,
            overflow="fold",
            min_width=longest.get(index),
        )
    for row in table.rows:
        drawn.add_row(*(Text(row[index], style=STYLES[TONES[row[index]]] if row[index] in TONES else "") for index in shown))
    if whole and _is_wider(drawn, width):
        for column, chosen in zip(drawn.columns, _widths(table, shown, width), strict=True):
            column.width = chosen
    return drawn


def _is_wider(drawn: rich.table.Table, width: int) -> bool:
    """Return whether rich draws a table wider than ``width``, so that a terminal would cut its cells and its note off.

    Rich narrows all columns alike, and then widens those again that are narrower than their longest word.
    """
    from rich.console import Console

    console = Console(width=width, file=io.StringIO())
    text = "".join(segment.text for segment in console.render(drawn))
    return max(map(len, text.splitlines())) > width


def _widths(table: Table, shown: list[int], width: int) -> list[int]:
    """Return widths of columns that fit together: the least that each needs, and more where a cell would have most lines."""
    cells = {index: [table.columns[index].title, *(row[index] for row in table.rows)] for index in shown}
    wanted = {index: max(map(len, texts)) for index, texts in cells.items()}
    found = {index: max(wanted[index] if table.columns[index].right else _longest_word(table, index), 1) for index in shown}
    for _ in range(width - 2 * len(shown) - sum(found.values())):
        narrowest = max(shown, key=lambda index: wanted[index] / found[index])
        found[narrowest] += found[narrowest] < wanted[narrowest]
    return list(found.values())


def _plain(table: Table) -> Table:
    """Return the table with every string on one line and without invisible characters."""
    heads = tuple(replace(column, title=one_line(column.title)) for column in table.columns)
    rows = tuple(tuple(map(one_line, row)) for row in table.rows)
    return Table(one_line(table.title), heads, rows, one_line(table.note))


def _fits(table: Table, shown: list[int], width: int) -> bool:
    """Return whether the columns fit if numbers are not broken and words wrap."""
    needed = 2 * len(shown)  # one space of padding and one between columns
    for index in shown:
        widest = max(len(text) for text in [table.columns[index].title, *(row[index] for row in table.rows)])
        needed += widest if table.columns[index].right else _longest_word(table, index)
    return needed <= width


def _longest_word(table: Table, index: int) -> int:
    """Return the length of a column's longest word. Words of more than ``LONG`` characters may be broken and are left out."""
    cells = [table.columns[index].title, *(row[index] for row in table.rows)]
    return max((len(word) for text in cells for word in text.split() if len(word) <= LONG), default=0)


def _markdown_row(cells: Iterable[str], widths: list[int], heads: tuple[Column, ...]) -> str:
    cells = (
        text.rjust(width) if column.right else text.ljust(width) for text, width, column in zip(cells, widths, heads, strict=True)
    )
    return f"| {' | '.join(cells)} |"


def _html_cell(text: str, column: Column) -> str:
    tone = TONES.get(text)
    content = f'<span class="{tone}">{html(text)}</span>' if tone else html(text)
    return f'<td{_html_class(column, text)} data-head="{attribute(column.title)}">{content}</td>'


def _html_class(column: Column, text: str = "") -> str:
    """Return the class attribute of a cell: ``long`` stands for a sentence, ``digest`` for one long word such as a hash."""
    classes = ["right"] if column.right else ["long" if " " in text else "digest"] if len(text) > LONG else []
    if column.optional:
        classes.append("optional")
    return f' class="{" ".join(classes)}"' if classes else ""
