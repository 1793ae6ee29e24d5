"""Tests of counting launches and grid barriers: the nodes of a captured graph, a variant's counter, and calls without a count.

The calls are of ``toy_sum``, the operation of ``toy.py``; ``toy_case`` returns a small case with sizes B, T and V. ``prose``
compares a text with its entry in ``tests/snapshots/prose.txt``. A test fails if it does not compare one of its entries, and
``tests/test_prose.py`` if the test or the parameter of an entry is gone.

``device`` is the first GPU, or the CPU.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from onelaunch.errors import DriverError
from onelaunch.workbench.measure import launches
from onelaunch.workbench.measure.count import Request
from tests.workbench.toy import toy_case, toy_sum

KERNEL, COPY, FILL, HOST, EMPTY = 0, 1, 2, 3, 5
"""Types of graph nodes, as in ``CUgraphNodeType``."""


class Driver:
    """Double of the CUDA driver with one graph: its handle, and the kinds of its nodes.

    Handles need more than 32 bits, so that a handle which ctypes passes as an int is noticed. ``error`` is the code that
    cuGraphGetNodes returns.
    """

    def __init__(self, *kinds: int, handle: int = 2**40 + 1, error: int = 0) -> None:
        self.kinds, self.handle, self.error = kinds, handle, error

    def cuGraphGetNodes(self, graph, nodes, size):
        assert graph.value == self.handle
        size._obj.value = len(self.kinds)
        for index in range(len(self.kinds) if nodes is not None else 0):
            nodes[index] = 2**41 + index
        return self.error

    def cuGraphNodeGetType(self, node, kind):
        assert isinstance(node, ctypes.c_void_p)
        kind._obj.value = self.kinds[node.value - 2**41]
        return 0


GRAPH = SimpleNamespace(raw_cuda_graph=lambda: 2**40 + 1)
"""Stand-in for a captured ``torch.cuda.CUDAGraph``, with the handle that :class:`Driver` expects."""


@pytest.mark.parametrize(
    ("kinds", "found"), [((), 0), ((KERNEL, KERNEL, COPY, FILL, KERNEL), 5), ((EMPTY, KERNEL, HOST, EMPTY), 1)]
)
def test_kernels_copies_and_memsets_are_launches(kinds, found, monkeypatch):
    monkeypatch.setattr(launches, "library", lambda: Driver(*kinds))
    assert launches.launches_in(GRAPH) == found


def test_a_driver_that_refuses_is_an_error(monkeypatch):
    monkeypatch.setattr(launches, "library", lambda: Driver(KERNEL, error=1))
    with pytest.raises(DriverError, match="cuGraphGetNodes"):
        launches.launches_in(GRAPH)


def test_on_a_cpu_nothing_is_counted_and_the_reason_is_given(prose):
    found = launches.count_launches(toy_sum, [Request(toy_case(), "parallel"), Request(toy_case(), "eager")])
    assert found[0] == found[1]
    prose(found[0])


def count_with(monkeypatch, name, counter):
    """Give a variant a function that returns the number of grid barriers of one call."""
    variant = toy_sum.get(name)
    monkeypatch.setattr(variant, "capabilities", replace(variant.capabilities, barriers=counter))


def test_barriers_are_read_from_the_variants_own_counter(monkeypatch, prose):
    # The counter of ``parallel`` also checks that it gets the requested case.
    count_with(monkeypatch, "parallel", lambda call: 7 * int(call.x.shape == (1, 5, 3)))

    def broken(call):
        raise RuntimeError("gave up")

    count_with(monkeypatch, "eager", broken)
    requests = [Request(toy_case(B=1, T=5, V=3), name) for name in ("parallel", "eager", "nan")]
    found = launches.count_barriers(toy_sum, requests)
    assert found[:2] == [7, "RuntimeError: gave up"]
    prose(found[2])  # the reason why there is no count: ``nan`` has no counter


@pytest.mark.gpu
def test_a_gpu_counts_every_launch(device):
    x, y = torch.ones(1000, device=device), torch.empty(1000, device=device)
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    (x + 1).sin().zero_()  # loads the kernels, which must not happen during the capture
    torch.cuda.synchronize(device)
    with torch.cuda.graph(graph):
        y.copy_((x + 1).sin())
    assert launches.launches_in(graph) == 3
    graph.replay()
    torch.testing.assert_close(y, (x + 1).sin())


@pytest.mark.gpu
def test_a_gpu_counts_variants_and_names_those_that_it_cannot(device):
    case = toy_case("float16", B=4, T=64, V=64)
    requests = [Request(case, "parallel"), Request(case, "parallel", "forward_backward"), Request(case, "no_such_variant")]
    forward, both, unknown = launches.count_launches(toy_sum, requests, device=device)
    assert 0 < forward < both
    assert "no_such_variant" in unknown
