"""Command ``onelaunch study report``: print or write the report on a stored result.

``compare.py`` and ``judge.py`` take the argument ``ResultPath`` from here.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from onelaunch.cli import output
from onelaunch.cli.study.arguments import Log
from onelaunch.errors import OutputUnwritable, ResultExists
from onelaunch.workbench.files import probe_folder
from onelaunch.workbench.report import write_report
from onelaunch.workbench.report.terminal import show
from onelaunch.workbench.result import Result
from onelaunch.workbench.sinks import Sink, deliver, make_sink

ResultPath = Annotated[Path, typer.Argument(metavar="RESULT", help="JSON file of a result.", show_default=False)]


def report(
    result: ResultPath,
    report_dir: Annotated[
        Path | None,
        typer.Option("--report-dir", help="Write report.md, report.html and result.json there.", show_default=False),
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Print all tables, not only the first screen.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace the report of another result in that folder.")] = False,
    log: Log = None,
) -> None:
    """Print the report on a stored result, and optionally write it as Markdown and HTML.

    With --log the result is also sent to a sink, such as one that could not be reached after the run.

    Example: onelaunch study report results/nvidia-h200/040-linear-rnn.json --report-dir reports/040
    """
    stored = Result.load(result)
    sinks = [make_sink(spec) for spec in log or ()]
    paths = None
    if report_dir:
        probe_folder(report_dir)
        paths = write_into(stored, report_dir, force=force)
    console = output.stdout()
    show(stored, console, full=full)
    if paths:
        console.print(
            f"\nReport: {paths['html']} (also {paths['markdown'].name}, {paths['json'].name})", soft_wrap=True, markup=False
        )
    send(stored, sinks, (result, *(paths[kind] for kind in ("html", "markdown") if paths)), console)


def send(result: Result, sinks: Sequence[Sink], files: Sequence[Path], console: Console) -> None:
    """Send a stored result to sinks, and print where it can be found. ``run.py`` calls this too."""
    if not sinks:
        return
    with output.busy("Sending the result"):
        lines = deliver(result, sinks, files)
    for line in lines:
        console.print(f"Sent to {line}", soft_wrap=True, markup=False)


def write_into(result: Result, folder: Path, *, force: bool) -> dict[str, Path]:
    """Write a report. The error for a folder that holds another result names ``--report-dir``. ``run.py`` calls this too.

    Raises:
        ResultExists: The folder holds another result, and ``force`` is off.
        OutputUnwritable: The report cannot be written. The message names the file or the folder.
    """
    try:
        return write_report(result, folder, force=force)
    except ResultExists as problem:
        raise ResultExists(problem.path, argument="folder") from None  # shown to the user as --report-dir
    except OutputUnwritable:
        raise
    except OSError as problem:
        raise OutputUnwritable(folder, problem.strerror or str(problem)) from problem
