"""Arguments and options that the commands on studies share."""

from __future__ import annotations

from typing import Annotated

import typer

from onelaunch.workbench.study import Scale

StudyName = Annotated[str, typer.Argument(metavar="NAME", help="Name of a study, or path of its file.", show_default=False)]
ScaleName = Annotated[
    Scale | None, typer.Option("--scale", help="Scale of the shapes: small suits a CPU, full a GPU.", show_default="by device")
]
