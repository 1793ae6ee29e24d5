"""Calls of the CUDA driver: its two bindings, its errors, and the current context of a thread.

Contexts, tensor maps and the nodes of captured graphs need only a few driver calls. These go through :mod:`ctypes`, which needs
nothing installed but the driver. Modules of CUDA C++ are loaded through ``cuda-bindings``, which their compiler (NVRTC) needs
anyway. ``module.py`` and ``tensor_maps.py`` of this folder call it. So do ``kernels/tma.py``, before Triton encodes a tensor map;
the replay of recorded launches (``onelaunch.launch``); ``parallel/exchange.py``, which asks for captures and peer access; the
workbench's count of launches; and ``cli/ahead.py``, which creates a context early for ``onelaunch generate``.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from typing import Any

from onelaunch.errors import DriverError

_ACCESS_SUPPORTED, _NATIVE_ATOMIC_SUPPORTED = 2, 3
"""Values of ``CUdevice_P2PAttribute``."""


@functools.cache
def library() -> Any:
    """Return the driver's library, loaded by :mod:`ctypes`.

    Raises:
        OSError: No NVIDIA driver is installed.
    """
    return ctypes.CDLL("libcuda.so.1")


def accept(call: str, error: int, about: str = "PyTorch's context") -> None:
    """Raise :class:`DriverError` unless a driver call made through :mod:`ctypes` returned 0 (success).

    Args:
        call: Name of the driver function.
        error: Result that it returned.
        about: Object of the call, such as a kernel or a context, for the error's message.
    """
    if error:
        raise DriverError(call, got=f"error {error}", about=about)


def bound(call: str, *arguments: Any, about: str = "PyTorch's context") -> Any:
    """Call a driver function through ``cuda-bindings`` and return its first result, or ``None`` if it has none.

    Args:
        call: Name of the driver function.
        *arguments: Its arguments.
        about: Object of the call, such as a kernel or a context, for the error's message.

    Raises:
        DriverError: The driver returned an error.
    """
    from cuda.bindings import driver

    error, *results = getattr(driver, call)(*arguments)
    if error:
        raise DriverError(call, got=error.name, about=about)
    return results[0] if results else None


@functools.cache
def primary_context(index: int) -> int:
    """Return the handle of a device's primary context, the one that PyTorch uses. It stays retained until the process ends.

    Raises:
        DriverError: The driver returned an error.
    """
    driver, context, device, about = library(), ctypes.c_void_p(), ctypes.c_int(), f"the context of device {index}"
    accept("cuDeviceGet", driver.cuDeviceGet(ctypes.byref(device), index), about)
    accept("cuDevicePrimaryCtxRetain", driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), about)
    return int(context.value or 0)


def make_context_current() -> None:
    """Make the context of PyTorch's current device current in this thread, if the thread has none.

    Encoding a tensor map needs a current context. A new thread has none; this includes PyTorch's threads for backward passes. The
    first call of the CUDA runtime that needs a context sets one. If memory and kernels come from caches, no such call may have
    happened yet.

    Raises:
        DriverError: The driver returned an error.
    """
    driver, context = library(), ctypes.c_void_p()
    error = driver.cuCtxGetCurrent(ctypes.byref(context))
    if error or context.value is None:  # an error is raised below, where the device that the message names is known
        import torch

        index = torch.cuda.current_device()
        about = f"the context of device {index}"
        accept("cuCtxGetCurrent", error, about)
        accept("cuCtxSetCurrent", driver.cuCtxSetCurrent(ctypes.c_void_p(primary_context(index))), about)


@contextlib.contextmanager
def current_context(index: int) -> Iterator[None]:
    """Make the primary context of a device current in this thread, and restore the previous one at the end."""
    driver, popped = library(), ctypes.c_void_p()
    accept("cuCtxPushCurrent", driver.cuCtxPushCurrent_v2(ctypes.c_void_p(primary_context(index))))
    try:
        yield
    finally:
        accept("cuCtxPopCurrent", driver.cuCtxPopCurrent_v2(ctypes.byref(popped)))


def capture_of(stream: int) -> int | None:
    """Return the number of the capture that a stream is part of, one that no other capture of the process has, or ``None``.

    Args:
        stream: Handle of the stream.

    Raises:
        DriverError: The driver returned an error.
    """
    driver, status, number = library(), ctypes.c_int(), ctypes.c_uint64()
    found = (ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(number), None, None, None)
    accept("cuStreamGetCaptureInfo", driver.cuStreamGetCaptureInfo_v2(*found), "a stream")
    return number.value if status.value else None


def reaches(index: int, other: int) -> bool:
    """Return whether a device can read, write and atomically change the memory of another one, as over NVLink.

    Raises:
        DriverError: The driver returned an error.
    """
    driver, value = library(), ctypes.c_int()
    for attribute in (_ACCESS_SUPPORTED, _NATIVE_ATOMIC_SUPPORTED):
        error = driver.cuDeviceGetP2PAttribute(ctypes.byref(value), attribute, index, other)
        accept("cuDeviceGetP2PAttribute", error, f"devices {index} and {other}")
        if not value.value:
            return False
    return True
