"""``swiglu`` and its names for few bits: results, gradients, shapes, what PyTorch does with it, and what it refuses."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import library
from torch.nn import functional as F

from onelaunch.errors import (
    ArgumentError,
    DeviceError,
    DTypeError,
    OneLaunchError,
    ShapeError,
    UnknownVariant,
)
from onelaunch.operation import find_operation
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
from onelaunch.workbench.calls import Callee
from onelaunch.workbench.verify import judge_control, trivial_answers
from tests.ops.cases import (
    BOTH,
    assert_correct,
    assert_near,
    assert_ok,
    assert_one_call_correct,
    judge,
    pytorch_variants,
    triton_variants,
)

SWIGLU = find_operation("swiglu")

DENSE: dict[str, dict[str, Any]] = {
    "one_row": {"dtype": "bfloat16", "M": 1, "N": 48, "K": 64},
    "one_of_everything": {"dtype": "float32", "M": 1, "N": 1, "K": 1},
    "odd_sizes": {"dtype": "float16", "M": 37, "N": 19, "K": 101},
    "float32": {"dtype": "float32", "M": 70, "N": 33, "K": 130},
    "stacked": {"dtype": "bfloat16", "M": 65, "N": 24, "K": 72, "stacked": True},
    "long_sums": {"dtype": "bfloat16", "M": 4, "N": 8, "K": 4096},
}
QUANTIZED: dict[str, dict[str, Any]] = {
    "fp8": {"dtype": "bfloat16", "M": 20, "N": 48, "K": 64, "format": "fp8"},
    "fp8_rows": {"dtype": "float16", "M": 33, "N": 16, "K": 80, "format": "fp8", "row_scales": True},
    "fp8_rows_bfloat16": {"dtype": "bfloat16", "M": 33, "N": 16, "K": 80, "format": "fp8", "row_scales": True},
    "fp8_stacked_to_float32": {
        "dtype": "float32", "M": 3, "N": 32, "K": 48, "format": "fp8", "stacked": True, "row_scales": True,
    },
    "nvfp4_weights": {"dtype": "bfloat16", "M": 17, "N": 40, "K": 128, "format": "nvfp4_weights"},
    "nvfp4_weights_float16": {"dtype": "float16", "M": 1, "N": 40, "K": 64, "format": "nvfp4_weights", "stacked": True},
    "every_code_in_weights": {"dtype": "bfloat16", "M": 9, "N": 64, "K": 256, "format": "nvfp4_weights", "codes": "full"},
    "nvfp4": {"dtype": "float16", "M": 20, "N": 48, "K": 96, "format": "nvfp4"},
    "nvfp4_swizzled": {"dtype": "float16", "M": 130, "N": 24, "K": 80, "format": "nvfp4", "swizzled_scales": True},
    "every_code": {"dtype": "float16", "M": 40, "N": 64, "K": 256, "format": "nvfp4", "codes": "full", "swizzled_scales": True},
    "nvfp4_to_float32": {"dtype": "float32", "M": 5, "N": 16, "K": 512, "format": "nvfp4"},
}  # fmt: skip
CASES = DENSE | QUANTIZED

LARGE: dict[str, dict[str, Any]] = {
    "many_rows": {"dtype": "bfloat16", "M": 500, "N": 1000, "K": 1032},
    "many_rows_float16": {"dtype": "float16", "M": 384, "N": 512, "K": 1024, "stacked": True},
    "many_rows_float32": {"dtype": "float32", "M": 300, "N": 200, "K": 500},
    "many_rows_fp8": {"dtype": "bfloat16", "M": 500, "N": 1008, "K": 1040, "format": "fp8"},
    "many_rows_nvfp4_weights": {"dtype": "bfloat16", "M": 200, "N": 1000, "K": 1040, "format": "nvfp4_weights"},
    "many_rows_nvfp4": {"dtype": "float16", "M": 200, "N": 1000, "K": 1040, "format": "nvfp4", "swizzled_scales": True},
}
"""Tiles of every size on a GPU."""

each_variant = pytest.mark.parametrize("variant", pytorch_variants(SWIGLU))


def case_of(name: str):
    return SWIGLU.case(name=name, **CASES[name])


def made(grad: bool = False, **given: Any) -> dict[str, Any]:
    chosen = {"dtype": "float32", "M": 6, "N": 16, "K": 32, **given}
    reading = SWIGLU.make_inputs(SWIGLU.case(**chosen), torch.device("cpu"), 0)
    for name in reading.differentiable if grad else ():
        reading.arguments[name].requires_grad_()
    return reading.arguments


# Right answers


@each_variant
@pytest.mark.parametrize("name", DENSE)
def test_results_and_gradients_of_plain_tensors(name, variant):
    assert_correct(SWIGLU, case_of(name), variant)


@each_variant
@pytest.mark.parametrize("name", QUANTIZED)
def test_results_of_quantized_operands(name, variant):
    case = case_of(name)
    assert_ok(judge(SWIGLU, case, variant=variant), SWIGLU, case, variant)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["stacked", "fp8_rows", "every_code_in_weights", "nvfp4_swizzled"])
def test_the_compiled_variant(name):
    case = case_of(name)
    if reason := SWIGLU.get("compiled").why_not(SWIGLU.query(case, "cpu")):
        pytest.skip(reason)
    assert_ok(judge(SWIGLU, case, variant="compiled"), SWIGLU, case, "compiled")


@pytest.mark.parametrize("name", CASES)
def test_no_thoughtless_answer_passes(name):
    from onelaunch.workbench.verify import Judge

    case = case_of(name)
    if name != "one_of_everything":  # shifted by one, it is itself
        assert not trivial_answers(Judge().truth(SWIGLU, case))


def test_the_wide_product_alone_is_right():
    case = case_of("stacked")
    assert judge_control(SWIGLU, case, "wide_gemm_alone").ok


def test_the_definition():
    given = made(M=5, N=16, K=48)
    x, w_gate, w_up = given.values()
    expected = F.silu(x @ w_gate.T) * (x @ w_up.T)
    assert torch.allclose(swiglu(x, w_gate, w_up), expected)
    assert torch.allclose(swiglu(x, torch.cat([w_gate, w_up])), expected)


def test_gradients_are_those_of_the_definition():
    given = {name: value.double().float().requires_grad_() for name, value in made().items()}
    (swiglu(**given) * torch.arange(16.0)).sum().backward()
    found = [value.grad for value in given.values()]
    again = {name: value.detach().double().requires_grad_() for name, value in given.items()}
    x, w_gate, w_up = again.values()
    (F.silu(x @ w_gate.T) * (x @ w_up.T) * torch.arange(16.0)).sum().backward()
    for one, other in zip(found, again.values(), strict=True):  # sums of 32 products in float32, some of which cancel
        assert torch.allclose(one.double(), other.grad, rtol=1e-4, atol=1e-5)


# Our kernels


RUNS = {"three_node": (False, True), "wide": (True,), "two_node": (False, True), "fused": (False, True)}
"""Our own kernels, with separate and with stacked weights."""

FORMS = [(name, stacked) for name, forms in RUNS.items() for stacked in forms]

each_own = pytest.mark.parametrize(("variant", "stacked"), FORMS)

TAKEN = [*DENSE, "fp8", "fp8_rows_bfloat16"]
"""Cases that PyTorch's products take."""

INTERPRETED = ["one_of_everything", "odd_sizes", "float32", "fp8", "fp8_rows_bfloat16"]
"""Of these, those that the interpreter computes rightly, whatever multiplies."""


def stacked_case(name: str, stacked: bool):
    """A case with separate or with stacked weights; swizzled scales part between whole atoms."""
    chosen = {**(CASES | LARGE)[name], "stacked": stacked}
    if stacked and chosen.get("swizzled_scales"):
        chosen["N"] = 128
    return SWIGLU.case(name=name, **chosen)


def runs(fused_cases: list[str], other_cases: list[str]):
    """Variant, stacked, name: every case with the variants that take it."""
    cells = [(*form, name) for form in FORMS for name in (fused_cases if form[0] == "fused" else other_cases)]
    return pytest.mark.parametrize(("variant", "stacked", "name"), cells)


@pytest.mark.interpret
@runs([*INTERPRETED, *(name for name, chosen in QUANTIZED.items() if name not in INTERPRETED)], INTERPRETED)
def test_kernels_give_right_results_and_gradients(variant, stacked, name):
    case = stacked_case(name, stacked)
    if CASES[name].get("format") == "nvfp4_weights":  # the interpreter's products of bfloat16 are wrong
        case = dataclasses.replace(case, dtype=torch.float16)
    assert_one_call_correct(SWIGLU, case, variant, "forward_backward" if name in DENSE else "forward")


@pytest.mark.interpret
@pytest.mark.parametrize(("variant", "stacked"), [form for form in FORMS if form[0] in ("three_node", "wide")])
def test_the_gate_in_bfloat16(variant, stacked):
    assert_one_call_correct(SWIGLU, stacked_case("one_row", stacked), variant)


@pytest.mark.interpret
@pytest.mark.parametrize("variant", ["two_node", "fused"])
@pytest.mark.parametrize(
    "sizes",
    [{"M": 1, "N": 48, "K": 64}, {"M": 4, "N": 8, "K": 4096}, {"M": 260, "N": 72, "K": 40}],
    ids=["one_row", "long_sums", "many_tiles"],
)
def test_products_of_other_sizes(variant, sizes):
    assert_one_call_correct(SWIGLU, SWIGLU.case("float16", **sizes), variant)


@pytest.mark.interpret
@pytest.mark.parametrize("asking", [("x",), ("w_gate",), ("w_up",), ("x", "w_up")])
@pytest.mark.parametrize("variant", ["two_node", "fused"])
def test_gradients_of_some_of_the_operands(variant, asking):
    given = made()
    found, expected = {}, {}
    for chosen, gradients in ((variant, found), ("eager", expected)):
        leaves = {name: given[name].clone().requires_grad_(name in asking) for name in given}
        SWIGLU(**leaves, variant=chosen).square().sum().backward()
        gradients |= {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    assert_near(found, expected, 1e-5)


@pytest.mark.interpret
@pytest.mark.parametrize("out_dtype", [torch.float16, torch.float32])
def test_every_float8_number_is_decoded_exactly(out_dtype):
    """A row for each number, behind a gate of 64."""
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    x = torch.zeros(256, 32).to(torch.float8_e4m3fn)
    x[:, 0], x[:, 1] = every, torch.ones(()).to(torch.float8_e4m3fn)
    gate, up = torch.zeros(2, 16, 32)
    gate[:, 1], up[:, 0] = 64.0, 1.0
    given = [Fp8Tensor(each.to(torch.float8_e4m3fn), torch.ones(())) for each in (x, gate, up)]
    h = swiglu(*given, out_dtype=out_dtype, variant="fused")
    expected = 64.0 * every.float()[:, None].expand(256, 16)  # silu(64) is 64
    assert torch.allclose(h.float(), expected, rtol=0.0, atol=0.0, equal_nan=True)


@pytest.mark.interpret
@pytest.mark.parametrize("form", ["nvfp4", "nvfp4_weights"])
def test_every_code_times_every_scale_is_decoded_exactly(form):
    """NaN and zeros of either sign included: column n of up has scale n, and row m of x picks its channel m."""
    bytes_ = torch.arange(256, dtype=torch.uint8)
    codes = (torch.arange(8) * 2 + (torch.arange(8) * 2 + 1) * 16).to(torch.uint8)  # 0 to 15
    up = NVFP4Tensor(codes.expand(256, 8), bytes_[:, None].view(torch.float8_e4m3fn))
    gate = NVFP4Tensor(torch.full((256, 8), 0x77, dtype=torch.uint8), torch.full((256, 1), 8.0).to(torch.float8_e4m3fn))
    rows = quantize_nvfp4(torch.eye(16) * 4.0, global_scale=1.0) if form == "nvfp4" else 4.0 * torch.eye(16).half()
    options = {"out_dtype": torch.float32} if form == "nvfp4" else {}
    assert torch.equal(rows.dequantize() if form == "nvfp4" else rows.float(), torch.eye(16) * 4.0)
    h = swiglu(rows, gate, up, variant="fused", **options)
    products = up.decode(torch.float32).T * 4.0  # [16, 256]
    expected = (192.0 * products).to(h.dtype)  # silu(192) is 192
    finite = bytes_ & 0x7F != 0x7F
    assert h[:, ~finite].isnan().all()
    assert torch.equal(h[:, finite], expected[:, finite])


@pytest.mark.interpret
@pytest.mark.parametrize("variant", ["two_node", "fused"])
def test_nan_stays_in_its_row_or_column(variant):
    given = made(M=20, N=40)
    given["x"][3, 5] = math.nan
    given["w_up"][7, 31] = math.nan
    h = SWIGLU(**given, variant=variant)
    assert h[3].isnan().all()
    assert h[:, 7].isnan().all()
    assert int(h.isnan().sum()) == 40 + 20 - 1


@pytest.mark.interpret
@pytest.mark.parametrize("variant", ["two_node", "fused"])
def test_operands_of_any_strides(variant):
    given = made(M=8, N=24)
    expected = SWIGLU(**given, variant=variant)
    wide = {name: F.pad(value, (3, 2))[:, 3:-2] for name, value in given.items()}
    turned = {name: value.T.contiguous().T for name, value in given.items()}
    for other in (wide, turned):
        assert torch.equal(SWIGLU(**other, variant=variant), expected)


@pytest.mark.interpret
def test_rows_in_16_bits_beside_nvfp4_of_any_strides():
    """They are read as words of two channels, which odd strides and offsets do not allow."""
    given = made(M=5, dtype="float16", format="nvfp4_weights")
    expected = SWIGLU(**given, variant="fused")
    for room in ((0, 3), (1, 1), (3, 2)):
        padded = F.pad(given["x"], room)[:, room[0] : room[0] + 32]
        assert torch.equal(SWIGLU(**{**given, "x": padded}, variant="fused"), expected)
        assert torch.equal(SWIGLU(**{**given, "x": padded[1:2]}, variant="fused"), expected[1:2])


@pytest.mark.interpret
def test_scales_that_are_swizzled_in_some_operands_alone():
    given = made(M=5, dtype="float16", format="nvfp4")
    expected = SWIGLU(**given, variant="fused")
    for name in given.keys() - {"out_dtype"}:
        assert torch.equal(SWIGLU(**{**given, name: given[name].swizzle()}, variant="fused"), expected), name


@pytest.mark.interpret
@pytest.mark.parametrize("variant", ["two_node", "fused"])
def test_scales_of_rows_beside_one_scale(variant):
    x, gate, up = torch.randn(6, 32), torch.randn(16, 32), torch.randn(16, 32)
    given = (quantize_fp8(x), quantize_fp8(gate, per_row=True), quantize_fp8(up))
    expected = swiglu(*given, out_dtype=torch.bfloat16)
    assert_near({"h": swiglu(*given, variant=variant)}, {"h": expected}, 2**-7)  # two roundings of bfloat16 more or less


@pytest.mark.interpret
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("kernel", ["two_node", "fused"])
def test_the_operator_keeps_pytorchs_rules(kernel, keep, stacked):
    given = made(grad=keep, M=3, stacked=stacked)
    weights = (given["w_gate"], given.get("w_up"))
    forward = torch.ops.onelaunch.swiglu_forward.default
    utilities = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    library.opcheck(forward, (given["x"], *weights, *(None,) * 6, torch.float32, False, keep, kernel), test_utils=utilities)


@pytest.mark.interpret
@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "name"),
    [("two_node", "odd_sizes"), ("two_node", "fp8"), ("fused", "odd_sizes"), ("fused", "fp8"), ("fused", "nvfp4_swizzled")],
)
def test_our_own_operator_compiles_without_a_break(variant, name):
    given = SWIGLU.make_inputs(case_of(name), torch.device("cpu"), 0).arguments
    leaves = [value.requires_grad_() for value in given.values() if name in DENSE]
    function = torch.compile(lambda **arguments: SWIGLU(**arguments, variant=variant), fullgraph=True, backend="aot_eager")
    found, expected = function(**given), SWIGLU(**given, variant=variant)
    assert torch.equal(found, expected)
    if leaves:
        for one, other in zip(torch.autograd.grad(found.sum(), leaves), torch.autograd.grad(expected.sum(), leaves), strict=True):
            assert torch.equal(one, other)


@pytest.mark.interpret
def test_float8_of_any_strides():
    given = made(dtype="bfloat16", format="fp8", stacked=True)
    turned = {name: Fp8Tensor(given[name].values.T.contiguous().T, given[name].scale) for name in ("x", "w_gate")}
    assert torch.equal(swiglu(**turned, variant="wide"), swiglu(given["x"], given["w_gate"], variant="wide"))


@pytest.mark.interpret
def test_rows_longer_than_a_program_takes():
    case = SWIGLU.case("float16", M=2, N=2500, K=8, stacked=True)
    assert_one_call_correct(SWIGLU, case, "wide")


@pytest.mark.interpret
def test_kernels_take_products_of_any_strides():
    from onelaunch.ops.swiglu import launch

    gate, up, dh = (torch.randn(40, 12).T for _ in range(3))
    # a sigmoid by another formula: a few roundings of numbers of unit size
    assert torch.allclose(launch.gate(gate, up), F.silu(gate) * up, atol=1e-6)
    leaves = [gate.clone().requires_grad_(), up.clone().requires_grad_()]
    expected = torch.autograd.grad(F.silu(leaves[0]) * leaves[1], leaves, dh)
    assert torch.allclose(launch.gate_backward(dh, gate, up), torch.cat(expected, 1), atol=1e-6)


@pytest.mark.gpu
@runs([*CASES, *LARGE], [*TAKEN, *(name for name in LARGE if "nvfp4" not in name)])
def test_kernels_on_a_gpu(variant, stacked, name, device):
    case = stacked_case(name, stacked)
    directions = BOTH if "format" not in case.options else BOTH[:1]
    assert_ok(judge(SWIGLU, case, variant=variant, device=device, directions=directions), SWIGLU, case, variant)


@pytest.mark.interpret
@pytest.mark.parametrize(
    ("variant", "changes", "reason"),
    [
        ("wide", {}, "needs stacked weights"),
        ("three_node", {"format": "nvfp4"}, "takes no NVFP4 operands"),
        ("three_node", {"format": "nvfp4_weights"}, "takes no NVFP4 operands"),
        ("three_node", {"format": "fp8", "dtype": "float16"}, "gives no float16 of float8"),
        ("three_node", {"format": "fp8", "dtype": "float32", "row_scales": True}, "gives bfloat16 alone"),
        ("three_node", {"M": 0}, "needs at least one element"),
        ("two_node", {"format": "nvfp4_weights", "dtype": "float16"}, "takes no NVFP4 operands"),
        ("two_node", {"format": "fp8", "dtype": "float16"}, "gives no float16 of float8"),
        ("two_node", {}, "needs a GPU for bfloat16"),
        ("fused", {}, "needs a GPU for bfloat16"),
        ("fused", {"format": "nvfp4_weights"}, "needs a GPU for bfloat16"),
        ("fused", {"dtype": "float16", "M": 0}, "needs at least one element"),
        ("fused", {"dtype": "float16", "M": 2**30}, "takes M, N and K below"),
    ],
)
def test_what_our_kernels_leave_to_others(variant, changes, reason):
    case = SWIGLU.case(**{"dtype": "bfloat16", "M": 4, "N": 16, "K": 32, **changes})
    assert reason in str(SWIGLU.get(variant).why_not(SWIGLU.query(case, "cpu")))


def test_every_own_variant_is_among_those_that_are_tested():
    assert list(RUNS) == triton_variants(SWIGLU)


# Shapes and layouts


@pytest.mark.parametrize("lead", [(0,), (2, 3), (2, 0, 4), (1, 2, 3, 4)])
def test_leading_dimensions_stay(lead):
    given = made()
    x = torch.randn(*lead, 32)
    h = swiglu(x, given["w_gate"], given["w_up"])
    assert h.shape == (*lead, 16)
    if h.numel():
        flat = swiglu(x.flatten(0, -2) if len(lead) > 1 else x, given["w_gate"], given["w_up"])
        assert torch.equal(h.flatten(0, -2) if len(lead) > 1 else h, flat)


def test_no_rows_are_an_empty_result_in_every_format():
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


def test_what_float16_cannot_hold_is_infinite_and_nan_stays():
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
    """A gate of -100000 closes; its product is beyond float16, what is left of it is not."""
    rows, weights = torch.full((2, 16), 250.0), torch.full((16, 16), 25.0)
    make = quantize_fp8 if form == "fp8" else quantize_nvfp4
    h = swiglu(make(rows), make(-weights), make(weights), out_dtype=torch.float16)
    assert h.isfinite().all()
    assert not h.any()


# Names for few bits


@pytest.mark.parametrize("row_scales", [False, True])
@pytest.mark.parametrize("stacked", [False, True])
def test_swiglu_fp8_is_swiglu_of_its_matrices(row_scales, stacked):
    given = made(dtype="bfloat16", format="fp8", row_scales=row_scales, stacked=stacked)
    x, gate, up = given["x"], given["w_gate"], given.get("w_up")
    parts = (x.values, gate.values, None if up is None else up.values)
    scales = (x.scale, gate.scale, None if up is None else up.scale)
    assert torch.equal(swiglu_fp8(*parts, *scales), SWIGLU(**given))
    assert swiglu_fp8(*parts, *scales, out_dtype=torch.float32).dtype == torch.float32


def test_swiglu_nvfp4_is_swiglu_of_its_matrices():
    given = made(dtype="float16", format="nvfp4_weights")
    assert torch.equal(swiglu_nvfp4(**given), SWIGLU(**given))
    assert swiglu_nvfp4(given["x"][None], given["w_gate"], given["w_up"]).shape == (1, 6, 16)


@pytest.mark.parametrize("swizzled", [False, True])
def test_dual_gemm_nvfp4_is_swiglu_of_its_matrices(swizzled):
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
    assert torch.allclose(alone.double(), expected, rtol=1e-5)  # sums of 32 exact products in float32


def test_the_query_of_a_case_is_that_of_its_call():
    for name in CASES:
        case = case_of(name)
        given = SWIGLU.make_inputs(case, torch.device("cpu"), 0).arguments
        assert SWIGLU.bind(**given).query() == SWIGLU.query(case, "cpu"), name


# PyTorch


def test_autocast_lowers_plain_tensors():
    given = made(grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        h = swiglu(**given)
    assert h.dtype == torch.bfloat16
    h.float().sum().backward()
    assert all(value.grad.dtype == torch.float32 for value in given.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["odd_sizes", "stacked", "fp8_rows", "nvfp4_weights", "nvfp4_swizzled"])
def test_it_compiles_without_a_break(name):
    given = SWIGLU.make_inputs(case_of(name), torch.device("cpu"), 0).arguments
    function = torch.compile(lambda **arguments: SWIGLU(**arguments), fullgraph=True, backend="aot_eager")
    assert torch.equal(function(**given), SWIGLU(**given))


def test_the_workbench_sees_every_tensor_of_a_quantized_operand():
    from onelaunch.workbench.calls import make_inputs

    inputs = make_inputs(SWIGLU, case_of("nvfp4"), torch.device("cpu"), 0, "forward")
    names = [name for name, _ in inputs.named_tensors()]
    assert names == [f"{one}.{part}" for one in ("x", "w_gate", "w_up") for part in ("codes", "scales", "global_scale")]
    other = make_inputs(SWIGLU, case_of("nvfp4"), torch.device("cpu"), 1, "forward")
    other.load(inputs)
    callee = Callee.variant(SWIGLU, "eager")
    assert torch.equal(callee(other)["h"], callee(inputs)["h"])


# Refusals


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


# Cost


def test_the_least_bytes_and_products():
    dense = SWIGLU.case("bfloat16", M=512, N=4096, K=7168)
    assert SWIGLU.cost(dense).flops == 4 * 512 * 4096 * 7168
    assert SWIGLU.cost(dense).bytes == 2 * (512 * 7168 + 2 * 4096 * 7168 + 512 * 4096)
    four = SWIGLU.case("bfloat16", M=512, N=4096, K=7168, format="nvfp4_weights")
    saved = SWIGLU.cost(dense).bytes - SWIGLU.cost(four).bytes
    assert saved == 2 * 4096 * 7168 * 2 - 2 * (4096 * 7168 * 9 // 16 + 4)
    both = SWIGLU.case("float16", M=512, N=4096, K=7168, format="nvfp4")
    assert SWIGLU.cost(both).bytes == (512 + 2 * 4096) * 7168 * 9 // 16 + 3 * 4 + 2 * 512 * 4096


def test_variants_add_what_their_launches_hand_on():
    case = SWIGLU.case("bfloat16", M=512, N=4096, K=7168)
    result, x = 2 * 512 * 4096, 2 * 512 * 7168
    added = {"eager": 4 * result + x, "three_node": 4 * result + x, "wide": 4 * result, "two_node": 2 * result + x, "fused": 0}
    for name, bytes_ in added.items():
        assert SWIGLU.cost(case, SWIGLU.get(name)).bytes == SWIGLU.cost(case).bytes + bytes_, name
    launches = {name: (variant.launches, variant.tags.get("backward_launches")) for name, variant in SWIGLU.variants.items()}
    own = {"three_node": (3, 6), "wide": (2, 3), "two_node": (2, 4), "fused": (1, 4), "block_scaled": (1, None)}
    own |= dict.fromkeys(("persistent", "stream_k", "small_m"), (1, 4))
    assert {name: counts for name, counts in launches.items() if counts[0]} == own
    for variant in SWIGLU.variants.values():
        for direction in ("forward", "forward_backward"):
            assert SWIGLU.cost(case, variant, direction).bytes >= SWIGLU.cost(case, None, direction).bytes
