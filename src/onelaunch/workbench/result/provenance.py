"""The provenance of a result: device, time, software and command."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import onelaunch
from onelaunch.device.hardware import describe
from onelaunch.operation import Operation, find_operation
from onelaunch.workbench.result.schema import Provenance
from onelaunch.workbench.study import Scale, Study

PACKAGE = Path(onelaunch.__file__).parent


def provenance(
    study: Study,
    device: torch.device,
    *,
    scale: Scale,
    rounds: int,
    clocks: Sequence[Mapping[str, float]] = (),
    command: str = "",
) -> Provenance:
    """Return the provenance of a run of a study that ends now.

    Args:
        study: whose variants name the peers that take part.
        device: where it ran.
        scale: which shapes ran.
        rounds: how many were asked for.
        clocks: as sampled at each shape and direction.
        command: how it was started; this process's command line by default.
    """
    facts = describe(str(device))
    return Provenance(
        device=facts.name,
        slug=facts.slug,
        architecture=facts.architecture,
        driver=driver(device),
        versions=versions(study),
        commit=commit(),
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        clocks=merge_clocks(clocks),
        command=command or spelled(sys.argv),
        scale=scale,
        rounds=rounds,
    )


def driver(device: torch.device) -> str:
    """Return the GPU driver's version; empty for a CPU, or where nvidia-ml-py cannot tell."""
    if device.type != "cuda" or torch.version.hip:
        return ""
    try:
        import pynvml

        pynvml.nvmlInit()
        found = pynvml.nvmlSystemGetDriverVersion()
    except Exception:  # noqa: BLE001 - the library raises its own errors; a missing fact must not stop a study
        return ""
    return found.decode() if isinstance(found, bytes) else str(found)


def versions(study: Study) -> dict[str, str]:
    """Return the versions of what a study rests on.

    Python, torch, triton, CUDA (or ROCm), onelaunch, the packages that its variants require, and those that provide the
    operation and its variants where they are a user's own: these have no commit, so their version says what was measured.
    """
    found = {"python": platform.python_version(), "torch": str(torch.__version__), "onelaunch": onelaunch.__version__}
    if toolkit := torch.version.cuda:
        found["cuda"] = toolkit
    if toolkit := torch.version.hip:
        found["rocm"] = toolkit
    owner = find_operation(study.operation)
    peers = [package for name in study.variant_names() if (package := owner.get(name).capabilities.requires)]
    for package in ("triton", *peers):
        if (version := _version(package)) is not None:
            found[package] = version
    return found | _makers(owner, study)


def _makers(owner: Operation[..., Any], study: Study) -> dict[str, str]:
    """Return the versions of the distributions, other than onelaunch, that the operation and its variants come from."""
    made = (owner, *(owner.get(name).run for name in study.variant_names()))
    packages = {(getattr(each, "__module__", None) or "").partition(".")[0] for each in made} - {"", "onelaunch", "__main__"}
    owners = _distributions() if packages else {}
    return {name: importlib.metadata.version(name) for package in sorted(packages) for name in owners.get(package, ())}


@functools.cache
def _distributions() -> Mapping[str, list[str]]:
    """Return the installed distributions of each package; looking through all of them takes a fifth of a second."""
    return importlib.metadata.packages_distributions()


def spelled(arguments: Sequence[str]) -> str:
    """Return the command line as another person can use it: folders that only this machine has are left off absolute paths."""
    return shlex.join([Path(part).name if Path(part).is_absolute() else part for part in arguments])


def commit() -> str:
    """Return the commit of the package's checkout, with ``-dirty`` when its files differ; empty for an installed package.

    Where the files came without their history, ``$ONELAUNCH_COMMIT`` says which commit they are.
    """
    if named := os.environ.get("ONELAUNCH_COMMIT"):
        return named
    if _git("ls-files", "--error-unmatch", "__init__.py") is None:
        return ""
    head = _git("rev-parse", "--short=12", "HEAD")
    changes = _git("status", "--porcelain", "--", ".")
    return f"{head}{'-dirty' if changes else ''}" if head else ""


def merge_clocks(samples: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the medians over all shapes; of what is a lowest value, the lowest."""
    values: dict[str, list[float]] = {}
    for sample in samples:
        for name, value in sample.items():
            values.setdefault(name, []).append(value)
    return {
        name: min(found) if name.endswith("_lowest") else float(statistics.median(found))
        for name, found in sorted(values.items())
    }


def _version(package: str) -> str | None:
    """Return the version of the distribution that holds an importable package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        owners = importlib.metadata.packages_distributions().get(package, ())
        return importlib.metadata.version(owners[0]) if owners else None
    except ValueError:  # metadata without a name or a version
        return None


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=PACKAGE, capture_output=True, encoding="utf-8", timeout=20, check=True)  # noqa: S607
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
