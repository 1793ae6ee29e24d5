"""Parts of a page that only Sphinx reads, and parts that only a reader of the Markdown file sees, such as on GitHub.

A directive of Sphinx is raw text on GitHub. So a page hides it there in an HTML comment, and says beside it what Sphinx drops::

    <!-- sphinx
    (a directive, which becomes part of the page when Sphinx reads it)
    -->
    <!-- github -->
    (Markdown in its place)
    <!-- end github -->

``conf.py`` calls :func:`for_sphinx` for each page, and a test checks that :func:`for_github` leaves no directive.
"""

from __future__ import annotations

import re

SPHINX = re.compile(r"^<!-- sphinx\n(.*?)^-->$", re.MULTILINE | re.DOTALL)
"""Part for Sphinx; the group is its text."""

GITHUB = re.compile(r"^<!-- github -->\n.*?^<!-- end github -->$", re.MULTILINE | re.DOTALL)
"""Part for a reader of the file."""


def for_sphinx(page: str) -> str:
    """Return the text of a page as Sphinx reads it. Every line keeps its number, which warnings name."""
    without = GITHUB.sub(lambda part: "\n" * part[0].count("\n"), page)
    return SPHINX.sub(lambda part: f"\n{part[1]}", without)


def for_github(page: str) -> str:
    """Return the text of a page that a reader of the file sees."""
    return SPHINX.sub("", page)
