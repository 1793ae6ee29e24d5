"""Choice of the parameters that a test runs with in ``make test``. The others have the marker ``thorough``.

Test files of all folders call it. ``conftest.py`` skips what has the marker, except in ``make check`` and with
``--update-prose``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def thorough_but(*brief: Any, of: Iterable[Any]) -> list[Any]:
    """Return the parameters ``of`` a test, all of which but the ``brief`` ones have the marker ``thorough``.

    Args:
        brief: Values, or tuples of values, of the parameters that run in ``make test`` too. Each must be among the parameters.
        of: Parameters: values, tuples of values, or results of ``pytest.param``, whose marks and ids are kept.
    """
    given = [each if hasattr(each, "marks") else pytest.param(*(each if isinstance(each, tuple) else (each,))) for each in of]
    values = [each.values[0] if len(each.values) == 1 else tuple(each.values) for each in given]
    missing = [each for each in brief if each not in values]
    assert not missing, f"{missing} are not among the parameters"
    return [
        each if value in brief else pytest.param(*each.values, id=each.id, marks=[*each.marks, pytest.mark.thorough])
        for each, value in zip(given, values, strict=True)
    ]
