"""All commands in one application, and how their errors reach the user."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from onelaunch import __version__
from onelaunch.cli.doctor import doctor
from onelaunch.cli.explain import explain
from onelaunch.cli.generate import generate
from onelaunch.cli.inspection import inspect
from onelaunch.cli.study.application import study
from onelaunch.errors import ArgumentError, OneLaunchError, UnknownNameError

FAILED, USAGE, INTERRUPTED = 1, 2, 130
"""Exit codes beside 0."""


class Commands(TyperGroup):
    """Turns errors made on purpose into one line on stderr and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except OneLaunchError as error:
            if ctx.params.get("debug"):
                raise
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(USAGE if isinstance(error, (UnknownNameError, ArgumentError)) else FAILED) from None
        except KeyboardInterrupt:
            typer.echo("interrupted", err=True)
            raise typer.Exit(INTERRUPTED) from None


application = typer.Typer(
    name="onelaunch",
    cls=Commands,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
application.add_typer(study, name="study")
application.command()(generate)
application.command()(explain)
application.command()(inspect)
application.command()(doctor)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"onelaunch {__version__}")
        raise typer.Exit


@application.callback()
def onelaunch(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the whole traceback of an error.")] = False,
) -> None:
    """Fused GPU kernels, and the workbench that proves when fusing pays.

    [bold]A first look[/bold]

      onelaunch doctor                      what is here, what is missing
      onelaunch generate "def main("        text from a small model
      onelaunch study run 040-linear-rnn    a decision and its report
      onelaunch explain linear_rnn --help   which variant runs a call, why
      onelaunch inspect linear_rnn          registers, spills: without a GPU

    Exit codes: 0 done, 1 failed, 2 wrong usage or name, 130 interrupted.
    """
