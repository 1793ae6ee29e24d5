"""Where commands print: results to stdout, progress to stderr, colours only on a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.text import Text

from onelaunch.workbench.report.tables import STYLES, TONES, Table, to_rich


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
    console.print(to_rich(content, console.width))


def status_text(word: str) -> Text:
    """A status in its colour."""
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
