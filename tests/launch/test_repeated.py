"""Tests of comparisons of a call's inputs with those of the call before: other facts are not taken for equal."""

from __future__ import annotations

import pytest
import torch

from onelaunch.launch import repeated
from onelaunch.launch.facts import facts_of
from onelaunch.launch.repeated import Repeated

pytestmark = pytest.mark.skipif(repeated._guards is None, reason="this PyTorch has no TensorGuards")

FLAGS = (True, False)
TEXT = "kernels"


def inputs():
    return torch.randn(4, 6), torch.randn(3).requires_grad_(), None, 4, 0.5, TEXT, FLAGS


def expected(given, named):
    return Repeated(given, named, facts_of((*given, *named, *named.values())))


@pytest.mark.parametrize("named", [{}, {"eps": 1e-5, "state": None}], ids=["positional", "named"])
def test_other_tensors_of_the_same_facts_are_found(named):
    compared = expected(inputs(), named)
    a, b, *rest = inputs()
    tensors, addresses = compared.tensors_of((a, b, *rest), named)
    assert tensors[0] is a
    assert tensors[1] is b
    assert addresses == [a.data_ptr(), b.data_ptr()]


@pytest.mark.parametrize(
    ("at", "other"),
    [
        pytest.param(0, lambda: torch.randn(4, 5), id="sizes"),
        pytest.param(0, lambda: torch.randn(6, 4).mT, id="strides"),
        pytest.param(0, lambda: torch.randn(25)[1:].view(4, 6), id="alignment"),
        pytest.param(0, lambda: torch.randn(4, 6).double(), id="dtype"),
        pytest.param(0, lambda: torch.randn(4, 6, device="meta"), id="device"),
        pytest.param(0, lambda: torch.randn(4, 6).requires_grad_(), id="takes a gradient"),
        pytest.param(1, lambda: torch.randn(3), id="takes no gradient"),
        pytest.param(0, lambda: torch.nn.Parameter(torch.randn(4, 6), requires_grad=False), id="class"),
        pytest.param(0, lambda: torch.randn(4, 6).to(torch.complex64).conj().imag, id="negative view"),
        pytest.param(0, lambda: None, id="no tensor"),
        pytest.param(2, lambda: torch.randn(3), id="one more tensor"),
        pytest.param(3, lambda: 4.0, id="type of a number"),
        pytest.param(3, lambda: 5, id="number"),
        pytest.param(4, lambda: -0.5, id="sign"),
        pytest.param(6, lambda: (True, True), id="flag"),
    ],
)
def test_other_facts_are_not_taken_for_equal(at, other):
    compared, given = expected(inputs(), {}), list(inputs())
    given[at] = other()
    assert compared.tensors_of(tuple(given), {}) is None


def test_other_names_numbers_of_inputs_and_modes_are_not_taken_for_equal():
    compared = expected(inputs(), {"eps": None})
    assert compared.tensors_of(inputs(), {"eps": None}) is not None
    assert compared.tensors_of(inputs(), {"scale": None}) is None
    assert compared.tensors_of(inputs(), {}) is None
    assert compared.tensors_of((*inputs(), None), {}) is None
    assert compared.tensors_of(inputs()[:-1], {"eps": None}) is None
    with torch.no_grad():
        assert compared.tensors_of(inputs(), {"eps": None}) is None


def test_the_same_tensor_twice_is_looked_up_by_its_facts():
    a, b = torch.randn(3), torch.randn(3)
    compared = expected((a, b), {})
    assert compared.tensors_of((a, b), {}) is not None
    assert compared.tensors_of((a, a), {}) is None


@pytest.mark.parametrize(
    "given",
    [
        pytest.param((torch.zeros(4), [1, 2]), id="a list, which may change"),
        pytest.param((torch.zeros(4), [torch.zeros(4)]), id="tensors in a list"),
        pytest.param((torch.zeros(5)[1:],), id="alignment"),
        pytest.param((1, 2), id="no tensor"),
    ],
)
def test_inputs_that_cannot_be_compared_are_refused(given):
    with pytest.raises(TypeError):
        expected(given, {})
