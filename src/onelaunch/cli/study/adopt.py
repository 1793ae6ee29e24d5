"""``onelaunch study adopt``: let the dispatcher choose by what was measured."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from onelaunch.cli import output
from onelaunch.folders import TABLES, tables_folder
from onelaunch.workbench.adopt import adopt as merge
from onelaunch.workbench.result import Result


def adopt(
    results: Annotated[
        list[Path], typer.Argument(metavar="RESULT...", help="Results of one device, later ones win.", show_default=False)
    ],
    into: Annotated[
        Path | None,
        typer.Option("--into", help="The folder of the tables.", show_default=f"${TABLES}, or the user's data folder"),
    ] = None,
) -> None:
    """Write measured times into a table that the dispatcher reads.

    From then on, a call near a measured size runs the variant that was fastest there, in processes that start later. The table
    lies in your own folder: upgrades of onelaunch leave it alone, and its rows go before those that ship with the package.

    Example: onelaunch study adopt results/nvidia-h200/040-linear-rnn.json
    """
    table = merge([Result.load(path) for path in results], into)
    console = output.stdout()
    console.print(f"Written: {table}", soft_wrap=True)
    if table.parent.resolve() != tables_folder().resolve():
        said = f"Tables are read from {tables_folder()}. To have this one read, set {TABLES}={table.parent.resolve()}"
        console.print(said, soft_wrap=True)
