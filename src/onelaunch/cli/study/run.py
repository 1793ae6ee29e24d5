"""Command ``onelaunch study run``: run a study, save its result and write its report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

from onelaunch.cli import output
from onelaunch.cli.measuring import INTERRUPTED, reported_termination, shown_progress
from onelaunch.cli.study.arguments import (
    AcrossCommits,
    Anew,
    CallLimit,
    Devices,
    InProcess,
    Log,
    PricePerHour,
    Processes,
    Resume,
    ScaleName,
    StudyName,
    TimeCap,
    Tuning,
)
from onelaunch.cli.study.report import send, write_into
from onelaunch.device.peaks import ceilings
from onelaunch.errors import ResultExists
from onelaunch.workbench.files import probe_file, probe_folder, within
from onelaunch.workbench.report import RESULT
from onelaunch.workbench.report.terminal import show
from onelaunch.workbench.result import Result
from onelaunch.workbench.run import (
    ResultUnsaved,
    default_path,
    is_resumable,
    partial_path,
    resolve_all,
    run_study,
    run_to_resume,
)
from onelaunch.workbench.sinks import Sink, make_sink
from onelaunch.workbench.study import Study
from onelaunch.workbench.study.read import find_study
from onelaunch.workbench.supervise import CALL_LIMIT_SECONDS, slug_of


def run(
    name: StudyName,
    device: Devices = "auto",
    scale: ScaleName = None,
    rounds: Annotated[
        int | None, typer.Option("--rounds", min=3, help="Number of timing rounds.", show_default="the study's")
    ] = None,
    time_cap: TimeCap = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Take a first look: measure only the first direction, and each shape for 3 seconds.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", help="JSON file of the result, or a folder for result and report.", show_default="results/DEVICE/NAME.json"
        ),
    ] = None,
    report_dir: Annotated[
        Path | None,
        typer.Option("--report-dir", help="Folder of the report.", show_default="reports/DEVICE/NAME"),
    ] = None,
    count: Annotated[
        bool,
        typer.Option(
            "--count/--no-count",
            help="Take what criteria ask for beside times: DRAM bytes by hardware counters, launches, barriers and host times.",
        ),
    ] = True,
    count_all: Annotated[bool, typer.Option("--count-all", help="Count DRAM bytes at every shape (slow).")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing result and report.")] = False,
    resume: Resume = False,
    across_commits: AcrossCommits = False,
    anew: Anew = None,
    processes: Processes = 0,
    tuning: Tuning = None,
    in_process: InProcess = False,
    call_limit: CallLimit = CALL_LIMIT_SECONDS,
    price_per_hour: PricePerHour = None,
    log: Log = None,
) -> None:
    """Run a study: plan, verify, time, count, judge, decide, report.

    A child process measures. A variant that ends it, or does not return, gets a status, and the others are measured without it.
    After Ctrl-C, everything that was measured is saved and reported; --resume measures the rest. A finished result is never
    overwritten without --force.

    Example: onelaunch study run 040-linear-rnn --device cpu --rounds 5
    """
    _, study = find_study(name)
    sinks = [make_sink(spec) for spec in log or ()]
    devices = resolve_all(device)
    where = devices[0]
    result_path, report_path = _paths(study, where, out, report_dir)
    replace = _probe(study, result_path, report_path, force=force, resume=resume, anew=anew or ())
    if in_process or where == "cpu":  # else the child does it, since this process must not initialise CUDA
        with output.busy(f"Reading the measured peaks of {where} (measured once, then stored)"):
            ceilings(where)
    counted: bool | Literal["all"] = "all" if count and count_all else count
    unsaved: ResultUnsaved | None = None
    with reported_termination(partial_path(result_path)), shown_progress() as report:
        try:
            result = run_study(
                study,
                device=",".join(devices),
                scale=scale or "auto",
                rounds=rounds,
                time_cap=time_cap,
                quick=quick,
                count=counted,
                on_progress=report,
                save_to=result_path,
                force=force,
                resume=resume,
                across_commits=across_commits,
                anew=anew or (),
                processes=processes,
                in_process=in_process,  # by default run_study, called from Python, measures in the calling process
                call_limit=call_limit,
                price_per_hour=price_per_hour,
                tuning=tuning,
            )
        except ResultUnsaved as problem:
            unsaved, result = problem, problem.result
    _finish(result, unsaved, result_path, report_path, replace=replace, sinks=sinks)


def _probe(study: Study, result_path: Path, report_path: Path, *, force: bool, resume: bool, anew: Sequence[str]) -> bool:
    """Check that a result and a report can be written, and return whether they may replace existing ones."""
    probe_file(result_path)
    probe_folder(report_path)
    replace = force or (
        resume and run_to_resume(study, result_path, anew=anew) is not None
    )  # a resumed run replaces its own partial result and report
    for path, argument in ((result_path, "save_to"), (partial_path(result_path), "save_to"), (report_path / RESULT, "folder")):
        if path.exists() and not replace:
            raise ResultExists(path, argument=argument, resumable=argument == "save_to" and is_resumable(path))
    return replace


def _finish(
    result: Result, unsaved: ResultUnsaved | None, result_path: Path, report_path: Path, *, replace: bool, sinks: Sequence[Sink]
) -> None:
    """Write the report, print it with the paths of the written files, and send the result to the sinks."""
    # The report is written before anything is printed, because printing fails if the reader of stdout ends.
    report, failed = None, None
    if unsaved is None:
        try:
            report = write_into(result, report_path, force=replace)
        except Exception as problem:  # noqa: BLE001 - raised below, after the decision and the path of the result are printed
            failed = problem
    console = output.stdout()
    show(result, console)
    if unsaved:
        raise unsaved
    console.print(f"\nResult: {result_path}", soft_wrap=True, markup=False)
    if report:
        console.print(f"Report: {report['html']} (also {report['markdown'].name})", soft_wrap=True, markup=False)
    send(result, sinks, (result_path, *((report["html"], report["markdown"]) if report else ())), console)
    if failed:
        raise failed
    if result.interrupted:
        output.stderr().print(f"interrupted: the measurements so far are saved in {result_path}", soft_wrap=True, markup=False)
        raise typer.Exit(INTERRUPTED)


def _paths(study: Study, device: str, out: Path | None, report_dir: Path | None) -> tuple[Path, Path]:
    """Return the path of the result and the folder of the report. If ``out`` is a folder, both go there."""
    slug = slug_of(device)
    if out is None:
        reports = Path("reports")
        # within raises if the study's name, which a file gives, leads out of the folder.
        return default_path(study, device), report_dir or within(reports, reports / slug / study.name)
    if out.suffix != ".json":
        return out / RESULT, report_dir or out
    return out, report_dir or Path("reports") / slug / out.stem
