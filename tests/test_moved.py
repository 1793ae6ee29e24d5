"""Modules that were moved are still found under their old names, with a warning that tells the new one."""

from __future__ import annotations

import importlib
import sys

import pytest

from onelaunch.moved import MOVED


@pytest.mark.parametrize("old", sorted(MOVED))
def test_an_old_name_gives_the_attributes_of_the_new_module(old, monkeypatch):
    new = importlib.import_module(MOVED[old])
    monkeypatch.delitem(sys.modules, old, raising=False)
    with pytest.warns(DeprecationWarning, match=MOVED[old]):
        module = importlib.import_module(old)
    names = [name for name in vars(new) if not name.startswith("_")]
    assert names
    assert all(getattr(module, name) is getattr(new, name) for name in names)


def test_a_name_that_the_new_module_lacks_is_an_attribute_error(monkeypatch):
    monkeypatch.delitem(sys.modules, "onelaunch.builds", raising=False)
    with pytest.warns(DeprecationWarning, match="build"):
        module = importlib.import_module("onelaunch.builds")
    with pytest.raises(AttributeError):
        module.nothing_of_this_name  # noqa: B018


def test_other_names_are_not_found():
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("onelaunch.never_was")
