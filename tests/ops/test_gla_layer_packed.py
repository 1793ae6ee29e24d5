"""Tests of ``gla_layer`` as one autograd function (variant "packed"): its gradients equal those of separate operations.

They cover autograd (some gradients alone, retained graphs, hooks, accumulation), the calls that the variant refuses, and the
memory that gradients are written into. ``test_gla_layer_hopper.py`` uses :func:`by_parts` and :func:`gradients_of` too.

``assert_near`` bounds the norm of each error, relative to that of the expected values. ``made()`` makes float32 arguments with
B = 2, T = 9, D = 40, H = 2, K = 16 and V = 20, unless others are given.

``prose(text)`` compares a test's texts, in the order of its calls, with its entries in tests/snapshots/prose.txt. A test fails
if it does not compare one of its entries, and ``tests/test_prose.py`` if the test or the parameter of an entry is gone.
``prose.raises`` does so with the message of an error, and otherwise is ``pytest.raises``.

``assert_one_call_correct`` checks the errors of one call, and that it writes all elements. ``differentiable`` returns the
arguments that take gradients. ``weights_like`` returns the weights of a loss, different for each element. ``CASES`` are the
probes of ``gla_layer``, by name. ``SMALL`` is the small case's sizes. ``TENSORS`` names the tensor arguments in their order.
``case_of`` returns a case by its name. A test marked ``thorough`` does not run in ``make test``, and one marked ``interpret``
runs in Triton's interpreter, with TRITON_INTERPRET=1.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import library

from onelaunch import dispatch
from onelaunch.errors import VariantUnsupported
from onelaunch.ops import gla_layer
from onelaunch.ops.gla_layer import autograd
from onelaunch.ops.gla_layer.composition import compose
from onelaunch.ops.gla_layer.variants.composed import tensors_of
from tests.ops.cases import assert_near, assert_one_call_correct, differentiable, weights_like
from tests.ops.gla_layer_cases import CASES, GLA_LAYER, SMALL, TENSORS, case_of, made

interpret = pytest.mark.interpret
TAKEN = [
    name
    for name, case in CASES.items()
    if not name.endswith("bfloat16") and name != "odd_sizes" and case.get("decay_per") != "head" and "conv_size" not in case
]
"""Cases that the variant takes. It refuses the others, and bfloat16 in the interpreter."""
# Checks of PyTorch's ``opcheck``: all, but with static instead of dynamic shapes
UTILITIES = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")

PARTS = ("wide_activated", "fused", "norm_gate")
"""Variants of ``projections``, ``gla`` and ``output_chain`` whose kernels ``packed`` runs in the interpreter."""


def by_parts(given: dict[str, Any], parts: tuple[str, str, str] = PARTS) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute the layer by separate operations of these variants: the launches of ``packed``, each with its own gradients."""
    call = GLA_LAYER.bind(**given)
    return compose(tensors_of(call), call.sizes, call.eps, call.output_final_state, parts)


def gradients_of(
    outputs: tuple[torch.Tensor | None, ...], leaves: dict[str, torch.Tensor], **how: Any
) -> dict[str, torch.Tensor]:
    """Return gradients of a loss that weighs every element differently, by the names of ``leaves``.

    ``how`` holds keyword arguments of ``torch.autograd.grad``.
    """
    loss = torch.stack([(value.float() * weights_like(value)).sum() for value in outputs if value is not None]).sum()
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values()), **how), strict=True))


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value), name


@interpret
@pytest.mark.parametrize("name", TAKEN)
def test_results_and_gradients(name):
    assert_one_call_correct(GLA_LAYER, case_of(name), "packed")


@interpret
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(
    "sizes", [{}, {"B": 3, "T": 130}, {"T": 70, "initial_state": True, "final_state": True}, {"T": 70, "rank": 5}, {"rank": 40}]
)
@pytest.mark.thorough
def test_results_equal_those_by_parts_bitwise(sizes, dtype):
    """The place of gradients in memory does not change them, as long as the same code multiplies.

    With a rank of 40 PyTorch computes the gradients of the decays' projection, else one launch does.
    """
    given = made(grad=True, dtype=dtype, **sizes)
    leaves = differentiable(given)
    found, expected = gla_layer(**given, variant="packed"), by_parts(given)
    assert torch.equal(found[0], expected[0])
    assert (found[1] is None) == (expected[1] is None)
    assert found[1] is None or torch.equal(found[1], expected[1])
    assert_equal(gradients_of(found, leaves), gradients_of(expected, leaves))


@interpret
def test_gradients_of_a_subset_of_the_tensors():
    everything = made(grad=True, T=20, initial_state=True, final_state=True)
    expected = gradients_of(by_parts(everything), differentiable(everything))
    for asking in (*[(name,) for name in (*TENSORS, "initial_state")], ("norm_weight", "w_out"), ("x", "gk_bias")):
        given = {
            name: value.detach().requires_grad_(name in asking) if isinstance(value, torch.Tensor) else value
            for name, value in everything.items()
        }
        leaves = differentiable(given)
        assert set(leaves) == set(asking)
        found = gradients_of(gla_layer(**given, variant="packed"), leaves)
        assert_near(found, {name: expected[name] for name in asking}, 1e-6)


@interpret
def test_a_retained_graph_gives_the_same_gradients_and_modifies_nothing():
    given = made(grad=True, T=70, initial_state=True, final_state=True)
    leaves = differentiable(given)
    before = {name: value.detach().clone() for name, value in leaves.items()}
    outputs = gla_layer(**given, variant="packed")
    results = [output.detach().clone() for output in outputs]
    first = gradients_of(outputs, leaves, retain_graph=True)
    kept = {name: value.clone() for name, value in first.items()}
    assert_equal(gradients_of(outputs, leaves), kept)
    assert_equal(first, kept)
    assert_equal({name: value.detach() for name, value in leaves.items()}, before)
    assert all(torch.equal(output, result) for output, result in zip(outputs, results, strict=True))
    with pytest.raises(RuntimeError, match="second time"):
        gradients_of(outputs, leaves)


@interpret
def test_results_used_twice_or_through_hooks_or_not_at_all():
    given = made(grad=True, initial_state=True, final_state=True)
    leaves = differentiable(given)

    def loss_of(out: torch.Tensor, final: torch.Tensor) -> torch.Tensor:
        out.register_hook(lambda gradient: 2 * gradient)
        return (out * weights_like(out)).sum() + out.square().sum() + (final * weights_like(final)).sum()

    seen: list[torch.Tensor] = []
    handle = given["in_proj_weight"].register_hook(lambda gradient: seen.append(gradient.clone()))
    ours, theirs = (
        dict(zip(leaves, torch.autograd.grad(loss_of(*outputs), list(leaves.values())), strict=True))
        for outputs in (gla_layer(**given, variant="packed"), by_parts(given))
    )
    handle.remove()
    assert_near(ours, theirs, 1e-6)
    assert_near(dict(enumerate(seen)), {0: ours["in_proj_weight"], 1: theirs["in_proj_weight"]}, 1e-6)
    for index in (0, 1):  # the other result is unused
        pair = (gla_layer(**given, variant="packed")[index], by_parts(given)[index])
        unused = {"norm_weight", "w_out"} if index else set()  # the final state does not depend on them
        ours, theirs = (gradients_of((each,), leaves, allow_unused=True, materialize_grads=True) for each in pair)
        assert all(not ours[name].any() and not theirs[name].any() for name in unused)
        assert_near(ours, theirs, 1e-6)


@interpret
def test_gradients_accumulate_over_two_calls():
    given = made(grad=True, T=20)
    leaves = differentiable(given)
    for outputs in (gla_layer(**given, variant="packed"), gla_layer(**{**given, "x": given["x"] * 0.5}, variant="packed")):
        outputs[0].sum().backward()  # an expanded gradient: all elements share one address
    found = {name: value.grad for name, value in leaves.items()}
    total = by_parts(given)[0].sum() + by_parts({**given, "x": given["x"] * 0.5})[0].sum()
    assert_near(found, dict(zip(leaves, torch.autograd.grad(total, list(leaves.values())), strict=True)), 1e-6)


@interpret
def test_gradients_are_not_differentiable_again():
    given = made(grad=True)
    (dx,) = torch.autograd.grad(gla_layer(**given, variant="packed")[0].sum(), given["x"], create_graph=True)
    assert not dx.requires_grad


@interpret
def test_tensors_of_any_strides():
    given = made(grad=True, T=70)
    turned = {
        name: value.detach().mT.contiguous().mT.requires_grad_() if name in TENSORS and value.dim() > 1 else value
        for name, value in given.items()
    }
    assert not turned["x"].is_contiguous()
    found = gradients_of(gla_layer(**turned, variant="packed"), differentiable(turned))
    assert_near(found, gradients_of(by_parts(given), differentiable(given)), 1e-6)


@interpret
@pytest.mark.thorough
def test_it_compiles_into_one_graph():
    torch.compiler.reset()
    function = torch.compile(lambda **given: gla_layer(**given, variant="packed"), fullgraph=True, backend="aot_eager")
    for options in ({"T": 70}, {"T": 20, "initial_state": True, "final_state": True}):
        given = made(grad=True, **options)
        leaves = differentiable(given)
        found, expected = function(**given), gla_layer(**given, variant="packed")
        assert torch.equal(found[0], expected[0])
        assert_near(gradients_of(found, leaves), gradients_of(expected, leaves), 1e-6)


@interpret
@pytest.mark.parametrize("want_final", [False, True])
@pytest.mark.thorough
def test_the_operators_pass_opcheck(want_final):
    given = made(grad=True, T=20, initial_state=want_final)
    tensors = [given[name] for name in TENSORS]
    kernels = "wide_activated,fused,norm_gate"
    arguments = (*tensors, given.get("initial_state"), 2, 16.0, 1e-5, want_final, False, want_final, kernels)
    forward, backward = (getattr(torch.ops.onelaunch, f"gla_layer_{way}").default for way in ("forward", "backward"))
    library.opcheck(forward, arguments, test_utils=UTILITIES)
    with torch.no_grad():
        out, final, *kept = autograd.run_forward(*arguments)
    state = arguments[6] if arguments[6] is None else arguments[6].detach()
    given_back = (torch.ones_like(out), torch.ones_like(final) if want_final else None)
    saved = (*(each.detach() for each in tensors), state, *kept)
    # ``wants`` says which gradients are asked for, in the order of the tensors: all, or that of ``w_out`` alone.
    for wants in ([True] * 6 + [want_final], [False] * 5 + [True, False]):
        library.opcheck(backward, (*given_back, *saved, 2, 16.0, kernels, wants), test_utils=UTILITIES)


@interpret
def test_it_is_refused_if_columns_cannot_be_addressed(prose):
    """Gradients lie side by side in one matrix. With H * K = 20, columns would not begin at multiples of 8 elements."""
    given = made(grad=True, H=1, K=20, V=24)
    with prose.raises(VariantUnsupported):
        gla_layer(**given, variant="packed")
    found = gla_layer(**given)[0]  # the dispatcher chooses another variant
    assert_near({"out": found}, {"out": gla_layer(**given, variant="unfused")[0]}, 1e-6)


# Supported calls, tested without kernels


def test_it_is_refused_without_a_backward_pass_or_a_kernel(prose):
    query = GLA_LAYER.query(case_of("small"), "cpu")
    variant = GLA_LAYER.get("packed")
    prose(variant.why_not(query))
    prose(variant.why_not(query._replace(grad=True)))
    assert dispatch.choose(query._replace(grad=True)).name == "composed"


def test_packed_states_is_used_only_by_name(monkeypatch, prose):
    """Emulate a GPU on which the kernels in ``able`` run.

    ``packed_states`` is refused unless the recurrence is "hopper", which can save states. It is not preferred.
    """
    able = {"projections": "wide_activated", "gla": "fused", "output_chain": "norm_gate"}
    monkeypatch.setattr(autograd, "own_kernel", lambda query, names: next((n for n in names if n == able[query.operation]), None))
    query = GLA_LAYER.query(case_of("small"), "cuda:0", grad=True)
    assert GLA_LAYER.get("packed").why_not(query) is None
    prose(GLA_LAYER.get("packed_states").why_not(query))
    able["gla"] = "hopper"
    assert GLA_LAYER.get("packed_states").why_not(query) is None
    assert "packed_states" not in GLA_LAYER.preference(query)[:2]


def test_a_gradient_buffer_of_a_wrong_layout_is_refused(prose):
    pytest.importorskip("triton", reason="launches import their kernels, which import Triton")
    from onelaunch.ops.gla import launch, launch_hopper

    k, matrix = torch.empty(2, 9, 2, 16), torch.empty(18, 80)
    fits = matrix[:, 32:64].view(2, 9, 2, 16)
    assert launch.output_like(k, fits) is fits
    assert launch.output_like(k, None).is_contiguous()
    for wrong in (matrix[:, 32:64].half().view(2, 9, 2, 16), matrix[:, :64].view(2, 9, 2, 32), fits[:, :8], fits.transpose(0, 1)):
        with prose.raises(ValueError):
            launch.output_like(k, wrong)
    with prose.raises(ValueError):
        wrong = matrix.bfloat16()[:, 33:65].unflatten(0, (2, 9)).unflatten(-1, (2, 16))
        launch_hopper.targets(launch_hopper.Boxes(64, 64, 64), wrong)
    assert SMALL["K"] == 16  # the sizes above are those of the small case


def test_gradient_buffers_are_borrowed_if_states_fit_into_them():
    """States may lie in the memory of dq and dk until these are written.

    That needs dq and dk side by side, whole chunks of 64 steps, no packing, V = 128, and K = 64 or 128. It also needs a 16-bit
    log-decay per channel and no shared heads, as all calls here have.
    """
    pytest.importorskip("triton", reason="launches import their kernels, which import Triton")
    from onelaunch.ops.gla import launch, launch_hopper

    def borrowed(length: int = 128, keys: int = 64, values: int = 128, gap: int = 0, offsets: torch.Tensor | None = None) -> Any:
        """Return a call with two heads, its gradient buffers, and the scratch buffers borrowed from them."""
        matrix = torch.zeros(2 * length, 8 + gap + 4 * keys + 2 * values, dtype=torch.bfloat16)
        _, q, _, k, v = matrix.split_with_sizes([8, 2 * keys, gap, 2 * keys, 2 * values], 1)
        into = launch.Into(*(each.view(2, length, 2, -1) for each in (q, k, v)))
        given = [torch.empty(into_one.shape, dtype=torch.bfloat16) for into_one in (into.q, into.k, into.v, into.q)]
        call = launch.Attention.of(*given, None, offsets, 1.0)
        return call, into, launch_hopper.aliased_state_buffers(call, into)

    for keys in (64, 128):
        call, into, found = borrowed(keys=keys)
        both, own = found
        assert both.shape == own.shape == (256, 4 * keys)
        assert both.numel() == call.slots * 2 * 128 * keys  # for all states
        both.fill_(1)
        assert bool((into.q == 1).all())
        assert bool((into.k == 1).all())
        assert not into.v.any()
        assert own.data_ptr() != both.data_ptr()
    offsets = torch.tensor([0, 256], dtype=torch.int32)
    for refused in ({"length": 100}, {"keys": 256}, {"values": 64}, {"values": 256}, {"gap": 8}, {"offsets": offsets}):
        assert borrowed(**refused)[2] is None
    assert launch_hopper.aliased_state_buffers(borrowed()[0], None) is None
