"""What tests of the decode kernels on this machine share: libraries of their own source, and launches that PyTorch plays."""

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
    """One folder for all workers of a run, so that what one of them compiled, the others load."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "libraries"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def weights():
    return random_weights(MODEL, 4)


@pytest.fixture
def played(weights, monkeypatch):
    """The kernels of ``streaming`` on this machine; they are made anew for each test."""
    played = Launch(weights)
    monkeypatch.setattr(kernels, "processors", lambda device: 5)
    monkeypatch.setattr("onelaunch.launch.launch.load", lambda *_, **__: played)
    monkeypatch.setattr(decode_step.get("streaming"), "_supports", [])
    MODELS.discard(weights)
    yield played
    dispatch.forget()
    dispatch.choose.cache_clear()
