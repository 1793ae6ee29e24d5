"""State of each thread: the outermost call that runs now, which knows all kernels that it is about to launch.

The code that starts a call enters a :class:`Running` object, a ``Launching`` of ``side_by_side.py``. Where a kernel is about to
be compiled, ``launch.py`` calls :func:`compile_running_call`, and the object compiles the other kernels of the call at the same
time.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod


class Running(ABC):
    """Context of one call. Nested calls are parts of the outermost one, and change nothing."""

    __slots__ = ("_entered",)

    def __enter__(self) -> None:
        self._entered = _STATE.call is None
        if self._entered:
            _STATE.call = self

    def __exit__(self, *_: object) -> None:
        if self._entered:
            _STATE.call = None

    @abstractmethod
    def compile_kernels(self, *, by_triton: bool) -> None:
        """Compile the kernels of the call that are not compiled yet. Problems are left to the launches that will meet them.

        Args:
            by_triton: Flag that Triton is about to compile a kernel, so that its driver is at work already.
        """


class _State(threading.local):
    """Outermost call of this thread."""

    call: Running | None = None


_STATE = _State()


def compile_running_call(*, by_triton: bool) -> None:
    """Compile all kernels of the call that runs in this thread, if one does. A kernel of it is about to be compiled."""
    if (call := _STATE.call) is not None:
        call.compile_kernels(by_triton=by_triton)
