"""Tests of operations under PyTorch's tracers and function transforms: they work, or raise an onelaunch error.

``prose.raises`` is ``pytest.raises`` that also compares the message with the entry of this test in tests/snapshots/prose.txt. A
test fails if it does not compare one of its entries, and ``tests/test_prose.py`` if the test or the parameter of an entry is
gone.

A test marked ``thorough`` does not run in ``make test``.
"""

from __future__ import annotations

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from onelaunch.errors import ArgumentError, TransformUnsupported, UnknownVariant, ValueRangeError
from onelaunch.launch.operator import Operator
from onelaunch.ops import gated_scan, gla, linear_rnn, swiglu

B, T, D, H, K, V = 2, 5, 16, 2, 16, 16


def arguments(operation, device="cpu"):
    """Return the positional tensor arguments of a small random call."""

    def draw(*shape):
        return torch.randn(*shape, device=device)

    return {
        linear_rnn: lambda: (draw(B, T, D), draw(D, V), -draw(B, T, V).abs(), draw(B, T, V)),
        gated_scan: lambda: (draw(B, T, V), -draw(B, T, V).abs(), draw(B, T, V)),
        gla: lambda: (draw(B, T, H, K), draw(B, T, H, K), draw(B, T, H, V), -draw(B, T, H, K).abs()),
        swiglu: lambda: (draw(B, T, D), draw(V, D), draw(V, D)),
    }[operation]()


def output(operation, *tensors, **options):
    """Call the operation, and return its first result."""
    found = operation(*tensors, **options)
    return found[0] if isinstance(found, tuple) else found


# Parametrization over all of these operations
OPERATIONS = pytest.mark.parametrize("operation", [linear_rnn, gated_scan, gla, swiglu], ids=lambda each: each.name)


@OPERATIONS
def test_fake_and_meta_tensors_have_shapes_and_no_values(operation):
    given = arguments(operation)
    shape = output(operation, *given).shape
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(each) for each in given]
        assert output(operation, *fake).shape == shape
    assert output(operation, *fake).shape == shape  # after the fake-tensor mode has ended
    assert output(operation, *arguments(operation, "meta")).is_meta


@OPERATIONS
def test_fake_gpu_tensors_have_shapes_on_a_machine_without_a_gpu(operation):
    """A model may be planned or exported on another machine than it will run on."""
    shape = output(operation, *arguments(operation)).shape
    kernels = [each for each in operation.variants.values() if each.launches == 1 and each.capabilities.automatic]
    with FakeTensorMode():
        given = [torch.empty(each.shape, device="cuda", dtype=torch.float16) for each in arguments(operation)]
        able = [each.name for each in kernels if each.why_not(operation.bind(*given).query()) is None]
        for variant in ("auto", *able):
            assert output(operation, *given, variant=variant).shape == shape


@OPERATIONS
@pytest.mark.parametrize("mode", ["real", "fake", pytest.param("symbolic", marks=pytest.mark.thorough)])
def test_make_fx_traces_a_call(operation, mode):
    given = arguments(operation)
    graph = make_fx(lambda *tensors: output(operation, *tensors), tracing_mode=mode)(*given)
    again = arguments(operation)
    torch.testing.assert_close(graph(*again), output(operation, *again), rtol=1e-5, atol=1e-5)


@OPERATIONS
def test_vmap_over_each_argument_equals_a_loop(operation):
    given = arguments(operation)
    for index, each in enumerate(given):
        stacked = torch.stack([each, 0.5 * each])

        def call(one, index=index):
            return output(operation, *given[:index], one, *given[index + 1 :])

        expected = torch.stack([call(one) for one in stacked])
        torch.testing.assert_close(torch.vmap(call)(stacked), expected, rtol=1e-5, atol=1e-5)


@OPERATIONS
def test_functional_gradients_equal_those_of_autograd(operation):
    first, *rest = arguments(operation)
    wanted = torch.func.grad(lambda one: output(operation, one, *rest).square().sum())(first)
    leaf = first.clone().requires_grad_()
    output(operation, leaf, *rest).square().sum().backward()
    torch.testing.assert_close(wanted, leaf.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("operation", [gated_scan, gla], ids=lambda each: each.name)
def test_packed_sequences_are_traced_too(operation):
    given = [each[:1] for each in arguments(operation)]
    offsets = torch.tensor([0, 2, 5], dtype=torch.int32)
    shape = output(operation, *given, cu_seqlens=offsets).shape
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(each) for each in (*given, offsets)]
        assert output(operation, *fake[:-1], cu_seqlens=fake[-1]).shape == shape
    meta = [each.to("meta") for each in (*given, offsets)]
    assert output(operation, *meta[:-1], cu_seqlens=meta[-1]).shape == shape


def test_kernels_refuse_transforms_and_state_the_remedy():
    def run(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    # This registers an operator with PyTorch, which stays until the process ends.
    kernel = Operator("test_transforms_copy", run, fake=torch.empty_like)
    assert torch.equal(kernel(torch.ones(2), grad=False), torch.ones(2))
    with pytest.raises(TransformUnsupported, match=r"test_transforms_copy.*variant='eager'"):
        torch.vmap(lambda x: kernel(x, grad=False))(torch.ones(2, 2))


def test_values_are_checked_while_flops_are_counted():
    from torch.utils.flop_counter import FlopCounterMode

    v, log_decay, gate = arguments(gated_scan)
    with FlopCounterMode(display=False), pytest.raises(ValueRangeError):
        gated_scan(v, -log_decay, gate)


STRIDELESS = {"sparse": lambda x: x.to_sparse(), "nested": lambda x: torch.nested.nested_tensor([x[0], x[1]])}


@pytest.mark.parametrize("kind", STRIDELESS)
@OPERATIONS
def test_a_tensor_that_is_not_strided_is_refused_by_name(operation, kind, prose):
    first, *rest = arguments(operation)
    with prose.raises(ArgumentError):
        operation(STRIDELESS[kind](first), *rest)


@pytest.mark.parametrize("variant", [None, 3, b"auto"])
def test_a_variants_name_must_be_a_string(variant, prose):
    with prose.raises(ArgumentError, match="variant"):
        swiglu(*arguments(swiglu), variant=variant)


def test_the_error_about_an_unknown_variant_mentions_auto():
    with pytest.raises(UnknownVariant, match=r"Known: auto, "):
        swiglu(*arguments(swiglu), variant="nothing")


@pytest.mark.parametrize(
    ("operation", "argument"),
    [(linear_rnn, "output_final_state"), (gated_scan, "output_final_state"), (gla, "output_final_state"), (gla, "state_v_first")],
)
@pytest.mark.parametrize("value", ["no", 1, None])
def test_a_switch_must_be_a_bool(operation, argument, value, prose):
    with prose.raises(ArgumentError, match=argument):
        operation(*arguments(operation), **{argument: value})


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), -float("inf")])
def test_a_scale_must_be_finite(scale, prose):
    with prose.raises(ArgumentError, match="scale"):
        gla(*arguments(gla), scale=scale)
