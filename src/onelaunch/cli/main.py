"""The console script. Importable with PyTorch alone, so that a missing extra becomes one line and not a traceback."""

from __future__ import annotations

import importlib
import sys

EXTRA = frozenset({"jinja2", "markdown_it", "matplotlib", "numpy", "pydantic", "rich", "tomli", "typer"})
"""What the extra ``workbench`` brings."""


def app() -> None:
    """Run the command line with the process's arguments."""
    try:
        importlib.import_module("matplotlib")  # better missed now than after a study has run
        from onelaunch.cli.application import application
    except ModuleNotFoundError as missing:
        if (missing.name or "").partition(".")[0] not in EXTRA:
            raise
        sys.exit(f'error: the command line needs {missing.name}. Do: pip install "onelaunch[workbench]"')
    application()
