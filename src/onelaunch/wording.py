"""Helpers for messages: lists of names, values and other libraries' errors on one line, and suggestions for mistyped names.

The error classes call them, and so do those modules, throughout the package, that put such text into a message or print it.
Plug-ins import them from ``onelaunch.errors``.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Pattern of characters that could control a terminal or cannot be encoded as UTF-8: control characters except newline and tab,
line and paragraph separators, bidirectional embeddings, overrides and isolates, and lone surrogates."""


def escaped(text: str) -> str:
    """Return a string with each :data:`UNSAFE` character replaced by its backslash escape."""
    return UNSAFE.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `` Did you mean 'x'?`` if a known name is close to ``name``, else an empty string."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def listing(names: Iterable[str]) -> str:
    """Return the names separated by commas, or ``none`` if there are none."""
    return ", ".join(names) or "none"


def in_a_line(problem: BaseException) -> str:
    """Return the message of another library's error on one line of at most about 300 characters, without a final full stop.

    Control characters are escaped. If the error has no message, or converting it to a string fails, the name of its type is
    returned.
    """
    try:
        text = str(problem)
    except Exception:  # noqa: BLE001 - __str__ of the error is another library's code too
        text = ""
    return escaped(" ".join(text.split())[:300]).removesuffix(".") or type(problem).__name__


def shown(value: object, most: int = 80) -> str:
    """Return the ``repr`` of a value for a message, on one line and at most ``most`` characters long."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # noqa: BLE001 - any object may be passed; the repr of an integer of 5000 digits raises
        return f"a value of type {type(value).__name__}"
    return text if len(text) <= most else f"{text[: most - 3]}..."
