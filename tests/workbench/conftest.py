"""What the tests of the workbench share: plots that are drawn once."""

from __future__ import annotations

import pytest

from tests.workbench.drawn import all_that_is_seen, draw_once


@pytest.fixture(autouse=True)
def plots_drawn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of results that differ in what no plot shows have the same plots."""
    draw_once(monkeypatch, all_that_is_seen)
