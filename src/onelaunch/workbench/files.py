"""File access of the workbench and its commands: UTF-8 text, read up to a limit of its size, and written atomically.

Results, reports, the reader of study files and ``onelaunch inspect`` read and write text here. ``run.py`` and the commands
``onelaunch study run`` and ``report`` call the probes, which check that an output can be written before a long measurement begins
or a report is made. ``run.py`` and ``onelaunch study run`` check the paths that they build from names by :func:`within`.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from onelaunch.errors import OutputUnwritable
from onelaunch.files import MOST_BYTES, read_bytes, reason, replace

__all__ = ["probe_file", "probe_folder", "read_text", "within", "write_text"]


def read_text(path: Path, most_bytes: int = MOST_BYTES) -> str:
    """Return the text of a regular file in UTF-8, without a byte-order mark.

    Raises:
        FileNotFoundError: The file does not exist.
        OSError: The file cannot be read, or is a folder or a device.
        onelaunch.files.FileTooLarge: The file has more than ``most_bytes`` bytes.
        UnicodeDecodeError: The file is not UTF-8.
    """
    return read_bytes(path, most_bytes).decode("utf-8-sig")


def write_text(path: Path, text: str) -> None:
    """Write a file atomically in UTF-8. Missing folders are created.

    Raises:
        OutputUnwritable: The file cannot be written. Its earlier contents are unchanged, and no temporary file is left.
    """
    try:
        replace(path, text.encode())
    except (OSError, ValueError) as problem:
        raise OutputUnwritable(path, reason(problem)) from problem


def probe_file(path: Path) -> None:
    """Check that a file can be written, by writing and removing a small file in its folder. Nothing is left behind.

    Raises:
        OutputUnwritable: The file cannot be written. The message names the path and the reason.
    """
    try:
        if stat.S_ISDIR(path.stat().st_mode):
            raise OutputUnwritable(path, "it is a folder", remedy="Name a file.")
    except OutputUnwritable:
        raise
    except (FileNotFoundError, NotADirectoryError):
        pass  # The file does not exist yet. An error of its folder is found by the check of the folder.
    except (OSError, ValueError) as problem:  # a name that is too long, or holds a NUL
        raise OutputUnwritable(path, reason(problem)) from problem
    probe_folder(path.parent, wanted=path)


def probe_folder(folder: Path, *, wanted: Path | None = None) -> None:
    """Check that files can be written into a folder, which need not exist yet. Nothing is left behind.

    Args:
        folder: Folder to check. Missing folders are created for the check and removed again.
        wanted: Path that an error names; ``folder`` by default.

    Raises:
        OutputUnwritable: A file is in the way, or the folder is read-only or full. The message names the path and the reason.
    """
    wanted = folder if wanted is None else wanted
    try:
        _check_parents(folder, wanted)
        with _created(folder), tempfile.NamedTemporaryFile(prefix=".onelaunch-", dir=folder) as probe:
            probe.write(b"\0" * 4096)
            probe.flush()
            os.fsync(probe.fileno())  # some file systems report a full disk or an exceeded quota only here
    except OutputUnwritable:
        raise
    except (OSError, ValueError) as problem:
        raise OutputUnwritable(wanted, reason(problem)) from problem


def within(folder: Path, path: Path) -> Path:
    """Return ``path`` after a check that it lies in ``folder``, symbolic links and ``..`` resolved.

    Raises:
        OutputUnwritable: It lies elsewhere.
    """
    if not path.resolve().is_relative_to(folder.resolve()):
        raise OutputUnwritable(
            path, f"it lies outside of {folder}", remedy="Check the names in the file from which the path was built."
        )
    return path


def _check_parents(folder: Path, wanted: Path) -> None:
    """Raise an error if a file stands where the folder or one of its parents would have to be created."""
    for part in (folder, *folder.parents):
        if part.is_dir():
            return
        if part.exists() or part.is_symlink():
            raise OutputUnwritable(wanted, f"{part} is a file, not a folder")


@contextlib.contextmanager
def _created(folder: Path) -> Iterator[None]:
    """Create a folder and its missing parents, and remove them at the end, unless they hold other files by then."""
    missing = [part for part in (folder, *folder.parents) if not part.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    finally:
        for part in missing:
            with contextlib.suppress(OSError):
                part.rmdir()
