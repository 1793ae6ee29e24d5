"""Pieces of messages: lists of names, values and foreign errors in one line, and suggestions for mistyped names."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that could steer a terminal or cannot be written as UTF-8: control characters except newline and tab, line and
paragraph separators, marks that change the direction of text, and lone surrogates."""


def escaped(text: str) -> str:
    """Return the text with each of its :data:`UNSAFE` characters written as a backslash escape."""
    return UNSAFE.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `` Did you mean 'x'?`` when a known name is close to ``name``, else an empty string."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def listing(names: Iterable[str]) -> str:
    """Return names in a readable row, or ``none``."""
    return ", ".join(names) or "none"


def in_a_line(problem: BaseException) -> str:
    """Return the message of somebody else's error for one of ours: in one line of bounded length, without a last full stop.

    Control characters are written as escapes. An error that cannot say what it is about is named by its type.
    """
    try:
        text = str(problem)
    except Exception:  # noqa: BLE001 - the error is somebody else's code too
        text = ""
    return escaped(" ".join(text.split())[:300]).removesuffix(".") or type(problem).__name__


def shown(value: object, most: int = 80) -> str:
    """Return the ``repr`` of a value for a message: on one line, and at most about ``most`` characters long."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # noqa: BLE001 - any object may come here; an integer of 5000 digits has no repr
        return f"a value of type {type(value).__name__}"
    return text if len(text) <= most else f"{text[: most - 3]}..."
