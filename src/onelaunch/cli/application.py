"""All commands in one application, and how their errors reach the user. A command is imported when it is named."""

from __future__ import annotations

import importlib
import logging
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from onelaunch import __version__
from onelaunch.cli.ahead import hastened_import
from onelaunch.errors import ArgumentError, OneLaunchError, UnknownNameError

FAILED, USAGE, INTERRUPTED = 1, 2, 130
"""Exit codes beside 0."""


COMMANDS = {
    "generate": "onelaunch.cli.generate",
    "explain": "onelaunch.cli.explain",
    "inspect": "onelaunch.cli.inspection",
    "doctor": "onelaunch.cli.doctor",
    "study": "onelaunch.cli.study.application",
}
"""Where each is: a function of that name, or an application of several. A text need not wait for what studies import."""


class Commands(TyperGroup):
    """Finds commands, and turns errors made on purpose into one line on stderr and an exit code."""

    def __init__(self, **facts: Any) -> None:
        super().__init__(**facts)
        names: Any = dict.fromkeys(COMMANDS)
        self.commands = names  # for what looks for a name that was meant

    def list_commands(self, ctx: Any) -> list[str]:
        del ctx
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        del ctx
        if cmd_name not in COMMANDS:
            return None
        with hastened_import():
            found = getattr(importlib.import_module(COMMANDS[cmd_name]), cmd_name)
        alone = found
        if not isinstance(found, typer.Typer):
            alone = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)
            alone.command(cmd_name)(found)
        command = typer.main.get_command(alone)
        command.name = cmd_name
        return command

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except OneLaunchError as error:
            if ctx.params.get("debug"):
                raise
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(USAGE if isinstance(error, (UnknownNameError, ArgumentError)) else FAILED) from None
        except OSError as error:  # such as a full disk below stdout
            if ctx.params.get("debug") or isinstance(error, BrokenPipeError):
                raise
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(FAILED) from None
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


def _is_about_this_machine(record: logging.LogRecord) -> bool:
    """Drop PyTorch's warning that a machine with CUDA's tools has no GPU: it would stand between a command's own lines."""
    return "No CUDA runtime is found" not in record.getMessage()


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
    logging.getLogger("torch.utils.cpp_extension").addFilter(_is_about_this_machine)
