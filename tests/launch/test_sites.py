"""Tests of call sites: in a taped call, an operator's forward pass is replayed without a look-up, for the right tensors only.

A planned function runs in full for the first inputs of a kind, is recorded for the second, and is replayed from then on. It
looks up what it recorded by the facts of its tensors: sizes, strides, alignment, dtype, device. If autograd follows the call,
the record is a tape: the list of operators that were called. The place of an operator in a tape is its call site. If its
tensors are those of the taped call, their facts are known already, so the site keeps the plan of the forward pass. Backward
passes are looked up, and so are forward passes of tensors that the call makes.

``machine`` replaces the GPU's driver by a stand-in. ``Kernel`` is a stand-in kernel, computed by a Python function.
"""

from __future__ import annotations

import threading

import pytest
import torch

from onelaunch.launch import planned as planning
from onelaunch.launch import repeated
from onelaunch.launch.launch import Launch
from onelaunch.launch.operator import Operator
from onelaunch.launch.planned import Planned, forget_plans
from tests.launch.replayed import Kernel, machine  # noqa: F401 - a fixture

pytestmark = pytest.mark.filterwarnings("ignore:The given buffer is not writable")

N = 16


def multiply(a, b, out, count):
    """Write ``a * b`` to the first elements of ``out``."""
    out[:count] = a[:count] * b[:count]


class Product:
    """Operator ``a * b`` whose passes launch stand-in kernels, and a planned function that calls it on its own arguments."""

    def __init__(self, machine, name):  # noqa: F811
        kernel = Kernel(machine, multiply, a="*fp32", b="*fp32", out="*fp32", count="i32")
        self.forwards = self.backwards = 0

        def product(a, b):
            out = torch.empty(a.shape)
            Launch(kernel, (1,), a.contiguous(), b.contiguous(), out, a.numel()).run()
            return out

        def forward(a: torch.Tensor, b: torch.Tensor, factor: float) -> torch.Tensor:
            self.forwards += 1
            return product(a, b)

        def backward(grad: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            self.backwards += 1
            return product(grad, b), product(grad, a)

        def save(ctx, inputs, output):
            ctx.save_for_backward(*inputs[:2])

        def gradients(ctx, run, grad):
            return (*run(grad, *ctx.saved_tensors), None)

        inner = Operator(f"{name}_backward", backward)
        self.operator = Operator(name, forward, save=save, gradients=gradients, backward=inner)
        self.planned = Planned(lambda a, b: self.operator(a, b, 1.0, grad=True), taped=True)

    def step(self, a, b):
        """Call the function and its backward pass, compare with PyTorch's, and return whether no Python code of a pass ran."""
        before = self.forwards, self.backwards
        out = self.planned(a, b)
        grad = torch.randn(a.shape)
        found = torch.autograd.grad(out, (a, b), grad)
        assert torch.equal(out, a * b)
        assert torch.equal(found[0], grad * b)
        assert torch.equal(found[1], grad * a)
        return (self.forwards, self.backwards) == before


@pytest.fixture
def product(machine, request):  # noqa: F811
    return Product(machine, f"test_sites_{len(request.node.name)}_{abs(hash(request.node.name))}")


def leaves(size=(N,)):
    return [torch.randn(size).requires_grad_() for _ in range(2)]


def look_ups(monkeypatch):
    """Return the list of the inputs whose facts are taken from now on. Those of repeated calls are taken in the same way."""
    monkeypatch.setattr(repeated, "_guards", None)
    forget_plans()
    taken, plain = [], planning.facts_of

    def facts_of(inputs):
        taken.append(inputs)
        return plain(inputs)

    monkeypatch.setattr(planning, "facts_of", facts_of)
    return taken


def test_the_facts_of_a_calls_tensors_are_taken_once_for_the_call_and_its_forward_pass(product, monkeypatch):
    taken = look_ups(monkeypatch)
    assert [product.step(*leaves()) for _ in range(4)] == [False, False, True, True]
    taken.clear()
    assert product.step(*leaves())
    assert len(taken) == 2  # for the call and for the backward pass


def test_a_forward_pass_is_not_replayed_for_other_sizes_strides_or_alignments(product):
    for _ in range(4):
        product.step(*leaves())
    whole = torch.randn(2 * N + 1)
    others = {
        "size": leaves((N // 2,)),
        "strides": [whole[: 2 * N : 2].detach().requires_grad_() for _ in range(2)],
        "alignment": [whole[1 : N + 1].detach().requires_grad_() for _ in range(2)],
    }
    for given in others.values():
        assert not product.step(*given)
    assert product.step(*leaves())
    for given in others.values():
        assert [product.step(*given) for _ in range(2)] == [False, True]


def test_tensors_that_the_call_makes_are_looked_up(machine, monkeypatch, request):  # noqa: F811
    made = Product(machine, "test_sites_made")
    made.planned = Planned(lambda a, b: made.operator(a.view(2, -1), b, 1.0, grad=True).view(-1), taped=True)

    def step():
        a, b = leaves()[0], leaves((2, N // 2))[0]
        return made.planned(a, b), (a.view(2, -1) * b).view(-1)

    taken = look_ups(monkeypatch)
    for _ in range(4):
        assert torch.equal(*step())
    taken.clear()
    step()
    assert len(taken) == 2  # for the call, and for the forward pass, which takes a view that the call makes


def test_forgotten_plans_are_made_again(product):
    for _ in range(4):
        product.step(*leaves())
    forget_plans()
    assert [product.step(*leaves()) for _ in range(3)] == [False, False, True]


def test_a_forward_pass_on_another_current_device_runs_in_full(product, machine):  # noqa: F811
    for _ in range(4):
        product.step(*leaves())
    machine.device = 1
    assert not product.step(*leaves())
    machine.device = 0
    assert product.step(*leaves())


def test_gradients_are_summed_over_several_calls_and_graphs_may_be_kept(product):
    for _ in range(5):
        a, b = leaves()
        out = product.planned(a, b) + product.planned(a, b)
        out.sum().backward(retain_graph=True)
        out.sum().backward()
        assert torch.equal(a.grad, 4 * b)


def test_threads_share_a_call_site(product):
    for _ in range(3):
        product.step(*leaves())
    said = []

    def run():
        said.append(all(product.step(*leaves()) for _ in range(50)))

    threads = [threading.Thread(target=run) for _ in range(3)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert said == [True] * 3


def test_a_call_that_is_followed_by_no_backward_pass_is_replayed_too(product):
    for _ in range(4):
        a, b = leaves()
        assert torch.equal(product.planned(a, b), a * b)
    before = product.forwards
    product.planned(*leaves())
    assert product.forwards == before


def test_allocations_of_plans_are_those_of_pytorch():
    from onelaunch.launch.plan import _allocator

    for device in (torch.device("cpu"), torch.device("meta")):
        made = _allocator(device)((2, 3), (1, 2), torch.bfloat16)
        assert (made.shape, made.stride(), made.dtype, made.device.type) == ((2, 3), (1, 2), torch.bfloat16, device.type)


def test_a_plan_of_a_call_that_ends_after_plans_were_forgotten_is_not_replayed(machine):  # noqa: F811
    """Nor is a tape (test_tape.py). Plans are forgotten in the first two calls, so the third is the first that counts as seen."""

    def copy(x, out, count):
        out[:count] = x[:count]

    kernel = Kernel(machine, copy, x="*fp32", out="*fp32", count="i32", BLOCK="constexpr")
    calls = []

    def copied(x):
        calls.append(None)
        out = torch.empty_like(x)
        Launch(kernel, (1,), x, out, x.numel(), BLOCK=8).run()
        if len(calls) < 3:
            planned.forget()
        return out

    planned = Planned(copied)
    given = [torch.randn(8) for _ in range(6)]
    assert all(torch.equal(planned(x), x) for x in given)
    assert len(calls) == 4, "seen in the third call, recorded in the fourth, replayed in the others"
