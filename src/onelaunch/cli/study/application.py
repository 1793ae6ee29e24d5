"""Application with the commands of ``onelaunch study``; ``cli/application.py`` imports it when ``study`` is called."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import typer

from onelaunch.cli.application import Command, LazyGroup


class Studies(LazyGroup):
    """Group of the commands on studies and their results."""

    table: ClassVar[Mapping[str, Command]] = {
        "list": Command("onelaunch.cli.study.listing", "list_all", "List the studies that can be run by name."),
        "show": Command(
            "onelaunch.cli.study.show", "show", "Show a study's declaration and plan: costs, roofline bounds and feasibility."
        ),
        "run": Command("onelaunch.cli.study.run", "run", "Run a study: plan, verify, time, count, judge, decide, report."),
        "models": Command(
            "onelaunch.cli.study.models",
            "models",
            "Run a study of whole models before and after onelaunch.accelerate, or show the result of one.",
        ),
        "ranks": Command(
            "onelaunch.cli.study.ranks",
            "ranks",
            "Run a study of calls whose steps are spread over several GPUs, or show the result of one.",
        ),
        "report": Command(
            "onelaunch.cli.study.report",
            "report",
            "Print the report on a stored result, and optionally write it as Markdown and HTML.",
        ),
        "compare": Command(
            "onelaunch.cli.study.compare",
            "compare",
            "Show what changed from one result to another beyond the noise within and between runs.",
        ),
        "judge": Command(
            "onelaunch.cli.study.judge",
            "judge",
            "Judge a stored result's criteria again with this version of onelaunch, and decide again.",
        ),
        "pack": Command(
            "onelaunch.cli.study.pack", "pack", "Pack a study into one file that runs on a machine with PyTorch and no network."
        ),
        "import": Command(
            "onelaunch.cli.study.importing", "import_result", "Store a result that was measured on another machine."
        ),
        "adopt": Command("onelaunch.cli.study.adopt", "adopt", "Write measured times into a table that the dispatcher reads."),
    }


study = typer.Typer(
    cls=Studies,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Declare, run, read and compare studies. Start with: onelaunch study run 040-linear-rnn",
)


@study.callback()
def _studies() -> None:
    """Take no options; each command has its own. Typer refuses an application that registers neither commands nor a callback."""
