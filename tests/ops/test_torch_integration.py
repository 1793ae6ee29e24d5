"""Tests of the scans and ``gla`` with PyTorch's features (torch.compile, autocast, strides, autograd), and of ``auto``.

``assert_near`` bounds errors by norm; ``results`` names results and gradients; ``prose.raises`` compares messages with
prose.txt. A test fails if it does not compare one of its entries, and ``tests/test_prose.py`` if the test or the parameter of
an entry is gone.

``OPERATIONS`` are ``gated_scan``, ``linear_rnn`` and ``gla``. ``arguments_of`` makes small random arguments on the CPU. ``small``
makes the arguments of a call with few steps and both states. ``first_of`` names an operation's first argument. ``decay_of`` names
an operation's log-decay argument. ``pytorch_variants`` are the variants of plain PyTorch. ``triton_variants`` are the variants
with kernels of our own for any GPU. ``stepwise_baseline`` is the loop over steps in PyTorch. ``differentiable`` returns the
arguments that take gradients. ``weights_like`` returns the weights of a loss, different for each element. A test marked
``thorough`` does not run in ``make test``, and one marked ``interpret`` runs in Triton's interpreter, with TRITON_INTERPRET=1.
``thorough_but`` marks all parameters but the named ones ``thorough``.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from onelaunch import dispatch
from onelaunch.operation import find_operation
from tests.ops.cases import (
    GLA,
    OPERATIONS,
    arguments_of,
    assert_near,
    decay_of,
    differentiable,
    first_of,
    pytorch_variants,
    results,
    small,
    stepwise_baseline,
    triton_variants,
    weights_like,
)
from tests.thorough import thorough_but

each_operation = pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)

EVERYWHERE = [
    pytest.param(operation, variant, id=f"{operation.name}-{variant}")
    for operation in OPERATIONS
    for variant in ("auto", *pytorch_variants(operation))
]
KERNELS = [
    pytest.param(operation, variant, id=f"{operation.name}-{variant}", marks=pytest.mark.interpret)
    for operation in OPERATIONS
    for variant in triton_variants(operation)
    if variant != "three_launch_cublas"  # left out: its parts are those of others, and the interpreter is slow
]
each_variant = pytest.mark.parametrize(("operation", "variant"), EVERYWHERE + KERNELS)
each_in_brief = pytest.mark.parametrize(
    ("operation", "variant"),
    [
        *EVERYWHERE,
        *thorough_but(*(each.values for each in KERNELS if each.values[1] in ("fused", "fused_chunked")), of=KERNELS),
    ],
)
"""All variants of plain PyTorch and, in ``make test``, one kernel of each operation."""
each_kernel = pytest.mark.parametrize(("operation", "variant"), KERNELS)


def total(outputs) -> torch.Tensor:
    return torch.stack([output.sum() for output in outputs]).sum()


def with_strides(value, make):
    """Return the values in other strides, as a leaf that takes gradients if ``value`` did."""
    changed = make(value.detach())
    assert torch.equal(changed, value.detach())
    return changed.requires_grad_(value.requires_grad)


# torch.compile

BRIEF = ("fused", "fused_chunked")
"""Kernels that are compiled in every run of the tests, one for each operation."""


def in_graphs():
    """Parametrize compilation. Kernels, which an operator hides from the compiler, are compiled with packed sequences alone.

    ``make test`` compiles ``auto`` of ``gated_scan``, and one kernel of each operation. The other operations in PyTorch are parts
    of layers that it compiles (tests/nn/test_layers.py).
    """
    for each in EVERYWHERE + KERNELS:
        operation, variant = each.values
        for packed in (False, True):
            read = packed and variant == stepwise_baseline(operation)  # reads offsets, which breaks the graph
            seen = not packed and (each in KERNELS or variant == "auto")  # auto: test_compiled_code_supports_other_lengths
            brief = variant in BRIEF if each in KERNELS else variant == "auto" and operation.name == "gated_scan"
            marks = [*each.marks, *([] if brief and packed else [pytest.mark.thorough])]
            if not read and not seen:
                yield pytest.param(*each.values, packed, id=f"{each.id}-{packed}", marks=marks)


@pytest.mark.parametrize(("operation", "variant", "packed"), in_graphs())
def test_it_compiles_into_one_graph(operation, variant, packed):
    torch.compiler.reset()
    arguments = small(operation, grad=True, lengths=(0, 13, 7) if packed else None)
    function = torch.compile(lambda **given: operation(**given, variant=variant), fullgraph=True, backend="aot_eager")
    outputs = function(**arguments)
    loss = total([output.float() * weights_like(output) for output in outputs])
    leaves = differentiable(arguments)
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    found = dict(zip(operation.outputs, (output.detach() for output in outputs), strict=True))
    found |= {f"grad {name}": gradient for name, gradient in zip(leaves, gradients, strict=True)}
    assert_near(found, results(operation, arguments, "chunked" if variant == "auto" else variant), 1e-6)


@pytest.mark.thorough
@each_operation
def test_compiled_code_supports_other_lengths(operation):
    torch.compiler.reset()
    function = torch.compile(operation, fullgraph=True, backend="aot_eager")
    for length in (20, 33, 21):  # compiled for this length, then for any length, then reused
        arguments = small(operation, T=length)
        expected = dict(enumerate(operation(**arguments)))
        assert_near(dict(enumerate(function(**arguments))), expected, 1e-6)


# Autocast

LOWERED = ("x", "weight", "gate", "q", "k", "v")  # arguments that autocast casts to its dtype


@pytest.mark.parametrize("variant", ["auto", "stepwise_baseline"])
@each_operation
def test_autocast_casts_all_but_the_log_decay(operation, variant):
    """Arguments are cast, with their gradients, and nothing inside the call: a float32 product there stays one."""
    variant = stepwise_baseline(operation) if variant == "stepwise_baseline" else variant
    arguments = small(operation, grad=True)
    low = {name: value.detach().bfloat16() if name in LOWERED else value for name, value in arguments.items()}
    low = {name: value.requires_grad_() if name in LOWERED else value for name, value in low.items()}
    with torch.autocast("cpu", torch.bfloat16):
        found = dict(zip(operation.outputs, operation(**arguments, variant=variant), strict=True))
    assert found[operation.outputs[0]].dtype is torch.bfloat16
    assert found["final_state"].dtype is torch.float32
    expected = dict(zip(operation.outputs, operation(**low, variant=variant), strict=True))
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    for given, outputs in ((arguments, found), (low, expected)):
        leaves = differentiable(given)
        loss = total([output.float() * weights_like(output) for output in outputs.values()])
        outputs |= dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
    for name in differentiable(arguments):
        assert found[name].dtype is torch.float32
        assert torch.equal(found[name], expected[name].float()), name


def test_a_backward_pass_under_autocast_is_the_same():
    """PyTorch advises against autocast there. Still, a call that recomputes its forward pass must not do so in bfloat16."""
    arguments = small(GLA, T=70, grad=True)
    o, final = GLA(**arguments, variant="chunked")
    loss, leaves = total([o * weights_like(o), final * weights_like(final)]), list(differentiable(arguments).values())
    expected = torch.autograd.grad(loss, leaves, retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        found = torch.autograd.grad(loss, leaves)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


@each_operation
def test_autocast_casts_a_16_bit_log_decay_to_float32(operation):
    """Sums of log-decays are the first to lose bits. Bits lost in the input stay lost, but no more are."""
    arguments = small(operation, dtype="bfloat16")
    with torch.autocast("cpu", torch.bfloat16):
        y, _ = operation(**arguments)
    name = decay_of(operation)
    expected, _ = operation(**(arguments | {name: arguments[name].float()}))
    assert torch.equal(y, expected)


@each_operation
def test_autocast_does_not_hide_a_wrong_argument(operation, prose):
    arguments, first = small(operation), first_of(operation)
    with torch.autocast("cpu", torch.bfloat16), prose.raises(TypeError, match=first):
        operation(**(arguments | {first: arguments[first].long()}))


# Strides


def transposed(value):
    return value.transpose(0, -1).contiguous().transpose(0, -1)


def sliced_out_of_a_projection(value):
    wide = torch.full((*value.shape[:-1], 3 * value.shape[-1]), torch.nan, dtype=value.dtype)
    part = wide[..., value.shape[-1] : 2 * value.shape[-1]]
    part.copy_(value)
    return part


def every_other(value):
    wide = torch.full((*value.shape[:-1], 2 * value.shape[-1]), torch.nan, dtype=value.dtype)
    part = wide[..., ::2]
    part.copy_(value)
    return part


STRIDES = [transposed, sliced_out_of_a_projection, every_other]


@functools.cache
def in_plain_strides(operation, variant):
    arguments = small(operation, B=2, grad=True)
    return arguments, results(operation, arguments, variant)


def check_strides(operation, variant, make, names):
    arguments, expected = in_plain_strides(operation, variant)
    changed = dict(arguments)
    for name in names(arguments):
        changed[name] = with_strides(arguments[name], make)
    assert_near(results(operation, changed, variant), expected, 2e-6)


@pytest.mark.parametrize("make", thorough_but(sliced_out_of_a_projection, of=STRIDES))
@each_variant
def test_sequences_and_weight_of_any_strides(operation, variant, make):
    check_strides(operation, variant, make, lambda arguments: differentiable(arguments).keys() - {"initial_state"})


@pytest.mark.parametrize("make", thorough_but(transposed, of=STRIDES))
@each_in_brief
def test_initial_states_of_any_strides(operation, variant, make):
    check_strides(operation, variant, make, lambda arguments: ["initial_state"])


@each_in_brief
def test_offsets_of_any_stride(operation, variant):
    arguments = small(operation, lengths=(5, 0, 15), grad=True)
    expected = results(operation, arguments, variant)
    table = torch.full((4, 2), 10**6, dtype=torch.int32)
    table[:, 0] = arguments["cu_seqlens"]
    assert_near(results(operation, arguments | {"cu_seqlens": table[:, 0]}, variant), expected, 2e-6)


@each_in_brief
def test_expanded_gradients(operation, variant):
    """The gradient of ``sum()`` is one element with strides of 0."""
    arguments = small(operation, B=2, grad=True)
    leaves = list(differentiable(arguments).values())
    found = operation(**arguments, variant=variant)
    for outputs in ([0], [1], [0, 1]):
        chosen = [found[n] for n in outputs]
        summed = torch.autograd.grad(total(chosen), leaves, allow_unused=True, retain_graph=True)
        ones = [torch.ones_like(each) for each in chosen]
        expected = torch.autograd.grad(chosen, leaves, ones, allow_unused=True, retain_graph=True)
        for ours, theirs in zip(summed, expected, strict=True):
            assert (ours is None) == (theirs is None)
            assert ours is None or torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)


@each_in_brief
def test_broadcast_inputs(operation, variant):
    """Broadcast one decay over the whole batch, or one gate or key over every step."""
    arguments, decay, other = small(operation, B=2), decay_of(operation), "k" if operation is GLA else "gate"
    arguments[decay] = arguments[decay][:1].expand_as(arguments[decay])
    arguments[other] = arguments[other][:, :1].expand_as(arguments[other])
    dense = {name: value.contiguous() if isinstance(value, torch.Tensor) else value for name, value in arguments.items()}
    expected = results(operation, dense, variant)
    assert_near(results(operation, arguments, variant), expected, 1e-6)


@pytest.mark.parametrize(("operation", "variant"), EVERYWHERE)
def test_pytorchs_default_dtype_does_not_matter(operation, variant):
    """The variants state the dtype of temporary tensors, so that it is not the default one."""
    found = []
    arguments = small(operation, lengths=(5, 0, 15), grad=True)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        torch.set_default_dtype(dtype)
        try:
            found.append(results(operation, arguments, variant))
        finally:
            torch.set_default_dtype(torch.float32)
    for other in found[1:]:
        assert list(other) == list(found[0])
        for name, value in other.items():
            assert value.dtype == found[0][name].dtype, name
            assert torch.equal(value, found[0][name]), name


# Autograd


@each_variant
def test_inputs_are_not_modified(operation, variant):
    arguments = small(operation, grad=True)
    tensors = {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor)}
    before = {name: (value.detach().clone(), value._version) for name, value in tensors.items()}
    outputs = operation(**arguments, variant=variant)
    total(outputs).backward()
    for name, (value, version) in before.items():
        assert torch.equal(tensors[name], value), name
        assert tensors[name]._version == version, name
    storages = {value.untyped_storage().data_ptr() for value in tensors.values()}
    assert not any(output.untyped_storage().data_ptr() in storages for output in outputs)


@each_in_brief
def test_each_result_alone_gives_gradients_to_its_inputs(operation, variant):
    arguments = small(operation, grad=True)
    leaves = differentiable(arguments)
    for index, unreached in ((0, set()), (1, {"q"} if operation is GLA else {"gate"})):
        output = operation(**arguments, variant=variant)[index]
        found = torch.autograd.grad((output * weights_like(output)).sum(), list(leaves.values()), allow_unused=True)
        output = operation(**arguments, variant=stepwise_baseline(operation))[index]
        expected = torch.autograd.grad((output * weights_like(output)).sum(), list(leaves.values()), allow_unused=True)
        for name, ours, theirs in zip(leaves, found, expected, strict=True):
            if name in unreached:
                assert ours is None or not ours.any(), name
            else:
                assert_near({name: ours}, {name: theirs}, 1e-5)


@each_in_brief
def test_only_inputs_that_require_gradients_get_them(operation, variant):
    arguments = small(operation, grad=True)
    expected = results(operation, arguments, variant)
    for name in differentiable(arguments):
        others = {key: value.detach() if isinstance(value, torch.Tensor) else value for key, value in arguments.items()}
        alone = others | {name: arguments[name]}
        found = results(operation, alone, variant)
        assert set(found) == {*operation.outputs, f"grad {name}"}
        assert_near(found, {key: expected[key] for key in found}, 1e-6)


@each_in_brief
def test_gradients_may_be_taken_twice_from_a_kept_graph(operation, variant):
    arguments = small(operation, grad=True)
    y, final = operation(**arguments, variant=variant)
    loss, leaves = y.square().sum() + final.square().sum(), list(differentiable(arguments).values())
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    second = torch.autograd.grad(loss, leaves)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@each_kernel
def test_kernels_refuse_a_second_derivative(operation, variant):
    arguments = small(operation, grad=True)
    y, _ = operation(**arguments, variant=variant)
    (gradient,) = torch.autograd.grad(y.square().sum(), [arguments[first_of(operation)]], create_graph=True)
    with pytest.raises(RuntimeError, match=r"once_differentiable|differentiate twice|does not require grad"):
        gradient.sum().backward()


@pytest.mark.parametrize(("operation", "variant"), [(op, name) for op in OPERATIONS for name in pytorch_variants(op)])
def test_plain_pytorch_has_second_derivatives(operation, variant):
    arguments, decay = small(operation, grad=True), decay_of(operation)
    found = {}
    for name in (variant, stepwise_baseline(operation)):
        y, _ = operation(**arguments, variant=name)
        (gradient,) = torch.autograd.grad(y.square().sum(), [arguments[decay]], create_graph=True)
        leaves = differentiable(arguments)
        second = torch.autograd.grad(gradient.square().sum(), list(leaves.values()))
        found[name] = dict(zip(leaves, second, strict=True))
    assert_near(found[variant], found[stepwise_baseline(operation)], 1e-5)


@each_in_brief
def test_saved_tensor_hooks_are_supported(operation, variant):
    """Offloading and checkpointing use such hooks on the tensors that a call saves."""
    arguments = small(operation, grad=True)
    expected = results(operation, arguments, variant)
    with save_on_cpu():
        assert_near(results(operation, arguments, variant), expected, 0)


@pytest.mark.parametrize(("operation", "variant"), [each for each in KERNELS if each.values[0] is not GLA])
def test_nothing_is_saved_without_gradients(operation, variant, monkeypatch):
    from onelaunch.kernels.scan import launch
    from onelaunch.ops.linear_rnn import launch as layer

    asked = []
    empty_states = launch.empty_states

    def watched(v, sequences, want_final, want_carries):
        asked.append(want_carries)
        return empty_states(v, sequences, want_final, want_carries)

    monkeypatch.setattr(launch, "empty_states", watched)
    monkeypatch.setattr(layer, "empty_states", watched)
    saved = []
    arguments = small(operation, grad=True)
    with saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        with torch.no_grad():
            y, final = operation(**arguments, variant=variant)
        assert not y.requires_grad
        assert not final.requires_grad
        operation(**small(operation), variant=variant)
        assert not any(asked)
        assert not saved
        operation(**arguments, variant=variant)
    assert asked[-1]
    assert saved


@each_operation
def test_integer_offsets_and_flags_are_ignored_by_autograd(operation):
    arguments = small(operation, lengths=(5, 15), grad=True)
    y, final = operation(**arguments)
    assert y.requires_grad
    assert final.requires_grad
    assert not arguments["cu_seqlens"].requires_grad


# Dispatch


@pytest.mark.interpret
@each_operation
def test_auto_runs_the_chosen_variant_in_the_interpreter(operation):
    check_auto(operation)


@each_operation
def test_auto_runs_the_chosen_variant(operation):
    check_auto(operation)


def check_auto(operation):
    for given in ({}, {"lengths": (0, 13, 7)}, {"T": 0}, {"grad": True}):
        arguments = small(operation, **given)
        call = operation.bind(**arguments)
        explanation = dispatch.explain(call.query())
        assert [standing.variant for standing in explanation.standings if standing.chosen] == [explanation.chosen]
        named = results(operation, arguments, explanation.chosen)
        assert_near(results(operation, arguments, "auto"), named, 0)


@each_operation
def test_a_case_and_its_call_have_the_same_query(operation):
    """Studies query by case and calls by tensors. Both must find the same measured variant."""
    every: list[dict[str, Any]] = [{}, {"initial_state": True}, {"final_state": True}, {"lengths": (4, 0, 5)}]
    for options in every:
        sizes: dict[str, Any] = {name: {"B": 1, "T": 9, "H": 2, "D": 5, "K": 20, "V": 16}[name] for name in operation.dimensions}
        case = operation.case("float16", **sizes, **options)
        for grad in (False, True):
            arguments = arguments_of(operation, dtype="float16", **sizes, **options, grad=grad)
            assert operation.bind(**arguments).query() == operation.query(case, "cpu", grad=grad)


def test_public_functions_are_documented():
    for operation in OPERATIONS:
        assert operation.__doc__
        assert all(variant.summary for variant in operation.variants.values())


def test_wide_layers_prefer_the_cublas_product():
    linear_rnn = find_operation("linear_rnn")
    narrow = linear_rnn.query(linear_rnn.case("float16", B=4, T=2048, D=256, V=64), "cuda:0")
    wide = linear_rnn.query(linear_rnn.case("float16", B=1, T=4096, D=2048, V=2048), "cuda:0")
    assert linear_rnn.preference(narrow)[0] == "fused_chunked"
    assert linear_rnn.preference(wide)[0] == "semi_fused"
    assert sorted(linear_rnn.preference(wide)) == sorted(linear_rnn.variants)
