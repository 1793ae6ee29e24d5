"""Fixtures shared by tests of decode kernels on the host: a folder of compiled libraries, and launches emulated in PyTorch."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from onelaunch import dispatch
from onelaunch.decode import decode_step, random_weights
from onelaunch.decode.runtime import kernels
from onelaunch.decode.runtime.models import MODELS
from tests.decode.played import MODEL, Launch


@pytest.fixture(scope="session")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return one folder of compiled libraries for all workers of a run, so that each library is compiled once."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "libraries"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def weights():
    """Return random bfloat16 weights of the tests' model."""
    return random_weights(MODEL, 4)


@pytest.fixture
def played(weights, monkeypatch):
    """Emulate the launches of ``streaming`` in PyTorch. The session objects of the weights are made anew for each test."""
    played = Launch(weights)
    monkeypatch.setattr(kernels, "processors", lambda device: 5)
    monkeypatch.setattr("onelaunch.launch.launch.load", lambda *_, **__: played)
    monkeypatch.setattr(decode_step.get("streaming"), "_supports", [])
    MODELS.discard(weights)
    yield played
    dispatch.forget()
    dispatch.choose.cache_clear()
