"""Command ``onelaunch study ranks``: run a study of ranks under torchrun, or show its stored result."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from onelaunch.cli import output
from onelaunch.cli.arguments import DeviceName
from onelaunch.cli.study.arguments import ScaleName
from onelaunch.device.hardware import resolve
from onelaunch.rank_studies.declare import find_rank_study
from onelaunch.rank_studies.judge import judged, lines
from onelaunch.rank_studies.ranks import run_rank_study
from onelaunch.rank_studies.result import RankResult


def ranks(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="Name of a study of ranks, path of its file, or a stored result to show.",
            show_default=False,
        ),
    ],
    device: DeviceName = "auto",
    scale: ScaleName = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="JSON file of the result.", show_default="results/DEVICE/ranks/NAME.json")
    ] = None,
) -> None:
    """Run a study of calls whose steps are spread over several GPUs, or show the result of one.

    torchrun starts a process for each rank. Runs with other numbers of ranks are added to the same result.

    Example: torchrun --nproc-per-node 4 -m onelaunch study ranks context-parallel
    """
    console = output.stdout()
    if name.endswith(".json"):
        _show(judged(RankResult.load(Path(name))), console)
        return
    made = run_rank_study(find_rank_study(name), resolve(device).type, scale, out)
    if made is not None:
        _show(made[0], console)
        console.print(f"Result: {made[1]}", soft_wrap=True, markup=False)


def _show(result: RankResult, console: Console) -> None:
    """Print a result."""
    for line in lines(result):
        console.print(line, soft_wrap=True, markup=False)
