"""Set an environment variable that configures Triton's compiler while kernels that need it are compiled or launched.

``global_atomics.py`` and ``warp_mma.py`` make a :class:`Switch` each.
"""

from __future__ import annotations

import os
import threading


class Switch:
    """Context manager that sets an environment variable, and restores its former value once no thread is inside.

    The environment belongs to the whole process, so the threads inside are counted. Otherwise a thread that leaves would remove
    the value while another thread still compiles, or would restore a value that the other thread had set.

    Args:
        name: Name of the variable.
        value: Value of the variable inside the context.
    """

    def __init__(self, name: str, value: str) -> None:
        self._name, self._value = name, value
        self._lock = threading.Lock()
        self._inside = 0
        self._before: str | None = None

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._before = os.environ.get(self._name)
                os.environ[self._name] = self._value
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside:
                return
            if self._before is None:
                os.environ.pop(self._name, None)
            else:
                os.environ[self._name] = self._before
