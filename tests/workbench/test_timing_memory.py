"""Tests of the memory that a measurement frees: of verified contents before others are timed, and of a candidate that failed.

``toy_case`` returns a small case of ``toy_sum``, whose variant ``parallel`` is honest.
"""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from onelaunch.workbench.measure import rotation
from onelaunch.workbench.measure.rotation import count_sets
from onelaunch.workbench.measure.timing import measure
from onelaunch.workbench.verify import Judge, gate
from tests.workbench.toy import parallel, toy_case, toy_sum


@pytest.fixture
def registered():
    """Register a function as a variant of ``toy_sum`` under the name ``of_this_test``."""
    yield lambda run: toy_sum.variant("of_this_test")(run)
    toy_sum.variants.pop("of_this_test", None)


class Watched(Judge):
    """Judge that keeps weak references to the inputs of its references, by their seed."""

    def __init__(self):
        super().__init__()
        self.inputs = {}

    def reference(self, *arguments, **options):
        found = super().reference(*arguments, **options)
        self.inputs[options.get("seed", 0)] = weakref.ref(found.inputs)
        return found


@pytest.mark.parametrize("free", [0, 1 << 40])
def test_verified_contents_are_dropped_before_others_are_timed_if_they_take_much_of_the_memory(free, monkeypatch):
    monkeypatch.setattr(gate, "free_memory", lambda device: free)
    judge, kept = Watched(), []

    def on_progress(step, done, total):
        if step == "prepare":
            kept.append(judge.inputs[0]() is not None)

    found = measure(
        toy_sum,
        toy_case(),
        variants=["parallel"],
        regimes=("cold",),
        rounds=3,
        judge=judge,
        timing_seed=5,
        on_progress=on_progress,
    )
    assert found.candidates["parallel"].status == "ok"
    assert kept == [free > 0]
    assert judge.inputs[5]() is not None  # timed outputs have been judged by it


def test_memory_of_a_candidate_that_had_too_little_is_free_for_the_next_one(registered):
    held, alive, calls = [], [], [0]

    def hungry(call):
        calls[0] += 1
        if calls[0] < 12:  # so that it is verified
            return parallel.run(call)
        temporary = torch.empty(1000)
        held.append(weakref.ref(temporary))
        cycle = [temporary]
        cycle.append(cycle)  # as tensors and their autograd graph may refer to each other
        raise torch.OutOfMemoryError("out of memory")

    def next_one(call):
        alive.extend(tensor() is not None for tensor in held)
        return parallel.run(call)

    registered(hungry)
    toy_sum.variant("next_one")(next_one)
    gc.disable()
    try:
        variants = ["of_this_test", "next_one"]
        found = measure(toy_sum, toy_case(), variants=variants, regimes=("eager",), rounds=3, examine=())
    finally:
        gc.enable()
        del toy_sum.variants["next_one"]
    assert found.candidates["of_this_test"].status == "out_of_memory"
    assert found.candidates["next_one"].status == "ok"
    assert held
    assert alive
    assert not any(alive)


def test_seven_graphs_of_the_widest_norm_leave_memory_for_calls_from_python(monkeypatch):
    """Inputs and outputs of 2 GiB each, of which two sets and the outputs of seven candidates would take 32 of 66 GiB."""
    monkeypatch.setattr(rotation, "free_memory", lambda device: 66 << 30)
    assert count_sets(2 << 30, 2 << 30, torch.device("cpu"), candidates=7)[0] == 1
    assert count_sets(1 << 30, 1 << 30, torch.device("cpu"), candidates=7) == (2, True)
