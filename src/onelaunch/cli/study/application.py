"""The commands of ``onelaunch study`` in one application."""

from __future__ import annotations

import typer

from onelaunch.cli.study.adopt import adopt
from onelaunch.cli.study.compare import compare
from onelaunch.cli.study.judge import judge
from onelaunch.cli.study.listing import list_all
from onelaunch.cli.study.report import report
from onelaunch.cli.study.run import run
from onelaunch.cli.study.show import show

study = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Declare, run, read and compare studies. Start with: onelaunch study run 040-linear-rnn",
)
study.command("list")(list_all)
study.command()(show)
study.command()(run)
study.command()(report)
study.command()(compare)
study.command()(judge)
study.command()(adopt)
