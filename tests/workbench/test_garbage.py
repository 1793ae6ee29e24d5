"""Tests of the collection of garbage between the cases of a run, and within a case."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from onelaunch.workbench.measure import garbage
from onelaunch.workbench.measure.garbage import Garbage, collect_garbage


class Node:
    """Object that can be part of a reference cycle, and that a weak reference can watch."""


def node():
    """Return a node that refers to itself, which only a collection frees."""
    made = Node()
    made.itself = made
    return made


def test_garbage_is_freed_and_what_stays_is_not_looked_at_again():
    kept = node()
    gone = weakref.ref(node())
    assert any(each is kept for each in gc.get_objects())
    collect_garbage()
    assert gone() is None
    assert not any(each is kept for each in gc.get_objects()), "later collections look at it"
    later = weakref.ref(node())
    gc.collect()
    assert later() is None, "what was made since is collected as ever"


def test_compiled_functions_are_freed():
    model = torch.nn.Linear(2, 2)
    made = []

    def backend(graph, _):
        made.append(weakref.ref(graph))
        return graph.forward

    torch.compile(model, backend=backend)(torch.ones(2))
    del model
    assert made[0]() is not None
    collect_garbage()
    assert made[0]() is None


@pytest.fixture
def nothing_frozen():
    """Let no object be frozen before a test, and freeze what there was again after it."""
    frozen = gc.get_freeze_count()
    gc.unfreeze()
    yield
    gc.unfreeze()
    if frozen:
        gc.freeze()


@pytest.mark.parametrize(("most", "passed_over"), [(0, True), (10**9, False)])
def test_a_case_that_has_made_many_objects_passes_over_them_until_its_end(most, passed_over, nothing_frozen, monkeypatch):
    monkeypatch.setattr(garbage, "MANY", most)
    with Garbage() as of_the_run:
        kept, gone = node(), weakref.ref(node())
        of_the_run.verified()
        assert (gone() is None) == passed_over
        assert any(each is kept for each in gc.get_objects()) != passed_over
        watched = weakref.ref(kept)
        del kept
        gc.collect()
        assert (watched() is None) != passed_over
        of_the_run.end_case()
        assert watched() is None, "nothing of a case stays for ever"
    assert gc.get_freeze_count() == 0


def test_what_there_was_before_is_passed_over_and_no_garbage_with_it(nothing_frozen):
    kept, gone = node(), weakref.ref(node())
    with Garbage():
        assert gone() is None
        assert not any(each is kept for each in gc.get_objects())
    assert any(each is kept for each in gc.get_objects())


def test_what_the_caller_has_frozen_is_never_looked_at(nothing_frozen, monkeypatch):
    monkeypatch.setattr(garbage, "MANY", 0)
    callers = node()
    gc.freeze()
    with Garbage() as of_the_run:
        for step in (of_the_run.verified, of_the_run.end_case):
            step()
            assert not any(each is callers for each in gc.get_objects())
    assert not any(each is callers for each in gc.get_objects())
