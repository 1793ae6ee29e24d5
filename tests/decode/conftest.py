"""Fixtures for tests of the decoding runtime and of sessions without a GPU: weights, and launches emulated in PyTorch."""

from __future__ import annotations

import pytest

from onelaunch import dispatch
from onelaunch.decode import decode_step, random_weights
from onelaunch.decode.runtime import kernels
from onelaunch.decode.runtime.models import MODELS
from tests.decode.played import MODEL, Launch


@pytest.fixture(scope="module")
def weights():
    """Return random weights of ``MODEL`` of ``tests/decode/played.py``, a float32 model of two layers."""
    return random_weights(MODEL, 4)


@pytest.fixture
def played(weights, monkeypatch):
    """Let PyTorch emulate the launches of the variant ``streaming``, as for a GPU of 5 SMs, and return the emulated kernel.

    Its attributes count the launches, and can make one of them fail. The variant's checks of what it supports are removed: it
    needs a Hopper GPU and weights in bfloat16, where those of ``MODEL`` are float32. The sessions of the fixture ``weights`` are
    made anew for each test.
    """
    played = Launch(weights)
    monkeypatch.setattr(kernels, "processors", lambda device: 5)
    monkeypatch.setattr("onelaunch.launch.launch.load", lambda *_, **__: played)
    monkeypatch.setattr(decode_step.get("streaming"), "_supports", [])
    MODELS.discard(weights)
    yield played
    # What dispatch chose while ``streaming`` ran anywhere must not outlive the test.
    dispatch.forget()
    dispatch.choose.cache_clear()
