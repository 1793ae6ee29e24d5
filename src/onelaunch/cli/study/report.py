"""Command ``onelaunch study report``: print or write the report on a stored result, or on all results of a folder.

``onelaunch report`` is the same command. ``compare.py`` and ``judge.py`` take the argument ``ResultPath`` from here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from onelaunch.cli import output
from onelaunch.cli.study.arguments import Log
from onelaunch.errors import OutputUnwritable, ResultExists
from onelaunch.model_studies import report as model_studies
from onelaunch.model_studies.result import ModelResult
from onelaunch.rank_studies import report as rank_studies
from onelaunch.rank_studies.judge import judged
from onelaunch.rank_studies.result import RankResult
from onelaunch.wording import escaped
from onelaunch.workbench import quantities as q
from onelaunch.workbench.files import probe_folder, read_text, within
from onelaunch.workbench.report import RESULT, write_report
from onelaunch.workbench.report.overview import Entry, collect, read_result
from onelaunch.workbench.report.overview_forms import render_terminal, with_reports, write_overview
from onelaunch.workbench.report.terminal import show
from onelaunch.workbench.result import Result
from onelaunch.workbench.result.saved import Saved
from onelaunch.workbench.sinks import Sink, deliver, make_sink

RESULTS = Path("results")
"""Folder of results by default: where runs write theirs."""

ResultPath = Annotated[Path, typer.Argument(metavar="RESULT", help="JSON file of a result.", show_default=False)]


def report(
    result: Annotated[
        Path | None,
        typer.Argument(metavar="RESULT", help="JSON file of a result; with --all a folder of results.", show_default=False),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Report on all results of a folder and the folders below it, by default ./results.")
    ] = False,
    report_dir: Annotated[
        Path | None,
        typer.Option(
            "--report-dir",
            help="Write report.md, report.html and result.json there; with --all one page on all results, and a folder for each.",
            show_default=False,
        ),
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="Print all tables, not only the first screen; with --all each first screen.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace the report of another result in that folder.")] = False,
    log: Log = None,
) -> None:
    """Print the report on a stored result, and optionally write it as Markdown and HTML.

    With --all it is a report on all results of a folder: decisions, speeds, and errors of predictions, for every device. Files
    that are no results are named with the reason. With --log a result is also sent to a sink, such as one that could not be
    reached after the run.

    Example: onelaunch study report results/nvidia-h200/040-linear-rnn.json --report-dir reports/040

    Example: onelaunch report --all --report-dir reports/all
    """
    if everything:
        if log:
            raise typer.BadParameter("it takes one result, so leave out --all.", param_hint="--log")
        _report_on_all(result or RESULTS, report_dir, full=full, force=force)
        return
    if result is None:
        raise typer.BadParameter("name the JSON file of a result, or pass --all for a folder of results.", param_hint="RESULT")
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


def _report_on_all(folder: Path, report_dir: Path | None, *, full: bool, force: bool) -> None:
    """Print the report on all results of a folder, and write it if ``report_dir`` is given."""
    if not folder.is_dir():
        what = "is a file; leave out --all to report on it" if folder.exists() else "does not exist; name a folder of results"
        raise typer.BadParameter(f"the folder {escaped(str(folder))} {what}.", param_hint="RESULT")
    overview, found = collect(folder.resolve(), _read)
    paths = None
    if report_dir:
        if (report_dir / RESULT).exists() and not force:
            raise ResultExists(report_dir / RESULT, argument="folder")
        probe_folder(report_dir)
        studied = {file: result for file, result in found.items() if isinstance(result, Result)}
        places = {file: file.removesuffix(".json") for file in studied}
        with output.busy(f"Writing {q.plural(len(studied), 'report')}"):
            for file, result in studied.items():
                write_into(result, within(report_dir, report_dir / places[file]), force=force)
            paths = write_overview(with_reports(overview, places), report_dir)
    console = output.stdout()
    console.print(render_terminal(overview, console.width))
    for result in found.values() if full else ():
        if isinstance(result, Result):
            console.print()
            show(result, console)
    if paths:
        console.print(f"\nReport: {paths['html']} (also {paths['markdown'].name})", soft_wrap=True, markup=False)


def _read(path: Path) -> tuple[Saved, Callable[[str], Entry]]:
    """Read the result of a study of variants, of models or of ranks."""
    try:
        kind = json.loads(read_text(path)).get("kind")
    except (OSError, ValueError, RecursionError, AttributeError):
        kind = None  # the reader of results says what is wrong
    if kind == "models":
        models = ModelResult.load(path)
        return models, lambda file: model_studies.overview_entry(models, file)
    if kind == "ranks":
        ranks = judged(RankResult.load(path))
        return ranks, lambda file: rank_studies.overview_entry(ranks, file)
    return read_result(path)


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
