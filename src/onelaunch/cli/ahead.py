"""Measures that shorten the start of a command.

The import of PyTorch runs without garbage collection, for which ``application.py`` imports each command in
:func:`hastened_import`. For ``onelaunch generate`` alone, ``main.py`` calls :func:`make_context`, which creates a CUDA context in
a thread during the import.
"""

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
"""Line of PyTorch's ``version.py`` that a build for CUDA contains."""


@contextlib.contextmanager
def hastened_import() -> Iterator[None]:
    """Disable garbage collection while PyTorch is imported.

    Garbage collection takes a tenth of the import's time, because it repeatedly scans objects that all stay alive. During the
    import Ctrl-C ends the process at once, since an exception could be swallowed by the code that is being imported.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    in_main_thread = threading.current_thread() is threading.main_thread()  # only there can signal handlers be set
    interruptible = in_main_thread and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    gc.disable()
    if interruptible:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        if interruptible:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        gc.freeze()  # later collections need not scan the imported objects either
        gc.enable()


def make_context(arguments: Sequence[str]) -> threading.Thread | None:
    """Create the first GPU's primary context, which PyTorch will use, in a thread.

    Args:
        arguments: Arguments of the command.

    Returns:
        The thread. ``None`` if the arguments name a device (maybe not the first GPU) or ask for help, or if PyTorch was not built
        for CUDA; no context is created then.
    """
    if any(argument.partition("=")[0] in ("--device", "--help", "-h") for argument in arguments) or not _for_cuda():
        return None
    os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")  # PyTorch sets this too, but only after the context exists
    thread = threading.Thread(target=_make_context, name="context")  # no daemon: the process waits for it at its end
    thread.start()
    return thread


def _for_cuda() -> bool:
    """Return whether PyTorch was built for CUDA, without importing it."""
    found = importlib.util.find_spec("torch")
    try:
        return bool(
            found and found.origin and _FOR_CUDA.search(Path(found.origin).with_name("version.py").read_text(encoding="utf-8"))
        )
    except OSError:
        return False


def _make_context() -> None:
    """Create the context. Without a driver or a GPU do nothing, since PyTorch reports later what is missing."""
    try:
        driver = library()
    except OSError:
        return
    if driver.cuInit(0) == 0:
        driver.cuDevicePrimaryCtxRetain(
            ctypes.byref(ctypes.c_void_p()), 0
        )  # never released, so that the context lives as long as the process
