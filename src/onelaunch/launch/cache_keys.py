"""Workaround for Triton: make the cache key of a kernel the same in every process.

Triton keeps compiled kernels by a key that covers the source of the kernel and of all functions that it calls, and the global
constants that these use. It adds the constants of a called function before it has computed that function's own key, which finds
them (``_update_hash`` in ``triton/runtime/jit.py``, seen in 3.7.1). So the key lacks them if the called function was not used
before. It depends on the order in which a process uses its kernels, and a kernel that another process compiled may be compiled
again. If the keys of called functions are computed first, nothing is missing. ``launch.py``, ``build.py`` and ``compile.py`` call
:func:`complete_key` before Triton asks for a kernel's key.
"""

from __future__ import annotations

import os
import threading
from types import ModuleType
from typing import Any

_COMPLETE: set[int] = set()
"""Identities of the functions whose keys are computed. Triton's functions live as long as their modules."""

_LOCK = threading.Lock()
"""Lock of one thread that computes keys. Another one waits, because it would compute a key without those of called functions."""


def _unlock() -> None:
    """Give a forked process a lock of its own, since no thread of it would ever release one that was held."""
    global _LOCK  # noqa: PLW0603
    _LOCK = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_unlock)


def complete_key(kernel: Any) -> None:
    """Compute Triton's cache keys of all functions that a kernel calls, called functions first, and then its own.

    Nothing happens for a kernel that was seen before, and in Triton's interpreter, which has no keys.
    """
    if id(kernel) not in _COMPLETE:
        with _LOCK:
            _complete(kernel, set())


def _complete(kernel: Any, begun: set[int]) -> None:
    """Compute the keys of a function and of those that it calls, except those that are complete or begun."""
    if id(kernel) in _COMPLETE or id(kernel) in begun:
        return
    begun.add(id(kernel))  # a function may call itself
    function = getattr(kernel, "fn", None)
    if function is not None and hasattr(type(kernel), "cache_key"):
        for called in _called(function):
            _complete(called, begun)
        _ = kernel.cache_key
    _COMPLETE.add(id(kernel))


def _called(function: Any) -> list[Any]:
    """Return the ``@triton.jit`` functions among the global names in a Python function, also as members of a module."""
    names = function.__code__.co_names
    found = []
    for name in names:
        value = function.__globals__.get(name)
        members = [vars(value).get(member) for member in names] if isinstance(value, ModuleType) else []
        found += [each for each in (value, *members) if hasattr(type(each), "cache_key")]
    return found
