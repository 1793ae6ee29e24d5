"""Folders of the user: the cache of files that can be made again, and the user's own tables of measured times.

A cache that cannot be read or written never stops work: :func:`keep` warns once, and the caller goes on.
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
    """Return the folder for files that can be made again: ``$ONELAUNCH_CACHE``, else ``onelaunch`` in the user's cache folder.

    On Linux the user's cache folder is ``$XDG_CACHE_HOME`` or ``~/.cache``. Where the user has no home folder, it is a folder
    below the system's folder for temporary files that only this user can enter, and one :class:`CacheNotice` says so.
    """
    own = os.environ.get(CACHE)
    return Path(own) if own else _users("cache")


def tables_folder() -> Path:
    """Return the folder of the user's tables: ``$ONELAUNCH_TABLES``, else ``onelaunch/tables`` in the user's data folder."""
    own = os.environ.get(TABLES)
    return Path(own) if own else _users("data") / "tables"


def kept(path: Path) -> bytes | None:
    """Return what a file of the cache holds, or ``None`` where there is none, or warn once where it cannot be read."""
    try:
        return read_bytes(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except FileTooLarge:
        say_unusable(path, "is too large to be a file of the cache")
    except OSError as problem:
        say_unusable(path, f"cannot be read ({reason(problem)})")
    return None


def keep(path: Path, data: bytes) -> bool:
    """Write a file of the cache whole or not at all, and return whether it was written; warn once where it cannot be."""
    try:
        replace(path, data)
    except OSError as problem:
        _say_unwritable(str(path.parent), reason(problem))
        return False
    return True


LOCK_SECONDS = 120.0
"""Longest wait for another process: more than a kernel takes to compile, or a device's peaks to be measured."""


@contextlib.contextmanager
def alone(folder: Path, name: str) -> Iterator[None]:
    """Keep other processes out of the same region, such as one that compiles what they want as well.

    Where no lock can be had, because the folder cannot be written or another process holds it for longer than
    :data:`LOCK_SECONDS`, the region is entered all the same: work may then be done twice, and files stay whole.

    Args:
        folder: Folder that holds the lock's file; made if it is not there.
        name: Name of the region, a part of the file's name.
    """
    import filelock  # 16 ms, which a process that compiles and measures nothing need not wait

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
def say_unusable(path: Path, problem: str) -> None:
    """Warn, once for each file and problem, that a file of the cache is ignored and made again.

    Args:
        path: The file.
        problem: Problem in words that complete "the file ...".
    """
    warnings.warn(CacheNotice(f"{path} {problem}; this is ignored, and made again where that is possible."), stacklevel=3)


@functools.cache
def _say_unwritable(folder: str, problem: str) -> None:
    warnings.warn(
        CacheNotice(
            f"{folder} cannot be written ({problem}), so what is measured and compiled is not kept for the next time. "
            f"Name a folder that can be written in the environment variable {CACHE}."
        ),
        stacklevel=3,
    )


def _users(kind: Literal["cache", "data"]) -> Path:
    """Return the user's folder of a kind. Without a home folder platformdirs gives no absolute path, or raises."""
    import platformdirs

    ask = {"cache": platformdirs.user_cache_dir, "data": platformdirs.user_data_dir}[kind]
    try:
        folder = Path(ask("onelaunch", appauthor=False))
    except (RuntimeError, KeyError, OSError):
        return _temporary()
    return folder if folder.is_absolute() else _temporary()


@functools.cache
def _temporary() -> Path:
    """Return a folder that stands for the home of a user who has none, below the system's folder for temporary files.

    Its name is known to everybody, so one that somebody else made, or can write to, is not taken: a new one is, for this process.
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
            f"This user has no home folder, so {folder} is used in its place. Name another in the environment variables {CACHE} "
            f"(what can be made again) and {TABLES} (tables of measured times)."
        ),
        stacklevel=4,
    )
    return folder
