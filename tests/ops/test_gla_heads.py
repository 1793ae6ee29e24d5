"""Tests of shared heads of ``gla``: q, k, v, g and states with fewer heads than the output.

Expected results are those of a call whose heads are repeated by the caller, or the oracle's. ``assert_near`` bounds the norm of
each error, relative to that of the expected values; ``results`` returns a variant's results and gradients by name.

``prose.raises`` is ``pytest.raises`` that also compares the message with the entry of this test in tests/snapshots/prose.txt. A
test fails if it does not compare one of its entries, and ``tests/test_prose.py`` if the test or the parameter of an entry is
gone.

``device`` is the first GPU, or the CPU. ``arguments_of`` makes small random arguments on the CPU. ``pytorch_variants`` are the
variants of plain PyTorch. ``assert_correct`` applies the whole verification gate, forward and with gradients.
``assert_one_call_correct`` checks the errors of one call, and that it writes all elements. ``ROUNDING`` is the tolerance between
float32 calls that split time differently. A test marked ``interpret`` runs in Triton's interpreter, with TRITON_INTERPRET=1.
``thorough_but`` marks all parameters but the named ones ``thorough``: they do not run in ``make test``.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from onelaunch.errors import ArgumentError, ShapeError, VariantUnsupported
from onelaunch.nn import Cache, GatedLinearAttention
from onelaunch.ops import chunk_gla, chunk_simple_gla, gla
from onelaunch.ops.gla import chunkwise
from onelaunch.ops.gla.heads import Heads, group_of
from tests.nn.layers import ROUNDING
from tests.ops.cases import (
    GLA,
    arguments_of,
    assert_captured_step_follows_its_inputs,
    assert_correct,
    assert_near,
    assert_one_call_correct,
    pytorch_variants,
    results,
)
from tests.thorough import thorough_but

FORMS: dict[str, dict[str, Any]] = {
    "fewer_q_and_k": {"q_heads": 2, "k_heads": 2},
    "one_q_and_k": {"q_heads": 1, "k_heads": 1, "decay_per": "head"},
    "fewer_v": {"v_heads": 2, "decay_per": "head"},
    "fewer_k_v_g": {"k_heads": 2, "v_heads": 2, "g_heads": 2, "decay_per": "head"},
    "fewer_k_v_g_and_states": {"k_heads": 2, "v_heads": 2, "g_heads": 2, "state_heads": 2, "initial_state": True},
    "fewer_k_v": {"k_heads": 2, "v_heads": 2, "decay_per": "head"},
    "four_numbers": {"k_heads": 1, "v_heads": 2, "g_heads": 2},
    "fewest_q": {"q_heads": 1, "v_heads": 2},
}
"""Options of cases with 4 heads of the output, by what has fewer. ``test_gla_heads_hopper.py`` tests them too."""

KERNELS = ("fused", "stepwise")
"""Variants with kernels of our own that run on any GPU and share heads; the ablations do not."""

each_form = pytest.mark.parametrize("form", FORMS)
each_variant = pytest.mark.parametrize(
    "variant", [*pytorch_variants(GLA), *(pytest.param(name, marks=pytest.mark.interpret) for name in KERNELS)]
)


def grouped(form: str, **given: Any) -> dict[str, Any]:
    """Return the options of a form with 4 heads of the output; those in ``given`` take precedence."""
    return {"B": 1, "H": 4, **FORMS[form], **given}


def repeated(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments with all shared heads repeated."""
    heads = max(arguments[name].shape[2] for name in "qkvg")
    found = dict(arguments)
    for name in ("q", "k", "v", "g", "gv"):
        if name in found:
            found[name] = found[name].repeat_interleave(heads // found[name].shape[2], dim=2)
    if "initial_state" in found:
        found["initial_state"] = found["initial_state"].repeat_interleave(heads // found["initial_state"].shape[1], dim=1)
    return found


# The contract


@pytest.mark.parametrize("value_gate", [False, True])
@each_form
def test_the_oracle_equals_that_of_repeated_heads(form, value_gate):
    """The gradients of repeated heads are added up by autograd."""
    arguments = arguments_of(GLA, **grouped(form, T=30, value_gate=value_gate, final_state=True))
    exact = {name: x.double().requires_grad_() if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}
    leaves = {name: x for name, x in exact.items() if isinstance(x, torch.Tensor)}
    found, expected = GLA.reference(**exact), GLA.reference(**repeated(exact))
    stride = 4 // found[1].shape[1]
    expected = (expected[0], expected[1][:, ::stride])
    gradients = [torch.autograd.grad(sum(x.cos().sum() for x in each), list(leaves.values())) for each in (found, expected)]
    assert_near(dict(enumerate((*found, *gradients[0]))), dict(enumerate((*expected, *gradients[1]))), 1e-12)


@each_variant
@each_form
def test_results_have_the_heads_of_the_output(form, variant):
    arguments = arguments_of(GLA, **grouped(form, T=3, final_state=True))
    o, final = gla(**arguments, variant=variant)
    assert o.shape == (1, 3, 4, 16)
    states = 2 if FORMS[form].get("state_heads") else 4
    assert final.shape == (1, states, 20, 16)
    turned = {name: x for name, x in arguments.items() if name != "initial_state"} | {"state_v_first": True}
    assert gla(**turned, variant=variant)[1].shape == (1, 4, 16, 20)


def test_states_of_each_query_head_may_differ():
    """With fewer heads of k, v and g, states with all heads are computed one by one: an initial one may differ in a group."""
    arguments = arguments_of(GLA, **grouped("fewer_k_v_g", T=70, initial_state=True, final_state=True, grad=True))
    for variant in pytorch_variants(GLA):
        _, final = gla(**arguments, variant=variant)
        assert not torch.equal(final[:, 0], final[:, 1])
        expected = GLA.reference(**repeated(arguments))[1]
        assert_near({"final": final}, {"final": expected}, 2e-6)


def test_without_an_initial_state_the_states_of_a_group_are_equal():
    _, final = gla(**arguments_of(GLA, **grouped("fewer_k_v_g", T=70, final_state=True)))
    assert torch.equal(final[:, 0], final[:, 1])


@pytest.mark.parametrize("form", ["fewer_q_and_k", "fewer_k_v_g", "fewer_k_v_g_and_states", "fewer_k_v"])
@pytest.mark.parametrize("variant", pytorch_variants(GLA))
def test_a_sequence_of_shared_heads_may_be_cut(form, variant):
    arguments = arguments_of(GLA, **grouped(form, T=90, final_state=True))
    o, final = gla(**arguments, variant=variant)
    parts, state = [], arguments.get("initial_state")
    for part in (slice(0, 37), slice(37, 38), slice(38, 90)):
        piece = {name: arguments[name][:, part] for name in "qkvg"}
        output, state = gla(**piece, initial_state=state, output_final_state=True, variant=variant)
        parts.append(output)
    assert_near({"o": torch.cat(parts, 1), "final": state}, {"o": o, "final": final}, 2e-6)


def test_numbers_of_heads_that_do_not_divide(prose):
    def call(q: int, k: int, v: int, g: int | None, gv: int | None = None, states: int | None = None, **more: Any) -> None:
        gla(
            torch.ones(2, 9, q, 20), torch.ones(2, 9, k, 20), torch.ones(2, 9, v, 16),
            None if g is None else -torch.ones(2, 9, g, 20), gv=None if gv is None else -torch.ones(2, 9, gv, 16),
            initial_state=None if states is None else torch.zeros(2, states, 20, 16), **more,
        )  # fmt: skip

    for arguments, named in (
        ((4, 3, 4, 4), "k"),
        ((4, 4, 6, 12), "v"),
        ((12, 2, 3, 6), "v"),
        ((0, 2, 2, 2), "k"),
        ((4, 2, 2, 1), "g"),
        ((4, 2, 2, 8), "g"),
        ((2, 2, 4, 2), "g"),
        ((4, 4, 4, 2), "g"),
        ((8, 2, 2, 4), "g"),
        ((4, 2, 2, 2, 4), "gv"),
        ((4, 2, 2, None, 3), "gv"),
        ((4, 2, 2, 2, None, 1), "initial_state"),
        ((2, 2, 4, 4, None, 2), "initial_state"),
    ):
        with prose.raises(ShapeError, match=rf"^{named} has shape") as caught:
            call(*arguments)
        assert caught.value.argument == named


def test_functions_with_the_names_of_fla_share_heads():
    arguments = arguments_of(GLA, **grouped("fewer_k_v_g", T=20, decay_per="channel"))
    q, k, v, g = (arguments[name] for name in "qkvg")
    assert_near({"o": chunk_gla(q, k, v, g)[0]}, {"o": gla(**repeated(arguments))[0]}, 1e-6)
    gamma = -torch.rand(2)
    constant = gamma.expand(1, 20, 2)
    assert_near({"o": chunk_simple_gla(q, k, v, g_gamma=gamma)[0]}, {"o": gla(q, k, v, constant)[0]}, 1e-6)
    four = -torch.rand(4)
    assert_near({"o": chunk_simple_gla(q, k, v, g_gamma=four)[0]}, {"o": gla(q, k, v, four.expand(1, 20, 4))[0]}, 1e-6)
    with pytest.raises(ShapeError, match=r"^g_gamma"):
        chunk_simple_gla(q, k, v, g_gamma=-torch.ones(1))


@each_form
def test_the_query_says_how_many_heads_share_one(form):
    options = grouped(form, T=9, K=20, V=16, B=2)
    query = GLA.query(GLA.case("float32", **options), "cpu")
    assert GLA.bind(**arguments_of(GLA, **options)).query() == query
    assert query.sizes == (2, 9, 4, 20, 16)
    for name in Heads._fields:
        assert group_of(query.flags, name) == 4 // FORMS[form].get(f"{name}_heads", 4)


def test_a_call_without_shared_heads_has_the_query_that_it_had():
    assert GLA.query(GLA.case("float32", B=2, T=9, H=4, K=20, V=16), "cpu").flags == ()
    assert Heads(4, 4, 4, 4, 4).flags() == ()
    assert Heads(0, 0, 0, 0, 0).groups == Heads(1, 1, 1, 1, 1)


def test_cases_with_the_wrong_most_heads_are_refused(prose):
    with prose.raises(ArgumentError, match="q_heads"):
        arguments_of(GLA, H=4, **dict.fromkeys(("q_heads", "k_heads", "v_heads", "g_heads"), 2))
    with prose.raises(ArgumentError, match="state_heads"):
        arguments_of(GLA, H=4, k_heads=2, v_heads=2, g_heads=2, state_heads=2)


def test_a_shared_state_needs_no_gradient_of_its_copies():
    """The gradient of an initial state with the heads of g is the sum over the queries that read it."""
    arguments = arguments_of(GLA, **grouped("fewer_k_v_g_and_states", T=40, final_state=True), grad=True)
    whole = results(GLA, arguments, "recurrent")
    assert whole["grad initial_state"].shape == (1, 2, 20, 16)


# The variants


@pytest.mark.parametrize(
    ("variant", "form"),
    thorough_but(
        *itertools.product(("chunked",), FORMS),
        ("recurrent", "fewest_q"),
        of=itertools.product(pytorch_variants(GLA), FORMS),
    ),
)
def test_pytorch_variants_are_correct(variant, form):
    packed = {} if form == "four_numbers" else {"lengths": (3, 0, 67)}
    case = GLA.case("float16", **grouped(form, T=70, K=24, V=20, initial_state=True, final_state=True, **packed))
    assert_correct(GLA, case, variant)


def test_parts_of_the_chunkwise_form_keep_groups_together(monkeypatch):
    """A part of a few heads holds all heads of the output that share a head, so that gradients of shared heads are whole."""
    arguments = arguments_of(GLA, **grouped("fewer_k_v_g", T=70, final_state=True), grad=True)
    expected = results(GLA, arguments, "chunked")
    monkeypatch.setitem(chunkwise.PART, "cpu", 1)  # as few heads in a part as can be
    assert_near(results(GLA, arguments, "chunked"), expected, 1e-6)


@pytest.mark.interpret
@pytest.mark.parametrize("form", thorough_but("fewer_k_v", "fewer_k_v_g_and_states", "fewest_q", of=FORMS))
def test_kernels_are_correct(form):
    packed = {"lengths": (3, 0, 67)} if "q" in form else {}
    case = GLA.case("float32", **grouped(form, T=70, K=20, V=16, initial_state=True, final_state=True, **packed))
    assert_one_call_correct(GLA, case, "fused")


@pytest.mark.interpret
@pytest.mark.parametrize(
    ("form", "per"),
    thorough_but(
        ("fewer_q_and_k", "channel"),
        of=itertools.product(("fewer_q_and_k", "fewer_k_v_g"), ("channel", "head")),
    ),
)
def test_kernels_start_without_states(form, per):
    """Without an initial state, equal states are computed once. Decays of all kinds take both forms of the pairs' products."""
    case = GLA.case("float16", **grouped(form, T=100, K=40, V=24, decay_per=per, decay="mixed", final_state=True))
    assert_one_call_correct(GLA, case, "fused")


@pytest.mark.interpret
@pytest.mark.parametrize(
    ("form", "per"),
    thorough_but(
        ("fewer_k_v_g_and_states", "head"),
        of=itertools.product(("fewer_q_and_k", "fewer_k_v_g_and_states"), ("channel", "head")),
    ),
)
def test_gradients_of_shared_heads_with_16_bit_products(form, per, monkeypatch):
    """All products take 16-bit operands, as with bfloat16, which the interpreter cannot multiply."""
    from onelaunch.ops.gla import launch

    monkeypatch.setattr(launch, "exact_gradients", lambda call: False)
    case = GLA.case("float16", **grouped(form, T=70, K=16, V=16, decay_per=per, initial_state=True, final_state=True))
    assert_one_call_correct(GLA, case, "fused")


@pytest.mark.interpret
@each_form
def test_the_loop_over_time_is_correct(form):
    packed = {"lengths": (2, 0, 3)} if "k" in form else {}
    case = GLA.case("float16", **grouped(form, T=5, K=20, V=40, initial_state=True, final_state=True, **packed))
    assert_one_call_correct(GLA, case, "stepwise", "forward")


@pytest.mark.interpret
def test_the_sum_over_heads_is_in_a_fixed_order():
    """The sum of these numbers depends on its order; rows of more elements than a CTA has take several CTAs."""
    from onelaunch.ops.gla import launch

    parts = torch.randn(2, 3, 12, 400) * torch.tensor([1e8, 1.0, -1e8] * 4)[:, None]
    out = torch.empty(2, 3, 4, 400)
    launch.sum_heads(parts, out)
    first, second, third = parts.unflatten(2, (4, 3)).unbind(3)
    assert torch.equal(out, (first + second) + third)


def test_ablations_refuse_shared_heads(prose):
    with prose.raises(VariantUnsupported, match="sequential"):
        gla(**arguments_of(GLA, **grouped("fewer_q_and_k")), variant="sequential")


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("lengths", [None, (0, 150, 1, 0, 149)])
@pytest.mark.parametrize("variant", KERNELS)
@each_form
def test_compiled_kernels_are_correct(form, variant, lengths, dtype, device):
    sizes: dict[str, Any] = {"T": 300, "K": 128, "V": 96, "decay": "mixed", "initial_state": True, "final_state": True}
    assert_correct(GLA, GLA.case(dtype, **grouped(form, **sizes, lengths=lengths)), variant, device)


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["fewer_q_and_k", "fewer_k_v_g"])
def test_sums_over_heads_are_the_same_to_the_last_bit(form, device):
    case = GLA.case("bfloat16", **grouped(form, B=2, T=2000, K=64, V=64, decay_per="head", final_state=True))
    reading = GLA.make_inputs(case, device, 0)
    for name in reading.differentiable:
        reading.arguments[name].requires_grad_()
    first = results(GLA, reading.arguments, "fused")
    for _ in range(10):
        again = results(GLA, reading.arguments, "fused")
        assert all(torch.equal(again[name], value) for name, value in first.items())


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["fewer_q_and_k", "fewer_k_v_g", "fewer_k_v_g_and_states"])
def test_a_captured_training_step_follows_its_inputs(form, device):
    def made(*, seed: int, grad: bool) -> dict[str, Any]:
        case = GLA.case("bfloat16", **grouped(form, T=200, K=64, V=64, final_state=True))
        reading = GLA.make_inputs(case, device, seed)
        for name in reading.differentiable if grad else ():
            reading.arguments[name].requires_grad_()
        return reading.arguments

    assert_captured_step_follows_its_inputs(GLA, "fused", made, device)


# The cost


def test_shared_heads_are_read_once():
    """Count bytes of a step at K = V = 128 in bfloat16: rows of 128 numbers have 256 bytes."""
    sizes: dict[str, Any] = {"B": 4, "T": 2048, "H": 16, "K": 128, "V": 128}
    case = GLA.case("bfloat16", **sizes, q_heads=4, k_heads=4)
    steps = 4 * 2048
    assert GLA.cost(case).bytes == steps * (4 + 4 + 16 + 16 + 16) * 256
    inputs = 4 + 4 + 16 + 16
    assert GLA.cost(case, direction="forward_backward").bytes == steps * (3 * inputs + 2 * 16) * 256
    shared = GLA.case("bfloat16", **sizes, k_heads=4, v_heads=4, g_heads=4)
    assert GLA.cost(shared).bytes == steps * (16 + 4 + 4 + 4 + 16) * 256
    assert GLA.cost(shared).flops == steps * 2 * (4 + 16) * 128 * 128  # k^T v for 4 states, q S for 16 heads
    states = {"initial_state": True, "final_state": True}
    decode = GLA.case("bfloat16", **sizes | {"T": 1}, k_heads=4, v_heads=4, g_heads=4, state_heads=4, **states)
    # rows of 16 + 4 + 4 + 4 + 16 heads, and the states, 4 heads of float32, before and after
    assert GLA.cost(decode).bytes == 4 * 44 * 256 + 2 * 4 * 4 * 128 * 128 * 4


def test_variants_that_repeat_heads_pay_for_it():
    """fla and PyTorch write and read all heads of what is shared; partial gradients of kernels of ours are float32."""
    sizes: dict[str, Any] = {"B": 1, "T": 640, "H": 16, "K": 128, "V": 128}
    case, whole = GLA.case("bfloat16", **sizes, q_heads=4, k_heads=4), GLA.case("bfloat16", **sizes)

    def added(case: Any, name: str, direction: Any = "forward") -> int:
        return GLA.cost(case, GLA.get(name), direction).bytes - GLA.cost(case, direction=direction).bytes

    for name in ("fla", "recurrent", "chunked"):
        assert added(case, name) - added(whole, name) == 2 * 640 * 2 * 16 * 256  # write and read q and k of 16 heads
    for name in ("fused", "hopper"):
        assert added(case, name) == added(whole, name)
        training = [added(each, name, "forward_backward") for each in (case, whole)]
        assert training[0] - training[1] == 2 * 640 * 2 * 16 * 128 * 4


def test_hopper_stores_what_each_head_gives_to_shared_values_and_states():
    """Count added bytes of training at K = V = 128: float32 parts of dk, dv, dg and the initial state's gradient, and states.

    One state for each group and chunk of 64 steps is stored, and its gradient for each head of the output.
    """
    sizes: dict[str, Any] = {"B": 1, "T": 640, "H": 16, "K": 128, "V": 128}
    shared = dict.fromkeys(("k_heads", "v_heads", "g_heads", "state_heads"), 4)
    case = GLA.case("bfloat16", **sizes, **shared, initial_state=True)
    added = GLA.cost(case, GLA.get("hopper"), "forward_backward").bytes - GLA.cost(case, direction="forward_backward").bytes
    parts = 640 * 3 * 16 * 128 * 4 + 16 * 128 * 128 * 4
    assert added == 2 * (parts + 10 * (4 + 16) * 128 * 128 * 2)


def test_the_peer_gets_repeated_heads(monkeypatch):
    calls = []

    class Module:
        def __getattr__(self, name: str) -> Any:
            def function(**given: Any) -> tuple[torch.Tensor, torch.Tensor]:
                calls.append(given)
                return torch.zeros(1), torch.zeros(1, 4, 20, 16)

            return function

    import sys

    package = type(sys)("fla.ops")
    package.gla, package.simple_gla = Module(), Module()
    monkeypatch.setitem(sys.modules, "fla.ops", package)
    for form, states in (("fewer_k_v_g_and_states", 2), ("fewer_k_v_g", 4)):
        call = GLA.bind(**arguments_of(GLA, **grouped(form, T=100, initial_state=True, final_state=True)))
        _, final = GLA.get("fla")(call)
        assert final.shape == (1, states, 20, 16)
        given = calls.pop()
        assert [given[name].shape[2] for name in "qkvg"] == [4] * 4
        assert given["initial_state"].shape == (1, 4, 20, 16)


# The layers


def test_a_layer_passes_shared_heads_as_they_are(monkeypatch):
    """No copies are made for groups of query heads; the cache holds a state for each query head, as fla's does."""
    from onelaunch.nn import gated

    shapes = []

    def watched(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, **rest: Any) -> Any:
        shapes.append([x.shape[2] for x in (q, k, v, g)])
        return gla(q, k, v, g, **rest)

    monkeypatch.setattr(gated, "gla", watched)
    layer = GatedLinearAttention(hidden_size=64, num_heads=4, num_kv_heads=2, expand_k=1.0, layer_idx=0)
    x = torch.randn(2, 12, 64)
    whole, _, _ = layer(x)
    cache = Cache()
    parts = [layer(piece, past_key_values=cache, use_cache=True)[0] for piece in x.split((7, 1, 4), dim=1)]
    torch.testing.assert_close(torch.cat(parts, 1), whole, **ROUNDING)
    assert shapes == [[4, 2, 2, 2]] * 4
    assert cache[0].recurrent_state.shape == (2, 4, 16, 16)
    assert whole.isfinite().all()
