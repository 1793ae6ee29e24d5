"""Sphinx configuration. It generates tables and plots of measurements from ``results/``, and shows what pages hide on GitHub."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS))

import tables  # noqa: E402  a module in the folder of this file
import two_readers  # noqa: E402

import onelaunch  # noqa: E402

project = "onelaunch"
author = "The onelaunch authors"
copyright = "The onelaunch authors, Apache-2.0"  # noqa: A001  Sphinx reads this name
version = release = onelaunch.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build", "_generated"]

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
napoleon_use_rtype = False

html_theme = "furo"
html_title = f"onelaunch {version}"
html_show_sphinx = False
html_static_path = ["_static"]
html_css_files = ["custom.css"]

SECTION = re.compile(r"(Args|Returns|Yields|Raises|Attributes|Example|Examples|Note):$")


def setup(app: Any) -> None:
    """Write the generated files before Sphinx reads any page, show what pages hide on GitHub, and equations as code."""
    tables.write(DOCS / "_generated", DOCS.parent)
    app.connect("source-read", show_hidden_parts)
    app.connect(
        "autodoc-process-docstring", show_equations, priority=100
    )  # runs before napoleon, which replaces the section headings


def show_hidden_parts(app: Any, page: str, source: list[str]) -> None:
    """Give Sphinx the parts of a page that are hidden on GitHub, without those that stand there in their place."""
    del app, page
    source[0] = two_readers.for_sphinx(source[0])


def show_equations(app: Any, what: str, name: str, of: Any, options: Any, lines: list[str]) -> None:
    """Turn indented lines before the first section into a code block, so that each equation stays on its own line."""
    del app, what, name, of, options
    end = next((index for index, line in enumerate(lines) if SECTION.match(line)), len(lines))
    # A block starts behind a blank line. It is left alone if the line before that one is indented (the same block goes on), a
    # directive or a list item.
    starts = [
        index
        for index in range(1, end)
        if lines[index].startswith("    ") and not lines[index - 1].strip() and not lines[index - 2].startswith((" ", "..", "-"))
    ]
    for index in reversed(starts):
        lines[index:index] = [".. code-block:: text", ""]
