"""CUDA C++ kernels: compiled by NVRTC at first use, loaded and launched through the driver.

Names are imported at their first use, so that a command that needs only the driver does not import PyTorch.
``kernels/gemm_sm90``, ``decode/codegen`` and ``device/read_rate.py`` make sources with it; ``launch/launch.py`` and
``device/read_rate.py`` load and launch them, and the inspector compiles them without a GPU. ``kernels/tma.py`` encodes tensor
maps. Measurements and the decode runtime capture CUDA graphs. Requirements of variants, ``device/read_rate.py`` and ``onelaunch
doctor`` ask what is :func:`missing`.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onelaunch.cuda.compiler import Compiled, Source, compile_now, compile_source, include, missing, read, version
    from onelaunch.cuda.driver import make_context_current
    from onelaunch.cuda.graphs import capture, no_garbage_collection
    from onelaunch.cuda.module import Function, Kind, load
    from onelaunch.cuda.tensor_maps import tensor_map

__all__ = [
    "Compiled",
    "Function",
    "Kind",
    "Source",
    "capture",
    "compile_now",
    "compile_source",
    "include",
    "load",
    "make_context_current",
    "missing",
    "no_garbage_collection",
    "read",
    "tensor_map",
    "version",
]

_HOMES = {
    **dict.fromkeys(("Function", "Kind", "load"), "module"),
    **dict.fromkeys(("capture", "no_garbage_collection"), "graphs"),
    "make_context_current": "driver",
    "tensor_map": "tensor_maps",
}
"""Submodule that defines each name; names that are not listed are in ``compiler``."""


def __getattr__(name: str) -> Any:
    """Import a name of :data:`__all__` from its submodule, and keep it in this module."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES.get(name, 'compiler')}"), name)
    globals()[name] = value
    return value
