"""CUDA graphs: the capture of a step, and a cache of captured steps.

``session.py`` and the variants ``captured`` and ``compiled`` of ``decode_step`` capture with it; ``session.py`` and
``models.py`` hold the caches.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

import torch

from onelaunch.cuda import capture

Captured = TypeVar("Captured")
Result = TypeVar("Result")


class GraphCache(Generic[Captured]):
    """Cache of captured steps that drops the least recently used one.

    It is not thread-safe: the owner holds a lock around each use.

    Args:
        capacity: Number of captured steps to keep.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._steps: OrderedDict[Hashable, Captured] = OrderedDict()

    def __len__(self) -> int:
        return len(self._steps)

    def get(self, key: Hashable, make: Callable[[], Captured]) -> Captured:
        """Return the step captured for ``key``; if there is none, capture it with ``make``."""
        steps = self._steps
        if key not in steps:
            steps[key] = make()
            while len(steps) > self.capacity:
                steps.popitem(last=False)
        steps.move_to_end(key)
        return steps[key]


class CaptureSite:
    """Stream and memory pool for captures whose replays run one after another, and whose results are copied before the next one.

    Their temporary tensors share memory. cuBLAS keeps a workspace of 32 MB for each stream that it ever ran on, so captures on
    streams of their own would add up to a gigabyte.

    Args:
        device: Device of the work.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._made: tuple[torch.cuda.Stream, Any] | None = None

    def get(self) -> tuple[torch.cuda.Stream, Any]:
        """Return the stream and the pool, made at the first call; the owner holds a lock."""
        if self._made is None:
            self._made = torch.cuda.Stream(self._device), torch.cuda.graph_pool_handle()
        return self._made


def capture_on_new_stream(
    step: Callable[[], Result], device: torch.device, *, warm_up: bool = False, site: CaptureSite | None = None
) -> tuple[torch.cuda.CUDAGraph, Result]:
    """Capture the work that a function enqueues, and return the graph and the function's result.

    Args:
        step: Function to capture.
        device: Device of its work.
        warm_up: Flag to call the function once before the capture, on the same stream, so that compilation and the allocation
            of workspaces are not captured.
        site: Stream and pool that captures share; by default new ones.
    """
    with torch.cuda.device(device):
        stream, pool = (torch.cuda.Stream(device), None) if site is None else site.get()
        if warm_up:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                step()
            torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        return graph, capture(step, graph, stream, pool)
