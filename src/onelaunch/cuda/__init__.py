"""CUDA C++ kernels: compiled by NVRTC at first use, loaded and launched through the driver."""

from onelaunch.cuda.compiler import Compiled, Source, compile_now, compile_source, include, missing, read, version
from onelaunch.cuda.driver import make_context_current
from onelaunch.cuda.module import Function, Kind, load
from onelaunch.cuda.tensor_map import tensor_map

__all__ = [
    "Compiled",
    "Function",
    "Kind",
    "Source",
    "compile_now",
    "compile_source",
    "include",
    "load",
    "make_context_current",
    "missing",
    "read",
    "tensor_map",
    "version",
]
