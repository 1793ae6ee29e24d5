"""Tests of replays as written functions: operators and their arguments, shared memory, freed memory, results as views.

They run on CPU memory with stand-in kernels, see ``replayed.py``. ``adding`` is a kernel that adds two vectors, and ``Called`` a
planned function that counts how often its Python code runs: in the first two calls. ``machine`` replaces the GPU's driver.
"""

from __future__ import annotations

import pytest
import torch

from onelaunch.launch import plan, written
from onelaunch.launch.launch import Launch
from tests.launch.replayed import machine  # noqa: F401 - a fixture
from tests.launch.test_plan import Called, N, adding, vectors  # noqa: F401 - a fixture is among them


@pytest.mark.parametrize("reinterpret", [written._reinterpret, None], ids=["reinterpreted", "as_strided"])
def test_arguments_of_operators_are_views_of_the_same_memory(reinterpret, monkeypatch):
    """The view begins two elements behind the first one of a tensor that itself begins inside of its memory."""
    monkeypatch.setattr(written, "_reinterpret", reinterpret)
    parameter = torch.nn.Parameter(torch.arange(24.0)[4:])
    found = written.viewer()(parameter.detach(), (3, 2), (5, 2), 2)
    assert found.tolist() == [[6.0, 8.0], [11.0, 13.0], [16.0, 18.0]]
    assert found.data_ptr() == parameter.data_ptr() + 2 * 4


def test_functions_in_place_of_operators_do_what_the_operators_do(adding):  # noqa: F811
    def run(a, b):
        added = torch.empty(N)
        Launch(adding, (1,), a, b, added, N, 1.0, BLOCK=8).run()
        square, other = added.view(4, 4), b.view(4, 4)
        product = torch.empty(4, 4)
        torch.mm(square, other.mT, out=product)
        sums = torch.sum(product, [0], keepdim=True, dtype=torch.float64)
        batched = torch.bmm(square.view(2, 2, 4), other.view(2, 4, 2))
        return square.mT @ other, product, sums, batched, torch.addmm(a[:4], square, other, beta=2.0, alpha=3.0)

    planned = Called(run)
    for _ in range(4):
        a, b = vectors()
        square, other = (a + b).view(4, 4), b.view(4, 4)
        expected = (
            square.mT @ other,
            square @ other.mT,
            (square @ other.mT).double().sum(0, keepdim=True),
            torch.bmm(square.view(2, 2, 4), other.view(2, 4, 2)),
            2 * a[:4] + 3 * square @ other,
        )
        # The bound is for float32 sums in another order: the formula of addmm, and operands that lie elsewhere in memory.
        torch.testing.assert_close(planned(a, b), expected, rtol=1e-5, atol=1e-5)
    assert planned.count == 2
    (found,) = planned.planned.plans()
    assert sum(step[0] == written.OPERATE for step in found.steps) == len(written.DIRECT)


def test_small_intermediate_tensors_share_an_allocation(adding, monkeypatch):  # noqa: F811
    def run(a):
        first, second, out = (torch.empty(N) for _ in range(3))
        Launch(adding, (1,), a, a, first, N, 1.0, BLOCK=8).run()
        Launch(adding, (1,), first, a, second, N, 1.0, BLOCK=8).run()
        Launch(adding, (1,), second, first, out, N, 1.0, BLOCK=8).run()
        return out

    made = []
    empty = plan._allocator(torch.device("cpu"))
    monkeypatch.setattr(plan, "_allocator", lambda device: lambda *given: made.append(given) or empty(*given))
    called = Called(run)
    for _ in range(2):
        called(*vectors(1))
    (a,) = vectors(1)
    torch.testing.assert_close(called(a), 5 * a)
    assert len(made) == 2


def test_a_large_intermediate_tensor_is_freed_after_its_last_use(adding):  # noqa: F811
    def run(a):
        large, out = torch.empty(1 << 19), torch.empty(N)
        Launch(adding, (1,), a, a, large, N, 1.0, BLOCK=8).run()
        Launch(adding, (1,), large, a, out, N, 1.0, BLOCK=8).run()
        del large
        return out + 0

    called = Called(run)
    for _ in range(2):
        called(*vectors(1))
    (found,) = called.planned.plans()
    codes = [step[0] for step in found.steps]
    assert codes.index(written.FREE) < codes.index(written.OPERATE)  # the step FREE comes before OPERATE, the addition at the end


def test_a_large_tensor_that_two_launches_read_is_freed_behind_the_second(adding):  # noqa: F811
    """Both read its address in one word of the packet, which the first writes."""

    def run(a):
        large, one, out = torch.empty(1 << 19), torch.empty(N), torch.empty(N)
        Launch(adding, (1,), a, a, large, N, 1.0, BLOCK=8).run()
        Launch(adding, (1,), large, a, one, N, 1.0, BLOCK=8).run()
        Launch(adding, (1,), large, one, out, N, 1.0, BLOCK=8).run()
        del large
        return out

    called = Called(run)
    for _ in range(3):
        (a,) = vectors(1)
        torch.testing.assert_close(called(a), 5 * a)
    (found,) = called.planned.plans()
    codes = [step[0] for step in found.steps]
    assert codes[-2:] == [written.START, written.FREE]
    assert [len(step[2]) for step in found.steps if step[0] == written.START] == [2, 1, 1]


def test_intermediate_tensors_of_one_dtype_share_an_allocation_with_arguments_of_operators(adding):  # noqa: F811
    def run(a):
        first, second, whole = torch.empty(N), torch.empty(2, N // 2), torch.empty(3, dtype=torch.int32)
        Launch(adding, (1,), a, a, first, N, 1.0, BLOCK=8).run()
        Launch(adding, (1,), first, a, second, N, 1.0, BLOCK=8).run()
        return torch.mm(second, second.mT), whole.zero_() + 1

    called = Called(run)
    for _ in range(4):
        (a,) = vectors(1)
        square, ones = called(a)
        torch.testing.assert_close(square, (3 * a).view(2, -1) @ (3 * a).view(2, -1).mT)
        assert ones.tolist() == [1, 1, 1]
    (found,) = called.planned.plans()
    assert [step[3] for step in found.steps if step[0] == written.ALLOCATE] == [torch.float32, torch.int32]


def test_results_on_the_same_memory_share_a_version_and_a_result_alone_has_its_own(machine):  # noqa: F811
    def run(a):
        whole, alone = a + 1, a + 2
        return whole[:8], whole[4:], alone[2:]

    called = Called(run)
    for _ in range(3):
        (a,) = vectors(1)
        first, second, alone = called(a)
    assert torch.equal(second, a[4:] + 1)
    assert torch.equal(alone, a[2:] + 2)
    first.zero_()
    assert second[:4].tolist() == [0.0] * 4
    assert (second._version, alone._version) == (first._version, 0)


def test_operators_take_keywords_that_python_reserves(machine):  # noqa: F811
    called = Called(lambda a: torch.ops.aten.random_(a + 0, **{"from": 3, "to": 4}))
    for _ in range(4):
        assert torch.equal(called(torch.zeros(5)), torch.full((5,), 3.0))
    assert called.count == 2
