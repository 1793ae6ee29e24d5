"""The user's folders: the cache of files that can be regenerated, and the user's own tables of measured times.

A cache that cannot be read or written never stops work. :func:`kept` and :func:`keep` warn once, and the caller continues. The
CUDA C++ compiler, the proofs of decode plans and the measured peaks keep files in the cache. ``workbench/run.py`` keeps the lock
files of running studies there, and ``onelaunch prebuild`` prints the folder. The dispatcher reads the tables, and ``onelaunch
study adopt`` writes them.
"""

from __future__ import annotations

import contextlib
import functools
import os
import stat
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from onelaunch.errors import CacheNotice
from onelaunch.files import FileTooLarge, read_bytes, reason, replace

CACHE = "ONELAUNCH_CACHE"
"""Environment variable that names the cache folder."""

TABLES = "ONELAUNCH_TABLES"
"""Environment variable that names the folder of the user's tables of measured times."""


def cache_folder() -> Path:
    """Return the folder for files that can be regenerated: ``$ONELAUNCH_CACHE``, else ``onelaunch`` in the user's cache folder.

    On Linux the user's cache folder is ``$XDG_CACHE_HOME`` or ``~/.cache``. For a user without a home folder it is a folder below
    the system's temporary folder that only this user can enter; one :class:`CacheNotice` says so.
    """
    own = os.environ.get(CACHE)
    return Path(own) if own else _users("cache")


def tables_folder() -> Path:
    """Return the folder of the user's tables: ``$ONELAUNCH_TABLES``, else ``onelaunch/tables`` in the user's data folder."""
    own = os.environ.get(TABLES)
    return Path(own) if own else _users("data") / "tables"


def kept(path: Path) -> bytes | None:
    """Return the content of a cache file, or ``None`` if there is no such file. Warn once if it cannot be read."""
    try:
        return read_bytes(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except FileTooLarge:
        warn_unusable(path, "is too large for a file of the cache")
    except OSError as problem:
        warn_unusable(path, f"cannot be read ({reason(problem)})")
    return None


def keep(path: Path, data: bytes) -> bool:
    """Write a cache file atomically, and return whether it was written. Warn once for a cache folder that cannot be written."""
    try:
        replace(path, data)
    except OSError as problem:
        whole = cache_folder()
        folder = str(whole if path.is_relative_to(whole) else path.parent)
        if folder not in _UNWRITABLE:
            _UNWRITABLE.add(folder)
            _warn_unwritable(folder, reason(problem))
        return False
    return True


_UNWRITABLE: set[str] = set()
"""Folders for which this process has warned that they cannot be written."""


LOCK_SECONDS = 120.0
"""Longest wait for another process, in seconds. Compiling a kernel or measuring a device's peaks takes less."""


@contextlib.contextmanager
def process_lock(folder: Path, name: str) -> Iterator[None]:
    """Hold a lock between processes, so that two do not compile or measure the same thing at once.

    If the lock cannot be acquired, because the folder cannot be written, its file system has no locks, or another process holds
    it for longer than :data:`LOCK_SECONDS`, the block is entered without it. Then work may be done twice, but no file is damaged.

    Args:
        folder: Folder of the lock file; it is created if it does not exist.
        name: Name of the lock, a part of the file name.
    """
    import filelock  # imported here, since it takes 16 ms and most processes take no lock

    lock = filelock.FileLock(folder / f".{name}.lock", timeout=LOCK_SECONDS)
    held = False
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
        held = True
    except (OSError, filelock.Timeout, NotImplementedError):
        pass
    try:
        yield
    finally:
        if held:
            lock.release()


@functools.cache
def warn_unusable(path: Path, problem: str) -> None:
    """Warn, once for each file and problem, that a cache file is ignored and made again.

    Args:
        path: Path of the file.
        problem: Problem, as a predicate that completes "the file ...".
    """
    warnings.warn(CacheNotice(f"{path} {problem}. The file is ignored, and written again where that is possible."), stacklevel=3)


def _warn_unwritable(folder: str, problem: str) -> None:
    """Warn that nothing can be written to the cache."""
    warnings.warn(
        CacheNotice(
            f"{folder} cannot be written ({problem}), so measured peaks and compiled code are not kept for the next process. "
            f"Set the environment variable {CACHE} to a folder that can be written."
        ),
        stacklevel=3,
    )


def _users(kind: Literal["cache", "data"]) -> Path:
    """Return the user's cache or data folder. For a user without a home folder, return the folder of :func:`_temporary`.

    In that case platformdirs returns a relative path or raises.
    """
    import platformdirs

    ask = {"cache": platformdirs.user_cache_dir, "data": platformdirs.user_data_dir}[kind]
    try:
        folder = Path(ask("onelaunch", appauthor=False))
    except (RuntimeError, KeyError, OSError):
        return _temporary()
    return folder if folder.is_absolute() else _temporary()


@functools.cache
def _temporary() -> Path:
    """Return a folder below the system's temporary folder, for a user without a home folder.

    Other users can predict its name. A folder that another user owns or can enter is therefore not used; a new one is created for
    this process instead.
    """
    folder = Path(tempfile.gettempdir()) / f"onelaunch-{os.getuid() if hasattr(os, 'getuid') else 'user'}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        facts = folder.lstat()
        ours = not hasattr(os, "getuid") or (facts.st_uid == os.getuid() and not facts.st_mode & 0o077)
        safe = stat.S_ISDIR(facts.st_mode) and ours
    except OSError:
        safe = False
    if not safe:
        folder = Path(tempfile.mkdtemp(prefix="onelaunch-"))
    warnings.warn(
        CacheNotice(
            f"This user has no home folder, so {folder} is used instead. Other folders can be set in the environment variables "
            f"{CACHE} (files that can be regenerated) and {TABLES} (tables of measured times)."
        ),
        stacklevel=4,
    )
    return folder
