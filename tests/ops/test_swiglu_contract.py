"""Tests of the arguments of ``swiglu`` and its functions for quantized weights: which are refused, and what the query holds.

The query (``operation.Query``) is the key by which the dispatcher picks a variant. ``constant_weights`` is a flag of it.

``made()`` makes float32 arguments with M = 6, N = 16 and K = 32, unless others are given.

``prose.raises`` is ``pytest.raises`` that also compares the message with the entry of this test in
``tests/snapshots/prose.txt``. A test fails if it does not compare one of its entries, and ``tests/test_prose.py`` if the test
or the parameter of an entry is gone.

``CASES`` are the probes of ``swiglu``, by name. ``case_of`` returns a case by its name.
"""

from __future__ import annotations

from collections.abc import Callable
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
from tests.prose import Prose


@pytest.fixture
def refused(prose: Prose) -> Callable[..., None]:
    """Expect a call to raise an error that names an argument, with the message recorded in ``tests/snapshots/prose.txt``.

    ``named`` is a regular expression that the message must contain, in most calls the argument's name.
    The file numbers the messages of a test in the order of its calls: after a change of them, run ``pytest --update-prose``.
    """

    def call(error: Any, named: str, function: Any = swiglu, /, *args: Any, **kwargs: Any) -> None:
        with prose.raises(error, match=rf"(?<!\w){named}(?!\w)") as caught:
            function(*args, **kwargs)
        assert isinstance(caught.value, OneLaunchError)
        assert not named.isidentifier() or named in getattr(caught.value, "argument", named)
        assert "\n" not in str(caught.value)

    return call


def test_wrong_shapes_are_named(refused):
    x, gate, up = made().values()
    refused(ShapeError, "x", swiglu, x[0], gate, up)
    refused(ShapeError, "w_gate", swiglu, x, gate[:, 0], up)
    refused(ShapeError, "w_gate", swiglu, x, gate[:, :30], up)
    refused(ShapeError, "w_gate", swiglu, x, gate.T, up)
    refused(ShapeError, "w_up", swiglu, x, gate, up[:10])
    refused(ShapeError, "w_gate", swiglu, x, gate[:15])


def test_wrong_dtypes_are_named(refused):
    x, gate, up = made().values()
    refused(DTypeError, "x", swiglu, x.double(), gate, up)
    refused(DTypeError, "w_up", swiglu, x, gate, up.half())
    refused(DTypeError, "out_dtype", swiglu, x, gate, up, out_dtype=torch.float16)
    weight = quantize_nvfp4(gate)
    refused(DTypeError, "x", swiglu, x, weight, weight)
    rows, weights = quantize_fp8(x), quantize_fp8(gate)
    refused(DTypeError, "out_dtype", swiglu, rows, weights, weights, out_dtype=torch.float64)


def test_operands_that_do_not_match_are_named(refused):
    x, gate, up = made().values()
    known = r"^x is a torch\.Tensor and w_gate an Fp8Tensor; .*an Fp8Tensor with an Fp8Tensor"
    refused(ArgumentError, known, swiglu, x, quantize_fp8(gate))
    refused(ArgumentError, "w_up", swiglu, x.half(), quantize_nvfp4(gate), up)
    refused(ArgumentError, "w_gate", swiglu, x, [1, 2])
    refused(DeviceError, "w_up", swiglu, x, gate, up.to("meta"))
    refused(UnknownVariant, "'fast'", swiglu, x, gate, up, variant="fast")


@pytest.mark.parametrize(("columns", "inner", "said"), [(16, 24, "^x has .*K that"), (24, 32, "^w_gate has .*N that")])
def test_sizes_unsupported_by_float8_units_are_named(columns, inner, said, refused):
    x, weight = quantize_fp8(torch.randn(4, inner)), quantize_fp8(torch.randn(columns, inner))
    refused(ShapeError, said, swiglu, x, weight, weight)


def test_gradients_through_quantized_operands_are_refused_rather_than_lost(refused):
    given = made(dtype="float16", format="nvfp4_weights")
    given["x"].requires_grad_()
    refused(ArgumentError, "no_grad", SWIGLU, **given)
    with torch.no_grad():
        assert SWIGLU(**given).shape == (6, 16)


def test_gradients_of_scales_are_refused_as_well(refused):
    weight = quantize_fp8(torch.randn(16, 32))
    asking = Fp8Tensor(weight.values, weight.scale.clone().requires_grad_())
    refused(ArgumentError, "w_up", swiglu, quantize_fp8(torch.randn(4, 32)), weight, asking)


@pytest.mark.parametrize("variant", SWIGLU.variants)
def test_no_variant_trains_quantized_operands(variant):
    query = SWIGLU.query(SWIGLU.case("bfloat16", M=4, N=16, K=32, format="fp8", stacked=True), "cpu", grad=True)
    assert SWIGLU.get(variant).why_not(query)


def test_stacked_weights_with_swizzled_scales_split_at_atoms(refused):
    x = quantize_nvfp4(torch.randn(4, 64), swizzled=True)
    refused(ShapeError, "w_gate", swiglu, x, quantize_nvfp4(torch.randn(64, 64), swizzled=True))
    both = quantize_nvfp4(torch.randn(256, 64))
    assert torch.equal(swiglu(x, both.swizzle()), swiglu(x, both.rows(0, 128), both.rows(128, 256)))


def test_errors_name_operands_as_the_caller_does(refused):
    given = made(dtype="float16", format="nvfp4")
    a, b1, b2 = (given[name].codes for name in ("x", "w_gate", "w_up"))
    sfa, sfb1, sfb2 = (given[name].scales for name in ("x", "w_gate", "w_up"))
    dual = dual_gemm_nvfp4
    refused(ShapeError, "sfb1", dual, a, b1, b2, sfa, sfb1[:, :1], sfb2)
    refused(DTypeError, "sfa", dual, a, b1, b2, sfa.float(), sfb1, sfb2)
    refused(ShapeError, "b2", dual, a, b1, b2[:, :15], sfa, sfb1, sfb2)
    refused(ShapeError, "sfa", dual, a, b1, b2, sfa, sfb1, sfb2, swizzled=True)
    refused(ShapeError, "b1", dual, a[:, :8], b1, b2, sfa[:, :1], sfb1, sfb2)
    refused(ShapeError, "b2", dual, a, b1, b2[:8], sfa, sfb1, sfb2[:8])
    refused(ArgumentError, "b2_global", dual, a, b1, b2, sfa, sfb1, sfb2, b2_global=2.0)
    x, w = quantize_fp8(torch.randn(4, 32)), quantize_fp8(torch.randn(16, 32))
    values = (x.values, w.values, w.values)
    refused(ShapeError, "gate_scale", swiglu_fp8, *values, x.scale, torch.ones(5), w.scale)
    refused(ArgumentError, "up_scale", swiglu_fp8, *values, x.scale, w.scale)


def test_a_case_of_an_unknown_format_lists_the_known_ones(refused):
    case = SWIGLU.case("float16", M=1, N=1, K=1, format="int4")
    refused(ArgumentError, "'int4'", SWIGLU.query, case, "cpu")
    assert isinstance(made(format="fp8")["x"], Fp8Tensor)
    assert isinstance(made(format="nvfp4")["x"], NVFP4Tensor)


@pytest.mark.parametrize(
    ("error", "said", "chosen"),
    [
        (ShapeError, "x", {"format": "fp8", "K": 24}),
        (ShapeError, "w_gate", {"format": "fp8", "N": 24}),
        (ShapeError, "w_gate", {"format": "nvfp4_weights", "K": 24}),
        (ShapeError, "w_gate", {"format": "nvfp4", "stacked": True, "swizzled_scales": True}),
        (DTypeError, "x", {"format": "nvfp4_weights", "dtype": "float32"}),
    ],
)
def test_a_case_is_refused_like_its_call(error, said, chosen, refused):
    case = SWIGLU.case(**{"dtype": "float16", "M": 4, "N": 16, "K": 32, **chosen})
    refused(error, said, SWIGLU.query, case, "cpu")


def test_functions_for_quantized_weights_refuse_other_formats(refused):
    given = made(dtype="bfloat16")
    refused(ArgumentError, "w_gate", swiglu_nvfp4, **given)
    weight = quantize_nvfp4(torch.randn(16, 32))
    refused(ArgumentError, "x", swiglu_nvfp4, quantize_nvfp4(torch.randn(4, 32)), weight, weight)
    with torch.autocast("cpu", torch.bfloat16):
        assert swiglu_nvfp4(torch.randn(4, 32), weight, weight).dtype == torch.bfloat16


def test_float64_parts_are_accepted_only_by_the_oracle(refused):
    weight = quantize_fp8(torch.randn(16, 32))
    refused(
        DTypeError,
        "w_gate",
        swiglu,
        quantize_fp8(torch.randn(4, 32)),
        Fp8Tensor(weight.values, weight.scale.double()),
    )
    four = quantize_nvfp4(torch.randn(16, 32)).map(lambda part: part.double() if part.is_floating_point() else part)
    refused(DTypeError, "w_gate", swiglu, torch.randn(4, 32).half(), four)


def test_a_case_and_its_call_have_the_same_query():
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


@pytest.mark.parametrize("form", ["dense", "fp8", "nvfp4_weights"])
def test_constant_weights_are_a_flag_of_the_query_and_change_no_other_fact(form):
    """Times were measured with them at few rows, so the dispatcher must be able to tell such calls from others."""
    case, other = (SWIGLU.case("bfloat16", M=3, N=32, K=64, format=form, constant_weights=each) for each in (True, False))
    arguments = SWIGLU.make_inputs(case, torch.device("cpu"), 0).arguments
    query, without = SWIGLU.query(case, "cpu"), SWIGLU.query(other, "cpu")
    assert SWIGLU.bind(**arguments).query() == query == without._replace(flags=(*without.flags, "constant_weights"))


@pytest.mark.parametrize("word", [1, None, "yes", torch.ones((), dtype=torch.bool)])
def test_constant_weights_must_be_a_bool(word, prose):
    x, w_gate = torch.randn(3, 64), torch.randn(32, 64)
    with prose.raises(ArgumentError, match="constant_weights"):
        swiglu(x, w_gate, constant_weights=word)


@pytest.mark.parametrize("promised", [True, False])
def test_every_function_passes_on_that_weights_are_constant(promised, monkeypatch):
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
