"""Tests of what a training step of ``nn.GatedLinearAttention`` takes of the host, by counts that do not depend on the machine.

From the third step on, what a step launches and allocates is replayed (``onelaunch/launch``). A GPU is pretended: tensors lie in
CPU memory, and launches do nothing, so that results are meaningless. ``machine`` replaces the GPU's driver by a stand-in.
"""

from __future__ import annotations

import ctypes
import sys
from collections import Counter
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from onelaunch.dispatch import choice
from onelaunch.launch import plan, recording, written
from onelaunch.launch.launch import Launch
from onelaunch.launch.packet import Address, Parameters
from onelaunch.launch.planned import forget_plans
from onelaunch.nn import GatedLinearAttention
from onelaunch.ops import gla_layer
from onelaunch.ops.gla_layer import autograd
from tests.launch.replayed import knobs, machine  # noqa: F401 - a fixture


def parameters_of(launch, _, resolve):
    """Return the parameters of a launch by its tensors alone."""
    tensors = [each for each in launch.arguments if isinstance(each, torch.Tensor)]
    values: list[bytes | Address] = [resolve(each) for each in tensors]
    return Parameters(1, tuple(values), (1, 1, 1), 128, 0)


class Step:
    """Training step of a layer, whose counts are taken at the fourth time."""

    def __init__(self):
        self.layer = GatedLinearAttention(hidden_size=64, num_heads=2, expand_k=1.0)
        self.x = torch.randn(1, 128, 64, requires_grad=True)
        self.ones = torch.ones(1, 128, 64)
        for _ in range(3):
            self()

    def __call__(self):
        for each in (self.x, *self.layer.parameters()):
            each.grad = None
        self.layer(self.x)[0].backward(self.ones)

    def python_calls(self) -> int:
        """Return the number of Python functions of the package that a step calls."""
        calls: Counter[str] = Counter()

        def count(frame: Any, event: str, _: Any) -> None:
            name = frame.f_code.co_filename
            if event == "call" and ("/onelaunch/" in name or name == "<replay>"):
                calls[frame.f_code.co_qualname if sys.version_info >= (3, 11) else frame.f_code.co_name] += 1

        sys.setprofile(count)
        try:
            self()
        finally:
            sys.setprofile(None)
        return calls.total()


@pytest.fixture
def counted(machine, monkeypatch):  # noqa: F811
    """Return counts of allocations, views and launches, which replays of a pretended GPU add to."""
    found: Counter[str] = Counter()

    def launch(self):
        knobs.runtime.launch_enter_hook(None)  # as Triton does
        if recording.recorder() is not None:
            recording.recorder().launched(self, None)

    def launched(*_):
        found["launches"] += 1
        return 0

    def counting(name, function):
        def call(*given):
            found[name] += 1
            return function(*given)

        return call

    function = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)(launched)
    allocator = plan._allocator
    monkeypatch.setattr(Launch, "_launch", launch)
    monkeypatch.setattr(recording, "of_triton", parameters_of)
    monkeypatch.setattr(plan.Device, "launch_function", staticmethod(lambda: function))
    monkeypatch.setattr(plan, "_allocator", lambda device: counting("allocations", allocator(device)))
    monkeypatch.setattr(written, "_reinterpret", counting("views", written._reinterpret))
    monkeypatch.setattr(autograd, "_kernels_for", lambda *_: "wide_activated,fused,norm_gate")
    monkeypatch.setattr(choice, "choose", lambda _: gla_layer.variants["packed"])
    forget_plans()
    yield found
    forget_plans()


@pytest.mark.skipif(written._reinterpret is None, reason="this PyTorch has no quick views")
def test_what_a_step_calls(counted):
    """The numbers are those of today. Fewer are better: lower them then, and raise them for good reasons alone."""
    step = Step()
    counted.clear()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        step()
    events = Counter(each.name for each in profiled.events())
    operators = {name: count for name, count in events.items() if name.startswith("aten::") and "resolve" not in name}
    # The gradients of x and of five parameters are taken over as they are, not copied.
    assert operators == {"aten::mm": 7, "aten::detach": 6}
    assert events["torch::autograd::AccumulateGrad"] == 6
    assert dict(counted) == {"launches": 11, "allocations": 14, "views": 15}
    assert step.python_calls() <= 49
