"""What ``swiglu`` and its names for few bits refuse, by the names that the caller knows; and its dispatch key."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from onelaunch.errors import (
    ArgumentError,
    DeviceError,
    DTypeError,
    OneLaunchError,
    ShapeError,
    UnknownVariant,
)
from onelaunch.ops import (
    Fp8Tensor,
    NVFP4Tensor,
    dual_gemm_nvfp4,
    quantize_fp8,
    quantize_nvfp4,
    swiglu,
    swiglu_fp8,
    swiglu_nvfp4,
)
from tests.ops.swiglu_cases import CASES, SWIGLU, case_of, made


def refused(error: Any, message: str, function: Any = swiglu, /, *args: Any, **kwargs: Any) -> None:
    with pytest.raises(error, match=message) as caught:
        function(*args, **kwargs)
    assert isinstance(caught.value, OneLaunchError)
    assert "\n" not in str(caught.value)


def test_wrong_shapes_are_named():
    x, gate, up = made().values()
    refused(ShapeError, r"^x has shape \(32,\); it must be \[\.\.\., K\]", swiglu, x[0], gate, up)
    refused(ShapeError, r"^w_gate has shape \(16,\); it must be \[N, K\]", swiglu, x, gate[:, 0], up)
    refused(ShapeError, r"^w_gate has shape \(16, 30\); .* = \[16, 32\] to match x \[6, 32\]", swiglu, x, gate[:, :30], up)
    refused(ShapeError, r"^w_gate has shape \(32, 16\); .*transpose", swiglu, x, gate.T, up)
    refused(ShapeError, r"^w_up has shape \(10, 32\); .* = \[16, 32\] .* w_gate \[16, 32\]", swiglu, x, gate, up[:10])
    refused(ShapeError, r"^w_gate has shape \(15, 32\); it must be \[2 N, K\], the gate's rows", swiglu, x, gate[:15])


def test_wrong_dtypes_are_named():
    x, gate, up = made().values()
    refused(DTypeError, r"^x is torch\.float64; it must be float16, bfloat16 or float32", swiglu, x.double(), gate, up)
    refused(DTypeError, r"^w_up is torch\.float16; it must be float32, the dtype of x", swiglu, x, gate, up.half())
    refused(DTypeError, r"^out_dtype is torch\.float16; it must be float32", swiglu, x, gate, up, out_dtype=torch.float16)
    weight = quantize_nvfp4(gate)
    refused(DTypeError, r"^x is torch\.float32; .* beside NVFP4 weights", swiglu, x, weight, weight)
    rows, weights = quantize_fp8(x), quantize_fp8(gate)
    refused(DTypeError, r"^out_dtype is torch\.float64", swiglu, rows, weights, weights, out_dtype=torch.float64)


def test_operands_that_do_not_go_together_are_named():
    x, gate, up = made().values()
    known = r"^x is a torch\.Tensor and w_gate an Fp8Tensor; .*an Fp8Tensor with an Fp8Tensor"
    refused(ArgumentError, known, swiglu, x, quantize_fp8(gate))
    refused(ArgumentError, r"^w_up is a torch\.Tensor and w_gate an NVFP4Tensor", swiglu, x.half(), quantize_nvfp4(gate), up)
    refused(ArgumentError, r"^w_gate is list; it must be", swiglu, x, [1, 2])
    refused(DeviceError, r"^w_up is on meta; it must be on cpu", swiglu, x, gate, up.to("meta"))
    refused(UnknownVariant, "There is no variant 'fast'", swiglu, x, gate, up, variant="fast")


@pytest.mark.parametrize(("columns", "inner", "said"), [(16, 24, "^x has .*K that"), (24, 32, "^w_gate has .*N that")])
def test_sizes_that_float8_units_do_not_take_are_named(columns, inner, said):
    x, weight = quantize_fp8(torch.randn(4, inner)), quantize_fp8(torch.randn(columns, inner))
    refused(ShapeError, f"{said} is a multiple of 16; pad with zeros", swiglu, x, weight, weight)


def test_gradients_through_quantized_operands_are_refused_rather_than_lost():
    given = made(dtype="float16", format="nvfp4_weights")
    given["x"].requires_grad_()
    refused(ArgumentError, r"^x requires gradients.*no_grad\(\)", SWIGLU, **given)
    with torch.no_grad():
        assert SWIGLU(**given).shape == (6, 16)


def test_gradients_of_scales_are_refused_as_well():
    weight = quantize_fp8(torch.randn(16, 32))
    asking = Fp8Tensor(weight.values, weight.scale.clone().requires_grad_())
    refused(ArgumentError, "^w_up requires gradients", swiglu, quantize_fp8(torch.randn(4, 32)), weight, asking)


@pytest.mark.parametrize("variant", SWIGLU.variants)
def test_no_variant_trains_quantized_operands(variant):
    query = SWIGLU.query(SWIGLU.case("bfloat16", M=4, N=16, K=32, format="fp8", stacked=True), "cpu", grad=True)
    assert SWIGLU.get(variant).why_not(query)


def test_stacked_weights_with_swizzled_scales_part_between_atoms():
    x = quantize_nvfp4(torch.randn(4, 64), swizzled=True)
    refused(ShapeError, r"^w_gate .*multiple of 128 .*plain\(\)", swiglu, x, quantize_nvfp4(torch.randn(64, 64), swizzled=True))
    both = quantize_nvfp4(torch.randn(256, 64))
    assert torch.equal(swiglu(x, both.swizzle()), swiglu(x, both.rows(0, 128), both.rows(128, 256)))


def test_parts_are_named_as_the_caller_knows_them():
    given = made(dtype="float16", format="nvfp4")
    a, b1, b2 = (given[name].codes for name in ("x", "w_gate", "w_up"))
    sfa, sfb1, sfb2 = (given[name].scales for name in ("x", "w_gate", "w_up"))
    dual = dual_gemm_nvfp4
    refused(ShapeError, r"^sfb1 has shape \(16, 1\); .*\[16, 2\] to match b1", dual, a, b1, b2, sfa, sfb1[:, :1], sfb2)
    refused(DTypeError, r"^sfa is torch\.float32", dual, a, b1, b2, sfa.float(), sfb1, sfb2)
    refused(ShapeError, r"^b2 has shape \(16, 15\); .*cut off", dual, a, b1, b2[:, :15], sfa, sfb1, sfb2)
    refused(ShapeError, r"^sfa has shape \(6, 2\); .*128 x 4", dual, a, b1, b2, sfa, sfb1, sfb2, swizzled=True)
    refused(ShapeError, r"^b1 has shape \(16, 32\); .* to match a \[6, 16\]", dual, a[:, :8], b1, b2, sfa[:, :1], sfb1, sfb2)
    refused(ShapeError, r"^b2 has shape .* and b1 \[16, 32\]", dual, a, b1, b2[:8], sfa, sfb1, sfb2[:8])
    refused(ArgumentError, "^b2_global is float", dual, a, b1, b2, sfa, sfb1, sfb2, b2_global=2.0)
    x, w = quantize_fp8(torch.randn(4, 32)), quantize_fp8(torch.randn(16, 32))
    values = (x.values, w.values, w.values)
    refused(ShapeError, r"^gate_scale has shape \(5,\)", swiglu_fp8, *values, x.scale, torch.ones(5), w.scale)
    refused(ArgumentError, "^up_scale is None, but w_up is given", swiglu_fp8, *values, x.scale, w.scale)


def test_a_case_of_an_unknown_format_says_which_there_are():
    case = SWIGLU.case("float16", M=1, N=1, K=1, format="int4")
    refused(ArgumentError, "format is 'int4'.*nvfp4_weights", SWIGLU.query, case, "cpu")
    assert isinstance(made(format="fp8")["x"], Fp8Tensor)
    assert isinstance(made(format="nvfp4")["x"], NVFP4Tensor)


@pytest.mark.parametrize(
    ("error", "said", "chosen"),
    [
        (ShapeError, "^x has .*K that is a multiple of 16", {"format": "fp8", "K": 24}),
        (ShapeError, "^w_gate has .*N that is a multiple of 16", {"format": "fp8", "N": 24}),
        (ShapeError, "^w_gate has .*K that is a multiple of 16", {"format": "nvfp4_weights", "K": 24}),
        (ShapeError, r"^w_gate .*multiple of 128 .*plain\(\)", {"format": "nvfp4", "stacked": True, "swizzled_scales": True}),
        (DTypeError, "^x is torch.float32; .* beside NVFP4 weights", {"format": "nvfp4_weights", "dtype": "float32"}),
    ],
)
def test_a_case_is_refused_as_its_call_would_be(error, said, chosen):
    case = SWIGLU.case(**{"dtype": "float16", "M": 4, "N": 16, "K": 32, **chosen})
    refused(error, said, SWIGLU.query, case, "cpu")


def test_names_for_few_bits_refuse_what_they_do_not_name():
    given = made(dtype="bfloat16")
    refused(ArgumentError, "^w_gate is Tensor; it must be an NVFP4Tensor", swiglu_nvfp4, **given)
    weight = quantize_nvfp4(torch.randn(16, 32))
    refused(ArgumentError, "^x is NVFP4Tensor", swiglu_nvfp4, quantize_nvfp4(torch.randn(4, 32)), weight, weight)
    with torch.autocast("cpu", torch.bfloat16):
        assert swiglu_nvfp4(torch.randn(4, 32), weight, weight).dtype == torch.bfloat16


def test_parts_of_the_oracles_width_are_for_the_oracle_alone():
    weight = quantize_fp8(torch.randn(16, 32))
    refused(
        DTypeError,
        "^the scale of w_gate is",
        swiglu,
        quantize_fp8(torch.randn(4, 32)),
        Fp8Tensor(weight.values, weight.scale.double()),
    )
    four = quantize_nvfp4(torch.randn(16, 32)).map(lambda part: part.double() if part.is_floating_point() else part)
    refused(DTypeError, "^the scales of w_gate is", swiglu, torch.randn(4, 32).half(), four)


def test_the_query_of_a_case_is_that_of_its_call():
    for name in CASES:
        case = case_of(name)
        given = SWIGLU.make_inputs(case, torch.device("cpu"), 0).arguments
        assert SWIGLU.bind(**given).query() == SWIGLU.query(case, "cpu"), name


@pytest.mark.parametrize("form", ["dense", "fp8", "nvfp4_weights"])
def test_constant_weights_change_no_result(form):
    case = SWIGLU.case("bfloat16", M=3, N=32, K=64, format=form, constant_weights=True)
    arguments = SWIGLU.make_inputs(case, torch.device("cpu"), 0).arguments
    assert arguments.pop("constant_weights") is True
    assert torch.equal(swiglu(**arguments, constant_weights=True), swiglu(**arguments))
    assert SWIGLU.bind(**arguments, constant_weights=True).constant_weights
    assert not SWIGLU.bind(**arguments).constant_weights
    assert SWIGLU.query(case, "cpu") == SWIGLU.query(SWIGLU.case("bfloat16", M=3, N=32, K=64, format=form), "cpu")


@pytest.mark.parametrize("word", [1, None, "yes", torch.ones((), dtype=torch.bool)])
def test_a_promise_is_true_or_false(word):
    x, w_gate = torch.randn(3, 64), torch.randn(32, 64)
    with pytest.raises(ArgumentError, match=r"constant_weights is .*; it must be True or False"):
        swiglu(x, w_gate, constant_weights=word)


@pytest.mark.parametrize("promised", [True, False])
def test_every_name_hands_on_that_weights_are_constant(promised, monkeypatch):
    heard = []
    monkeypatch.setattr(SWIGLU.get("eager"), "run", lambda call: heard.append(call.constant_weights) or (torch.empty(16, 32),))
    x, w_gate, w_up = (torch.randn(rows, 64, dtype=torch.bfloat16) for rows in (16, 32, 32))
    swiglu(x, w_gate, w_up, constant_weights=promised, variant="eager")
    codes = [quantize_nvfp4(each.float()) for each in (w_gate, w_up)]
    swiglu_nvfp4(x, *codes, constant_weights=promised, variant="eager")
    rows, gate, up = (quantize_fp8(each.float()) for each in (x, w_gate, w_up))
    parts = (rows.values, gate.values, up.values, rows.scale, gate.scale, up.scale)
    swiglu_fp8(*parts, constant_weights=promised, variant="eager")
    assert heard == [promised] * 3
