"""Script of a packed study, its ``__main__.py``: install the packed wheels into a folder of their own, and run the study.

It runs on the other machine before onelaunch is installed there, so it imports Python's standard library alone. An older Python
than onelaunch needs can run it up to the error that says so. ``build.py`` copies this file into the pack.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from pathlib import Path
from typing import Any

SCHEMA = 1
"""Version of the pack's schema: its members, and the keys of ``manifest.json``."""

MANIFEST = "manifest.json"


def main(pack: Path, arguments: list[str]) -> None:
    """Install a pack's wheels beside it, unless they are installed already, and run its study in place of this process.

    Args:
        pack: File of the pack.
        arguments: Further arguments of ``onelaunch study run``. They override those that are passed here.

    Raises:
        SystemExit: The pack is damaged or of another schema, or this Python or its packages do not suit it.
    """
    raw, manifest = read(pack)
    check_python(pack, manifest)
    installed = pack.parent / (pack.stem + "-" + hashlib.sha256(raw).hexdigest()[:12])
    if not installed.is_dir():
        try:
            install(pack, manifest, installed)
        except OSError as problem:
            raise SystemExit(f"error: {installed} cannot be written: {problem.strerror or problem}") from None
    run(manifest, installed, arguments)


def read(pack: Path) -> tuple[bytes, dict[str, Any]]:
    """Return the manifest of a pack as bytes and parsed, after a check of its schema and of the digest of every member."""
    try:
        with zipfile.ZipFile(str(pack)) as archive:
            raw = archive.read(MANIFEST)
            manifest = json.loads(raw.decode())
            if manifest["schema_version"] != SCHEMA:
                found = manifest["schema_version"]
                raise SystemExit(
                    f"error: {pack} is a packed study of schema {found}; this script reads schema {SCHEMA}. Pack the study again."
                )
            for name, digest in manifest["members"].items():
                if hashlib.sha256(archive.read(name)).hexdigest() != digest:
                    raise ValueError(name + " is not the file that was packed")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, zipfile.BadZipFile, zlib.error) as problem:
        raise SystemExit(f"error: {pack} is damaged: {problem}. Copy it again.") from None
    return raw, manifest


def check_python(pack: Path, manifest: dict[str, Any]) -> None:
    """Exit if this is another version of Python than the pack's, or if it has no PyTorch or no pip."""
    here, wanted = f"{sys.version_info[0]}.{sys.version_info[1]}", manifest["python"]
    if here != wanted or platform.python_implementation() != "CPython":
        raise SystemExit(
            f"error: {pack} is packed for CPython {wanted}; this is {platform.python_implementation()} {here}. "
            f"Run it with python{wanted}, or pack the study with --python {here}."
        )
    if importlib.util.find_spec("torch") is None:
        raise SystemExit(
            f"error: {sys.executable} has no PyTorch, which is never packed. Run the pack with a Python that has it."
        )
    if importlib.util.find_spec("pip") is None:
        raise SystemExit(f"error: {sys.executable} has no pip, which installs the wheels. Do: {sys.executable} -m ensurepip")


def install(pack: Path, manifest: dict[str, Any], installed: Path) -> None:
    """Install the wheels without a network and without dependencies. The folder appears only once it is complete."""
    partial = Path(tempfile.mkdtemp(prefix="." + installed.name + "-", dir=str(installed.parent)))
    try:
        with zipfile.ZipFile(str(pack)) as archive:
            wheels = [archive.extract(name, str(partial)) for name in sorted(manifest["members"]) if name.endswith(".whl")]
            archive.extract(manifest["study"] + ".toml", str(partial))
        sys.stderr.write(f"Installing {len(wheels)} wheels into {installed}\n")
        # --isolated: neither the user's settings nor PIP_... variables, such as --user, may redirect it.
        command = [sys.executable, "-m", "pip", "--isolated", "--disable-pip-version-check", "install", "--quiet", "--no-index"]
        command += ["--no-deps", "--no-cache-dir", "--target", str(partial / "site"), *wheels]
        done = subprocess.run(command, capture_output=True, check=False)
        if done.returncode:
            said = done.stderr.decode(errors="replace").strip().splitlines() or [f"pip ended with exit code {done.returncode}"]
            reason = next((line for line in said if line.startswith("ERROR:")), said[-1])
            raise SystemExit(f"error: the wheels of {pack} cannot be installed: {reason.replace('ERROR: ', '', 1)}")
        shutil.rmtree(str(partial / "wheels"))
        try:
            partial.rename(installed)
        except OSError:
            if not installed.is_dir():  # else another process has installed the same pack meanwhile
                raise
    finally:
        shutil.rmtree(str(partial), ignore_errors=True)


def run(manifest: dict[str, Any], installed: Path, arguments: list[str]) -> None:
    """Replace this process by ``onelaunch study run``, so that it receives Ctrl-C and returns its own exit code."""
    environment = dict(os.environ)
    paths = [str(installed / "site"), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    if manifest["commit"]:
        environment["ONELAUNCH_COMMIT"] = manifest["commit"]
    study, beside = manifest["study"], installed.parent
    command = [sys.executable, "-m", "onelaunch", "study", "run", str(installed / (study + ".toml"))]
    command += ["--out", str(beside / (study + "-result.json")), "--report-dir", str(beside / (study + "-report")), *arguments]
    os.execve(sys.executable, command, environment)  # noqa: S606


if __name__ == "__main__":
    main(Path(sys.argv[0]).resolve(), sys.argv[1:])
