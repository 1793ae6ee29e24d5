"""Files of a model folder: checks that a file may be read, and the reading of text and JSON.

A model folder is untrusted input, and its files name other files. A file is read only if it is an entry of the folder itself, a
regular file, and not a link that leaves the folder. In the cache of Hugging Face's hub, the entries of a folder are links to
files in the cache's own blob folders; these links are followed.

``config.py``, ``weights.py`` and ``tokenizer.py`` of this folder read through it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from onelaunch.errors import ArgumentError, CheckpointError
from onelaunch.files import FileTooLarge, read_bytes, reason
from onelaunch.wording import in_a_line, shown

_JSON_BYTES = 8 * 2**20
"""Largest configuration file that is read, in bytes. A model's takes kilobytes, a tokenizer's up to 1.2 million bytes."""

INDEX_BYTES = 32 * 2**20
"""Largest index of weights that is read, in bytes. The index of a model with 100,000 tensors takes about ten million."""

TOKENIZER_BYTES = 256 * 2**20
"""Largest tokenizer that is read, in bytes. The largest published ones take about 35 million."""

_NAME_LENGTH = 255
"""Longest file name that is accepted, in characters."""


def folder_path(argument: str, value: object) -> Path:
    """Return a caller's folder argument as a path.

    Raises:
        ArgumentError: ``value`` is neither a string nor a path.
    """
    if isinstance(value, (str, os.PathLike)) and isinstance(found := os.fspath(value), str) and found:
        return Path(found)
    raise ArgumentError(f"{argument} is {shown(value)}; it must be the path of a model folder, a string or a pathlib.Path.")


def entry(folder: Path, name: object, *, named_by: str = "", suffix: str = "") -> Path:
    """Return the path of a file of a model folder, which need not exist.

    Args:
        folder: Model folder.
        name: Name of the file, either a known one or one that another file gives.
        named_by: Path of the file that gives the name, for the error message.
        suffix: Suffix that the name must have.

    Raises:
        CheckpointError: ``name`` is no plain file name with that suffix, or the entry is a link that leaves the folder.
    """
    said = f"{named_by or folder} names the file {shown(name)}"
    if not isinstance(name, str) or not _is_plain(name):
        raise CheckpointError(f"{said}; it must be the name of a file in that folder, without separators")
    if not name.endswith(suffix):
        raise CheckpointError(f"{said}; its name must end with {suffix}")
    path = folder / name
    if path.is_symlink():
        target = Path(os.path.realpath(path))
        if not any(target.is_relative_to(root) for root in _roots(folder)):
            raise CheckpointError(
                f"{path} is a link to {target}, outside its folder, and is not followed. Copy the file there, or pass the "
                "folder that holds the files themselves"
            )
    return path


def _is_plain(name: str) -> bool:
    """Return whether a string is a plain file name on every system: no separator, drive, control character or parent folder."""
    return 0 < len(name) <= _NAME_LENGTH and name.isprintable() and name not in (".", "..") and not set(name) & set("/\\:")


def _roots(folder: Path) -> list[Path]:
    """Return the folders to which links of a model folder may lead: itself and, in the hub's cache, the blob folders.

    The cache is laid out as ``CACHE/models--OWNER--NAME/{blobs,snapshots/REVISION}``, with ``CACHE/blobs`` for files that
    several models share.
    """
    real = Path(os.path.realpath(folder))
    model = real.parent.parent
    if real.parent.name != "snapshots" or not model.name.startswith("models--"):
        return [real]
    return [real, *(Path(os.path.realpath(each / "blobs")) for each in (model, model.parent))]


def read_text(path: Path, most_bytes: int = _JSON_BYTES) -> str:
    """Return the text of a file whose path :func:`entry` has checked.

    Raises:
        CheckpointError: there is no such regular file, it is larger than ``most_bytes``, or no UTF-8.
    """
    check_size(path, most_bytes)
    try:
        return read_bytes(path, most_bytes).decode("utf-8-sig")  # -sig drops a byte order mark, which JSON does not allow
    except (OSError, FileTooLarge) as problem:  # the file may have changed since check_size
        raise CheckpointError(f"{path} cannot be read: {reason(problem)}") from None
    except ValueError as problem:
        raise CheckpointError(f"{path} is not text in UTF-8: {in_a_line(problem)}") from None


def check_size(path: Path, most_bytes: int) -> None:
    """Raise :class:`CheckpointError` unless a path is a regular file of at most ``most_bytes``.

    ``tokenizer.py`` calls it before a library opens the file. :func:`read_text` calls it for its messages alone, since
    ``read_bytes`` checks again that what it has opened is a regular file of that size.
    """
    try:
        if not path.exists():
            raise CheckpointError(f"{path} cannot be read: there is no such file")
        if not path.is_file():
            raise CheckpointError(f"{path} cannot be read: it is not a regular file")
        size = path.stat().st_size
    except OSError as problem:
        raise CheckpointError(f"{path} cannot be read: {problem.strerror or problem}") from None
    if size > most_bytes:
        raise CheckpointError(f"{path} has {size:,} bytes; such a file may have {most_bytes:,}")


def read_json(path: Path, most_bytes: int = _JSON_BYTES) -> dict[str, Any]:
    """Return the object that a JSON file holds.

    Raises:
        CheckpointError: the file cannot be read, is not JSON, holds something other than an object, repeats a key, or holds NaN
            or Infinity, which JSON does not have.
    """
    text = read_text(path, most_bytes)
    try:
        values = json.loads(text, object_pairs_hook=_distinct, parse_constant=_no_number)
    except RecursionError:
        raise CheckpointError(f"{path} is not JSON that can be read: it is nested too deeply") from None
    except ValueError as problem:
        raise CheckpointError(f"{path} is not JSON: {in_a_line(problem)}") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    return values


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return pairs as a dict, and raise for a repeated key, since a dict would silently keep only its last value."""
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name in values:
            raise ValueError(f"the key {shown(name)} stands twice in one object")
        values[name] = value
    return values


def _no_number(text: str) -> Any:
    """Raise for a constant such as NaN, which Python's parser would accept."""
    raise ValueError(f"{text} is no number of JSON")
