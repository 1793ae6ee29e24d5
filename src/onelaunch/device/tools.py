"""Look-up of optional packages and of NVIDIA's profiler on this machine.

Requirements and predicates of variants, the workbench and the commands ask it.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from importlib.machinery import PathFinder
from pathlib import Path


def package_installed(name: str) -> bool:
    """Return whether a package, or a module such as ``fla.layers``, is installed. Nothing is imported.

    ``importlib.util.find_spec`` would import the parent packages of a module, which takes ten seconds for ``fla``.
    """
    top, *rest = name.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except ValueError:  # A loaded module has no specification.
        return False
    found = top
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            return False
        found = f"{found}.{part}"
        spec = PathFinder.find_spec(found, spec.submodule_search_locations)
    return spec is not None


def find_ncu() -> str | None:
    """Return the path of NVIDIA's profiler ``ncu``, from ``PATH`` or the usual folders of CUDA; ``None`` if it is not found."""
    if found := shutil.which("ncu"):
        return found
    homes = [Path(os.environ[name]) / "bin" for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    homes += [Path("/usr/local/cuda/bin"), *sorted(Path("/opt/nvidia/nsight-compute").glob("*"), reverse=True)]
    return next((str(home / "ncu") for home in homes if os.access(home / "ncu", os.X_OK)), None)
