"""Where commands print: results to stdout, progress to stderr, colours only on a terminal."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TextIO, cast

from rich.console import Console
from rich.text import Text

from onelaunch.errors import OutputUnwritable

if TYPE_CHECKING:
    from onelaunch.workbench.report.tables import Table  # with pydantic, which only tables need


class Stdout:
    """The current stdout. What cannot be written, as on a full disk, is an error that names it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stdout, name)

    def write(self, text: str) -> int:
        with self._named():
            return sys.stdout.write(text)

    def flush(self) -> None:
        with self._named():
            sys.stdout.flush()

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            raise
        except OSError as problem:
            drop_stdout()
            raise OutputUnwritable("stdout", problem.strerror or str(problem), remedy="Lead it elsewhere.") from problem


def drop_stdout() -> None:
    """Lead stdout to nowhere, so that the interpreter's end does not try again to write what is left in its buffer."""
    with suppress(OSError, ValueError, AttributeError):  # a test's stdout has no descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class OneConsole(Console):
    """Console whose reader may go away, as with ``| head``: the command then ends as others do."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def stdout() -> Console:
    """A console on the current stdout."""
    return OneConsole(highlight=False, file=cast("TextIO", Stdout()) if sys.stdout else None)


def stderr() -> Console:
    """A console on the current stderr."""
    return OneConsole(stderr=True, highlight=False)


def heading(console: Console, title: str, text: str = "") -> None:
    """A bold line, and what belongs to it."""
    console.print(Text.assemble((title, "bold"), "  " if text else "", text))


def table(console: Console, content: Table) -> None:
    """A table as wide as the console."""
    from onelaunch.workbench.report.tables import to_rich

    console.print(to_rich(content, console.width))


def entries(console: Console, title: str, rows: Iterable[tuple[str, str, str]]) -> None:
    """Print a list of names, each with a status and a text that wraps between words.

    A word that is longer than a line, such as a path, stays whole, also in a file: this is what people paste into issues.
    """
    rows = list(rows)
    names, statuses = (max(len(row[index]) for row in rows) + 2 for index in (0, 1))
    console.print(Text(title, style="italic"))
    for name, status, text in rows:
        room = max(24, console.width - names - statuses - 1)
        first, *more = textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False) or [""]
        rest = "".join(f"\n{' ' * (names + statuses + 1)}{line}" for line in more)
        line = Text.assemble(f" {name:{names}}", status_text(status), " " * (statuses - len(status)), first, rest)
        console.print(line, soft_wrap=True)
    console.print()


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
