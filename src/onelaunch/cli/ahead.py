"""What a text waits for and what needs no Python: begun beside the import of PyTorch, which takes longer."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence

_CALLS = ("cuInit", "cuDevicePrimaryCtxRetain")


def make_context(arguments: Sequence[str]) -> threading.Thread | None:
    """Make the first GPU's primary context, PyTorch's own, in a thread; a quarter of a second that the command need not wait.

    Args:
        arguments: of the command. Where they name a device, or ask for help, nothing is begun, and ``None`` comes back.
    """
    if any(argument.partition("=")[0] in ("--device", "--help", "-h") for argument in arguments):
        return None
    thread = threading.Thread(target=_make_context, name="context", daemon=True)
    thread.start()
    return thread


def _make_context() -> None:
    """Without a driver or a GPU nothing happens: PyTorch says later what is missing."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        initialise, retain = (getattr(driver, name) for name in _CALLS)
    except (OSError, AttributeError):
        return
    if initialise(0) == 0:
        retain(ctypes.byref(ctypes.c_void_p()), 0)  # never released: the process keeps it
