"""The report on a finished or interrupted study, made from its stored result alone."""

from __future__ import annotations

from pathlib import Path

from onelaunch.workbench.report import markdown, page
from onelaunch.workbench.report.documents import docs_overview, docs_section, docs_table
from onelaunch.workbench.result import Result

__all__ = ["RESULT", "docs_overview", "docs_section", "docs_table", "write_report"]

RESULT = "result.json"
"""The result's name in the folder of its report."""


def write_report(result: Result, folder: Path, *, force: bool = False) -> dict[str, Path]:
    """Write ``report.md``, ``report.html`` and ``result.json`` into a folder.

    Args:
        result: what to report on.
        folder: made if it is not there.
        force: replace the report of another result.

    Returns:
        Paths by kind: ``markdown``, ``html``, ``json``.

    Raises:
        ResultExists: the folder holds another result, and ``force`` is off.
    """
    paths = {"markdown": folder / "report.md", "html": folder / "report.html", "json": folder / RESULT}
    own = paths["json"].exists() and paths["json"].read_text(encoding="utf-8") == result.model_dump_json(indent=1) + "\n"
    if not own:
        result.save(paths["json"], force=force)
    paths["markdown"].write_text(markdown.render(result), encoding="utf-8")
    paths["html"].write_text(page.render(result), encoding="utf-8")
    return paths
