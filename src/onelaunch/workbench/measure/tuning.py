"""Choices of Triton's autotuner in one file, so that a study can be repeated without tuning its peers again.

Triton stores the choices of tuners with ``cache_results`` (fla's are such) in its cache folder, each in a file whose folder is
named by a hash of the kernel, its configurations and Triton. :func:`keep` writes them into a file beside the results, and
:func:`restore` puts them back. A choice that no longer matches its kernel has another hash, so it is not found and is made again.
``onelaunch study run --tuning FILE`` does both.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from onelaunch import files
from onelaunch.device.tools import package_installed
from onelaunch.errors import ArgumentError

SCHEMA = 1
"""Version of the file's format."""

_SUFFIX = ".autotune.json"


def restore(path: Path, device: str) -> str:
    """Put the choices of a file into Triton's cache folder, except those that are there already.

    Args:
        path: File that :func:`keep` has written; if there is none, nothing happens.
        device: Name of the device that will measure. Choices that were made on another one are left out.

    Returns:
        What was done, in a sentence for the notes of a result; empty if nothing was done.

    Raises:
        ArgumentError: The file is damaged, or was written by a newer version.
    """
    if not path.exists() or not package_installed("triton"):
        return ""
    stored = _read(path)
    if stored["device"] != device:
        return f"The tuning of {path.name} was left out: it was made on {stored['device']}."
    for name, choice in stored["choices"].items():
        target = _cache_folder() / name
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            files.replace(target, json.dumps(choice).encode())
    return (
        f"{len(stored['choices'])} choices of Triton's autotuner were taken from {path.name}, which an earlier run has written."
    )


def keep(path: Path, device: str) -> str:
    """Write all choices of Triton's autotuner that its cache folder holds, and those that the file has already, into a file.

    Of each tuner the choice is kept with its time, without the other configurations.

    Args:
        path: File to write.
        device: Name of the device that has measured. Choices of another one in the file are dropped.

    Returns:
        The reason if nothing could be written, in a sentence for the notes of a result; else an empty string.
    """
    if not package_installed("triton"):
        return ""
    try:
        stored = _read(path) if path.exists() else {"device": device, "choices": {}}
        choices = dict(stored["choices"]) if stored["device"] == device else {}
        folder = _cache_folder()
        for found in folder.glob(f"*/*{_SUFFIX}"):
            tuned = json.loads(found.read_bytes())
            tuned["configs_timings"] = [min(tuned["configs_timings"], key=lambda each: each[1])]
            choices[found.relative_to(folder).as_posix()] = tuned
        lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(choice)}" for name, choice in sorted(choices.items()))
        path.parent.mkdir(parents=True, exist_ok=True)
        files.replace(path, f'{{"schema": {SCHEMA}, "device": {json.dumps(device)}, "choices": {{\n{lines}\n}}}}\n'.encode())
    except (OSError, ArgumentError, ValueError, LookupError, TypeError) as problem:
        return f"The choices of Triton's autotuner could not be kept: {files.reason(problem)}."
    return ""


def _cache_folder() -> Path:
    """Return the folder in which Triton stores compiled kernels and choices of its autotuner."""
    from triton import knobs

    return Path(knobs.cache.dir)


def _read(path: Path) -> dict[str, Any]:
    """Return the content of a file that :func:`keep` has written.

    Raises:
        ArgumentError: It is damaged, or was written by a newer version.
    """
    try:
        stored = json.loads(files.read_bytes(path))
        if stored["schema"] > SCHEMA:
            raise ValueError("a newer version of onelaunch has written it")
        inside = all(Path(name).name.endswith(_SUFFIX) and len(Path(name).parts) == 2 for name in stored["choices"])
        if not inside or ".." in str(list(stored["choices"])) or not isinstance(stored["device"], str):
            raise ValueError("it does not hold choices of Triton's autotuner")
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as problem:
        raise ArgumentError(f"{path} holds no choices of Triton's autotuner: {files.reason(problem)}.") from problem
    return stored
