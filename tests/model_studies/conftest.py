"""Fixtures of the tests of studies of models."""

from __future__ import annotations

import sys
import types

import pytest
import torch

from onelaunch.model_studies import build, tasks
from tests.model_studies import tiny
from tests.untuned import interpreter, untuned


@pytest.fixture
def standin(monkeypatch):
    """Let a stand-in run as fla on a CPU, on one thread, with a short text."""
    fla = types.ModuleType("fla")
    fla.__version__ = "0.6.0"
    monkeypatch.setitem(sys.modules, "fla", fla)
    example = build.example()
    make = example.build

    def made(impl, size, seed):
        ours = make("onelaunch", size, seed)
        if impl == "onelaunch":
            return ours
        theirs = tiny.Model(size)
        theirs.load_state_dict(ours.state_dict())
        return theirs

    monkeypatch.setattr(example, "build", made)
    monkeypatch.setattr(example, "Text", tiny.Text)
    monkeypatch.setattr(tasks, "why_not", lambda *_: None)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def untuned_processes(tmp_path, monkeypatch):
    """Let fla's autotuners take their first configuration, here and in the processes of tasks."""
    monkeypatch.setattr(sys, "executable", interpreter(tmp_path))
    with untuned():
        yield
