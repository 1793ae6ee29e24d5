"""Count the launches of one call, and its grid barriers.

Launches are the kernels, copies and fills in a CUDA graph that captures the call. The graph holds all work of the device,
including that of libraries, compiled code and the backward pass. No permission to profile is needed. Grid barriers are counted by
the kernel itself: a variant whose kernel counts them has the capability ``barriers``, a function that makes a call and reads the
counter. The measures in ``measures/counts.py`` call :func:`count_launches` and :func:`count_barriers`.
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
from onelaunch.workbench.verify.calls import Candidate, Inputs, draw_gradients, make_inputs, status_of

LAUNCHES = (0, 1, 2)
"""Types of graph nodes that are work for the device, by their ``CUgraphNodeType``: kernel, memcpy and memset."""


def count_launches(
    operation: Operation[..., Any],
    requests: Sequence[Request],
    *,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> list[int | str]:
    """Return for each request the number of launches of one call, or the reason why they could not be counted."""
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
    """Return for each request the number of grid barriers in one call, or the reason why they could not be counted."""
    device = torch.device(device)
    return [_or_why_not(_barriers, operation, request, device, seed) for request in requests]


_GRAPH_NODES = "the nodes of a captured graph"
"""Object that errors of the driver name."""


def launches_in(graph: torch.cuda.CUDAGraph) -> int:
    """Return the number of kernels, copies and fills in a captured graph, which must be made with ``keep_graph=True``.

    Raises:
        DriverError: The driver cannot list the nodes of the graph.
    """
    driver, handle, size = library(), ctypes.c_void_p(graph.raw_cuda_graph()), ctypes.c_size_t()
    accept("cuGraphGetNodes", driver.cuGraphGetNodes(handle, None, ctypes.byref(size)), _GRAPH_NODES)
    nodes, kind = (ctypes.c_void_p * size.value)(), ctypes.c_int()
    if size.value:
        accept("cuGraphGetNodes", driver.cuGraphGetNodes(handle, nodes, ctypes.byref(size)), _GRAPH_NODES)
    found = 0
    for node in nodes:
        accept("cuGraphNodeGetType", driver.cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind)), _GRAPH_NODES)
        found += kind.value in LAUNCHES
    return found


Count = Callable[[Operation[..., Any], Request, torch.device, int], int | str]
"""Function that counts one request on a device with a seed, and returns the count or the reason why there is none."""


def _or_why_not(count: Count, operation: Operation[..., Any], request: Request, device: torch.device, seed: int) -> int | str:
    """Return a count, or the message of the exception that prevented it."""
    try:
        return count(operation, request, device, seed)
    except Exception as error:  # noqa: BLE001 - the other requests are counted whatever this variant raises
        return status_of(error)[1]


def _barriers(operation: Operation[..., Any], request: Request, device: torch.device, seed: int) -> int | str:
    """Count the grid barriers of one call, or return the reason why they cannot be counted."""
    variant = None if request.control else operation.variants.get(request.variant)  # none for auto
    counter = None if variant is None else variant.capabilities.barriers
    if counter is None:
        return "its kernels count none"
    inputs = make_inputs(operation, request.case, device, seed, request.direction)
    with torch.no_grad():
        return counter(operation.bind(**inputs.arguments))


def _launches(operation: Operation[..., Any], request: Request, device: torch.device, seed: int) -> int:
    """Count the kernels, copies and fills of one call, captured in a CUDA graph after warming up."""
    control = operation.controls[request.variant] if request.control else None
    candidate = Candidate.variant(operation, request.variant) if control is None else Candidate.control(operation, control)
    inputs = make_inputs(operation, request.case, device, seed, request.direction)
    stream, graph = torch.cuda.Stream(device), torch.cuda.CUDAGraph(keep_graph=True)
    stream.wait_stream(torch.cuda.current_stream(device))  # on which the inputs were drawn
    with torch.cuda.stream(stream):
        if inputs.differentiable:
            inputs.output_gradients = draw_gradients(
                candidate(Inputs(inputs.arguments)), request.case.dtype, seed, inputs.through
            )
        for _ in range(WARM_UP_CALLS):
            candidate(inputs)
        stream.synchronize()
    capture(candidate, [inputs], 1, graph, stream)
    return launches_in(graph)
