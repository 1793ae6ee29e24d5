"""Tests of ``Switch``, which sets an environment variable of Triton's compiler while any thread is inside its ``with`` block."""

from __future__ import annotations

import os

import pytest

from onelaunch.launch.switch import Switch

NAME = "ONELAUNCH_TEST_SWITCH"


@pytest.mark.parametrize("before", [None, "own"])
def test_the_former_value_is_restored(before, monkeypatch):
    monkeypatch.delenv(NAME, raising=False) if before is None else monkeypatch.setenv(NAME, before)
    inside = None

    def fail():
        nonlocal inside
        inside = os.environ[NAME]
        raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"), Switch(NAME, "1"):
        fail()
    assert inside == "1"
    assert os.environ.get(NAME) == before


@pytest.mark.parametrize("before", [None, "own"])
def test_a_thread_that_leaves_first_does_not_affect_the_others(before, monkeypatch):
    """The ``with`` blocks overlap without nesting, as those of two threads do."""
    monkeypatch.delenv(NAME, raising=False) if before is None else monkeypatch.setenv(NAME, before)
    switch = Switch(NAME, "1")
    switch.__enter__()
    switch.__enter__()
    switch.__exit__()
    assert os.environ[NAME] == "1"
    switch.__exit__()
    assert os.environ.get(NAME) == before
