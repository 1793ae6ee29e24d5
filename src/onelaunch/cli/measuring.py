"""Progress of commands that measure, and their end by SIGTERM.

``study/run.py`` and ``tune.py`` use it.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from onelaunch.cli import output
from onelaunch.workbench.report.summary import direction_words
from onelaunch.workbench.report.text import one_line
from onelaunch.workbench.run import Progress as Step

INTERRUPTED, TERMINATED = 130, 128 + signal.SIGTERM
"""Exit codes after Ctrl-C and after SIGTERM."""


class Terminated(BaseException):
    """SIGTERM. It is no ``SystemExit``, which would be taken for one of the variant that is measured."""


@contextmanager
def reported_termination(partial: Path) -> Iterator[None]:
    """Print on SIGTERM where the finished shapes are saved (the file ``partial`` grows with the run), and exit with its code."""

    def end(signum: int, frame: FrameType | None) -> None:
        del signum, frame
        saved = f"finished shapes are saved in {partial}; continue with --resume" if partial.exists() else "no shape was finished"
        output.stderr().print(f"terminated: {saved}", soft_wrap=True, markup=False)
        raise Terminated

    if threading.current_thread() is not threading.main_thread():  # only the main thread may handle signals
        yield
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    except Terminated:
        raise SystemExit(TERMINATED) from None
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def shown_progress() -> Iterator[Callable[[Step], None]]:
    """Yield a callback that shows the progress of a run on stderr: as a bar on a terminal, else as a line for each step.

    A line has the seconds since the start of the run, as the bar has, so that a log says which step took long.
    """
    console = output.stderr()
    if not console.is_terminal:
        seen: set[str] = set()
        begun = time.monotonic()

        def report_line(step: Step) -> None:
            line = f"[{step.cases_done + 1}/{step.cases}] {_case(step)}"
            if line not in seen:
                seen.add(line)
                console.print(f"{time.monotonic() - begun:5.0f} s {line}", soft_wrap=True, markup=False)

        yield report_line
        return
    heads = (TextColumn("{task.description}", markup=False), BarColumn(bar_width=24), TextColumn("{task.fields[part]}"))
    with Progress(*heads, TimeElapsedColumn(), console=console, transient=True) as bar:
        task = bar.add_task("starting", total=None, part="")

        def report_bar(step: Step) -> None:
            share = step.done / step.total if step.total else 0.0
            bar.update(
                task,
                description=_case(step),
                completed=step.cases_done + share,
                total=step.cases,
                part=f"{step.cases_done + 1} of {step.cases}",
            )

        yield report_bar


def _case(step: Step) -> str:
    return one_line(f"{step.shape}, {direction_words(step.direction)}: {step.step}")
