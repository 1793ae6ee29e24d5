"""Wheels of a packed study: our own, and those that extras of it need on another machine.

pip downloads them, from the index that the user has configured. Which ones are needed is decided here, because pip evaluates
environment markers for the Python that runs it, and because PyTorch and Triton with their dependencies must stay out.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.metadata
import importlib.util
import io
import re
import subprocess
import sys
import zipfile
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from onelaunch.errors import ArgumentError, PackError
from onelaunch.operation.sources import installed_version
from onelaunch.workbench.result.provenance import PACKAGE

LEFT_OUT = ("torch", "triton")
"""Packages that the other machine must have itself. Neither they nor what only they need is packed."""

_ALIASES = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}
"""Older names of platforms by the minor version of glibc 2."""

_REWRITTEN = ("RECORD", "INSTALLER", "REQUESTED", "direct_url.json")
"""Metadata files that pip writes when it installs a wheel, and that a wheel does not hold or has otherwise."""


@dataclass(frozen=True)
class Machine:
    """Python version and platform for which wheels are chosen.

    Attributes:
        python: Version of CPython, such as ``3.12``.
        platform: Platform in the form of wheels' tags, such as ``manylinux_2_28_x86_64``: glibc 2.28 or newer.

    Raises:
        ArgumentError: One of them has another form.
    """

    python: str
    platform: str

    def __post_init__(self) -> None:
        found = re.fullmatch(r"3\.(\d{1,2})", self.python)
        if not found or int(found[1]) < 10:
            raise ArgumentError(f"--python is {self.python!r}; it must be a version of at least 3.10, such as 3.12.")
        if not re.fullmatch(r"manylinux_2_\d{1,2}_[a-z0-9_]+", self.platform):
            raise ArgumentError(f"--platform is {self.platform!r}; it must be like manylinux_2_28_x86_64 (glibc 2.28, x86_64).")

    @property
    def tags(self) -> list[str]:
        """Platform tags of wheels that run there: those of its glibc and of every older one, newest first."""
        minor, architecture = re.findall(r"manylinux_2_(\d+)_(.+)", self.platform)[0]
        tags = []
        for older in range(int(minor), 4, -1):  # no platform is older than glibc 2.5
            tags.append(f"manylinux_2_{older}_{architecture}")
            if older in _ALIASES:
                tags.append(f"{_ALIASES[older]}_{architecture}")
        return tags

    @property
    def environment(self) -> dict[str, str]:
        """Values of environment markers there. Of the Python version the newest patch release is assumed."""
        full = f"{self.python}.99"
        return {
            **{name: str(value) for name, value in default_environment().items()},
            "implementation_name": "cpython",
            "implementation_version": full,
            "os_name": "posix",
            "platform_machine": re.sub(r"manylinux_2_\d+_", "", self.platform),
            "platform_python_implementation": "CPython",
            "platform_system": "Linux",
            "python_full_version": full,
            "python_version": self.python,
            "sys_platform": "linux",
        }


def own_wheel(folder: Path) -> Path:
    """Write the wheel of the onelaunch that runs into a folder, and return its path.

    Raises:
        PackError: It is neither a checkout nor installed, it cannot be built, or files of the installation are missing.
    """
    checkout = PACKAGE.parents[1]
    if PACKAGE.parent.name != "src" or not (checkout / "pyproject.toml").is_file():
        try:
            installed = importlib.metadata.distribution("onelaunch")
        except importlib.metadata.PackageNotFoundError:
            installed = None
        if installed is None or Path(str(installed.locate_file(PACKAGE.name))).resolve() != PACKAGE.resolve():
            raise PackError(f"The onelaunch in {PACKAGE} is neither a checkout nor installed. Install it, or run a checkout's.")
        return repacked(installed, folder)
    # With the build's own requirement at hand, pip needs no index to build.
    isolation = ["--no-build-isolation"] if importlib.util.find_spec("hatchling") else []
    if problem := _pip("wheel", "--quiet", "--no-deps", *isolation, "--wheel-dir", str(folder), str(checkout)):
        raise PackError(f"The wheel of onelaunch could not be built from {checkout}: {problem}")
    return next(folder.glob("onelaunch-*.whl"))


def repacked(distribution: importlib.metadata.Distribution, folder: Path) -> Path:
    """Write a wheel of an installed distribution from its files, and return the wheel's path.

    Raises:
        PackError: The installation has no list of its files, or lacks one of them.
    """
    name, version = distribution.metadata["Name"], distribution.version
    installed = [PurePosixPath(file) for file in distribution.files or ()]
    # Scripts in folders outside of the packages are made anew from the metadata.
    kept = [file for file in installed if ".." not in file.parts and "__pycache__" not in file.parts]
    metadata = next((file.parent for file in kept if file.name == "WHEEL" and file.parent.suffix == ".dist-info"), None)
    if metadata is None:
        raise PackError(f"{name} {version} was not installed from a wheel, so no wheel can be made of it. Install one.")
    described = Path(str(distribution.locate_file(metadata / "WHEEL"))).read_text(encoding="utf-8")
    tag = re.findall(r"^Tag: (\S+)", described, re.MULTILINE)[0]
    wheel, record = folder / f"{canonicalize_name(name).replace('-', '_')}-{version}-{tag}.whl", io.StringIO()
    rows = csv.writer(record, lineterminator="\n")
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in kept:
            if file.parent == metadata and file.name in _REWRITTEN:
                continue
            try:
                data = Path(str(distribution.locate_file(file))).read_bytes()
            except OSError as problem:
                raise PackError(f"The installed {name} {version} lacks {file} ({problem.strerror}). Install it again.") from None
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            rows.writerow((file, f"sha256={digest}", len(data)))
            archive.writestr(str(file), data)
        rows.writerow((metadata / "RECORD", "", ""))
        archive.writestr(str(metadata / "RECORD"), record.getvalue())
    return wheel


def gather(own: Path, extras: Collection[str], machine: Machine) -> None:
    """Download what a wheel and extras of it need on a machine into the wheel's folder, :data:`LEFT_OUT` excepted.

    A version that is installed here is taken where it has a wheel for the machine and meets all requirements.

    Args:
        own: The wheel, alone in its folder.
        extras: Names of its extras.
        machine: Machine on which the wheels will be installed.

    Raises:
        PackError: pip cannot download a wheel that is needed. The message holds pip's.
    """
    needs: dict[str, SpecifierSet] = {}
    while True:
        wheels = _wheels(own.parent)
        # Requirements of wheels that are replaced below stay, so each turn asks for more, and the loop ends.
        for requirement in _requirements(own, extras, machine, wheels):
            name = canonicalize_name(requirement.name)
            needs[name] = needs.get(name, SpecifierSet()) & requirement.specifier
        missing = {}
        for name, specifier in needs.items():
            found = wheels.get(name)
            if found is None or not specifier.contains(found[1].version, prereleases=True):
                missing[name] = specifier
                if found is not None:
                    found[0].unlink()
        if not missing:
            return
        _download(missing, machine, own.parent)


def _wheels(folder: Path) -> dict[str, tuple[Path, importlib.metadata.Distribution]]:
    """Return the wheels in a folder with their metadata, by name."""
    found = ((wheel, next(iter(importlib.metadata.distributions(path=[str(wheel)])))) for wheel in sorted(folder.glob("*.whl")))
    return {canonicalize_name(distribution.metadata["Name"]): (wheel, distribution) for wheel, distribution in found}


def _requirements(
    own: Path, extras: Collection[str], machine: Machine, wheels: Mapping[str, tuple[Path, importlib.metadata.Distribution]]
) -> Iterable[Requirement]:
    """Yield what a wheel, extras of it, and the present wheels that these need, require on a machine."""
    root = next(name for name, (wheel, _) in wheels.items() if wheel == own)
    pending = [(root, extra) for extra in ("", *extras)]
    seen = set(pending)
    for name, extra in pending:  # grows during the loop
        environment = {**machine.environment, "extra": extra}
        for text in (wheels[name][1].requires or ()) if name in wheels else ():
            requirement = Requirement(text)
            needed = canonicalize_name(requirement.name)
            if needed in LEFT_OUT or (requirement.marker and not requirement.marker.evaluate(environment)):
                continue
            yield requirement
            more = {(needed, each) for each in ("", *requirement.extras)} - seen
            seen |= more
            pending += sorted(more)


def _download(needs: Mapping[str, SpecifierSet], machine: Machine, folder: Path) -> None:
    """Download one wheel for each name: all at once in the installed versions, or one by one where that fails."""
    command = ["download", "--quiet", "--no-deps", "--only-binary=:all:", "--implementation", "cp", "--dest", str(folder)]
    command += ["--python-version", machine.python, *(f"--platform={tag}" for tag in machine.tags)]
    choices = {name: (_installed(name, specifier), f"{name}{specifier}") for name, specifier in needs.items()}
    if not _pip(*command, *(installed or free for installed, free in choices.values())):
        return
    for installed, free in choices.values():
        if installed and not _pip(*command, installed):
            continue
        if problem := _pip(*command, free):
            raise PackError(f"pip found no wheel of {free} for Python {machine.python} on {machine.platform}: {problem}")


def _installed(name: str, specifier: SpecifierSet) -> str:
    """Return a requirement of the version that is installed here, or an empty string if none is or it is not allowed."""
    version = installed_version(name)
    return f"{name}=={version}" if version and specifier.contains(version, prereleases=True) else ""


def _pip(*arguments: str) -> str:
    """Run pip, and return its error in one line, or an empty string if it succeeded."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", check=False)
    if done.returncode == 0:
        return ""
    said = done.stderr.strip().splitlines() or [f"pip ended with exit code {done.returncode}"]
    return next((line for line in reversed(said) if line.startswith("ERROR:")), said[-1]).removeprefix("ERROR: ")
