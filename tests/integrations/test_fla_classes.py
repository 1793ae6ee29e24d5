"""Tests of the classes that ``accelerate`` knows of fla against fla's own, where fla is installed."""

from __future__ import annotations

import importlib

import pytest

from onelaunch.integrations.known import FLA, KNOWN


@pytest.mark.parametrize("name", [name for name, (library, _) in KNOWN.items() if library is FLA])
def test_a_known_class_has_this_name_in_its_library(name):
    """A class that moved is found under its old name too, but its own name is the new one, by which modules are recognized."""
    module, _, kind = name.rpartition(".")
    pytest.importorskip("fla", reason="it looks at fla's classes")
    found = getattr(importlib.import_module(module), kind)
    assert f"{found.__module__}.{found.__qualname__}" == name
