"""Fixture that all tests of the workbench use: plots that are drawn once."""

from __future__ import annotations

import pytest

from tests.workbench.drawn import draw_once


@pytest.fixture(autouse=True)
def plots_drawn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let pages of results that differ only in values that no plot shows share their plots."""
    draw_once(monkeypatch)
