"""Packages and tools that are installed beside onelaunch."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path


def package_installed(name: str) -> bool:
    """Return whether a package, or a module of one such as ``fla.layers``, can be imported. Nothing but its parents is run."""
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):  # its parent is missing, or a module of that name has no specification
        return False


def find_ncu() -> str | None:
    """Return the path of NVIDIA's profiler: on ``PATH``, else where CUDA is installed, else ``None``."""
    if found := shutil.which("ncu"):
        return found
    homes = [Path(os.environ[name]) / "bin" for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    homes += [Path("/usr/local/cuda/bin"), *sorted(Path("/opt/nvidia/nsight-compute").glob("*"), reverse=True)]
    return next((str(home / "ncu") for home in homes if os.access(home / "ncu", os.X_OK)), None)
