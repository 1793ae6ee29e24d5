"""How the workbench reads and writes its files: UTF-8, of a bounded size, whole or not at all, and tried before it measures."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from onelaunch.errors import OutputUnwritable
from onelaunch.files import MOST_BYTES, FileTooLarge, read_bytes, reason, replace

__all__ = ["FileTooLarge", "probe_file", "probe_folder", "read_text", "within", "write_text"]


def read_text(path: Path, most_bytes: int = MOST_BYTES) -> str:
    """Return the text of a regular file in UTF-8, without a byte-order mark.

    Raises:
        FileNotFoundError: there is no such file.
        OSError: it cannot be read, or is a folder or a device.
        FileTooLarge: it has more than ``most_bytes``.
        UnicodeDecodeError: it is not UTF-8.
    """
    return read_bytes(path, most_bytes).decode("utf-8-sig")


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all, in UTF-8; missing folders are created.

    Raises:
        OutputUnwritable: the file cannot be written. What was there before is unchanged, and nothing new is left.
    """
    try:
        replace(path, text.encode())
    except (OSError, ValueError) as problem:
        raise OutputUnwritable(path, reason(problem)) from problem


def probe_file(path: Path) -> None:
    """Check that a file can be written, by writing and removing a small one beside it. Nothing is left behind.

    Raises:
        OutputUnwritable: it cannot; names the path and the reason.
    """
    try:
        if stat.S_ISDIR(path.stat().st_mode):
            raise OutputUnwritable(path, "it is a folder", remedy="Name a file.")
    except OutputUnwritable:
        raise
    except (FileNotFoundError, NotADirectoryError):
        pass  # the usual case, and one that the check of the folder explains
    except (OSError, ValueError) as problem:  # a name that is too long, or holds a NUL
        raise OutputUnwritable(path, reason(problem)) from problem
    probe_folder(path.parent, wanted=path)


def probe_folder(folder: Path, *, wanted: Path | None = None) -> None:
    """Check that files can be written into a folder, which need not be there yet. Nothing is left behind.

    Args:
        folder: the folder; it and its parents are created for the check, and those that were missing are removed again.
        wanted: the path that an error names, if not the folder.

    Raises:
        OutputUnwritable: a file is in the way, or the folder is read-only or full; names the path and the reason.
    """
    wanted = folder if wanted is None else wanted
    try:
        _check_way(folder, wanted)
        with _created(folder), tempfile.NamedTemporaryFile(prefix=".onelaunch-", dir=folder) as probe:
            probe.write(b"\0" * 4096)
            probe.flush()
            os.fsync(probe.fileno())
    except OutputUnwritable:
        raise
    except (OSError, ValueError) as problem:
        raise OutputUnwritable(wanted, reason(problem)) from problem


def within(folder: Path, path: Path) -> Path:
    """Return ``path`` after a check that it lies in ``folder``, symbolic links and ``..`` resolved.

    Raises:
        OutputUnwritable: it lies elsewhere.
    """
    if not path.resolve().is_relative_to(folder.resolve()):
        raise OutputUnwritable(path, f"it lies outside of {folder}", remedy="Look at the names in the file that it was made of.")
    return path


def _check_way(folder: Path, wanted: Path) -> None:
    for part in (folder, *folder.parents):
        if part.is_dir():
            return
        if part.exists() or part.is_symlink():
            raise OutputUnwritable(wanted, f"{part} is a file, not a folder")


@contextlib.contextmanager
def _created(folder: Path) -> Iterator[None]:
    """Create a folder and its missing parents, and remove those again at the end unless something else came into them."""
    missing = [part for part in (folder, *folder.parents) if not part.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    finally:
        for part in missing:
            with contextlib.suppress(OSError):
                part.rmdir()
