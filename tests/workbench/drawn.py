"""Replacements of ``page.plots`` for tests that render pages without examining their plots.

Matplotlib takes a tenth of a second per plot, and a page may have dozens. :func:`draw_once` makes results of equal cache keys
share their plots. :func:`keep_texts_alone` gives plots that consist of their texts.
:func:`onelaunch.workbench.report.plots.plots` itself draws all of a plot, except after :func:`keep_texts_alone`. The first is for
all tests of this folder (``conftest.py``), the second for those of commands and of the headline. ``test_report_plots.py`` checks
that no plot shows what the cache key leaves out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from onelaunch.workbench.report import page, plots
from onelaunch.workbench.report.plots import Plot
from onelaunch.workbench.report.text import html
from onelaunch.workbench.result import Result

UNSEEN = {"question": "Is it seen?", "notes": "unseen", "criteria": ()}
"""Fields of a study that no plot shows, with other values."""

_DRAWN: dict[str, tuple[Plot, ...]] = {}
"""Plots by cache key, for the whole test process."""

_WRITTEN: dict[str, tuple[Plot, ...]] = {}
"""Plots that consist of their texts, by cache key."""


def unseen_changed(result: Result) -> Result:
    """Return the result with other values in the fields that no plot shows."""
    study = result.study.model_copy(update=UNSEEN)
    nothing = {"study_digest": "", "outcomes": (), "decision": None, "notes": (), "noise": (), "interrupted": False}
    return result.model_copy(update={"study": study, **nothing})


def all_that_is_seen(result: Result) -> str:
    """Return a cache key from everything that plots show."""
    return unseen_changed(result).model_dump_json()


def draw_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace ``page.plots`` by a cache, so that results that differ only in what no plot shows share their plots."""

    def drawn(result: Result) -> tuple[Plot, ...]:
        seen = all_that_is_seen(result)
        if seen not in _DRAWN:
            _DRAWN[seen] = plots.plots(result)
        return _DRAWN[seen]

    monkeypatch.setattr(page, "plots", drawn)


def keep_texts_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the SVG of a plot hold its texts only. Laying out and drawing everything else takes most of the time."""

    def texts(figure: Any, title: str) -> str:
        shown = texts_of(figure)
        return f"<svg><title>{html(title)}</title>{''.join(f'<text>{html(text)}</text>' for text in shown if text)}</svg>"

    def written(result: Result) -> tuple[Plot, ...]:
        seen = all_that_is_seen(result)
        if seen not in _WRITTEN:
            _WRITTEN[seen] = plots.plots(result)
        return _WRITTEN[seen]

    monkeypatch.setattr(plots, "_svg", texts)
    monkeypatch.setattr(page, "plots", written)


def texts_of(artist: Any) -> Iterator[str]:
    """Yield the texts of an artist of Matplotlib and of those inside it, except labels of minor ticks.

    Our plots label no minor ticks, and Matplotlib needs half of the time of a plot to make them.
    """
    if hasattr(artist, "get_text"):
        yield artist.get_text()
    ticked = hasattr(artist, "get_major_ticks")
    for each in [artist.label, artist.offsetText, *artist.get_major_ticks()] if ticked else artist.get_children():
        yield from texts_of(each)
