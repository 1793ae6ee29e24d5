"""What makes a command start sooner: what needs no Python is begun beside the import of PyTorch, and that import hastened."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib.util
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from onelaunch.cuda.driver import library

_FOR_CUDA = re.compile(r"^cuda\b.*= *['\"]", re.MULTILINE)
"""In PyTorch's ``version.py``, where it was built for CUDA."""


@contextlib.contextmanager
def hastened_import() -> Iterator[None]:
    """PyTorch's, without garbage collection: a tenth of its time goes into looking again and again through what stays.

    Ctrl-C ends the process at once meanwhile: an exception could be lost amid the import.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    alone = threading.current_thread() is threading.main_thread()
    interruptible = alone and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    gc.disable()
    if interruptible:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        if interruptible:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        gc.freeze()  # nor are they looked through later
        gc.enable()


def make_context(arguments: Sequence[str]) -> threading.Thread | None:
    """Make the first GPU's primary context, PyTorch's own, in a thread.

    Args:
        arguments: of the command. Where they name a device, or ask for help, nothing is begun, and ``None`` comes back; nor where
            PyTorch will not use a GPU.
    """
    if any(argument.partition("=")[0] in ("--device", "--help", "-h") for argument in arguments) or not _for_cuda():
        return None
    os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")  # as PyTorch does, which comes too late now
    thread = threading.Thread(target=_make_context, name="context")  # the end of the process waits for it
    thread.start()
    return thread


def _for_cuda() -> bool:
    """Without importing it."""
    found = importlib.util.find_spec("torch")
    try:
        return bool(
            found and found.origin and _FOR_CUDA.search(Path(found.origin).with_name("version.py").read_text(encoding="utf-8"))
        )
    except OSError:
        return False


def _make_context() -> None:
    """Without a driver or a GPU nothing happens: PyTorch says later what is missing."""
    try:
        driver = library()
    except OSError:
        return
    if driver.cuInit(0) == 0:
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(ctypes.c_void_p()), 0)  # never released: the process keeps it
