"""Environment variables that switch what Triton's compiler does, set while kernels are launched that need it."""

from __future__ import annotations

import os
import threading


class Switch:
    """Environment variable that has a value inside ``with`` blocks, and its former value once no thread is inside one.

    The environment is the process's. Without the count of threads inside, one that leaves would take the value from another that
    still compiles, or put back a value that was set by the other.

    Args:
        name: Name of the variable.
        value: Value inside.
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
