"""``onelaunch study report``: read a stored result again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from onelaunch.cli import output
from onelaunch.workbench.report import write_report
from onelaunch.workbench.report.terminal import show
from onelaunch.workbench.result import Result

ResultPath = Annotated[Path, typer.Argument(metavar="RESULT", help="A result's JSON file.", show_default=False)]


def report(
    result: ResultPath,
    report_dir: Annotated[
        Path | None,
        typer.Option("--report-dir", help="Write report.md, report.html and result.json there.", show_default=False),
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Print all tables, not the first screen alone.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace the report of another result in that folder.")] = False,
) -> None:
    """Print the report on a stored result, and write it as Markdown and HTML if asked to.

    Example: onelaunch study report results/nvidia-h200/040-linear-rnn.json --report-dir reports/040
    """
    stored = Result.load(result)
    console = output.stdout()
    show(stored, console, full=full)
    if report_dir:
        paths = write_report(stored, report_dir, force=force)
        console.print(
            f"\nReport: {paths['html']} (also {paths['markdown'].name}, {paths['json'].name})", soft_wrap=True, markup=False
        )
