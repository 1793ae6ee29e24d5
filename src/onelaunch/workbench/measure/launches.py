"""Count what one call launches, and the barriers over the grid that its kernel meets at.

Launches are the kernels, copies and fills of a CUDA graph that the call is captured in. A graph holds what the device is given,
whoever launched it: libraries, compilers and the backward pass included. No profiler has to be permitted for that. Barriers are
counted by the kernel itself: a variant whose kernel does so has a tag ``barriers``, which runs a call and reads the counter.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch

from onelaunch.cuda.driver import accept, library
from onelaunch.operation import Operation
from onelaunch.workbench.measure.count import Request
from onelaunch.workbench.measure.sampling import WARM_UP_CALLS, capture
from onelaunch.workbench.verify.calls import Callee, Inputs, draw_gradients, make_inputs, status_of

LAUNCHES = (0, 1, 2)
"""The driver's kinds of nodes that are work of their own for the device: kernels, copies, fills."""


def count_launches(
    operation: Operation[..., Any],
    requests: Sequence[Request],
    *,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> list[int | str]:
    """Return the launches of one call for each request, or why they could not be counted, in the order of the requests."""
    device = torch.device(device)
    if device.type != "cuda" or torch.version.hip:
        return ["launches are counted on NVIDIA GPUs only"] * len(requests)
    return [_or_why_not(_launches, operation, request, device, seed) for request in requests]


def count_barriers(
    operation: Operation[..., Any],
    requests: Sequence[Request],
    *,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> list[int | str]:
    """Return the barriers over the grid in one call for each request, or why they could not be counted, in their order."""
    device = torch.device(device)
    return [_or_why_not(_barriers, operation, request, device, seed) for request in requests]


ABOUT = "the nodes of a captured graph"
"""Object of the driver's errors here."""


def launches_in(graph: torch.cuda.CUDAGraph) -> int:
    """Return the number of kernels, copies and fills in a captured graph, made with ``keep_graph=True``.

    Raises:
        DriverError: The driver does not tell what the graph holds.
    """
    driver, handle, size = library(), ctypes.c_void_p(graph.raw_cuda_graph()), ctypes.c_size_t()
    accept("cuGraphGetNodes", driver.cuGraphGetNodes(handle, None, ctypes.byref(size)), ABOUT)
    nodes, kind = (ctypes.c_void_p * size.value)(), ctypes.c_int()
    if size.value:
        accept("cuGraphGetNodes", driver.cuGraphGetNodes(handle, nodes, ctypes.byref(size)), ABOUT)
    found = 0
    for node in nodes:
        accept("cuGraphNodeGetType", driver.cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind)), ABOUT)
        found += kind.value in LAUNCHES
    return found


Count = Callable[[Operation[..., Any], Request, torch.device, int], int | str]


def _or_why_not(count: Count, operation: Operation[..., Any], request: Request, device: torch.device, seed: int) -> int | str:
    try:
        return count(operation, request, device, seed)
    except Exception as error:  # noqa: BLE001 - whatever a variant does wrong here, the others are counted
        return status_of(error)[1]


def _barriers(operation: Operation[..., Any], request: Request, device: torch.device, seed: int) -> int | str:
    counter = None if request.control else operation.get(request.variant).capabilities.barriers
    if counter is None:
        return "its kernels count none"
    inputs = make_inputs(operation, request.case, device, seed, request.direction)
    with torch.no_grad():
        return counter(operation.bind(**inputs.arguments))


def _launches(operation: Operation[..., Any], request: Request, device: torch.device, seed: int) -> int:
    control = operation.controls[request.variant] if request.control else None
    callee = Callee.variant(operation, request.variant) if control is None else Callee.control(operation, control)
    inputs = make_inputs(operation, request.case, device, seed, request.direction)
    stream, graph = torch.cuda.Stream(device), torch.cuda.CUDAGraph(keep_graph=True)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        if inputs.differentiable:
            inputs.output_gradients = draw_gradients(callee(Inputs(inputs.arguments)), request.case.dtype, seed)
        for _ in range(WARM_UP_CALLS):
            callee(inputs)
        stream.synchronize()
    capture(callee, [inputs], 1, graph, stream)
    return launches_in(graph)
