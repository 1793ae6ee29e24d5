"""Output of commands: results go to stdout, progress to stderr, and colours only to a terminal.

The modules of commands in ``cli`` and ``cli/study`` print with these functions. ``application.py`` calls :func:`drop_stdout` for
a closed pipe.
"""

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
    from onelaunch.workbench.report.tables import Table  # imports pydantic, which only tables need


class Stdout:
    """Wrapper of the current stdout. If it cannot be written, as on a full disk, an error names it."""

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
        """Turn an error of the operating system into :class:`OutputUnwritable`."""
        try:
            yield
        except BrokenPipeError:
            raise
        except OSError as problem:
            drop_stdout()
            raise OutputUnwritable("stdout", problem.strerror or str(problem), remedy="Redirect it to another file.") from problem


def drop_stdout() -> None:
    """Redirect stdout to the null device, so that the interpreter does not try again to flush its buffer when it exits."""
    with suppress(OSError, ValueError, AttributeError):  # the stdout of a test has no file descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class OneConsole(Console):
    """Console that raises :class:`BrokenPipeError` if its reader ends, as with ``| head``. Rich would exit instead."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def stdout() -> Console:
    """Return a console on the current stdout."""
    return OneConsole(highlight=False, file=cast("TextIO", Stdout()) if sys.stdout else None)


def stderr() -> Console:
    """Return a console on the current stderr."""
    return OneConsole(stderr=True, highlight=False)


def heading(console: Console, title: str, text: str = "") -> None:
    """Print a bold title, and a text after it on the same line."""
    console.print(Text.assemble((title, "bold"), "  " if text else "", text))


def table(console: Console, content: Table) -> None:
    """Print a table that fits the width of the console."""
    from onelaunch.workbench.report.tables import to_rich

    console.print(to_rich(content, console.width))


def entries(console: Console, title: str, rows: Iterable[tuple[str, str, str]]) -> None:
    """Print a list of names, each with a status and a text that wraps between words.

    A word that is longer than a line, such as a path, is not broken, since people paste this output into issues.
    """
    rows = list(rows)
    names, statuses = (max(len(row[index]) for row in rows) + 2 for index in (0, 1))
    console.print(Text(title, style="italic"))
    for name, status, text in rows:
        width = max(24, console.width - names - statuses - 1)
        first, *more = textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False) or [""]
        rest = "".join(f"\n{' ' * (names + statuses + 1)}{line}" for line in more)
        line = Text.assemble(f" {name:{names}}", _status_text(status), " " * (statuses - len(status)), first, rest)
        console.print(line, soft_wrap=True)
    console.print()


def _status_text(word: str) -> Text:
    """Return a status word in its colour."""
    from onelaunch.workbench.report.tables import STYLES, TONES

    return Text(word, style=STYLES[TONES[word]] if word in TONES else "")


@contextmanager
def busy(message: str) -> Iterator[None]:
    """Show that something takes a while: a spinner on a terminal, one line elsewhere."""
    console = stderr()
    if console.is_terminal:
        with console.status(message):
            yield
    else:
        console.print(message)
        yield
