"""Capture enqueued work in a CUDA graph, undisturbed by other threads and by Python's garbage collector.

The workbench, where it measures times or counts launches, the measurement of peaks, and the decode runtime
(``decode/runtime/graphs.py``) capture with it.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

Result = TypeVar("Result")

_ONE_AT_A_TIME = threading.RLock()
"""Lock held during a capture: a capture first empties PyTorch's cache of free memory, which another capture may be using."""


def capture(step: Callable[[], Result], graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> Result:
    """Capture the work that a function enqueues, and return the function's result.

    Garbage collection is off during the capture: a collection in this thread could destroy another CUDA graph, which CUDA does
    not allow during a capture. Other threads may use the GPU meanwhile.

    Args:
        step: Function to capture. Call it once before, on the same stream, if it compiles kernels or allocates workspaces.
        graph: Empty graph to capture into.
        stream: Stream to capture on; not the default stream of its device.

    Raises:
        Exception: The error that ``step`` raised. The broken capture raises a second error, which would hide the reason.
    """
    first: BaseException | None = None
    try:
        # PyTorch's default is a stream of the device that captured first, and a mode that other threads' CUDA calls may break.
        # Before the capture it synchronizes the current device, which is therefore made the stream's.
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
    """Turn the garbage collector off inside, and back on at the end if it was on before."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
