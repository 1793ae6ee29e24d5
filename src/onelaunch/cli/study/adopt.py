"""``onelaunch study adopt``: let the dispatcher choose by what was measured."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from onelaunch import measured
from onelaunch.cli import output
from onelaunch.workbench.adopt import adopt as merge
from onelaunch.workbench.result import Result


def adopt(
    results: Annotated[
        list[Path], typer.Argument(metavar="RESULT...", help="Results of one device, later ones win.", show_default=False)
    ],
    into: Annotated[
        Path, typer.Option("--into", help="The folder of the tables.", show_default="the package's own")
    ] = measured.TABLES,
) -> None:
    """Write measured times into the table that the dispatcher reads.

    From then on, a call near a measured size runs the variant that was fastest there.

    Example: onelaunch study adopt results/nvidia-h200/040-linear-rnn.json
    """
    table = merge([Result.load(path) for path in results], into)
    output.stdout().print(f"Written: {table}", soft_wrap=True)
