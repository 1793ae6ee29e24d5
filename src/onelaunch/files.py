"""Reading and writing of files for every layer: regular files of a bounded size, replaced whole or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from pathlib import Path

MOST_BYTES = 256 << 20
"""Size of the largest file that is read."""

READ = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
"""Flags for opening a file to read. Without O_NONBLOCK, opening a pipe would wait until somebody writes to it."""

CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
"""Flags for creating a file that nobody else has made."""


class FileTooLarge(ValueError):
    """A file is larger than any that onelaunch writes."""


def read_bytes(path: Path, most_bytes: int = MOST_BYTES) -> bytes:
    """Return the content of a regular file. A pipe is not waited for, and a device is not read.

    Raises:
        FileNotFoundError: there is no such file.
        OSError: it cannot be read, or is a folder, a pipe or a device.
        FileTooLarge: it has more than ``most_bytes``.
    """
    try:
        handle = os.open(path, READ)
    except ValueError as problem:  # a NUL in the name
        raise FileNotFoundError(str(problem)) from None
    try:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            raise OSError("it is no regular file")
        file = os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise
    with file:
        data = file.read(most_bytes + 1) if found.st_size <= most_bytes else b""
    size = max(found.st_size, len(data))  # a file may grow meanwhile
    if size > most_bytes:
        raise FileTooLarge(f"it has {size:,} bytes; at most {most_bytes:,} are read")
    return data


def replace(path: Path, data: bytes) -> None:
    """Write a file and the folders above it; other processes see the old file or the new one, never a part.

    The new file has the permissions that the process's umask leaves. Where writing fails, the old file is unchanged and nothing
    new is left.

    Raises:
        OSError: the folder cannot be made, or the file cannot be written.
        ValueError: the name cannot be one of a file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".onelaunch-{secrets.token_hex(8)}.partial")  # in the same folder, so on the same disk
    handle = os.open(partial, CREATE, 0o666)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:  # Ctrl-C, too
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


def reason(problem: Exception) -> str:
    """Return what an exception of reading or writing says, without the number and the path."""
    told = problem.strerror if isinstance(problem, OSError) else None
    return told or str(problem) or type(problem).__name__
