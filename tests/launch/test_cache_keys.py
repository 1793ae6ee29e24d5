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
import importlib, os, sys
from onelaunch.launch import cache_keys
from onelaunch.launch.cache_keys import complete_key
cache_keys._LOCK.acquire()
modules = [importlib.import_module(name) for name in sys.argv[1:]]
for order in (modules, modules[::-1]):
    if os.fork() == 0:
        for module in order:
            for attribute, kernel in vars(module).items():
                if attribute.endswith("_kernel"):
                    complete_key(kernel)
                    print(module.__name__, attribute, kernel.cache_key)
        sys.stdout.flush()
        os._exit(0)
    os.wait()
    print("end", flush=True)
"""
"""Program that prints the keys of the kernels of the modules that it is given, in their order, then in the other order.

A forked process computes the keys of each order, so that no keys are computed before. It is forked while keys are computed, as
by another thread, which holds the lock. Importing PyTorch takes most of the time.
"""


def test_keys_do_not_depend_on_the_order_of_kernels():
    """Without ``complete_key``, Triton 3.7.1 computes two keys for the gradients of gla's portable kernels."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    printed = subprocess.run(
        [sys.executable, "-c", KEYS, *MODULES], check=True, capture_output=True, text=True, env=environment, timeout=120
    ).stdout
    first, second, rest = (sorted(each.splitlines()) for each in printed.split("end\n"))
    assert len(first) >= len(MODULES)
    assert first == second
    assert not rest
