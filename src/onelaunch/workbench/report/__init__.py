"""Report on a finished or interrupted study, made from its stored result alone.

Commands ``onelaunch study run`` and ``report`` call :func:`write_report`. ``documents.py`` explains the other functions.
"""

from __future__ import annotations

from pathlib import Path

from onelaunch.workbench.files import read_text, write_text
from onelaunch.workbench.report import markdown, page
from onelaunch.workbench.report.documents import docs_overview, docs_section, docs_table
from onelaunch.workbench.result import Result

__all__ = ["RESULT", "docs_overview", "docs_section", "docs_table", "write_report"]

RESULT = "result.json"
"""File name of the result in the folder of its report."""


def write_report(result: Result, folder: Path, *, force: bool = False) -> dict[str, Path]:
    """Write ``report.md``, ``report.html`` and ``result.json`` into a folder.

    Args:
        result: Result to report on.
        folder: Folder of the report. It is created if it does not exist.
        force: Whether to replace the report of another result.

    Returns:
        Paths of the files by kind: ``markdown``, ``html``, ``json``.

    Raises:
        ResultExists: The folder holds another result, and ``force`` is off.
        OutputUnwritable: A file cannot be written. Each file is written atomically.
    """
    texts = {"markdown": markdown.render(result), "html": page.render(result)}
    paths = {"markdown": folder / "report.md", "html": folder / "report.html", "json": folder / RESULT}
    if not _holds(paths["json"], result):
        result.save(paths["json"], force=force)
    for kind, text in texts.items():
        write_text(paths[kind], text)
    return paths


def _holds(path: Path, result: Result) -> bool:
    """Return whether a file holds exactly this result."""
    try:
        return read_text(path) == result.stored()
    except (OSError, ValueError):
        return False
