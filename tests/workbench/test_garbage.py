"""Tests of the collection of garbage between the cases of a run."""

from __future__ import annotations

import gc
import weakref

import torch

from onelaunch.workbench.measure.garbage import collect_garbage


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
