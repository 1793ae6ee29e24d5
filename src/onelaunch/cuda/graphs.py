"""Capture of enqueued work in a CUDA graph."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

Result = TypeVar("Result")

_ONE_AT_A_TIME = threading.RLock()
"""Lock held during a capture. A capture first empties PyTorch's cache of free memory, which another capture may be using."""


def capture(step: Callable[[], Result], graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> Result:
    """Capture the work that a function enqueues, and return the function's result.

    Python collects no garbage meanwhile. A collection in this thread may destroy another graph, which CUDA does not allow
    during a capture. Other threads may go on using the GPU.

    Args:
        step: Function to capture. Call it once before, on the same stream, if it compiles kernels or allocates workspaces.
        graph: Empty graph to capture into.
        stream: Stream to capture on; not the default stream of its device.

    Raises:
        Exception: Whatever the function raises. A capture that broke has an error of its own, but that one hides the reason.
    """
    first: BaseException | None = None
    try:
        # By default PyTorch captures on a stream of the device that captured first, and fails on what other threads do meanwhile.
        with (
            _ONE_AT_A_TIME,
            _no_garbage_collection(),
            torch.cuda.device(stream.device),
            torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"),
        ):
            try:
                return step()
            except BaseException as error:
                first = error
                raise
    except Exception as error:
        if first is None or first is error:
            raise
        raise first from error


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
