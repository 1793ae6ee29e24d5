"""Compile kernels into a temporary folder where Triton's cache folder cannot be written, instead of failing with Triton's error.

Triton writes every kernel, and the C code of its driver, to its cache folder, and reads them from there. Where that fails, as for
a read-only home folder or a full disk, a folder below the system's temporary folder takes what is new until the process ends.
Kernels that the cache folder holds are still read from it, so a prebuilt cache may be read-only. ``launch.py`` and
``workspace.py`` call :func:`fall_back` when Triton fails to write; ``side_by_side.py`` calls :func:`ensure_writable` before it
compiles.
"""

from __future__ import annotations

import atexit
import errno
import functools
import os
import shutil
import tempfile
import threading
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

from onelaunch.errors import CacheNotice
from onelaunch.files import reason

_PROBE = 1 << 16
"""Bytes that are written to find out whether a folder can be written."""

_FULL = (errno.ENOSPC, errno.EDQUOT)
"""Errors of a full disk or an exhausted quota, which a short file may not meet."""

_LOCK = threading.Lock()


def ensure_writable() -> None:
    """Use a temporary folder from now on if Triton's cache folder cannot be written."""
    with suppress(ImportError):
        if not _replaced() and (problem := _unwritable()) is not None:
            fall_back(problem)


def fall_back(problem: OSError) -> bool:
    """Return whether what raised an error may be tried again: the cache could not be written, and a temporary folder is used now.

    One :class:`CacheNotice` of the process says so. The result is false if the error has another cause, if no temporary folder
    can be made, or if Triton's cache is managed by a class of the user's.
    """
    from triton import knobs

    with _LOCK:
        if _replaced():
            return str(knobs.cache.dir) in str(problem.filename)  # raised before another thread has replaced the folder
        found = problem if problem.errno in _FULL else _unwritable()
        if found is None or knobs.cache.manager_class is not None:
            return False
        try:
            folder = _temporary()
        except OSError:
            return False
        knobs.cache.manager_class = _manager(folder)
    warnings.warn(
        CacheNotice(
            f"Triton's cache folder {knobs.cache.dir} cannot be written ({reason(found)}), so kernels that are compiled now are "
            "not kept for the next process. Set the environment variable TRITON_CACHE_DIR to a folder that can be written."
        ),
        stacklevel=3,
    )
    return True


def _replaced() -> bool:
    """Return whether kernels go to a temporary folder."""
    from triton import knobs

    return getattr(knobs.cache.manager_class, "temporary_folder", None) is not None


def _unwritable() -> OSError | None:
    """Return the error of writing to Triton's cache folder, or ``None`` if it can be written."""
    from triton import knobs

    folder = Path(knobs.cache.dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(_PROBE))
    except OSError as problem:
        return problem
    return None


def _temporary() -> str:
    """Return a new folder, which is removed when this process ends."""
    folder, owner = tempfile.mkdtemp(prefix="onelaunch-triton-"), os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # a forked process has inherited this function
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return folder


@functools.cache
def _manager(folder: str) -> Any:
    """Return a class for Triton's caches that reads from the cache folder and a temporary one, and writes to the latter."""
    from triton import knobs
    from triton.runtime.cache import FileCacheManager

    class TemporaryCacheManager(FileCacheManager):
        """Cache of one kernel in a temporary folder, with what the cache folder holds of it."""

        temporary_folder = folder

        def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
            self._kept: FileCacheManager | None = None
            if override or dump:  # folders of their own
                super().__init__(key, override, dump)
                return
            self.key = key
            own = Path(folder, key)
            own.mkdir(exist_ok=True)
            self.cache_dir, self.lock_path = str(own), str(own / "lock")
            self._kept = FileCacheManager.__new__(FileCacheManager)  # its own constructor would make the folder
            self._kept.key, self._kept.lock_path = key, None
            self._kept.cache_dir = str(Path(knobs.cache.dir, key))

        def get_file(self, filename: str) -> str | None:
            found = super().get_file(filename)
            return found if found is not None or self._kept is None else self._kept.get_file(filename)

        def get_group(self, filename: str) -> dict[str, str] | None:
            found = super().get_group(filename)
            return found if found is not None or self._kept is None else self._kept.get_group(filename)

    return TemporaryCacheManager
