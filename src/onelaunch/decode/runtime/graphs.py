"""CUDA graphs: the capture of a step, and a cache of captured steps.

``session.py`` and the variants ``captured`` and ``compiled`` of ``decode_step`` capture with it; ``session.py`` and
``models.py`` hold the caches.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

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


def capture_on_new_stream(
    step: Callable[[], Result], device: torch.device, *, warm_up: bool = False
) -> tuple[torch.cuda.CUDAGraph, Result]:
    """Capture the work that a function enqueues, and return the graph and the function's result.

    Args:
        step: Function to capture.
        device: Device of its work.
        warm_up: Flag to call the function once before the capture, on the same stream, so that compilation and the allocation
            of workspaces are not captured.
    """
    with torch.cuda.device(device):
        stream = torch.cuda.Stream(device)
        if warm_up:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                step()
            torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        return graph, capture(step, graph, stream)
