"""The provenance of a result: device, time, software and command.

``running.py`` calls :func:`provenance` for each result, partial ones included. Command ``onelaunch study judge`` asks for
:func:`commit` alone, and ``run.py`` for :func:`spelled`.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path

import torch

import onelaunch
from onelaunch.device.hardware import describe
from onelaunch.operation.sources import distributions as _distributions
from onelaunch.operation.sources import installed_version
from onelaunch.workbench.result.facts import EarlierCommit, Provenance
from onelaunch.workbench.result.sources import package_digest, variant_sources
from onelaunch.workbench.study import Scale, Study

PACKAGE = Path(onelaunch.__file__).parent
"""Folder of the package."""


def provenance(
    study: Study,
    device: torch.device,
    *,
    scale: Scale,
    rounds: int,
    clocks: Sequence[Mapping[str, float]] = (),
    command: str = "",
    timing_seed: int | None = None,
) -> Provenance:
    """Return the provenance of a run of a study that ends now.

    Args:
        study: Study that ran. The packages that its variants require are recorded with their versions.
        device: Device of the run.
        scale: Scale of the shapes that ran.
        rounds: Number of rounds that were asked for.
        clocks: Sampled clocks, one dictionary for each case.
        command: Command line of the run; this process's own if empty.
        timing_seed: Seed of the inputs that were timed.
    """
    facts, committed = describe(str(device)), commit()
    return Provenance(
        device=facts.name,
        slug=facts.slug,
        architecture=facts.architecture,
        driver=driver(device),
        versions=versions(study),
        commit=committed,
        package=package_digest() if not committed or committed.endswith("-dirty") else "",
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        clocks=merge_clocks(clocks),
        command=command or spelled(sys.argv),
        scale=scale,
        rounds=rounds,
        variants=variant_sources(study),
        timing_seed=timing_seed,
    )


def taken_over(earlier: Provenance, kept: Collection[str], commit: str) -> tuple[EarlierCommit, ...]:
    """Return what a run takes over from an earlier result that was measured at other commits than its own.

    Args:
        earlier: Provenance of the earlier result, which may have taken over measurements itself.
        kept: Names of the measurements that are taken over, in order, as :class:`EarlierCommit` has them.
        commit: Commit of the run.
    """
    before = [each.model_copy(update={"measured": tuple(filter(each.measured.__contains__, kept))}) for each in earlier.earlier]
    older = {name for each in before for name in each.measured}
    own = tuple(name for name in kept if name not in older)
    found = [*before, EarlierCommit(commit=earlier.commit, date=earlier.date, measured=own)]
    return tuple(each for each in found if each.measured and each.commit != commit)


def driver(device: torch.device) -> str:
    """Return the NVIDIA driver's version, or an empty string for a CPU or an AMD GPU, or without nvidia-ml-py."""
    if device.type != "cuda" or torch.version.hip:
        return ""
    try:
        import pynvml

        pynvml.nvmlInit()
        found = pynvml.nvmlSystemGetDriverVersion()
    except Exception:  # noqa: BLE001 - a missing driver version must not stop a study, whatever the library raises
        return ""
    return found.decode() if isinstance(found, bytes) else str(found)


def versions(study: Study) -> dict[str, str]:
    """Return the versions of the software that a study depends on.

    These are Python, torch, triton, CUDA (or ROCm), onelaunch and the packages that its variants require. If a user's own package
    provides the operation or a variant, its version is recorded too, because the commit says nothing about it.
    """
    found = {"python": platform.python_version(), "torch": str(torch.__version__), "onelaunch": onelaunch.__version__}
    if toolkit := torch.version.cuda:
        found["cuda"] = toolkit
    if toolkit := torch.version.hip:
        found["rocm"] = toolkit
    peers = dict.fromkeys(package for _, variant in study.registered() if (package := variant.capabilities.requires))
    for package in ("triton", *peers):
        if (version := installed_version(package)) is not None:
            found[package] = version
    return found | _providers(study)


def _providers(study: Study) -> dict[str, str]:
    """Return the versions of the distributions, other than onelaunch, that provide the operations and their variants."""
    found = packages(study) - {"onelaunch", "__main__"}
    owners = _distributions() if found else {}
    return {name: importlib.metadata.version(name) for package in sorted(found) for name in owners.get(package, ())}


def packages(study: Study) -> set[str]:
    """Return the top-level packages whose code provides the operations and variants of a study."""
    made = (*study.operations(), *(variant.run for _, variant in study.registered()))
    return {(getattr(each, "__module__", None) or "").partition(".")[0] for each in made} - {""}


def spelled(arguments: Sequence[str]) -> str:
    """Return the command line with absolute paths reduced to their last part, since other machines have other folders."""

    def shortened(part: str) -> str:
        option, given, path = part.rpartition("=")
        return f"{option}{given}{Path(path).name}" if Path(path).is_absolute() else part

    return shlex.join(map(shortened, arguments))


def commit() -> str:
    """Return the commit of the package's checkout, with ``-dirty`` if files of the package are changed or not committed.

    The result is empty for a package that is installed without its Git history.

    The environment variable ``ONELAUNCH_COMMIT``, if set, is returned instead, for a copy of the files without the history.
    """
    if named := os.environ.get("ONELAUNCH_COMMIT"):
        return named
    # A package that is installed in a folder of another repository, such as its .venv, must not report that one's commit.
    if _git("ls-files", "--error-unmatch", "__init__.py") is None:
        return ""
    head = _git("rev-parse", "--short=12", "HEAD")
    changes = _git("status", "--porcelain", "--", ".")
    return f"{head}{'-dirty' if changes else ''}" if head else ""


def merge_clocks(samples: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Merge the clocks of all cases: the median of each value, and the minimum of those whose name ends in ``_lowest``."""
    values: dict[str, list[float]] = {}
    for sample in samples:
        for name, value in sample.items():
            values.setdefault(name, []).append(value)
    return {
        name: min(found) if name.endswith("_lowest") else float(statistics.median(found))
        for name, found in sorted(values.items())
    }


def _git(*arguments: str) -> str | None:
    """Return the output of a Git command in the package's folder, or ``None`` if it fails or there is no Git."""
    try:
        done = subprocess.run(["git", *arguments], cwd=PACKAGE, capture_output=True, encoding="utf-8", timeout=20, check=True)  # noqa: S607
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
