"""Record the kernels of a variant from example calls on fake tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch

from onelaunch.device.architectures import find_architecture
from onelaunch.errors import ArgumentError
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
    """Return the launches of an example call, with those of its backward pass if it has one, in order."""
    operation, grad = variant.operation, example.direction == "forward_backward"
    # PyTorch builds no autograd graph on a pretended device, so only the query says that gradients are wanted.
    with record(architecture) as (device, launches), torch.no_grad():
        reading = operation.make_inputs(example.case, device, 0)
        for name in example.wants:  # the recorded backward pass reads which inputs require a gradient, see launch/operator.py
            reading.arguments[name].requires_grad_()
        call = operation.bind(**reading.arguments)
        variant.run(_differentiable(variant, call) if grad else call)
    return launches


def _differentiable(variant: Variant, call: Any) -> Any:
    """Return a call whose query says that gradients are wanted.

    Raises:
        ArgumentError: The call has no field ``key`` that holds its query.
    """
    key = call.query()._replace(grad=True)
    if hasattr(call, "_replace") and hasattr(call, "key"):
        return call._replace(key=key)
    if dataclasses.is_dataclass(call) and hasattr(call, "key"):
        return dataclasses.replace(call, key=key)  # pyrefly: ignore[bad-argument-type]
    raise ArgumentError(
        f"An example of {variant!r} asks for a backward pass, but its call has no field 'key' that holds its query; "
        "give the call one, or list the kernels by @variant.kernels."
    )
