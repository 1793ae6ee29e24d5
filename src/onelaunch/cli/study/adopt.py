"""Command ``onelaunch study adopt``: merge measured times into the dispatcher's table."""

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
        list[Path],
        typer.Argument(
            metavar="RESULT...",
            help="Results of one device. Rows of newer runs replace those of older ones, whatever the order.",
            show_default=False,
        ),
    ],
    into: Annotated[
        Path | None,
        typer.Option("--into", help="Folder of the tables.", show_default=f"${TABLES}, or the user's data folder"),
    ] = None,
) -> None:
    """Write measured times into a table that the dispatcher reads.

    In processes that start later, a call near a measured size runs the variant that was fastest there. The table is written to
    your own folder, which upgrades of onelaunch do not change. Its rows take precedence over those of the package.

    Example: onelaunch study adopt results/nvidia-h200/040-linear-rnn.json
    """
    table = merge([Result.load(path) for path in results], into)
    console = output.stdout()
    console.print(f"Written: {table}", soft_wrap=True)
    if table.parent.resolve() != tables_folder().resolve():
        advice = f"Tables are read from {tables_folder()}. To use this one, set {TABLES}={table.parent.resolve()}"
        console.print(advice, soft_wrap=True)
