"""Fixtures of the tests of ``onelaunch.integrations``."""

from __future__ import annotations

import sys
import types

import pytest


@pytest.fixture
def fla(monkeypatch):
    """Return a stand-in for the package fla, whose version ``accelerate`` reads."""
    module = types.ModuleType("fla")
    module.__version__ = "0.6.0"
    monkeypatch.setitem(sys.modules, "fla", module)
    return module
