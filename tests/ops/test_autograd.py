"""Tests of ``Operator``, which wraps a function and its gradients as one operator for eager and compiled code.

The operators of this file stand for those of kernels. ``run`` computes, ``fake`` gives the shapes, ``save`` and ``gradients``
are the two parts of an autograd function, and only the first ``outputs`` of the results are differentiable. ``CALLS`` shows
which functions ran.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import library

from onelaunch.launch.operator import Operator

CALLS: list[str] = []
"""Names of the functions that ran, in order. ``packed_gradients`` adds the widths of its gradients in place of its name."""


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()
    CALLS.clear()


def run_power(x: torch.Tensor, offset: torch.Tensor | None, exponent: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return ``(x + offset) ** exponent`` and ``3 * (x + offset)``; the third output is for the backward pass alone."""
    CALLS.append("forward")
    base = x.clone() if offset is None else x + offset  # PyTorch refuses operators that return an input
    return base**exponent, 3 * base, base


def run_power_backward(
    dy: torch.Tensor, dtripled: torch.Tensor | None, base: torch.Tensor, exponent: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradient of ``x + offset`` in two parts: from the power and from the triple, whose gradient may be ``None``."""
    CALLS.append("backward")
    dbase = dy * exponent * base ** (exponent - 1)
    return dbase, torch.zeros_like(dy) if dtripled is None else 3 * dtripled


def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    _, offset, ctx.exponent = inputs
    ctx.shifted = offset is not None
    ctx.save_for_backward(output[2])
    ctx.set_materialize_grads(False)  # the gradient of an unused output is None


def gradients(ctx: Any, backward: Any, dy: torch.Tensor | None, dtripled: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of x, offset and exponent. ``backward`` is the operator :data:`BACKWARD`, or its function."""
    (base,) = ctx.saved_tensors
    one, other = backward(torch.zeros_like(base) if dy is None else dy, dtripled, base, ctx.exponent)
    return one + other, one + other if ctx.shifted else None, None


BACKWARD = Operator("test_power_backward", run_power_backward, fake=lambda dy, dtripled, base, exponent: (dy.clone(), dy.clone()))
POWER = Operator(
    "test_power",
    run_power,
    fake=lambda x, offset, exponent: (torch.empty_like(x), torch.empty_like(x), torch.empty_like(x)),
    save=save,
    gradients=gradients,
    backward=BACKWARD,
    outputs=2,
)


def run_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    CALLS.append("product")
    return a @ b


# Without ``backward``, the operator itself is passed to ``gradients``.
PRODUCT = Operator(
    "test_product",
    run_product,
    fake=lambda a, b: a.new_empty(a.shape[0], b.shape[1]),
    save=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    gradients=lambda ctx, product, dout: (product(dout, ctx.saved_tensors[1].t()), product(ctx.saved_tensors[0].t(), dout)),
)


def run_packed(x: torch.Tensor, widths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sine of x, and for the backward pass its cosine. Callers get the sine in parts of these ``widths``."""
    CALLS.append("packed")
    return x.sin(), x.cos()


def cut(inputs: tuple[Any, ...], packed: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return views of the first output, one for each width."""
    return packed.split_with_sizes(list(inputs[1]), -1)


def packed_gradients(ctx: Any, backward: Any, *given: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of x and widths. ``given`` has one gradient for each view, ``None`` for an unused one."""
    CALLS.append(" ".join("none" if each is None else str(each.shape[-1]) for each in given))
    (slope,) = ctx.saved_tensors
    filled = [slope.new_zeros(width) if each is None else each for each, width in zip(given, ctx.widths, strict=True)]
    return torch.cat(filled, -1) * slope, None


def save_packed(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    ctx.widths = inputs[1]
    ctx.save_for_backward(output[1])
    ctx.set_materialize_grads(False)


PACKED = Operator(
    "test_packed",
    run_packed,
    fake=lambda x, widths: (torch.empty_like(x), torch.empty_like(x)),
    save=save_packed,
    gradients=packed_gradients,
    views=cut,
)


def leaves(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    """Return random float64 tensors that take gradients, one for each shape."""
    return [torch.rand(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def test_without_gradients_the_function_runs_directly():
    x, offset = leaves((4,), (4,))
    y, tripled, base = POWER(x.detach(), offset.detach(), 3, grad=False)
    assert torch.equal(y, (x + offset) ** 3)
    assert not any(output.requires_grad for output in (y, tripled, base))
    assert CALLS == ["forward"]


def test_gradients_are_right():
    x, offset = leaves((4,), (4,))
    assert torch.autograd.gradcheck(lambda *given: POWER(*given, 3, grad=True)[:2], (x, offset))
    assert torch.autograd.gradcheck(lambda given: POWER(given, None, 3, grad=True)[:2], (x,))


def test_only_the_first_outputs_are_returned_to_calls_that_take_gradients():
    (x,) = leaves((4,))
    y, tripled = POWER(x, None, 2, grad=True)
    assert y.requires_grad
    assert tripled.requires_grad
    assert len(POWER(x, None, 2, grad=False)) == 3


def test_an_unused_output_has_no_gradient():
    (x,) = leaves((4,))
    _, tripled = POWER(x, None, 2, grad=True)
    (found,) = torch.autograd.grad(tripled.sum(), [x])
    assert torch.equal(found, torch.full_like(x, 3))


def test_a_function_may_be_its_own_backward():
    assert torch.autograd.gradcheck(lambda a, b: PRODUCT(a, b, grad=True), tuple(leaves((3, 4), (4, 2))))
    assert set(CALLS) == {"product"}


def test_gradients_are_not_differentiable_again():
    (x,) = leaves((4,))
    y, *_ = POWER(x, None, 3, grad=True)
    (found,) = torch.autograd.grad(y.square().sum(), [x], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        found.sum().backward()


def test_profiles_show_the_operators_name():
    (x,) = leaves((4,))
    assert type(POWER(x, None, 2, grad=True)[0].grad_fn).__name__ == "test_powerBackward"


@pytest.mark.parametrize("grad", [False, True])
def test_compiled_code_calls_the_operators(grad):
    targets = []

    def watch(graph, example_inputs):
        targets.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
        return graph

    x, offset = leaves((4,), (4,))
    function = torch.compile(lambda *given: POWER(*given, 3, grad=grad)[0], fullgraph=True, backend=watch)
    function(x, offset)
    assert torch.ops.onelaunch.test_power.default in targets


def test_compiled_gradients_equal_eager_gradients():
    x, offset = leaves((4,), (4,))
    function = torch.compile(lambda *given: POWER(*given, 3, grad=True)[:2], fullgraph=True, backend="aot_eager")
    found, expected = (
        torch.autograd.grad([output.sum() for output in call(x, offset)], [x, offset])
        for call in (function, lambda *given: POWER(*given, 3, grad=True)[:2])
    )
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert CALLS.count("backward") == 2  # once for each of the two calls


def test_a_function_without_gradients_is_an_operator_too():
    base = torch.rand(4)
    function = torch.compile(lambda dy: BACKWARD(dy, None, base, 2, grad=False)[0], fullgraph=True, backend="aot_eager")
    assert torch.equal(function(torch.ones(4)), 2 * base)


def test_the_operators_keep_pytorchs_rules():
    x, offset = leaves((4,), (4,))
    library.opcheck(torch.ops.onelaunch.test_power.default, (x, offset, 3))
    library.opcheck(torch.ops.onelaunch.test_power.default, (x, None, 3))
    library.opcheck(torch.ops.onelaunch.test_power_backward.default, (x.detach(), None, x.detach(), 3))
    library.opcheck(torch.ops.onelaunch.test_product.default, tuple(leaves((3, 4), (4, 2))))


def test_results_that_are_views_of_a_packed_output_have_gradients():
    (x,) = leaves((6,))
    assert [part.shape[0] for part in PACKED(x.detach(), [1, 3, 2], grad=False)] == [1, 3, 2]
    parts = PACKED(x, [1, 3, 2], grad=True)
    assert len({part.untyped_storage().data_ptr() for part in parts}) == 1
    assert torch.autograd.gradcheck(lambda given: PACKED(given, [1, 3, 2], grad=True), (x,))
    CALLS.clear()
    parts = PACKED(x, [1, 3, 2], grad=True)
    (found,) = torch.autograd.grad([parts[1], parts[2]], x, [torch.ones(3, dtype=x.dtype), torch.zeros(2, dtype=x.dtype)])
    assert torch.equal(found, torch.tensor([0, 1, 1, 1, 0, 0]) * x.cos())
    assert CALLS == ["packed", "none 3 2"]


def test_views_have_the_same_gradients_in_compiled_code():
    (x,) = leaves((6,))
    function = torch.compile(lambda given: PACKED(given, [1, 3, 2], grad=True), fullgraph=True, backend="aot_eager")
    parts = function(x)
    assert torch.equal(torch.cat(parts), x.sin())
    (found,) = torch.autograd.grad(parts[1].sum(), x)
    assert torch.equal(found, torch.tensor([0, 1, 1, 1, 0, 0]) * x.cos())
    library.opcheck(torch.ops.onelaunch.test_packed.default, (x, [1, 3, 2]))
