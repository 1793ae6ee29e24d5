"""``torch.compile`` as variants use it: a graph for each shape, and a reason where it cannot run."""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from onelaunch.operation import Query

SHAPES = 256
"""Shapes that a process may compile a function for."""

R = TypeVar("R")


def compiler_missing(query: Query) -> str | None:
    """Return why torch.compile, which needs a C++ compiler on a CPU, cannot run, or ``None``."""
    compilers = (os.environ.get("CXX", "c++"), "g++", "clang++")
    if query.device_type == "cpu" and not any(shutil.which(name) for name in compilers):
        return "needs a C++ compiler (g++ or clang++) on a CPU"
    return None


@functools.cache
def compile_static(function: Callable[..., R]) -> Callable[..., R]:
    """Compile a function once per shape: studies sweep shapes, and a dynamic graph would be a slower baseline than people get."""
    compiled_function = torch.compile(function, dynamic=False)

    def call(*arguments: Any) -> R:
        if torch.compiler.is_compiling():
            return function(*arguments)
        from torch._dynamo import config as dynamo  # slow to import

        with dynamo.patch(recompile_limit=SHAPES):  # past the limit, Dynamo would run it uncompiled
            return compiled_function(*arguments)

    return call
