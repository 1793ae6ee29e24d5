"""Read regular files of bounded size, and replace files atomically, for every layer of the package."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from pathlib import Path

MOST_BYTES = 256 << 20
"""Default for the size of the largest file that is read, in bytes."""

_READ = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
"""Flags for opening a file to read. Without O_NONBLOCK, opening a pipe would block until another process writes to it."""

_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
"""Flags for creating a new file; opening fails if the file exists."""


class FileTooLarge(ValueError):
    """Error for a file that is larger than the limit for reading."""


def read_bytes(path: Path, most_bytes: int = MOST_BYTES) -> bytes:
    """Return the content of a regular file. The call never blocks on a pipe and never reads a device file.

    Raises:
        FileNotFoundError: The file does not exist.
        OSError: The file cannot be read, or the path is a folder, a pipe or a device.
        FileTooLarge: The file has more than ``most_bytes`` bytes.
    """
    try:
        handle = os.open(path, _READ)
    except ValueError as problem:  # the name contains a NUL character
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
    size = max(found.st_size, len(data))  # The file may have grown after fstat.
    if size > most_bytes:
        raise FileTooLarge(f"it has {size:,} bytes; at most {most_bytes:,} are read")
    return data


def replace(path: Path, data: bytes) -> None:
    """Write a file atomically, and create the folders above it. Other processes see the old file or the whole new one.

    The new file has the default permissions of the process's umask. If writing fails, the old file is unchanged and no new file
    is left.

    Raises:
        OSError: The folder cannot be created, or the file cannot be written.
        ValueError: The name is not valid for a file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(
        f".onelaunch-{secrets.token_hex(8)}.partial"
    )  # in the same folder, hence on the same disk, so that the rename is atomic
    handle = os.open(partial, _CREATE, 0o666)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:  # including Ctrl-C
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


def reason(problem: Exception) -> str:
    """Return the message of an exception of reading or writing, without the error number and the path."""
    told = problem.strerror if isinstance(problem, OSError) else None
    return told or str(problem) or type(problem).__name__
