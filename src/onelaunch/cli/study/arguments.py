"""Arguments and options of the commands on studies; ``run.py``, ``show.py`` and ``report.py`` import them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from onelaunch.workbench.study import Scale

StudyName = Annotated[str, typer.Argument(metavar="NAME", help="Name of a study, or path of its file.", show_default=False)]
ScaleName = Annotated[
    Scale | None, typer.Option("--scale", help="Scale of the shapes: small suits a CPU, full a GPU.", show_default="by device")
]

Devices = Annotated[
    str,
    typer.Option(
        "--device",
        help="Device: cpu, cuda, cuda:1 and so on; auto is the first GPU, or the CPU. "
        "Devices of one kind, as in cuda:0,cuda:1, share the shapes and measure side by side.",
    ),
]

InProcess = Annotated[
    bool,
    typer.Option(
        "--in-process", help="Measure in this process, such as under a debugger. A variant that exits or hangs then ends the run."
    ),
]

CallLimit = Annotated[
    float, typer.Option("--call-limit", min=1.0, help="Seconds after which a variant that does not return counts as hung.")
]

TimeCap = Annotated[
    float | None,
    typer.Option(
        "--time-cap",
        min=0.1,
        help="Seconds of timing after which no new round of a shape and direction begins. Three rounds are always measured.",
        show_default="15 at small scale, 60 at full scale",
    ),
]

PricePerHour = Annotated[
    float | None,
    typer.Option(
        "--price-per-hour",
        min=0.0,
        help="Price of an hour of this machine, in any currency: the result then holds the cost of its wall time.",
        show_default="none, or that of the run to resume",
    ),
]

Log = Annotated[
    list[str] | None,
    typer.Option(
        "--log",
        metavar="SINK[:WHERE]",
        help="Send the stored result to wandb, tensorboard or mlflow; may be repeated. WHERE is a project or offline, a folder, "
        "or a tracking URI.",
        show_default=False,
    ),
]

Resume = Annotated[bool, typer.Option("--resume", help="Continue an interrupted run after the shapes that it finished.")]

AcrossCommits = Annotated[
    bool, typer.Option("--across-commits", help="Let --resume keep what another commit measured; the result names it.")
]

Anew = Annotated[
    list[str] | None,
    typer.Option(
        "--anew",
        metavar="SHAPE",
        help="Let --resume measure this shape even if it is finished, as in a finished run; may be repeated.",
    ),
]

Processes = Annotated[
    int, typer.Option("--processes", min=0, help="Number of processes that compile before shapes are measured; 0 for none.")
]

Tuning = Annotated[
    Path | None,
    typer.Option("--tuning", help="File that keeps the choices of peers' autotuners from run to run.", show_default="none"),
]
