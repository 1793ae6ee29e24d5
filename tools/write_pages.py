"""Write the tables of the documentation's pages that are made of the registry, the results and the models of study files.

Run it from the root of the repository after one of them changed: ``python -m tools.write_pages``. ``tests/test_documents.py``
fails if that was forgotten. GitHub shows a page as it is committed, so these tables stand in the pages themselves, and ``docs/``
generates only what is too long for that. It needs the packages of the dependency group docs.
"""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
"""Root of the repository."""

PART = re.compile(
    r"^<!-- Written by `python -m tools\.write_pages`: ([\w-]+)\. -->\n.*?^<!-- End of the written part\. -->$",
    re.MULTILINE | re.DOTALL,
)
"""Written part of a page: its name and, between two lines, its text."""


def parts(root: Path) -> dict[str, str]:
    """Return the text of each part by its name."""
    sys.path.insert(0, str(root / "docs"))
    try:
        tables = importlib.import_module("tables")
    finally:
        sys.path.pop(0)
    return tables.parts(root)


def files(root: Path) -> dict[Path, str]:
    """Return the content of every page that has a written part, by its path."""
    made = parts(root)
    pages = {path: path.read_text(encoding="utf-8") for path in sorted((root / "docs").rglob("*.md"))}
    return {path: filled(text, made) for path, text in pages.items() if PART.search(text)}


def filled(page: str, made: dict[str, str]) -> str:
    """Return a page with its parts written anew."""

    def write(part: re.Match[str]) -> str:
        begin, end = part[0].splitlines()[0], part[0].splitlines()[-1]
        return f"{begin}\n\n{made[part[1]].strip()}\n\n{end}"

    return PART.sub(write, page)


if __name__ == "__main__":
    for path, text in files(ROOT).items():
        path.write_text(text, encoding="utf-8")
