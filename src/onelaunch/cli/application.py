"""All commands in one application, and how their errors reach the user. A command is imported when it is called."""

from __future__ import annotations

import importlib
import inspect
import logging
import re
import warnings
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

from onelaunch import __version__
from onelaunch.cli import output
from onelaunch.cli.ahead import hastened_import
from onelaunch.errors import AdvisedError, OneLaunchError
from onelaunch.wording import escaped

FAILED, INTERRUPTED, PIPE_CLOSED = 1, 130, 141
"""Exit codes beside 0. Errors of ours say their own: :attr:`onelaunch.errors.OneLaunchError.exit_code`."""

OPTIONS = {"save_to": "--out", "folder": "--report-dir", "force": "--force", "resume": "--resume", "scale": "--scale"}
"""Options that stand for the arguments which errors advise to pass."""


class Command(NamedTuple):
    """A command's place and its summary, so that help need not import it."""

    module: str
    function: str
    """Name of the command's function in the module, or of a Typer application of several commands."""
    summary: str
    """First sentence of its help."""


class LazyGroup(TyperGroup):
    """Group of commands that are imported, with all that they need, only when they are called."""

    table: ClassVar[Mapping[str, Command]] = {}

    def __init__(self, **facts: Any) -> None:
        super().__init__(**facts)
        names: Any = dict.fromkeys(self.table)
        self.commands = names  # for what looks for a name that was meant
        self._helping = False

    def list_commands(self, ctx: Any) -> list[str]:
        del ctx
        return list(self.table)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command, imported; while the group's help is made, a stand-in with its name and summary."""
        del ctx
        if cmd_name not in self.table:
            return None
        return TyperCommand(cmd_name, help=self.table[cmd_name].summary) if self._helping else self.load(cmd_name)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help of the group, for which no command is imported."""
        self._helping = True
        try:
            super().format_help(ctx, formatter)
        finally:
            self._helping = False

    @classmethod
    def load(cls, name: str) -> Any:
        """Import a command."""
        place = cls.table[name]
        with hastened_import():
            found = getattr(importlib.import_module(place.module), place.function)
        alone = found
        if not isinstance(found, typer.Typer):
            alone = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)
            alone.command(name, help=_paragraphs(found.__doc__))(found)
        command = typer.main.get_command(alone)
        command.name = name
        return command


class Commands(LazyGroup):
    """All commands. Turns errors made on purpose into one line on stderr and an exit code."""

    table: ClassVar[Mapping[str, Command]] = {
        "generate": Command(
            "onelaunch.cli.generate",
            "generate",
            "Continue a text with a model of the Qwen3 family.",
        ),
        "explain": Command("onelaunch.cli.explain", "explain", "Say which variant would run a call here, and why."),
        "inspect": Command(
            "onelaunch.cli.inspection",
            "inspect",
            "Compile an operation's kernels for an architecture and take them apart: no GPU is needed.",
        ),
        "doctor": Command("onelaunch.cli.doctor", "doctor", "Say what is here and what is missing for what."),
        "study": Command("onelaunch.cli.study.application", "study", "Declare, run, read and compare studies."),
    }

    def invoke(self, ctx: Any) -> Any:
        debug = ctx.params.get("debug")
        try:
            with warnings.catch_warnings():
                warnings.showwarning = _one_line(warnings.showwarning)
                return super().invoke(ctx)
        except BrokenPipeError:
            if debug:
                raise
            output.drop_stdout()
            raise typer.Exit(PIPE_CLOSED) from None
        except OneLaunchError as error:
            if debug:
                raise
            typer.echo(f"error: {escaped(_said(error))}", err=True)
            raise typer.Exit(error.exit_code) from None
        except OSError as error:
            if debug:
                raise
            typer.echo(f"error: {escaped(str(error))}", err=True)
            raise typer.Exit(FAILED) from None
        except KeyboardInterrupt:
            typer.echo("interrupted", err=True)
            raise typer.Exit(INTERRUPTED) from None


def _paragraphs(text: str | None) -> str | None:
    """Return a docstring with each paragraph on one line, since help wraps lines again but keeps line breaks."""
    if text is None:
        return None
    paragraphs = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(part if re.search(r"^ ", part, re.MULTILINE) else " ".join(part.split("\n")) for part in paragraphs)


def _said(error: OneLaunchError) -> str:
    """Return an error's message, with options where it advises to pass arguments."""
    return error.told(OPTIONS) if isinstance(error, AdvisedError) else str(error)


def _one_line(show: Any) -> Any:
    """Return a function that shows a warning of ours as one line, and any other as ``show`` does."""

    def show_warning(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
        if issubclass(category, OneLaunchError):
            typer.echo(f"warning: {escaped(str(message))}", err=True)
        else:
            show(message, category, *place, **more)

    return show_warning


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

    [bold]Exit codes[/bold]

        0  done
        1  failed while working
        2  wrong usage, name or argument
      130  interrupted (Ctrl-C)
      141  the reader of stdout went away, as with "| head"
      143  terminated (SIGTERM)
    """
    logging.getLogger("torch.utils.cpp_extension").addFilter(_is_about_this_machine)
