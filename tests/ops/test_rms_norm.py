"""Tests of ``rms_norm`` in PyTorch: results, gradients, shapes, refused arguments, cost, and use with PyTorch's features.

A residual is added to rows, and their sum, which is the second result, is normalized.

``assert_near`` bounds the norm of each error, relative to that of the expected values; ``results`` returns a variant's results
and gradients by name. ``made()`` makes float32 arguments with M = 9 rows of D = 40 channels, unless others are given.

``prose.raises`` is ``pytest.raises`` that also compares the message with the entry of this test in tests/snapshots/prose.txt. A
test fails if it does not compare one of its entries, and ``tests/test_prose.py`` if the test or the parameter of an entry is
gone.

``pytorch_variants`` are the variants of plain PyTorch. ``assert_correct`` applies the whole verification gate, forward and with
gradients. ``assert_compiled_correct`` applies the gate to the ``torch.compile`` variant, in training. ``differentiable`` returns
the arguments that take gradients. ``trivial_answers`` returns trivial outputs, such as zeros, that would pass the gate at a case:
there must be none. ``CASES`` are the probes of ``rms_norm`` by name. ``TENSORS`` names the tensor arguments. ``case_of`` returns
a case by its name. A test marked ``thorough`` does not run in ``make test``.
"""

from __future__ import annotations

import math

import pytest
import torch

from onelaunch.dispatch.capture import compiler_missing
from onelaunch.errors import ArgumentError, DeviceError, DTypeError, ShapeError, UnknownVariant, VariantUnsupported
from onelaunch.ops import rms_norm
from onelaunch.workbench.verify import Judge
from tests.ops.cases import assert_compiled_correct, assert_correct, assert_near, differentiable, pytorch_variants, results
from tests.ops.rms_norm_cases import CASES, RMS_NORM, TENSORS, case_of, made
from tests.trivial import trivial_answers

each_variant = pytest.mark.parametrize("variant", pytorch_variants(RMS_NORM))


# Correctness


@each_variant
@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients(name, variant):
    assert_correct(RMS_NORM, case_of(name), variant)


@pytest.mark.thorough
@pytest.mark.slow
def test_the_compiled_variant_is_correct():
    case = case_of("float32_beside_float16")
    if reason := compiler_missing(RMS_NORM.query(case, "cpu")):
        pytest.skip(reason)
    assert_compiled_correct(RMS_NORM, case)


class _RoundedGradient(torch.autograd.Function):
    """Identity whose gradient is rounded to bfloat16, as fla rounds that of a float32 residual."""

    @staticmethod
    def forward(ctx, residual):
        return residual.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.bfloat16().float()


def test_the_rounded_gradient_of_a_float32_residual_is_outside_the_gate_and_timed():
    """The tolerance is the one that the variant ``fla`` states, whose kernels do not run here."""

    def rounded(call):
        return RMS_NORM.get("functional").run(call._replace(residual=_RoundedGradient.apply(call.residual)))

    own = RMS_NORM.get("fla").capabilities.own_tolerance
    RMS_NORM.variant("of_this_test", requires="torch", own_tolerance=own, maker="a test")(rounded)
    try:
        case = RMS_NORM.case("bfloat16", M=64, D=1024, residual="float32")
        verdict = Judge(settle_seconds=0.0).judge(RMS_NORM, case, variant="of_this_test", directions=("forward_backward",))
    finally:
        del RMS_NORM.variants["of_this_test"]
    assert not verdict.ok
    assert verdict.outside
    assert [part.name for part in verdict.components if part.error > part.allowed] == ["grad residual"]


# A single number shifted by one place is itself.
@pytest.mark.parametrize("name", [name for name in CASES if name != "one_of_everything"])
def test_trivial_outputs_do_not_pass(name):
    assert not trivial_answers(Judge().reference(RMS_NORM, case_of(name)))


@each_variant
def test_variants_match_the_definition(variant):
    given = made()
    total = given["x"] + given["residual"]
    expected = total / ((total * total).sum(-1, keepdim=True) / 40 + 1e-5).sqrt() * given["weight"]
    y, found = rms_norm(**given, variant=variant)
    assert_near({"y": y, "sum": found}, {"y": expected, "sum": total}, 1e-6)


def test_the_default_eps_matches_flas_norm():
    y, total = rms_norm(torch.full((3, 16), 1e-3))
    assert total is None
    assert torch.allclose(y, torch.full((3, 16), 1e-3 / math.sqrt(1e-6 + 1e-5)))


@each_variant
@pytest.mark.parametrize("lead", [(), (9,), (3, 3), (3, 1, 3), (0,), (2, 0)])
def test_leading_dimensions_are_kept(lead, variant):
    given = made(M=math.prod(lead))
    shaped = {name: value.reshape(*lead, 40) if name in ("x", "residual") else value for name, value in given.items()}
    found, expected = (rms_norm(**each, variant=variant) for each in (shaped, given))
    for one, other in zip(found, expected, strict=True):
        assert one.shape == (*lead, 40)
        assert torch.equal(one.reshape(other.shape), other)


@each_variant
def test_operands_of_any_strides(variant):
    given = made()
    expected = dict(enumerate(rms_norm(**given, variant=variant)))
    for name in TENSORS:
        apart = torch.stack([given[name], given[name]], -1)[..., 0]
        assert_near(dict(enumerate(rms_norm(**{**given, name: apart}, variant=variant))), expected, 1e-6)


# PyTorch features


@each_variant
def test_gradients_of_a_subset_of_the_operands(variant):
    for asking in TENSORS:
        given = made()
        given[asking].requires_grad_()
        assert set(results(RMS_NORM, given, variant)) == {"y", "sum", f"grad {asking}"}


def test_autocast_changes_nothing():
    given = made(grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        found = results(RMS_NORM, given, "auto")
    assert_near(found, results(RMS_NORM, given, "auto"), 0.0)


@pytest.mark.thorough
@pytest.mark.parametrize("variant", ["auto", "compiled"])
def test_it_compiles_into_one_graph(variant):
    torch.compiler.reset()
    function = torch.compile(lambda **given: rms_norm(**given, variant=variant), fullgraph=True, backend="aot_eager")
    for options in ({}, {"residual": "none"}, {"M": 7, "weight": "none"}):
        given = made(grad=True, **options)
        leaves = list(differentiable(given).values())
        (y, total), (true, _) = function(**given), rms_norm(**given, variant="eager")
        assert (total is None) == ("residual" in options)
        assert_near({"y": y}, {"y": true}, 1e-6)
        ours, theirs = (torch.autograd.grad(each.sin().sum(), leaves) for each in (y, true))
        assert_near(dict(enumerate(ours)), dict(enumerate(theirs)), 1e-5)


# Arguments


def test_wrong_arguments_are_named(prose):
    given = made()

    def refused(error, named, **changes):
        with prose.raises(error, match=rf"(?<!\w){named}(?!\w)"):
            rms_norm(**{**given, **changes})

    refused(ShapeError, "x", x=torch.ones(()))
    refused(ShapeError, "x", x=torch.ones(3, 0))
    refused(ShapeError, "weight", weight=given["weight"][1:])
    refused(ShapeError, "residual", residual=given["residual"][1:])
    refused(DTypeError, "x", x=given["x"].double())
    refused(DTypeError, "residual", residual=given["residual"].half())
    refused(DTypeError, "weight", x=given["x"].half(), residual=None, weight=given["weight"].bfloat16())
    refused(DeviceError, "residual", residual=given["residual"].to("meta"))
    refused(ArgumentError, "weight", weight=[1.0])
    for eps in (-1e-6, math.nan, True, None):
        refused(ArgumentError, "eps", eps=eps)
    refused(UnknownVariant, "'fuse'", variant="fuse")
    refused(VariantUnsupported, "CUDA", variant="fused")


def test_a_case_of_unknown_options_is_refused(prose):
    for changes in ({"residual": "half"}, {"weight": "yes"}):
        with prose.raises(ArgumentError, match=next(iter(changes.values()))):
            RMS_NORM.cost(RMS_NORM.case("float32", M=1, D=1, **changes))


@pytest.mark.parametrize("grad", [False, True])
def test_a_case_and_its_call_have_the_same_query(grad):
    for name, chosen in CASES.items():
        assert RMS_NORM.bind(**made(grad=grad, **chosen)).query() == RMS_NORM.query(case_of(name), "cpu", grad=grad), name


def test_a_query_states_which_operands_are_given():
    assert RMS_NORM.bind(**made()).query().flags == ("weight", "residual")
    mixed = made(dtype="float16", residual="float32", weight="float32")
    assert RMS_NORM.bind(**mixed).query().flags == ("weight", "residual", "float32_residual", "float32_weight")
    assert RMS_NORM.bind(**made(residual="none", weight="none")).query().flags == ()
    assert RMS_NORM.bind(torch.ones(2, 3, 40)).query().sizes == (6, 40)


# Cost


def test_bytes():
    rows, weight, fused = 2 * 8192 * 4096, 2 * 4096, RMS_NORM.get("fused")
    case = RMS_NORM.case("bfloat16", M=8192, D=4096)
    assert RMS_NORM.cost(case).bytes == 4 * rows + weight
    # Backward reads the sum, both gradients and the weight, and writes one gradient for x and the residual, and the weight's.
    both = RMS_NORM.cost(case, None, "forward_backward")
    assert both.bytes == 8 * rows + 3 * weight
    assert RMS_NORM.cost(case, fused, "forward_backward").bytes == both.bytes + 2 * 4 * 8192
    assert RMS_NORM.cost(case, fused, "forward_backward").launches == 3
    bare = RMS_NORM.case("bfloat16", M=8192, D=4096, residual="none", weight="none")
    assert RMS_NORM.cost(bare, None, "forward_backward").bytes == 5 * rows
    assert RMS_NORM.cost(bare, fused, "forward_backward").launches == 2
    wide = RMS_NORM.case("bfloat16", M=8192, D=4096, residual="float32", weight="none")
    assert RMS_NORM.cost(wide, None, "forward_backward").bytes == (2 + 2 * 2) * rows + (1 + 2 + 2 + 1 + 2) * rows
    # PyTorch reads the sum again, and without the fused norm writes and reads the rows before the weight.
    assert RMS_NORM.cost(case, RMS_NORM.get("functional")).bytes == 5 * rows + weight
    assert RMS_NORM.cost(case, RMS_NORM.get("eager")).bytes == 7 * rows + weight
