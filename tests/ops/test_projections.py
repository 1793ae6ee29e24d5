"""Tests of ``projections`` in PyTorch: results, gradients, shapes, use by ``gla``, and use with PyTorch's features.

One product of x with a packed weight gives the columns of all segments, each with an activation of its own. The segments
``EVERY`` of :func:`of_every_kind` are q, k, gate, decay and gk, of the widths 20, 15, 14, 3 and 18; its x is ``[2, 5, 12]``.

``assert_near`` bounds the norm of each error, relative to that of the expected values; ``results`` returns a variant's results
and gradients by name. ``made()`` makes float32 arguments with B = 2, T = 9, D = 40, H = 3, K = 20 and V = 12, unless others are
given.

``prose.raises`` is ``pytest.raises`` that also compares the message with the entry of this test in tests/snapshots/prose.txt. A
test fails if it does not compare one of its entries, and ``tests/test_prose.py`` if the test or the parameter of an entry is
gone.

``pytorch_variants`` are the variants of plain PyTorch. ``assert_correct`` applies the whole verification gate, forward and with
gradients. ``assert_compiled_correct`` applies the gate to the ``torch.compile`` variant, in training. ``trivial_answers`` returns
trivial outputs, such as zeros, that would pass the gate at a case: there must be none. ``CASES`` are the probes of
``projections`` and longer cases, by name. ``SMALL`` is the small case's sizes. ``case_of`` returns a case by its name. A test
marked ``thorough`` does not run in ``make test``.
"""

from __future__ import annotations

import math

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch.nn import functional as F

from onelaunch.dispatch.capture import compiler_missing
from onelaunch.ops import Segment, gla, projections
from onelaunch.ops.projections.layout import ACTIVATIONS
from onelaunch.workbench.verify import Judge, judge_control
from onelaunch.workbench.verify.calls import Candidate, make_inputs
from tests.ops.cases import assert_compiled_correct, assert_correct, assert_near, pytorch_variants, results
from tests.ops.projections_cases import CASES, EVERY, PROJECTIONS, SMALL, case_of, made, of_every_kind
from tests.trivial import trivial_answers

each_variant = pytest.mark.parametrize("variant", pytorch_variants(PROJECTIONS))


# Correctness


@each_variant
@pytest.mark.parametrize("name", [pytest.param(each, marks=[pytest.mark.thorough] * (each == "many_rows")) for each in CASES])
def test_results_and_gradients(name, variant):
    assert_correct(PROJECTIONS, case_of(name), variant)


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param("normalized_float16", marks=pytest.mark.every), "biases_of_every_kind"])
def test_the_compiled_variant_is_correct(name):
    case = case_of(name)
    if reason := compiler_missing(PROJECTIONS.query(case, "cpu")):
        pytest.skip(reason)
    assert_compiled_correct(PROJECTIONS, case)


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("one_of_everything", "heads_of_one_channel")])
def test_trivial_outputs_do_not_pass(name):
    """Cases of single channels are left out: results shifted by one or normalized to signs are then near the correct ones."""
    # returns the components for which zeros, shifted results or an input would pass
    assert not trivial_answers(Judge().reference(PROJECTIONS, case_of(name)))


@pytest.mark.parametrize("name", ["normalized", "bfloat16_gla"])
def test_the_wide_product_alone_is_correct(name):
    """The product is a control: a part of the operation that studies time in addition."""
    assert judge_control(PROJECTIONS, case_of(name), "wide_gemm_alone").ok


def test_variants_match_the_definition():
    given = of_every_kind()
    z = given["x"] @ given["weight"].T
    q, k, gate, decay, gk = z.split([20, 15, 14, 3, 18], -1)
    added = given["bias"].split([15, 14, 18])
    q = q.view(2, 5, 2, 10)
    expected = {
        "q": q / (q.square().sum(-1, keepdim=True) + 1e-6).sqrt(),
        "k": (k + added[0]).view(2, 5, 3, 5),
        "gate": F.silu(gate + added[1]).view(2, 5, 2, 7),
        "decay": torch.sigmoid(decay),
        "gk": (F.logsigmoid(gk + added[2]) / 16).view(2, 5, 2, 9),
    }
    found = dict(zip(expected, projections(**given), strict=True))
    assert_near(found, expected, 1e-6)


def test_eps_keeps_small_heads_finite():
    segments, weight = (Segment("q", 2, 4, "l2norm"),), torch.randn(8, 4)
    for variant in pytorch_variants(PROJECTIONS):
        (q,) = projections(torch.zeros(3, 4), weight, segments, variant=variant)
        assert not q.any()
        (q,) = projections(torch.full((3, 4), 1e-3), weight, segments, eps=1.0, variant=variant)
        assert float(q.norm(dim=-1).max()) < 0.1


def test_values_whose_squares_overflow_float16_are_normalized():
    x, weight = torch.full((2, 4), 300.0).half(), torch.eye(4).half()
    for variant in pytorch_variants(PROJECTIONS):
        (q,) = projections(x, weight, (Segment("q", 1, 4, "l2norm"),), variant=variant)
        assert torch.allclose(q, torch.full_like(q, 0.5), rtol=1e-3)


@each_variant
def test_gradients_match_the_definition(variant):
    given = of_every_kind(grad=True)
    found = results(PROJECTIONS, given, variant)
    exact = {name: value.detach().double().requires_grad_() if name != "segments" else value for name, value in given.items()}
    outputs = PROJECTIONS.reference(**exact)
    # weighs every element differently, as in ``results``
    loss = sum(
        (output * torch.cos(torch.arange(output.numel()) * math.sqrt(2)).float().reshape(output.shape)).sum()
        for output in outputs
    )
    gradients = torch.autograd.grad(loss, [exact[name] for name in ("x", "weight", "bias")])
    expected = {segment.name: output.detach().float() for segment, output in zip(EVERY, outputs, strict=True)}
    expected |= {f"grad {name}": each.float() for name, each in zip(("x", "weight", "bias"), gradients, strict=True)}
    assert_near(found, expected, 1e-5)


# Arguments of a segment after its name: heads, head size, activation, normalizer, bias.
# test_projections_kernels.py draws them too.
segments = st.builds(
    lambda heads, size, activation, normalizer, bias: (
        heads,
        size,
        activation,
        normalizer if activation == "logsigmoid" else 1.0,
        bias,
    ),
    st.integers(1, 4),
    st.sampled_from([1, 2, 3, 7, 8, 16]),
    st.sampled_from(ACTIVATIONS),
    st.sampled_from([1.0, 16.0, 0.25]),
    st.booleans(),
)


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(st.lists(segments, min_size=1, max_size=6), st.sampled_from(pytorch_variants(PROJECTIONS)))
def test_a_packed_call_equals_calls_of_its_segments(kinds, variant):
    check_packing(kinds, variant)


def check_packing(kinds, variant):
    """Require one call with segments of these kinds, drawn by ``segments``, to equal a call for each segment.

    ``test_projections_kernels.py`` calls this too.
    """
    packed = tuple(Segment(f"s{index}", *kind) for index, kind in enumerate(kinds))
    x, weight = torch.randn(3, 6), torch.randn(sum(each.width for each in packed), 6)
    biases = [torch.randn(each.width) if each.bias else None for each in packed]
    added = [bias for bias in biases if bias is not None]
    together = projections(x, weight, packed, bias=torch.cat(added) if added else None, variant=variant)
    rows = weight.split([each.width for each in packed])
    for result, segment, part, bias in zip(together, packed, rows, biases, strict=True):
        (alone,) = projections(x, part, (segment,), bias=bias, variant=variant)
        assert result.shape == alone.shape == (3, *segment.shape)
        assert torch.allclose(result, alone, rtol=1e-5, atol=1e-5)


# Shapes and layouts


@pytest.mark.parametrize("lead", [(4,), (2, 3), (2, 3, 4), (0,), (2, 0), (0, 3)])
def test_leading_dimensions_are_kept(lead):
    given = of_every_kind(lead=lead, grad=True)
    found = projections(**given)
    assert [each.shape for each in found] == [(*lead, *segment.shape) for segment in EVERY]
    flat = projections(**{**given, "x": given["x"].reshape(-1, 12)})
    for one, other in zip(found, flat, strict=True):
        assert torch.allclose(one.reshape(other.shape), other, atol=1e-6)
    torch.stack([each.sum() for each in found]).sum().backward()
    assert given["x"].grad.shape == (*lead, 12)
    assert bool(given["weight"].grad.any()) == bool(math.prod(lead))


@each_variant
def test_any_strides(variant):
    given = of_every_kind()
    expected = projections(**given, variant=variant)
    turned = {name: given[name].mT.contiguous().mT for name in ("x", "weight")}
    assert not turned["x"].is_contiguous()
    spread = torch.zeros(47, 2)
    spread[:, 1] = given["bias"]
    across = given["x"].transpose(0, 1).contiguous().transpose(0, 1)
    for changes in (turned, {"x": across}, {"bias": spread[:, 1]}):
        for one, other in zip(projections(**{**given, **changes}, variant=variant), expected, strict=True):
            assert torch.allclose(one, other, atol=1e-6)


@each_variant
def test_channels_are_contiguous_in_memory(variant):
    for result in projections(**made(), variant=variant):
        assert result.stride(-1) == 1


@pytest.mark.parametrize("chain", ["normalized", "gla"])
def test_gla_accepts_the_results(chain):
    given = made(grad=True, segments=chain, K=16, V=16)
    q, k, v, gate, decay = projections(**given)
    g = torch.log(decay) if chain == "normalized" else decay
    o, _ = gla(q, k, v, g)
    assert o.shape == gate.shape == (2, 9, 3, 16)
    (o * gate).sum().backward()
    assert all(given[name].grad.isfinite().all() for name in given if name != "segments")
    dense, _ = gla(q.contiguous(), k.contiguous(), v.contiguous(), g.contiguous())
    assert torch.equal(o, dense)


def test_the_workbench_names_results_after_segments():
    inputs = make_inputs(PROJECTIONS, case_of("gla"), torch.device("cpu"), 0, "forward")
    assert list(Candidate.variant(PROJECTIONS, "wide")(inputs)) == ["q", "k", "v", "gate", "gk"]


# PyTorch features


def test_autocast_casts_all_tensors(prose):
    given = of_every_kind(grad=True)
    low = {name: value.detach().bfloat16() if name != "segments" else value for name, value in given.items()}
    with torch.autocast("cpu", torch.bfloat16):
        found = projections(**given)
    for one, other in zip(found, projections(**low), strict=True):
        assert one.dtype == torch.bfloat16
        assert torch.equal(one, other)
    torch.stack([each.float().sum() for each in found]).sum().backward()
    assert all(given[name].grad.dtype == torch.float32 for name in ("x", "weight", "bias"))
    with torch.autocast("cpu", torch.bfloat16), prose.raises(TypeError, match=r"\bx\b"):
        projections(**{**given, "x": given["x"].long()})


@pytest.mark.parametrize(
    "variant",
    # "auto" chooses "wide" here.
    ["auto", *pytorch_variants(PROJECTIONS), "compiled"],
)
@pytest.mark.thorough
def test_it_compiles_into_one_graph(variant):
    torch.compiler.reset()
    function = torch.compile(lambda **given: projections(**given, variant=variant), fullgraph=True, backend="aot_eager")
    for lead in ((2, 5), (2, 7), (3,)):
        given = of_every_kind(lead=lead, grad=True)
        leaves = [given[name] for name in ("x", "weight", "bias")]
        # "auto" takes "wide" here. "compiled" alone takes seconds per shape; other tests judge it.
        alone = {"auto": "wide", "compiled": "unfused"}.get(variant, variant)
        found, expected = function(**given), projections(**given, variant=alone)
        assert_near(dict(enumerate(found)), dict(enumerate(expected)), 1e-6)
        ours, theirs = (torch.autograd.grad(sum(each.square().sum() for each in given), leaves) for given in (found, expected))
        assert_near(dict(enumerate(ours)), dict(enumerate(theirs)), 1e-5)


@pytest.mark.thorough
@pytest.mark.slow
def test_the_compiled_variant_takes_rows_without_a_batch():
    given = of_every_kind(lead=(3,), grad=True)
    if reason := compiler_missing(PROJECTIONS.query(case_of("gla"), "cpu")):
        pytest.skip(reason)
    torch.compiler.reset()
    found, expected = (results(PROJECTIONS, given, variant) for variant in ("compiled", "unfused"))
    for gradients, tolerance in ((False, 1e-6), (True, 1e-5)):
        ours, theirs = (
            {name: value for name, value in each.items() if name.startswith("grad ") is gradients} for each in (found, expected)
        )
        assert ours
        assert_near(ours, theirs, tolerance)


@pytest.mark.parametrize("sizes", [{"T": 0}, {"B": 0}])
def test_a_case_without_tokens(sizes):
    assert_correct(PROJECTIONS, PROJECTIONS.case("float32", **{**SMALL, **sizes}), "wide")
