"""Sphinx configuration. The tables of variants and of measurements are written from the registry and from ``results/``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS))

import tables  # noqa: E402  beside this file

import onelaunch  # noqa: E402

project = "onelaunch"
author = "The onelaunch authors"
copyright = "The onelaunch authors, Apache-2.0"  # noqa: A001  the name that Sphinx reads
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


def setup(app: Any) -> None:
    """Write what the pages include before they are read."""
    del app
    tables.write(DOCS / "_generated", DOCS.parent / "results", DOCS / "notebook")
