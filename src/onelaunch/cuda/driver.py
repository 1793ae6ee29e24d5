"""The CUDA driver: its bindings, its errors, and the context of a thread.

Two bindings meet here. What launches of Triton's kernels need goes through :mod:`ctypes`, since nothing but the driver has to be
installed for it. Modules of CUDA C++ are loaded through ``cuda-bindings``, which brings their compiler as well.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from typing import Any

from onelaunch.errors import DriverError


@functools.cache
def library() -> Any:
    """Return the driver by :mod:`ctypes`.

    Raises:
        OSError: There is no driver of NVIDIA's.
    """
    return ctypes.CDLL("libcuda.so.1")


def accept(call: str, error: int, about: str = "PyTorch's context") -> None:
    """Raise :class:`DriverError` unless a call by :mod:`ctypes` returned success."""
    if error:
        raise DriverError(call, got=f"error {error}", about=about)


def bound(call: str, *arguments: Any, about: str = "PyTorch's context") -> Any:
    """Return the result of a call through ``cuda-bindings``.

    Raises:
        DriverError: The driver refused.
    """
    from cuda.bindings import driver

    error, *results = getattr(driver, call)(*arguments)
    if error:
        raise DriverError(call, got=error.name, about=about)
    return results[0] if results else None


@functools.cache
def primary_context(index: int) -> int:
    """Return the primary context of a device, which is PyTorch's own. It is retained for as long as the process lives.

    Raises:
        DriverError: The driver refused.
    """
    driver, context, device, about = library(), ctypes.c_void_p(), ctypes.c_int(), f"the context of device {index}"
    accept("cuDeviceGet", driver.cuDeviceGet(ctypes.byref(device), index), about)
    accept("cuDevicePrimaryCtxRetain", driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), about)
    return int(context.value or 0)


def make_context_current() -> None:
    """Give this thread the context of PyTorch's current device where it has none, as tensor maps need one.

    A thread begins without, PyTorch's own for backward passes too, and gets one from the first call of the CUDA runtime that
    needs it. Where memory and kernels come from caches there may have been no such call.

    Raises:
        DriverError: The driver refused.
    """
    import torch

    driver, context = library(), ctypes.c_void_p()
    error = driver.cuCtxGetCurrent(ctypes.byref(context))
    if error or context.value is None:
        index = torch.cuda.current_device()
        about = f"the context of device {index}"
        accept("cuCtxGetCurrent", error, about)
        accept("cuCtxSetCurrent", driver.cuCtxSetCurrent(ctypes.c_void_p(primary_context(index))), about)


@contextlib.contextmanager
def current_context(index: int) -> Iterator[None]:
    """Make the primary context of a device this thread's current one, and put back the one before at the end."""
    driver, before = library(), ctypes.c_void_p()
    accept("cuCtxPushCurrent", driver.cuCtxPushCurrent_v2(ctypes.c_void_p(primary_context(index))))
    try:
        yield
    finally:
        accept("cuCtxPopCurrent", driver.cuCtxPopCurrent_v2(ctypes.byref(before)))
