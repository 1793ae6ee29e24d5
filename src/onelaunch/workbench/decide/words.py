"""Words for the two sides of a criterion, for evidence and reports.

``criteria.py``, the measures of time and ``report/summary.py`` call them.
"""

from __future__ import annotations

from onelaunch.workbench.study import Criterion, Selector, members


def selector_words(selector: Selector, fastest: str, fastest_of_all: str) -> str:
    """Return a variant's name, or words for the fastest variant with some tags, such as ``the fastest with launches 1 or 2``.

    Args:
        selector: A name, or a table of tags.
        fastest: Words for the fastest of the variants with the tags.
        fastest_of_all: Words for the fastest where there are no tags.
    """
    if isinstance(selector, str):
        return selector
    tags = ", ".join(f"{key} {' or '.join(map(str, members(value)))}" for key, value in selector.items())
    return f"{fastest} with {tags}" if tags else fastest_of_all


def per(criterion: Criterion) -> str:
    """Return `` per B*T`` for a criterion whose times are divided by sizes, else an empty string."""
    return f" per {'*'.join(criterion.per)}" if criterion.per else ""
