"""Tests of PyTorch's setting for TF32: every way to set it is read, and it is part of the keys of plans."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from onelaunch.launch import facts
from onelaunch.launch.tf32 import allows_tf32

MATMUL = torch.backends.cuda.matmul

SETTINGS = {
    "set_float32_matmul_precision": lambda: torch.set_float32_matmul_precision("high"),
    "allow_tf32": lambda: setattr(MATMUL, "allow_tf32", True),
    "fp32_precision": lambda: setattr(MATMUL, "fp32_precision", "tf32"),
    "fp32_precision of all backends": lambda: setattr(torch.backends, "fp32_precision", "tf32"),
}


@pytest.fixture(autouse=True)
def _setting_as_before():
    before = MATMUL.fp32_precision
    MATMUL.fp32_precision = "none"
    yield
    torch.backends.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")
    MATMUL.fp32_precision = before


@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_of_pytorch_is_read_and_part_of_the_keys_of_plans(name, monkeypatch):
    def collect(inputs, grad, key, tensors, addresses):
        tensors.append(SimpleNamespace(is_cuda=True))  # a tensor of a GPU, which this machine need not have
        return True

    monkeypatch.setattr(facts, "_collect", collect)
    before = facts.facts_of(()).key
    assert not allows_tf32()
    SETTINGS[name]()
    assert allows_tf32()
    assert facts.facts_of(()).key != before
    MATMUL.fp32_precision = "ieee"
    assert not allows_tf32()
