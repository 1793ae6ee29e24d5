"""Where commands print: results to stdout, progress to stderr, colours only on a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

if TYPE_CHECKING:
    from onelaunch.workbench.report.tables import Table  # with pydantic, which only tables need


def stdout() -> Console:
    """A console on the current stdout."""
    return Console(highlight=False)


def stderr() -> Console:
    """A console on the current stderr."""
    return Console(stderr=True, highlight=False)


def heading(console: Console, title: str, text: str = "") -> None:
    """A bold line, and what belongs to it."""
    console.print(Text.assemble((title, "bold"), "  " if text else "", text))


def table(console: Console, content: Table) -> None:
    """A table as wide as the console."""
    from onelaunch.workbench.report.tables import to_rich

    console.print(to_rich(content, console.width))


def status_text(word: str) -> Text:
    """A status in its colour."""
    from onelaunch.workbench.report.tables import STYLES, TONES

    return Text(word, style=STYLES[TONES[word]] if word in TONES else "")


@contextmanager
def busy(message: str) -> Iterator[None]:
    """Say what takes a while: a spinner on a terminal, one line elsewhere."""
    console = stderr()
    if console.is_terminal:
        with console.status(message):
            yield
    else:
        console.print(message)
        yield
