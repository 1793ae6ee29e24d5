"""Keep the threads of a process on one CPU core while calls from Python are timed, and lower the priority of compilers beside it.

PyTorch runs a backward pass of GPU tensors in a thread of its own, for which the caller's thread waits. On two cores each of
these waits ends by waking an idle core, which takes from a few to some hundred microseconds, most in virtual machines, and varies
from call to call. On one core the threads take turns at once. ``sampling.py`` enters :func:`one_core` for each part of a sample.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_THREADS = Path("/proc/self/task")
"""Folder with an entry for each thread of this process, on Linux."""


@contextmanager
def one_core() -> Iterator[None]:
    """Keep all threads of this process on one of its cores inside, and give each its cores back.

    Threads that start inside get those of the calling thread. Nothing happens where threads cannot be moved: on other systems
    than Linux, and where a sandbox forbids it.
    """
    before: dict[int, set[int]] = {}
    if not hasattr(os, "sched_setaffinity") or not _THREADS.is_dir():
        yield
        return
    own = os.sched_getaffinity(0)
    core = {sorted(own)[os.getpid() % len(own)]}  # another one for a process that measures at the same time
    try:
        for thread in _threads():
            with suppress(OSError):  # it has ended, or may not be moved
                cores = os.sched_getaffinity(thread)
                os.sched_setaffinity(thread, core)
                before[thread] = cores
        yield
    finally:
        for thread in _threads():
            with suppress(OSError):
                os.sched_setaffinity(thread, before.get(thread, own))


_NICENESS = 10
"""Niceness that processes which compile add to their own. A process that measures then gets nine tenths of a core it shares."""


def give_way() -> None:
    """Lower the priority of this process, which compiles, below that of processes that measure on the same machine."""
    if hasattr(os, "nice"):
        with suppress(OSError):  # a sandbox may forbid it
            os.nice(_NICENESS)


def _threads() -> list[int]:
    return [int(each.name) for each in _THREADS.iterdir()]
