"""Name the differences between the declarations of two results, down to a criterion whose bound was moved.

``compare.py`` calls :func:`declaration_differences`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onelaunch.wording import listing
from onelaunch.workbench.result import Result

_BOUNDS = ("at_least", "at_most", "equals")
"""Keys of a criterion's bound, whose values are named where they differ."""


def declaration_differences(a: Result, b: Result) -> list[str]:
    """Describe the differences between two declarations, one sentence each.

    The declarations themselves are compared, because a stored digest does not change when somebody edits the criteria beside it.
    """
    sentences = []
    if a.study_digest != b.study_digest:
        sentences.append(f"The declarations differ (digests {a.study_digest[:12]} and {b.study_digest[:12]}).")
    for which, result in (("first", a), ("second", b)):
        if result.study.digest() != result.study_digest:
            sentences.append(f"The criteria or shapes of the {which} were changed after its run: its digest is of another study.")
    one, other = a.study.model_dump(), b.study.model_dump()
    for key in ("shapes", "criteria"):
        sentences += _entries_differ(key, *({entry["name"]: entry for entry in declared[key]} for declared in (one, other)))
    keys = dict.fromkeys((*one, *other))  # a stored declaration leaves out newer keys at their default
    sentences += [f"{key} differ." for key in keys if key not in ("shapes", "criteria") and one.get(key) != other.get(key)]
    for which, result in (("first", a), ("second", b)):
        judged = {outcome.criterion.name for outcome in result.outcomes}
        if dropped := [name for name in (criterion.name for criterion in result.study.criteria) if judged and name not in judged]:
            sentences.append(f"criteria: the {which} has no outcome of {listing(map(repr, dropped))}, which its study declares.")
    return sentences


def _entries_differ(key: str, earlier: Mapping[str, Mapping[str, Any]], later: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Describe the shapes or criteria that two declarations do not share, or declare differently; bounds with both values."""
    sentences = []
    for name in dict.fromkeys((*earlier, *later)):
        if name not in later:
            sentences.append(f"{key}: {name!r} is in the first only.")
        elif name not in earlier:
            sentences.append(f"{key}: {name!r} is in the second only.")
        elif earlier[name] != later[name]:
            one, other = earlier[name], later[name]
            fields = [field for field in dict.fromkeys((*one, *other)) if one.get(field) != other.get(field)]
            changes = (_change(field, one.get(field), other.get(field)) for field in fields)
            sentences.append(f"{key}: {name!r} differs in {', '.join(changes)}.")
    return sentences


def _change(field: str, before: object, after: object) -> str:
    """Return the key of a difference, with both values if it is a bound, such as ``at_least (1.3, then 1.1)``."""
    if field not in _BOUNDS:
        return field
    return f"{field} ({'none' if before is None else before}, then {'none' if after is None else after})"
