"""Application of all commands. It imports a command when it is called, and reports errors in one line with an exit code.

``main.py``, the console script, runs the application. ``cli/study/application.py`` derives the group of ``onelaunch study`` from
it.
"""

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

_FAILED, _INTERRUPTED, _PIPE_CLOSED = 1, 130, 141
"""Exit codes other than 0. An error of onelaunch has its own: :attr:`onelaunch.errors.OneLaunchError.exit_code`."""

OPTIONS = {
    "save_to": "--out",
    "folder": "--report-dir",
    "force": "--force",
    "resume": "--resume",
    "across_commits": "--across-commits",
    "scale": "--scale",
}
"""Command-line options by the name of the function argument that an error advises to pass."""


class Command(NamedTuple):
    """Location and summary of a command, so that help can be printed without importing it."""

    module: str
    function: str
    """Name of the command's function in the module, or of a Typer application of several commands."""
    summary: str
    """First sentence of the command's help."""


class LazyGroup(TyperGroup):
    """Group of commands that are imported only when they are called."""

    table: ClassVar[Mapping[str, Command]] = {}
    """Commands by name."""

    def __init__(self, **facts: Any) -> None:
        super().__init__(**facts)
        names: Any = dict.fromkeys(self.table)
        self.commands = names  # Typer reads these names to suggest one for a mistyped name
        self._helping = False

    def list_commands(self, ctx: Any) -> list[str]:
        del ctx
        return list(self.table)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import and return a command. While the group's help is printed, return a placeholder with its name and summary."""
        del ctx
        if cmd_name not in self.table:
            return None
        return TyperCommand(cmd_name, help=self.table[cmd_name].summary) if self._helping else self.load(cmd_name)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help of the group without importing any command."""
        self._helping = True
        try:
            super().format_help(ctx, formatter)
        finally:
            self._helping = False

    @classmethod
    def load(cls, name: str) -> Any:
        """Import a command."""
        command = cls.table[name]
        with hastened_import():
            found = getattr(importlib.import_module(command.module), command.function)
        app = found
        if not isinstance(found, typer.Typer):
            app = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)
            app.command(name, help=_paragraphs(found.__doc__))(found)
        loaded = typer.main.get_command(app)
        loaded.name = name
        return loaded


class Commands(LazyGroup):
    """Group of all commands. It reports expected errors in one line on stderr and ends with their exit code."""

    table: ClassVar[Mapping[str, Command]] = {
        "generate": Command(
            "onelaunch.cli.generate",
            "generate",
            "Continue a text with a dense model, such as Qwen3 or Llama.",
        ),
        "serve": Command("onelaunch.cli.serve", "serve", "Serve a model by OpenAI's HTTP API, one request at a time."),
        "explain": Command("onelaunch.cli.explain", "explain", "Show which variant would run a call here, and why."),
        "inspect": Command(
            "onelaunch.cli.inspection",
            "inspect",
            "Compile and disassemble an operation's kernels for an architecture; no GPU is needed.",
        ),
        "prebuild": Command(
            "onelaunch.cli.prebuild", "prebuild", "Compile kernels ahead of their first launch; no GPU is needed."
        ),
        "tune": Command(
            "onelaunch.cli.tune",
            "tune",
            "Measure the variants of an operation on this machine, and let auto take the fastest from then on.",
        ),
        "doctor": Command(
            "onelaunch.cli.doctor", "doctor", "List the devices and software found here, and what is missing for which purpose."
        ),
        "report": Command(
            "onelaunch.cli.study.report",
            "report",
            "Print the report on a stored result, and optionally write it as Markdown and HTML.",
        ),
        "study": Command("onelaunch.cli.study.application", "study", "Declare, run, read and compare studies."),
    }

    def invoke(self, ctx: Any) -> Any:
        """Run a command, and turn expected errors into one line on stderr and an exit code.

        With ``--debug`` errors are raised instead; Ctrl-C still ends in one line. A closed pipe prints nothing.
        """
        debug = ctx.params.get("debug")
        try:
            with warnings.catch_warnings():
                warnings.showwarning = _one_line(warnings.showwarning)
                return super().invoke(ctx)
        except BrokenPipeError:
            if debug:
                raise
            output.drop_stdout()
            raise typer.Exit(_PIPE_CLOSED) from None
        except OneLaunchError as error:
            if debug:
                raise
            typer.echo(f"error: {escaped(_said(error))}", err=True)
            raise typer.Exit(error.exit_code) from None
        except OSError as error:
            if debug:
                raise
            typer.echo(f"error: {escaped(str(error))}", err=True)
            raise typer.Exit(_FAILED) from None
        except KeyboardInterrupt:
            typer.echo("interrupted", err=True)
            raise typer.Exit(_INTERRUPTED) from None


def _paragraphs(text: str | None) -> str | None:
    """Return a docstring with each paragraph on one line.

    Help wraps lines itself but keeps line breaks. Paragraphs with indented lines stay as they are.
    """
    if text is None:
        return None
    paragraphs = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(part if re.search(r"^ ", part, re.MULTILINE) else " ".join(part.split("\n")) for part in paragraphs)


def _said(error: OneLaunchError) -> str:
    """Return an error's message, with command-line options in place of the arguments that it advises to pass."""
    return error.told(OPTIONS) if isinstance(error, AdvisedError) else str(error)


def _one_line(show: Any) -> Any:
    """Return a function that prints a warning of onelaunch as one line, and any other warning as ``show`` does."""

    def show_warning(message: Warning | str, category: type[Warning], *location: Any, **more: Any) -> None:
        if issubclass(category, OneLaunchError):
            typer.echo(f"warning: {escaped(str(message))}", err=True)
        else:
            show(message, category, *location, **more)

    return show_warning


application = typer.Typer(
    name="onelaunch",
    cls=Commands,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _is_worth_showing(record: logging.LogRecord) -> bool:
    """Return False for PyTorch's warning that a machine with CUDA's tools has no GPU, so that it does not clutter the output."""
    return "No CUDA runtime is found" not in record.getMessage()


def _version(asked: bool) -> None:
    """Print the version and exit, if ``--version`` was passed."""
    if asked:
        typer.echo(f"onelaunch {__version__}")
        raise typer.Exit


@application.callback()
def onelaunch(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the whole traceback of an error.")] = False,
) -> None:
    """Fused GPU kernels, and the workbench that shows when fusing pays.

    [bold]First commands to try[/bold]

      onelaunch doctor                      list what is installed or missing
      onelaunch generate "def main("        continue a text with a small model
      onelaunch serve Qwen/Qwen3-0.6B       answer requests of OpenAI's API
      onelaunch study run 040-linear-rnn    run a study and write its report
      onelaunch explain linear_rnn --help   show which variant runs a call
      onelaunch inspect linear_rnn          show registers and spills, no GPU
      onelaunch prebuild gla --arch sm_90a  compile ahead of the first launch
      onelaunch tune gla                    measure which variant is fastest

    [bold]Exit codes[/bold]

        0  success
        1  failure during the work
        2  wrong usage, name or argument
      130  interrupted (Ctrl-C)
      141  stdout was closed by its reader, as with "| head"
      143  terminated (SIGTERM)
    """
    logging.getLogger("torch.utils.cpp_extension").addFilter(_is_worth_showing)
