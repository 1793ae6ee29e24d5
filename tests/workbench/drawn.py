"""Plots drawn once for results whose cache key is equal, for tests that render pages without examining their plots.

Matplotlib takes a tenth of a second per plot, and a page has up to a dozen. With this replacement ``page.plots`` returns cached
plots. :func:`onelaunch.workbench.report.plots.plots` itself always draws.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from onelaunch.workbench.report import page
from onelaunch.workbench.report.plots import Plot, plots
from onelaunch.workbench.result import Result

UNSEEN = {"question": "Is it seen?", "notes": "unseen", "criteria": ()}
"""Fields of a study that no plot shows, with other values."""

Key = Callable[[Result], str]
"""Function that returns the cache key of a result: :func:`all_that_is_seen` or :func:`all_but_numbers`."""

_DRAWN: dict[str, tuple[Plot, ...]] = {}
"""Plots by cache key, for the whole test process."""


def unseen_changed(result: Result) -> Result:
    """Return the result with other values in the fields that no plot shows."""
    study = result.study.model_copy(update=UNSEEN)
    nothing = {"study_digest": "", "outcomes": (), "decision": None, "notes": (), "noise": (), "interrupted": False}
    return result.model_copy(update={"study": study, **nothing})


def all_that_is_seen(result: Result) -> str:
    """Return a cache key from everything that plots show."""
    return unseen_changed(result).model_dump_json()


def all_but_numbers(result: Result) -> str:
    """Return a cache key from the measurements' status and regimes.

    Two runs of one study differ only in their numbers, so the second run's page shows the plots of the first.
    """
    cells = [(c.shape, c.direction, c.variant, c.control, c.status, [t.regime for t in c.timings]) for c in result.cells]
    return repr((result.study.shapes, cells))


def draw_once(monkeypatch: pytest.MonkeyPatch, key: Key) -> None:
    """Replace ``page.plots`` by a cache, so that results with equal keys share their plots."""

    def drawn(result: Result) -> tuple[Plot, ...]:
        seen = key(result)
        if seen not in _DRAWN:
            _DRAWN[seen] = plots(result)
        return _DRAWN[seen]

    monkeypatch.setattr(page, "plots", drawn)
