"""Plots drawn once for results that look alike, for tests that render pages without looking at their plots.

Matplotlib takes a tenth of a second for each, and a page has up to a dozen. Where this is asked for, ``page.plots`` returns the
plots that a page shows; :func:`onelaunch.workbench.report.plots.plots` always draws.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from onelaunch.workbench.report import page
from onelaunch.workbench.report.plots import Plot, plots
from onelaunch.workbench.result import Result

UNSEEN = {"question": "Is it seen?", "notes": "unseen", "criteria": ()}
"""Parts of a study, with other values, that no plot shows."""

Key = Callable[[Result], str]

_DRAWN: dict[str, tuple[Plot, ...]] = {}


def unseen_changed(result: Result) -> Result:
    """The result with other values of what no plot shows."""
    study = result.study.model_copy(update=UNSEEN)
    nothing = {"study_digest": "", "outcomes": (), "decision": None, "notes": (), "noise": (), "interrupted": False}
    return result.model_copy(update={"study": study, **nothing})


def all_that_is_seen(result: Result) -> str:
    return unseen_changed(result).model_dump_json()


def all_but_numbers(result: Result) -> str:
    """The cells with their status and how they were timed: two runs of a study differ in their numbers alone."""
    cells = [(c.shape, c.direction, c.variant, c.control, c.status, [t.regime for t in c.timings]) for c in result.cells]
    return repr((result.study.shapes, cells))


def draw_once(monkeypatch: pytest.MonkeyPatch, key: Key) -> None:
    """Let pages show plots that were drawn for a result of the same key."""

    def drawn(result: Result) -> tuple[Plot, ...]:
        seen = key(result)
        if seen not in _DRAWN:
            _DRAWN[seen] = plots(result)
        return _DRAWN[seen]

    monkeypatch.setattr(page, "plots", drawn)
