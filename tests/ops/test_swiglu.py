"""Tests of ``swiglu`` and its functions for quantized weights, in PyTorch: results, gradients, shapes, and PyTorch features.

``made()`` makes float32 arguments with M = 6 rows of x, N = 16 columns of the result and K = 32, unless others are given.

``prose.raises`` is ``pytest.raises`` that also compares the message with the entry of this test in tests/snapshots/prose.txt. A
test fails if it does not compare one of its entries, and ``tests/test_prose.py`` if the test or the parameter of an entry is
gone. ``judge`` applies the whole verification gate of the workbench, and ``assert_ok`` requires its verdict to be right.

``pytorch_variants`` are the variants of plain PyTorch. ``assert_correct`` applies the whole verification gate, forward and with
gradients. ``CASES`` are the probes of ``swiglu``, by name. ``DENSE`` are the cases with plain operands. ``QUANTIZED`` are the
cases with quantized operands. ``case_of`` returns a case by its name. A test marked ``thorough`` does not run in ``make test``.
``thorough_but`` marks all parameters but the named ones ``thorough``.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from onelaunch.errors import ArgumentError
from onelaunch.ops import (
    dual_gemm_nvfp4,
    quantize_fp8,
    quantize_nvfp4,
    swiglu,
    swiglu_fp8,
    swiglu_nvfp4,
)
from onelaunch.workbench.verify import judge_control
from onelaunch.workbench.verify.calls import Candidate
from tests.ops.cases import (
    assert_correct,
    assert_ok,
    judge,
    pytorch_variants,
)
from tests.ops.swiglu_cases import CASES, DENSE, QUANTIZED, SWIGLU, case_of, made
from tests.thorough import thorough_but
from tests.trivial import trivial_answers

each_variant = pytest.mark.parametrize("variant", pytorch_variants(SWIGLU))


# Correctness


@each_variant
@pytest.mark.parametrize("name", DENSE)
def test_results_and_gradients_of_plain_tensors(name, variant):
    assert_correct(SWIGLU, case_of(name), variant)


@each_variant
@pytest.mark.parametrize("name", QUANTIZED)
def test_results_of_quantized_operands(name, variant):
    case = case_of(name)
    assert_ok(judge(SWIGLU, case, variant=variant), SWIGLU, case, variant)


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("name", ["stacked", "fp8_rows", "every_code_in_weights", "nvfp4_swizzled"])
def test_the_compiled_variant_is_correct(name):
    case = case_of(name)
    if reason := SWIGLU.get("compiled").why_not(SWIGLU.query(case, "cpu")):
        pytest.skip(reason)
    assert_ok(judge(SWIGLU, case, variant="compiled"), SWIGLU, case, "compiled")


@pytest.mark.parametrize("name", CASES)
def test_trivial_outputs_do_not_pass(name):
    """``trivial_answers`` returns the components for which zeros, shifted results or an input would pass."""
    from onelaunch.workbench.verify import Judge

    case = case_of(name)
    if name != "one_of_everything":  # a single channel shifted by one is itself
        assert not trivial_answers(Judge().reference(SWIGLU, case))


@pytest.mark.parametrize("more", [{}, {"format": "fp8"}, {"format": "fp8", "row_scales": True}])
def test_the_wide_product_alone_is_correct(more):
    """The product is a control: a part of the operation that studies time in addition, for weights in one stacked matrix."""
    case = SWIGLU.case("bfloat16", M=20, N=48, K=64, stacked=True, **more)
    assert judge_control(SWIGLU, case, "wide_gemm_alone").ok


@pytest.mark.parametrize(
    ("more", "message"),
    [({}, "w_up"), ({"stacked": True, "format": "nvfp4_weights"}, "w_gate")],
)
def test_the_wide_product_alone_refuses_unsupported_calls(more, message, prose):
    with prose.raises(ArgumentError, match=message):
        judge_control(SWIGLU, SWIGLU.case("bfloat16", M=4, N=16, K=64, **more), "wide_gemm_alone")


def test_results_match_the_definition():
    given = made(M=5, N=16, K=48)
    x, w_gate, w_up = given.values()
    expected = F.silu(x @ w_gate.T) * (x @ w_up.T)
    assert torch.allclose(swiglu(x, w_gate, w_up), expected)
    assert torch.allclose(swiglu(x, torch.cat([w_gate, w_up])), expected)


def test_gradients_match_the_definition():
    given = made(grad=True)
    (swiglu(**given) * torch.arange(16.0)).sum().backward()
    found = [value.grad for value in given.values()]
    again = {name: value.detach().double().requires_grad_() for name, value in given.items()}
    x, w_gate, w_up = again.values()
    (F.silu(x @ w_gate.T) * (x @ w_up.T) * torch.arange(16.0)).sum().backward()
    for one, other in zip(found, again.values(), strict=True):  # tolerance: sums of 32 products in float32, some of which cancel
        assert torch.allclose(one.double(), other.grad, rtol=1e-4, atol=1e-5)


# Shapes and layouts


@pytest.mark.parametrize("lead", [(0,), (2, 3), (2, 0, 4), (1, 2, 3, 4)])
def test_leading_dimensions_are_kept(lead):
    given = made()
    x = torch.randn(*lead, 32)
    h = swiglu(x, given["w_gate"], given["w_up"])
    assert h.shape == (*lead, 16)
    if h.numel():
        flat = swiglu(x.flatten(0, -2) if len(lead) > 1 else x, given["w_gate"], given["w_up"])
        assert torch.equal(h.flatten(0, -2) if len(lead) > 1 else h, flat)


def test_no_rows_give_an_empty_result_in_every_format():
    for name, chosen in CASES.items():
        given = made(**{**chosen, "M": 0})
        h = SWIGLU(**given)
        assert h.shape == (0, chosen["N"]), name
        assert h.dtype == getattr(torch, chosen["dtype"]), name


def test_any_strides():
    given = made(M=8)
    turned = {name: value.T.contiguous().T for name, value in given.items()}
    assert not turned["x"].is_contiguous()
    assert torch.allclose(swiglu(**turned), swiglu(**given))
    x = torch.randn(16, 32)[::2]
    assert torch.allclose(swiglu(x, given["w_gate"], given["w_up"]), swiglu(x.contiguous(), given["w_gate"], given["w_up"]))


def test_overflow_in_float16_gives_infinity_and_nan_propagates():
    x, w_gate, w_up = torch.full((1, 16), 60.0), torch.full((16, 16), 10.0), torch.full((16, 16), 10.0)
    h = swiglu(x.half(), w_gate.half(), w_up.half())
    assert h.isposinf().all()
    x[0, 3] = math.nan
    assert swiglu(x, w_gate, w_up).isnan().all()
    given = made(**QUANTIZED["nvfp4_weights"])
    given["x"][2, 5] = math.nan
    assert SWIGLU(**given).isnan().any(1).tolist() == [row == 2 for row in range(17)]


@pytest.mark.parametrize("form", ["fp8", "nvfp4"])
def test_quantized_products_beyond_float16_still_make_finite_results(form):
    """A gate of -100000 closes. Its product overflows float16, but the result does not."""
    rows, weights = torch.full((2, 16), 250.0), torch.full((16, 16), 25.0)
    make = quantize_fp8 if form == "fp8" else quantize_nvfp4
    h = swiglu(make(rows), make(-weights), make(weights), out_dtype=torch.float16)
    assert h.isfinite().all()
    assert not h.any()


# Functions for quantized weights


@pytest.mark.parametrize("row_scales", [False, True])
@pytest.mark.parametrize("stacked", [False, True])
def test_swiglu_fp8_equals_swiglu_of_its_matrices(row_scales, stacked):
    given = made(dtype="bfloat16", format="fp8", row_scales=row_scales, stacked=stacked)
    x, gate, up = given["x"], given["w_gate"], given.get("w_up")
    parts = (x.values, gate.values, None if up is None else up.values)
    scales = (x.scale, gate.scale, None if up is None else up.scale)
    assert torch.equal(swiglu_fp8(*parts, *scales), SWIGLU(**given))
    assert swiglu_fp8(*parts, *scales, out_dtype=torch.float32).dtype == torch.float32


def test_swiglu_nvfp4_equals_swiglu_of_its_matrices():
    given = made(dtype="float16", format="nvfp4_weights")
    assert torch.equal(swiglu_nvfp4(**given), SWIGLU(**given))
    assert swiglu_nvfp4(given["x"][None], given["w_gate"], given["w_up"]).shape == (1, 6, 16)


@pytest.mark.parametrize("swizzled", [False, True])
def test_dual_gemm_nvfp4_equals_swiglu_of_its_matrices(swizzled):
    given = made(dtype="float16", format="nvfp4", swizzled_scales=swizzled)
    matrices = [given[name] for name in ("x", "w_gate", "w_up")]
    codes, scales = [each.codes for each in matrices], [each.scales for each in matrices]
    shared = dict(zip(("a_global", "b1_global", "b2_global"), (each.global_scale for each in matrices), strict=True))
    found = dual_gemm_nvfp4(*codes, *scales, swizzled=swizzled, **shared)
    assert found.dtype == torch.float16
    assert torch.equal(found, SWIGLU(**given))
    alone = dual_gemm_nvfp4(*codes, *scales, swizzled=swizzled, out_dtype=torch.float32)
    decoded = [each.decode(torch.float64) for each in matrices]
    expected = F.silu(decoded[0] @ decoded[1].T) * (decoded[0] @ decoded[2].T)
    assert torch.allclose(alone.double(), expected, rtol=1e-5)  # tolerance: sums of 32 exact products in float32


# PyTorch features


def test_autocast_casts_plain_tensors():
    given = made(grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        h = swiglu(**given)
    assert h.dtype == torch.bfloat16
    h.float().sum().backward()
    assert all(value.grad.dtype == torch.float32 for value in given.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", thorough_but("odd_sizes", "fp8_rows", of=["odd_sizes", "stacked", "fp8_rows", "nvfp4_weights", "nvfp4_swizzled"])
)
def test_it_compiles_without_graph_breaks(name):
    given = SWIGLU.make_inputs(case_of(name), torch.device("cpu"), 0).arguments
    function = torch.compile(lambda **arguments: SWIGLU(**arguments), fullgraph=True, backend="aot_eager")
    assert torch.equal(function(**given), SWIGLU(**given))


def test_the_workbench_sees_every_tensor_of_a_quantized_operand():
    from onelaunch.workbench.verify.calls import make_inputs

    inputs = make_inputs(SWIGLU, case_of("nvfp4"), torch.device("cpu"), 0, "forward")
    names = [name for name, _ in inputs.named_tensors()]
    assert names == [f"{one}.{part}" for one in ("x", "w_gate", "w_up") for part in ("codes", "scales", "global_scale")]
    other = make_inputs(SWIGLU, case_of("nvfp4"), torch.device("cpu"), 1, "forward")
    other.load(inputs)
    callee = Candidate.variant(SWIGLU, "eager")
    assert torch.equal(callee(other)["h"], callee(inputs)["h"])
