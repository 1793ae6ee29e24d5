"""Use of ``torch.compile`` by variants: one static graph per shape, and the predicate that says why it cannot run.

The variants ``compiled`` of the operations, ``decode_step`` included, use both.
"""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from onelaunch.launch.imitation import imitated
from onelaunch.launch.planned import unrecorded
from onelaunch.operation import Query

_SHAPES = 256
"""Largest number of shapes for which a process compiles one function."""

R = TypeVar("R")


def compiler_missing(query: Query) -> str | None:
    """Return why torch.compile cannot run a call, or ``None``. On a CPU it needs a C++ compiler."""
    compilers = (os.environ.get("CXX", "c++"), "g++", "clang++")
    if query.device_type == "cpu" and not any(shutil.which(name) for name in compilers):
        return "needs a C++ compiler (g++ or clang++) on a CPU"
    return None


@functools.cache
def compile_static(function: Callable[..., R]) -> Callable[..., R]:
    """Return a function compiled once per shape.

    The same function gives the same object, so that it is compiled once in a process, and callers may take the object as a key.

    Studies sweep over shapes. After the second shape ``torch.compile`` would make a dynamic graph, which is a slower baseline
    than users of a single shape get.
    """
    compiled_function = torch.compile(function, dynamic=False)

    def call(*arguments: Any) -> R:
        # The caller is traced, and its graph takes the function in, or the call is run for its launches alone.
        if torch.compiler.is_compiling() or imitated():
            return function(*arguments)
        from torch._dynamo import config as dynamo  # slow to import

        # A recording would change what Dynamo compiles, and sees none of the kernels that compiled code launches. Beyond the
        # limit Dynamo would run the function uncompiled.
        with unrecorded("compiled code launches kernels in other ways"), dynamo.patch(recompile_limit=_SHAPES):
            return compiled_function(*arguments)

    return call
