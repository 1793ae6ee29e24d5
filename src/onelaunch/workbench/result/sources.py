"""Sources of the variants of a study: a digest of the code of each, and the distribution that provides it.

``provenance.py`` stores them in a result. ``workbench/running.py`` asks for them when a run begins, since a digest is taken once.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
from pathlib import Path

import onelaunch
from onelaunch.operation import Variant, plugins
from onelaunch.operation.entry_points import UNKNOWN
from onelaunch.operation.sources import NATIVE, digest_of, digest_of_files, distributions
from onelaunch.workbench.result.facts import VariantSource
from onelaunch.workbench.study import Study


def variant_sources(study: Study) -> dict[str, VariantSource]:
    """Return the source of each variant of a study by its label, :meth:`~onelaunch.workbench.study.Study.label`.

    If ``auto`` takes part, they include the variants that it may choose.
    """
    return {label: source_of(variant) for label, variant in study.registered()}


def source_of(variant: Variant) -> VariantSource:
    """Return the digest of a variant's code and the distribution that provides it."""
    return VariantSource(source=digest_of(variant), distribution=_distribution_of(variant.package))


@functools.cache
def package_digest() -> str:
    """Return the SHA-256 of all sources of this package."""
    folder = Path(onelaunch.__file__).parent
    files = (path for path in folder.rglob("*") if path.suffix in (".py", *NATIVE))
    return digest_of_files({path.relative_to(folder).as_posix(): path for path in files})


def _distribution_of(package: str) -> str:
    """Return the name and version of the distribution that provides a top-level package, or an empty string."""
    if package == "onelaunch":
        return f"onelaunch {onelaunch.__version__}"
    announced = (each.distribution for each in plugins() if each.module.partition(":")[0].partition(".")[0] == package)
    return next((name for name in announced if name != UNKNOWN), None) or _installed(package)


def _installed(package: str) -> str:
    """Return the name and version of the installed distribution with a top-level package, or an empty string."""
    for name in distributions().get(package, ()):
        with contextlib.suppress(Exception):  # broken metadata
            return f"{name} {importlib.metadata.version(name)}"
    return ""
