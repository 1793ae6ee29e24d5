"""Tests that Triton's cache key of a kernel does not depend on which kernels a process used before."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

MODULES = ("onelaunch.ops.gla.kernels.chunk_output", "onelaunch.ops.gla.kernels.backward", "onelaunch.kernels.scan.backward")
"""Modules whose kernels call functions of other modules, some of them the same."""

KEYS = """
import importlib, sys
from onelaunch.launch.cache_keys import complete_key
for name in sys.argv[1:]:
    module = importlib.import_module(name)
    for attribute, kernel in vars(module).items():
        if attribute.endswith("_kernel"):
            complete_key(kernel)
            print(name, attribute, kernel.cache_key)
"""
"""Program that prints the keys of the kernels of the modules that it is given, in their order."""


def keys_of(modules):
    """Return the keys that a new process computes, sorted by module and kernel."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    printed = subprocess.run(
        [sys.executable, "-c", KEYS, *modules], check=True, capture_output=True, text=True, env=environment, timeout=120
    ).stdout
    return sorted(printed.splitlines())


def test_keys_do_not_depend_on_the_order_of_kernels():
    """Without ``complete_key``, Triton 3.7.1 computes two keys for the gradients of gla's portable kernels."""
    first, second = keys_of(MODULES), keys_of(MODULES[::-1])
    assert len(first) >= len(MODULES)
    assert first == second
