"""Tests of ablation variants: they are found by name, and never chosen automatically.

They are implementations in ``onelaunch.ablations`` that were measured and lost, and are kept as lessons.

A test marked ``thorough`` does not run in ``make test``, and one marked ``interpret`` runs in Triton's interpreter, with
TRITON_INTERPRET=1.
"""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys

import pytest

from onelaunch import ablations
from onelaunch.dispatch.choice import able, choose
from onelaunch.operation import operations
from onelaunch.ops import gla

# All ablation variants of all operations, recognized by the module of their function.
LESSONS = [
    variant for operation in operations() for variant in operation.variants.values() if "ablations" in variant.run.__module__
]
each_lesson = pytest.mark.parametrize("variant", LESSONS, ids=lambda variant: f"{variant.operation.name}-{variant.name}")


def test_every_module_of_the_package_registers_some():
    """Every module of ``onelaunch.ablations``, except its subpackages of kernels, registers an ablation variant."""
    modules = [found.name for found in pkgutil.iter_modules(ablations.__path__, f"{ablations.__name__}.") if not found.ispkg]
    assert modules
    for module in map(importlib.import_module, modules):
        assert module.__name__ in {variant.run.__module__ for variant in LESSONS}


@each_lesson
def test_ablations_run_only_by_name(variant):
    assert variant.capabilities.by_name_only
    assert not variant.capabilities.automatic


@pytest.mark.interpret
def test_auto_does_not_choose_ablations_that_can_run(monkeypatch):
    """The ablations ``sequential`` and ``pipelined`` are not chosen even if they come first in the order of preference.

    On a CPU their kernels can run only in Triton's interpreter, so the test needs it.
    """
    query = gla.query(gla.case("float32", B=1, T=70, H=1, K=16, V=16), "cpu")
    monkeypatch.setitem(gla.defaults, "cpu", ("sequential", "pipelined", "recurrent"))
    assert gla.preference(query)[:2] == ["sequential", "pipelined"]
    assert {"sequential", "pipelined"} <= set(able(gla, query))
    # ``__wrapped__`` is the function without its cache, in which the choice by the changed order would stay.
    assert choose.__wrapped__(query).name not in {variant.name for variant in LESSONS}


FIRST = ("onelaunch.ops", "onelaunch.ablations", "onelaunch.ops.gla.contract")

IN_FORKS = f"""
import os, torch
for first in {FIRST}:
    if os.fork():
        os.wait()
    else:
        __import__(first)
        from onelaunch.ops import gla
        print(first, gla.get("sequential").run.__module__, flush=True)
        os._exit(0)
"""


@pytest.mark.thorough
def test_ablations_are_registered_whichever_module_is_imported_first():
    """Each module is imported in a process that has imported PyTorch, but nothing of this package."""
    done = subprocess.run([sys.executable, "-c", IN_FORKS], capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.splitlines() == [f"{first} onelaunch.ablations.gla" for first in FIRST]
