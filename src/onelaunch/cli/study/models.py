"""Command ``onelaunch study models``: run a study of whole models, or show its stored result."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from onelaunch.cli import output
from onelaunch.cli.arguments import DeviceName
from onelaunch.cli.measuring import INTERRUPTED
from onelaunch.cli.study.arguments import ScaleName, Tuning
from onelaunch.device.hardware import resolve
from onelaunch.model_studies.declare import find_model_study
from onelaunch.model_studies.judge import judged, summary
from onelaunch.model_studies.report import facts, tables
from onelaunch.model_studies.result import ModelResult
from onelaunch.model_studies.run import default_path, run_model_study

Only = Annotated[
    list[str] | None,
    typer.Option(
        "--only",
        metavar="TASK",
        help="Carry out these tasks now: alone, timed, gradients, training, control, the name of a model, or both as "
        "MODEL/gradients. May be repeated.",
        show_default="all",
    ),
]

Anew = Annotated[
    list[str] | None,
    typer.Option(
        "--anew",
        metavar="TASK",
        help="With --resume, measure these tasks once more, named as for --only. May be repeated.",
        show_default=False,
    ),
]

Also = Annotated[
    list[Path] | None,
    typer.Option(
        "--also",
        metavar="RESULT",
        help="Take over the finished tasks of another run, such as one on another GPU. May be repeated.",
        show_default=False,
    ),
]

AcrossCommits = Annotated[
    bool,
    typer.Option(
        "--across-commits",
        help="With --resume or --also, keep what was measured at other commits; the result names them.",
    ),
]


def models(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="Name of a study of models, path of its file, or a stored result to show.",
            show_default=False,
        ),
    ],
    device: DeviceName = "auto",
    scale: ScaleName = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="JSON file of the result.", show_default="results/DEVICE/models/NAME.json")
    ] = None,
    only: Only = None,
    anew: Anew = None,
    also: Also = None,
    time_limit: Annotated[
        float | None,
        typer.Option("--time-limit", min=0.0, help="Seconds after which the run stops; --resume goes on.", show_default="none"),
    ] = None,
    tuning: Tuning = None,
    processes: Annotated[
        int, typer.Option("--processes", min=0, help="Number of processes that compile fla's configurations ahead; 0 for none.")
    ] = 0,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing result.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted run with the tasks that are left.")] = False,
    across_commits: AcrossCommits = False,
    in_process: Annotated[
        bool, typer.Option("--in-process", help="Measure in this process; first steps then have no empty caches.")
    ] = False,
) -> None:
    """Run a study of whole models before and after onelaunch.accelerate, or show the result of one.

    Each task has a process of its own: the first steps of a variant, times of all variants in turn, gradients, and training runs.
    The result is saved after each. Training runs save checkpoints; Ctrl-C and --time-limit stop them, and --resume goes on.

    Example: onelaunch study models in-model --device cpu
    """
    console = output.stdout()
    if name.endswith(".json"):
        _show(judged(ModelResult.load(Path(name))), console)
        return
    study = find_model_study(name)
    path = out or default_path(study, str(resolve(device)))
    errors = output.stderr()
    result = run_model_study(
        study,
        device=device,
        scale=scale,
        save_to=path,
        force=force,
        resume=resume,
        across_commits=across_commits,
        only=only or (),
        anew=anew or (),
        also=also or (),
        time_limit=time_limit,
        in_process=in_process,
        tuning=tuning,
        processes=processes,
        on_progress=lambda words: errors.print(words, soft_wrap=True, markup=False),
    )
    _show(result, console)
    console.print(f"\nResult: {path}", soft_wrap=True, markup=False)
    if result.interrupted:
        errors.print(f"tasks are left; continue with --resume: {path}", soft_wrap=True, markup=False)
        raise typer.Exit(INTERRUPTED)


def _show(result: ModelResult, console: Console) -> None:
    """Print the report on a result."""
    output.heading(console, f"{result.study.name}: {summary(result)}", result.study.question)
    console.print(facts(result), style="dim", markup=False)
    for table in tables(result):
        output.table(console, table)
    for note in result.notes:
        console.print(note, markup=False)
