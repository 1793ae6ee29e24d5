"""Capture enqueued work in a CUDA graph, undisturbed by other threads and by Python's garbage collector.

The workbench, where it measures times or counts launches, the measurement of peaks, and the decode runtime
(``decode/runtime/graphs.py``) capture with it.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")

_ONE_AT_A_TIME = threading.RLock()
"""Lock held during a capture: a capture first empties PyTorch's cache of free memory, which another capture may be using."""


def capture(step: Callable[[], Result], graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, pool: Any = None) -> Result:
    """Capture the work that a function enqueues, and return the function's result.

    Garbage collection is off during the capture: a collection in this thread could destroy another CUDA graph, which CUDA does
    not allow during a capture. Other threads may use the GPU meanwhile.

    Args:
        step: Function to capture. Call it once before, on the same stream, if it compiles kernels or allocates workspaces.
        graph: Empty graph to capture into.
        stream: Stream to capture on; not the default stream of its device.
        pool: Memory pool that graphs share whose replays follow one another, by ``torch.cuda.graph_pool_handle``; by default one
            of its own.

    Raises:
        Exception: The error that ``step`` raised. The broken capture raises a second error, which would hide the reason.
    """
    first: BaseException | None = None
    pool = torch.cuda.graph_pool_handle() if pool is None else pool
    try:
        # PyTorch's default is a stream of the device that captured first, and a mode that other threads' CUDA calls may break.
        # Before the capture it synchronizes the current device, which is therefore made the stream's.
        with (
            _ONE_AT_A_TIME,
            no_garbage_collection(),
            torch.cuda.device(stream.device),
            torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
        ):
            try:
                return step()
            except BaseException as error:
                first = error
                raise
    except Exception as error:
        _abandon(pool, stream.device)
        if first is None or first is error:
            raise
        raise first from error


def _abandon(pool: tuple[int, int], device: torch.device) -> None:
    """Let PyTorch forget a capture that CUDA could not end, such as after a call that no capture allows.

    PyTorch's allocator would count it as under way for ever, and then keep each block that several streams have used. The default
    generator of random numbers would refuse every later call. Nothing happens if the capture ended, or did not begin.
    """
    if device.type != "cuda":
        return
    index = torch.cuda.current_device() if device.index is None else device.index
    try:
        torch._C._cuda_endAllocateToPool(index, pool)  # noqa: SLF001
    except RuntimeError:  # no capture with this pool is under way
        return
    torch._C._cuda_releasePool(index, pool)  # noqa: SLF001
    generator = torch.cuda.default_generators[index]
    generator.graphsafe_set_state(generator.clone_state())


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Turn the garbage collector off inside, and back on at the end if it was on before."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
