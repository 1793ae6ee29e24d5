"""Console script ``onelaunch``, which ``python -m onelaunch`` runs too. At import it needs neither ``workbench`` nor PyTorch.

``workbench`` is an extra. So a missing extra is reported in one line, not a traceback, and :func:`app` can begin to create a CUDA
context before PyTorch is imported.
"""

from __future__ import annotations

import io
import sys

from onelaunch.device.tools import package_installed

_EXTRA = frozenset({"jinja2", "markdown_it", "matplotlib", "numpy", "pydantic", "rich", "tomli", "typer"})
"""Modules of the extra ``workbench`` that commands import; without ``nvidia-ml-py``, which is optional."""


def app() -> None:
    """Run the command line with the arguments of the process."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a character that the locale lacks must not end a command
            stream.reconfigure(errors="backslashreplace")
    try:
        for package in sorted(_EXTRA - ({"tomli"} if sys.version_info >= (3, 11) else set())):
            if not package_installed(package):  # reported now, not after a study has run
                raise ModuleNotFoundError(f"No module named {package!r}", name=package)
        from onelaunch.cli.ahead import make_context
        from onelaunch.cli.application import application
    except ModuleNotFoundError as missing:
        if (missing.name or "").partition(".")[0] not in _EXTRA:
            raise
        sys.exit(f'error: the command line needs the package {missing.name}. Do: pip install "onelaunch[workbench]"')
    if sys.argv[1:2] == ["generate"]:  # creating a CUDA context takes long; here it overlaps the import of PyTorch
        make_context(sys.argv[2:])
    application()
