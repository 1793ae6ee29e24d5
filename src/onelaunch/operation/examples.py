"""Record the kernels of a variant from example calls on fake tensors.

:meth:`Variant.builds <onelaunch.operation.Variant.builds>`, which the inspector calls among others, calls
:func:`recorded_builds`. ``onelaunch prebuild`` calls :func:`builds_for_case` and :func:`builds_of_examples`. The workbench calls
:func:`builds_for_case` before it judges variants on probes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from onelaunch.device.architectures import find_architecture, pretended
from onelaunch.errors import ArgumentError
from onelaunch.launch.build import Build, builds_of
from onelaunch.launch.imitation import record
from onelaunch.launch.launch import CudaLaunch, Launch
from onelaunch.operation.case import Case
from onelaunch.operation.definition import Operation
from onelaunch.operation.query import Direction, Query
from onelaunch.operation.registry import find_operation
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
        # The recorded backward pass reads which inputs require a gradient (launch/operator.py), and so may the call.
        for name in example.wants or (reading.differentiable if grad else ()):
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


def variants_for(query: Query, names: Iterable[str] = ()) -> Iterator[Variant]:
    """Yield the variants with kernels of their own that could run a call: those named, or those that ``auto`` may choose."""
    named = tuple(names)
    for variant in find_operation(query.operation).variants.values():
        wanted = variant.name in named if named else variant.capabilities.automatic
        if wanted and variant.launches is not None and variant.why_not(query) is None:
            yield variant


def builds_for_case(case: Case, architecture: str, directions: Iterable[Direction], names: Iterable[str] = ()) -> list[Build]:
    """Return the distinct kernels that a call of a case launches on an architecture.

    Args:
        case: Sizes, dtype and options of the call. Tensors are as the operation's input maker makes them: contiguous, and aligned
            to 16 bytes where their sizes allow.
        architecture: Name of the architecture, such as ``sm_90a``.
        directions: Directions to record. ``forward_backward`` is left out for a variant without a backward pass.
        names: Names of the variants; by default all that ``auto`` may choose, of which it takes the fastest measured on a device.
    """
    operation = find_operation(case.operation)
    found: dict[object, Build] = {}
    device = pretended(find_architecture(architecture).name)
    for direction in directions:
        query = operation.query(case, str(device), grad=direction == "forward_backward")
        for variant in variants_for(query, names):
            for build in recorded_builds(variant, [Example(case, direction)], architecture):
                found.setdefault(build.key, dataclasses.replace(build, name=f"{variant.name}: {build.name}"))
    return list(found.values())


def builds_of_examples(operation: Operation[..., Any], architecture: str, names: Iterable[str] = ()) -> list[Build]:
    """Return the distinct kernels that the example calls of an operation's variants launch on an architecture.

    Args:
        operation: Operation whose variants list examples.
        architecture: Name of the architecture, such as ``sm_90a``.
        names: Names of the variants; by default all that ``auto`` may choose.
    """
    named = [operation.get(name) for name in names]
    variants = named or [variant for variant in operation.variants.values() if variant.capabilities.automatic]
    return [
        dataclasses.replace(build, name=f"{variant.name}: {build.name}")
        for variant in variants
        for build in variant.builds(architecture)
    ]
