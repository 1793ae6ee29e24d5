"""Tests of ``output_chain`` in PyTorch: results, gradients, shapes, and use with PyTorch's features.

Every head of a token is normalized and multiplied by silu(gate); then all heads together are multiplied by ``w_out``.

``assert_near`` bounds the norm of each error, relative to that of the expected values; ``results`` returns a variant's results
and gradients by name. ``made()`` makes float32 arguments with B = 2, T = 9, H = 3, V = 20, D = 40 and a bias, unless others are
given.

``prose.raises`` is ``pytest.raises`` that also compares the message with the entry of this test in tests/snapshots/prose.txt. A
test fails if it does not compare one of its entries, and ``tests/test_prose.py`` if the test or the parameter of an entry is
gone.

``pytorch_variants`` are the variants of plain PyTorch. ``assert_correct`` applies the whole verification gate, forward and with
gradients. ``assert_compiled_correct`` applies the gate to the ``torch.compile`` variant, in training. ``differentiable`` returns
the arguments that take gradients. ``trivial_answers`` returns trivial outputs, such as zeros, that would pass the gate at a case:
there must be none. ``flat`` reshapes the leading dimensions. ``packed_gate`` makes a gate by ``projections``. ``CASES`` are the
probes of ``output_chain`` and longer cases, by name. ``SMALL`` is the small case's sizes. ``TENSORS`` names the tensor arguments
in their order. ``case_of`` returns a case by its name. A test marked ``thorough`` does not run in ``make test``.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from onelaunch.dispatch.capture import compiler_missing
from onelaunch.ops import Segment, gla, output_chain, projections
from onelaunch.workbench.verify import Judge, judge_control
from tests.ops.cases import assert_compiled_correct, assert_correct, assert_near, differentiable, pytorch_variants, results
from tests.ops.output_chain_cases import CASES, OUTPUT_CHAIN, SMALL, TENSORS, case_of, flat, made, packed_gate
from tests.trivial import trivial_answers

each_variant = pytest.mark.parametrize("variant", pytorch_variants(OUTPUT_CHAIN))


# Correctness


@each_variant
@pytest.mark.parametrize("name", [pytest.param(each, marks=[pytest.mark.thorough] * (each == "many_rows")) for each in CASES])
def test_results_and_gradients(name, variant):
    assert_correct(OUTPUT_CHAIN, case_of(name), variant)


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("name", ["activated", "float32_weight_beside_float16"])
def test_the_compiled_variant_is_correct(name):
    case = case_of(name)
    if reason := compiler_missing(OUTPUT_CHAIN.query(case, "cpu")):
        pytest.skip(reason)
    assert_compiled_correct(OUTPUT_CHAIN, case)


# A single number shifted by one place is itself.
@pytest.mark.parametrize("name", [name for name in CASES if name != "one_of_everything"])
def test_trivial_outputs_do_not_pass(name):
    # returns the components for which zeros, shifted results or an input would pass
    assert not trivial_answers(Judge().reference(OUTPUT_CHAIN, case_of(name)))


@pytest.mark.parametrize("name", ["gated", "bfloat16"])
def test_the_product_alone_is_correct(name):
    """The product is a control: a part of the operation that studies time in addition."""
    assert judge_control(OUTPUT_CHAIN, case_of(name), "gemm_alone").ok


@each_variant
@pytest.mark.parametrize("activated", [False, True])
def test_variants_match_the_definition(variant, activated):
    given = made()
    h, gate, norm_weight, w_out, bias = (given[name] for name in TENSORS)
    heads = []
    for head in range(3):
        x = h[:, :, head]
        x = x / ((x * x).sum(-1, keepdim=True) / 20 + 1e-5).sqrt()
        opened = gate[:, :, head] if activated else F.silu(gate[:, :, head])
        heads.append(x * norm_weight * opened)
    expected = torch.cat(heads, -1) @ w_out.T + bias
    found = output_chain(h, gate, norm_weight, w_out, bias=bias, activated=activated, variant=variant)
    assert_near({"out": found}, {"out": expected}, 1e-6)


def test_the_default_eps_matches_flas_layers():
    given = made(gate="none", norm_weight="none", V=16, bias=False)
    h = torch.full_like(given["h"], 1e-3)
    out = output_chain(h, None, None, given["w_out"])
    expected = (h / math.sqrt(1e-6 + 1e-5)).flatten(-2) @ given["w_out"].T
    assert_near({"out": out}, {"out": expected}, 1e-5)


@each_variant
def test_activated_gates_equal_gates_activated_by_the_caller(variant):
    given = made(grad=True)
    rest = {name: value for name, value in given.items() if name not in ("gate", "activated")}
    before = output_chain(**rest, gate=given["gate"], variant=variant)
    after = output_chain(**rest, gate=F.silu(given["gate"]), activated=True, variant=variant)
    leaves = list(differentiable(given).values())
    found, expected = (torch.autograd.grad(each.square().sum(), leaves) for each in (after, before))
    assert_near({"out": after}, {"out": before}, 1e-6)
    assert_near(dict(enumerate(found)), dict(enumerate(expected)), 1e-5)


@each_variant
def test_heads_are_normalized_independently(variant):
    given = made(gate="none")
    scaled = {**given, "h": given["h"] * torch.tensor([1.0, 100.0, 1e4])[:, None], "eps": 0.0}
    expected = output_chain(**{**given, "eps": 0.0}, variant=variant)
    assert_near({"out": output_chain(**scaled, variant=variant)}, {"out": expected}, 1e-6)


def test_values_whose_squares_overflow_float16_are_normalized():
    for variant in pytorch_variants(OUTPUT_CHAIN):
        out = output_chain(torch.full((1, 2, 1, 4), 3e4).half(), None, None, torch.eye(4).half(), variant=variant)
        assert torch.equal(out, torch.ones_like(out))


# Shapes and layouts


@each_variant
@pytest.mark.parametrize("lead", [(18,), (3, 6), (3, 2, 3)])
def test_leading_dimensions_are_kept(lead, variant):
    given = made(grad=True)
    expected = output_chain(**given, variant=variant)
    found = output_chain(**flat(given, lead), variant=variant)
    assert found.shape == (*lead, 40)
    # with other strides, the product may sum in another order
    assert_near({"out": found.reshape(expected.shape)}, {"out": expected}, 1e-6)


@pytest.mark.parametrize("sizes", [{"T": 0}, {"B": 0}])
def test_a_case_without_tokens(sizes):
    assert_correct(OUTPUT_CHAIN, OUTPUT_CHAIN.case("float32", **{**SMALL, **sizes}), "unfused")
    given = made(grad=True, **sizes)
    output_chain(**given).sum().backward()
    assert not given["w_out"].grad.any()


@each_variant
def test_operands_of_any_strides(variant):
    given = made()
    expected = output_chain(**given, variant=variant)
    for name in TENSORS:
        apart = torch.stack([given[name], given[name]], -1)[..., 0]
        assert not apart.is_contiguous()
        assert_near({name: output_chain(**{**given, name: apart}, variant=variant)}, {name: expected}, 1e-6)
    for name in ("h", "gate", "w_out"):
        turned = given[name].transpose(0, 1).contiguous().transpose(0, 1)
        assert_near({name: output_chain(**{**given, name: turned}, variant=variant)}, {name: expected}, 1e-6)


@each_variant
@pytest.mark.parametrize("activated", [False, True])
def test_a_gate_of_projections(variant, activated):
    """A gate that lies between other segments of a packed projection gives the result of a contiguous copy."""
    gate = packed_gate(activated=activated)
    given = {**made(), "activated": activated}
    found = output_chain(**{**given, "gate": gate}, variant=variant)
    expected = output_chain(**{**given, "gate": gate.clone(memory_format=torch.contiguous_format)}, variant=variant)
    assert_near({"out": found}, {"out": expected}, 1e-6)


@pytest.mark.parametrize("activated", [False, True])
def test_a_layer_trains_from_its_projections_to_its_output(activated):
    segments = (
        Segment("q", 2, 16),
        Segment("k", 2, 16, "l2norm"),
        Segment("v", 2, 16),
        Segment("gate", 2, 16, "silu" if activated else "none"),
        Segment("gk", 2, 16, "logsigmoid", normalizer=16.0),
    )
    x, weight = torch.randn(2, 9, 24), (torch.randn(160, 24) / 5).requires_grad_()
    norm_weight, w_out = torch.ones(16, requires_grad=True), (torch.randn(24, 32) / 6).requires_grad_()
    q, k, v, gate, gk = projections(x, weight, segments)
    o, _ = gla(q, k, v, gk)
    out = output_chain(o, gate, norm_weight, w_out, activated=activated)
    assert out.shape == x.shape
    (out * torch.randn(out.shape)).sum().backward()
    for leaf in (weight, norm_weight, w_out):
        assert leaf.grad.isfinite().all()
        assert leaf.grad.any()


# PyTorch features


@each_variant
def test_gradients_of_a_subset_of_the_operands(variant):
    for asking in TENSORS:
        given = made()
        given[asking].requires_grad_()
        found = results(OUTPUT_CHAIN, given, variant)
        assert set(found) == {"out", f"grad {asking}"}


def test_autocast_casts_all_tensors_but_the_norms_weight(prose):
    given = made(grad=True)
    low = {name: value.detach().bfloat16() if name in TENSORS else value for name, value in given.items()}
    low["norm_weight"] = given["norm_weight"].detach()
    with torch.autocast("cpu", torch.bfloat16):
        found = output_chain(**given)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, output_chain(**low))
    found.float().sum().backward()
    assert all(given[name].grad.dtype == torch.float32 for name in TENSORS)
    with torch.autocast("cpu", torch.bfloat16), prose.raises(TypeError, match=r"\bh\b"):
        output_chain(**{**given, "h": given["h"].detach().long()})


@pytest.mark.parametrize(
    "variant",
    [
        "auto",  # chooses "unfused" here
        *pytorch_variants(OUTPUT_CHAIN),
        "compiled",
    ],
)
@pytest.mark.thorough
def test_it_compiles_into_one_graph(variant):
    torch.compiler.reset()
    function = torch.compile(lambda **given: output_chain(**given, variant=variant), fullgraph=True, backend="aot_eager")
    for options in ({}, {"T": 7}, {"gate": "none"}, {"gate": "activated", "bias": False}):
        given = made(grad=True, **options)
        leaves = list(differentiable(given).values())
        found, expected = function(**given), output_chain(**given, variant="unfused")
        assert_near({"out": found}, {"out": expected}, 1e-6)
        ours, theirs = (torch.autograd.grad(each.square().sum(), leaves) for each in (found, expected))
        assert_near(dict(enumerate(ours)), dict(enumerate(theirs)), 1e-5)
