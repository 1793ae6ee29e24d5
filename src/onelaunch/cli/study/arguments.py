"""Arguments and options of the commands on studies; ``run.py`` and ``show.py`` import them."""

from __future__ import annotations

from typing import Annotated

import typer

from onelaunch.workbench.study import Scale

StudyName = Annotated[str, typer.Argument(metavar="NAME", help="Name of a study, or path of its file.", show_default=False)]
ScaleName = Annotated[
    Scale | None, typer.Option("--scale", help="Scale of the shapes: small suits a CPU, full a GPU.", show_default="by device")
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
