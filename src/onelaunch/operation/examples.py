"""Kernels of a variant, recorded from example calls on fake tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from onelaunch.device.architectures import find_architecture
from onelaunch.launch.build import Build, builds_of
from onelaunch.launch.imitation import record
from onelaunch.launch.launch import CudaLaunch, Launch
from onelaunch.operation.variant import Example, Variant


def recorded_builds(variant: Variant, examples: Iterable[Example], architecture: str) -> list[Build]:
    """Return the distinct kernels that a variant's example calls launch on an architecture."""
    launches: list[tuple[str, Launch | CudaLaunch]] = []
    for example in examples:
        if example.architectures is None or architecture in example.architectures:
            named = example.name or str(example.case)
            launches += [(named, launch) for launch in recorded_launches(variant, example, architecture)]
    return builds_of(launches, find_architecture(architecture))


def recorded_launches(variant: Variant, example: Example, architecture: str) -> list[Launch | CudaLaunch]:
    """Return the launches of a call by a variant, and of its backward pass where the example has one, in their order."""
    operation, grad = variant.operation, example.direction == "forward_backward"
    # PyTorch makes no graph of tensors on a device that is not here, so the query alone says that gradients are wanted
    with record(architecture) as (device, launches), torch.no_grad():
        reading = operation.make_inputs(example.case, device, 0)
        for name in example.wants:
            reading.arguments[name].requires_grad_()
        call: Any = operation.bind(**reading.arguments)
        variant.run(call._replace(key=call.query()._replace(grad=True)) if grad else call)
    return launches
