"""Tests of ``gla_layer``: variants against the oracle and a loop written out, tolerances, and use with PyTorch's features.

``assert_near`` bounds the norm of each error, relative to that of the expected values; ``results`` returns a variant's results
and gradients by name. ``made()`` makes float32 arguments with B = 2, T = 9, D = 40, H = 2, K = 16 and V = 20, unless others are
given.

``pytorch_variants`` are the variants of plain PyTorch. ``assert_correct`` applies the whole verification gate, forward and with
gradients. ``assert_compiled_correct`` applies the gate to the ``torch.compile`` variant, in training. ``differentiable`` returns
the arguments that take gradients. ``trivial_answers`` returns trivial outputs, such as zeros, that would pass the gate at a case:
there must be none. ``CASES`` are the probes of ``gla_layer``, by name. ``TENSORS`` names the tensor arguments in their order.
``case_of`` returns a case by its name. A test marked ``thorough`` does not run in ``make test``. ``thorough_but`` marks all
parameters but the named ones ``thorough``.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from onelaunch.dispatch.capture import compiler_missing
from onelaunch.ops import gla_layer
from onelaunch.workbench.verify import Judge
from onelaunch.workbench.verify.reference import CAPS
from tests.ops.cases import assert_compiled_correct, assert_correct, assert_near, differentiable, pytorch_variants, results
from tests.ops.gla_layer_cases import CASES, GLA_LAYER, TENSORS, case_of, made
from tests.thorough import thorough_but
from tests.trivial import trivial_answers

PORTABLE = [name for name in pytorch_variants(GLA_LAYER) if not name.startswith(("packed", "module"))]
"""Variants that make calls of other operations, with states.

Those that are one autograd function are tested in test_gla_layer_packed.py, and ``module`` in test_gla_layer_module.py.
"""
each_variant = pytest.mark.parametrize("variant", PORTABLE)

PAIRS = [(name, variant) for name in CASES for variant in PORTABLE]
BRIEF = [(name, variant) for name, variant in PAIRS if variant != "stepwise" or name in ("small", "a_step")]
"""Cases and variants of every run of the tests. The loop over single steps takes most of the time of the others."""


@pytest.mark.parametrize(("name", "variant"), thorough_but(*BRIEF, of=PAIRS))
def test_results_and_gradients(name, variant):
    assert_correct(GLA_LAYER, case_of(name), variant)


@pytest.mark.thorough
@pytest.mark.slow
def test_the_compiled_variant():
    case = case_of("a_step")
    if reason := compiler_missing(GLA_LAYER.query(case, "cpu")):
        pytest.skip(reason)
    assert_compiled_correct(GLA_LAYER, case)


def test_trivial_outputs_do_not_pass():
    # returns the components for which zeros, shifted results or an input would pass
    assert not trivial_answers(Judge().reference(GLA_LAYER, case_of("chunks_and_states")))


def test_the_tolerance_grows_by_the_root_of_three_stages():
    """The layer has three stages: projections, recurrence and output.

    The allowed error is twice that of the PyTorch baseline, up to a cap (``CAPS``, by dtype) times the root of the number of
    stages. In bfloat16 the cap decides, and in float32 the baseline's error.
    """
    truth = Judge().reference(GLA_LAYER, case_of("bfloat16"))
    assert truth.allowed["out"] == pytest.approx(3**0.5 * CAPS[torch.bfloat16][0])
    exact = Judge().reference(GLA_LAYER, case_of("small"))
    assert exact.allowed["out"] < CAPS[torch.float32][0] / 10


@each_variant
def test_variants_match_the_definition(variant):
    """Compute the second sequence of the batch step by step and head by head.

    The rows of the packed weight are q and k (32 each), v and the gate (40 each), and the 16 of the low-rank decay.
    """
    given = made(initial_state=True, final_state=True)
    x, packed, gk_weight, gk_bias, norm_weight, w_out = (given[name] for name in TENSORS)
    q, k, v, gate, low_rank = (
        x[1] @ packed[:32].T,
        x[1] @ packed[32:64].T,
        *(x[1] @ rows.T for rows in packed[64:].split([40, 40, 16])),
    )
    decay = (F.logsigmoid(low_rank @ gk_weight.T + gk_bias) / 16).exp()
    out, states = [], []
    for head in range(2):
        keys, values = slice(16 * head, 16 * head + 16), slice(20 * head, 20 * head + 20)
        state, rows = given["initial_state"][1, head], []
        for t in range(9):
            state = decay[t, keys, None] * state + torch.outer(k[t, keys], v[t, values])
            o = q[t, keys] @ state / 4  # the square root of 16 key channels
            rows.append(o / (o.square().mean() + 1e-5).sqrt() * norm_weight * F.silu(gate[t, values]))
        out.append(torch.stack(rows))
        states.append(state)
    found, final_state = gla_layer(**given, variant=variant)
    expected = {"out": torch.cat(out, -1) @ w_out.T, "final_state": torch.stack(states)}
    assert_near({"out": found[1], "final_state": final_state[1]}, expected, 2e-6)


@each_variant
def test_no_final_state_is_returned_by_default(variant):
    out, final_state = gla_layer(**made(), variant=variant)
    assert out.shape == (2, 9, 40)
    assert final_state is None


@each_variant
def test_a_sequence_may_be_split_into_two_calls(variant):
    given = made(T=70, final_state=True)
    whole, end = gla_layer(**given, variant=variant)
    first, state = gla_layer(**{**given, "x": given["x"][:, :41]}, variant=variant)
    rest, final_state = gla_layer(**{**given, "x": given["x"][:, 41:]}, initial_state=state, variant=variant)
    found = {"out": torch.cat([first, rest], 1), "final_state": final_state}
    assert_near(found, {"out": whole, "final_state": end}, 2e-6)


@pytest.mark.parametrize("sizes", [{"T": 0}, {"B": 0}])
def test_a_case_without_tokens(sizes):
    given = made(grad=True, **{"initial_state": True, "final_state": True, **sizes})
    out, final_state = gla_layer(**given)
    assert out.shape == (sizes.get("B", 2), sizes.get("T", 9), 40)
    assert torch.equal(final_state, given["initial_state"])
    (out.sum() + final_state.sum()).backward()
    assert not given["w_out"].grad.any()


@each_variant
def test_gradients_of_a_subset_of_the_tensors(variant):
    for asking in TENSORS:
        given = made()
        given[asking].requires_grad_()
        assert set(results(GLA_LAYER, given, variant)) == {"out", f"grad {asking}"}


def test_autocast_casts_all_tensors_but_the_norms_weight_and_the_state():
    given = made(grad=True, initial_state=True, final_state=True)
    low = {name: value.detach().bfloat16() if name in TENSORS else value for name, value in given.items()}
    low["norm_weight"] = given["norm_weight"].detach()
    with torch.autocast("cpu", torch.bfloat16):
        out, final_state = gla_layer(**given)
    assert (out.dtype, final_state.dtype) == (torch.bfloat16, torch.float32)
    expected, state = gla_layer(**low)
    assert torch.equal(out, expected)
    assert torch.equal(final_state, state)
    out.float().sum().backward()
    assert all(given[name].grad.dtype == torch.float32 for name in TENSORS)


@pytest.mark.thorough
@pytest.mark.parametrize("variant", ["auto", "compiled"])
def test_it_compiles_into_one_graph(variant):
    torch.compiler.reset()
    function = torch.compile(lambda **given: gla_layer(**given, variant=variant), fullgraph=True, backend="aot_eager")
    for options in ({}, {"T": 1, "initial_state": True, "final_state": True}):
        given = made(grad=True, **options)
        leaves = list(differentiable(given).values())
        found, expected = function(**given)[0], gla_layer(**given, variant="unfused")[0]
        assert_near({"out": found}, {"out": expected}, 1e-6)
        ours, theirs = (torch.autograd.grad(each.square().sum(), leaves) for each in (found, expected))
        assert_near(dict(enumerate(ours)), dict(enumerate(theirs)), 1e-5)


def test_first_steps_of_a_case_are_well_conditioned():
    """The norm divides by the product of the first query and key.

    If that were near zero, only its rounding error would be left.
    """
    given = made(B=16, T=1, D=128, H=8, K=64, V=16)
    rows = given["gk_weight"].shape[0]
    q, k = (given["x"] @ given["in_proj_weight"][: 2 * rows].mT).split(rows, -1)
    products = F.cosine_similarity(*(each.unflatten(-1, (8, 64)) for each in (q, k)), -1)
    assert products.min() > 0.3
    assert q.std() == pytest.approx(1, abs=0.1)
    assert k.std() == pytest.approx(1, abs=0.1)
