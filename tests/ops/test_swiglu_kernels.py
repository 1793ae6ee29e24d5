"""Tests of the Triton kernels of ``swiglu``: results, gradients, exact decoding, layouts, and calls that they refuse.

``assert_near`` bounds the norm of each error, relative to that of the expected values. ``made()`` makes float32 arguments with
M = 6 rows of x, N = 16 columns of the result and K = 32, unless others are given.

``prose(text)`` compares a test's texts, in the order of its calls, with its entries in tests/snapshots/prose.txt. A test fails
if it does not compare one of its entries, and ``tests/test_prose.py`` if the test or the parameter of an entry is gone.
``judge`` applies the whole verification gate of the workbench, and ``assert_ok`` requires its verdict to be right.

``device`` is the first GPU, or the CPU. ``BOTH`` are the directions: forward, and forward with gradients. ``triton_variants`` are
the variants with kernels of our own for any GPU. ``assert_one_call_correct`` checks the errors of one call, and that it writes
all elements. ``CASES`` are the probes of ``swiglu``, by name. ``DENSE`` are the cases with plain operands. ``QUANTIZED`` are the
cases with quantized operands. ``LARGE`` are cases with more rows. ``case_of`` returns a case by its name. A test marked
``interpret`` runs in Triton's interpreter, with TRITON_INTERPRET=1. ``thorough_but`` marks all parameters but the named ones
``thorough``: they do not run in ``make test``.
"""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import library
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from onelaunch.ops import (
    Fp8Tensor,
    NVFP4Tensor,
    quantize_fp8,
    quantize_nvfp4,
    swiglu,
)
from tests.ops.cases import (
    BOTH,
    assert_near,
    assert_ok,
    assert_one_call_correct,
    judge,
    triton_variants,
)
from tests.ops.swiglu_cases import CASES, DENSE, LARGE, QUANTIZED, SWIGLU, case_of, made
from tests.thorough import thorough_but

RUNS = {"three_node": (False, True), "wide": (True,), "two_node": (False, True), "fused": (False, True)}
"""Variants with kernels of our own, and the values of ``stacked`` that they take: both weights in one matrix, or not.

"three_node" and "wide" multiply by PyTorch, by two products or one, and have a kernel for the gate. "two_node" has a kernel for
the second product and the gate; "fused" has one for everything.
"""

FORMS = [(name, stacked) for name, forms in RUNS.items() for stacked in forms]

each_own = pytest.mark.parametrize(("variant", "stacked"), FORMS)

TAKEN = [*DENSE, "fp8", "fp8_rows_bfloat16"]
"""Names of cases that PyTorch's matrix products support."""

INTERPRETED = ["one_of_everything", "odd_sizes", "float32", "fp8", "fp8_rows_bfloat16"]
"""Names of the cases in :data:`TAKEN` that the interpreter computes correctly, whichever function multiplies."""


def stacked_case(name: str, stacked: bool):
    """Return a case with separate or stacked weights. Swizzled scales are split at whole atoms."""
    chosen = {**(CASES | LARGE)[name], "stacked": stacked}
    if stacked and chosen.get("swizzled_scales"):
        chosen["N"] = 128
    return SWIGLU.case(name=name, **chosen)


def runs(fused_cases: list[str], other_cases: list[str]):
    """Parametrize ``variant``, ``stacked`` and ``name``: the first cases for "fused", the others for each other variant."""
    cells = [(*form, name) for form in FORMS for name in (fused_cases if form[0] == "fused" else other_cases)]
    return pytest.mark.parametrize(("variant", "stacked", "name"), cells)


@pytest.mark.interpret
@runs([*INTERPRETED, *(name for name, chosen in QUANTIZED.items() if name not in INTERPRETED)], INTERPRETED)
def test_results_and_gradients_are_correct(variant, stacked, name):
    case = stacked_case(name, stacked)
    if CASES[name].get("format") == "nvfp4_weights":  # the interpreter's bfloat16 products are wrong
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
def test_gradients_of_a_subset_of_the_operands(variant, asking):
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
    """Each row holds one number, multiplied by a gate of 64."""
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    x = torch.zeros(256, 32).to(torch.float8_e4m3fn)
    x[:, 0], x[:, 1] = every, torch.ones(()).to(torch.float8_e4m3fn)
    gate, up = torch.zeros(2, 16, 32)
    gate[:, 1], up[:, 0] = 64.0, 1.0
    given = [Fp8Tensor(each.to(torch.float8_e4m3fn), torch.ones(())) for each in (x, gate, up)]
    h = swiglu(*given, out_dtype=out_dtype, variant="fused")
    expected = 64.0 * every.float()[:, None].expand(256, 16)  # silu(64) is 64
    # bitwise; the two NaN among them are equal to nothing
    assert torch.allclose(h.float(), expected, rtol=0.0, atol=0.0, equal_nan=True)


@pytest.mark.interpret
@pytest.mark.parametrize("form", ["nvfp4", "nvfp4_weights"])
def test_every_code_times_every_scale_is_decoded_exactly(form):
    """NaN and zeros of either sign are included. Column n of up has scale n, and row m of x selects its channel m.

    The product with the gate, 192, is x (4) times the code 7 (6) times its scale (8).
    """
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
def test_16_bit_rows_of_any_strides_with_nvfp4_weights():
    """Rows are read as 32-bit words of two channels, which odd strides and offsets do not allow."""
    given = made(M=5, dtype="float16", format="nvfp4_weights")
    expected = SWIGLU(**given, variant="fused")
    for room in ((0, 3), (1, 1), (3, 2)):
        padded = F.pad(given["x"], room)[:, room[0] : room[0] + 32]
        assert torch.equal(SWIGLU(**{**given, "x": padded}, variant="fused"), expected)
        assert torch.equal(SWIGLU(**{**given, "x": padded[1:2]}, variant="fused"), expected[1:2])


@pytest.mark.interpret
def test_scales_swizzled_in_only_some_operands():
    given = made(M=5, dtype="float16", format="nvfp4")
    expected = SWIGLU(**given, variant="fused")
    for name in given.keys() - {"out_dtype"}:
        assert torch.equal(SWIGLU(**{**given, name: given[name].swizzle()}, variant="fused"), expected), name


@pytest.mark.interpret
@pytest.mark.parametrize("per_row", ["x", "gate", "up"])
@pytest.mark.parametrize("variant", ["two_node", "fused"])
def test_row_scales_combined_with_one_tensor_scale(variant, per_row):
    matrices = {"x": torch.randn(6, 32), "gate": torch.randn(16, 32), "up": torch.randn(16, 32)}
    given = [quantize_fp8(matrix, per_row=name == per_row) for name, matrix in matrices.items()]
    expected = swiglu(*given, out_dtype=torch.bfloat16)
    # tolerance: two roundings to bfloat16 more or less
    assert_near({"h": swiglu(*given, variant=variant)}, {"h": expected}, 2**-7)


@pytest.mark.interpret
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("kernel", ["two_node", "fused"])
def test_the_operator_passes_opcheck(kernel, keep, stacked):
    given = made(grad=keep, M=3, stacked=stacked)
    weights = (given["w_gate"], given.get("w_up"))
    forward = torch.ops.onelaunch.swiglu_forward.default  # the six arguments after the weights are scales
    utilities = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    library.opcheck(
        forward, (given["x"], *weights, *(None,) * 6, torch.float32, False, keep, False, kernel), test_utils=utilities
    )


@pytest.mark.interpret
@pytest.mark.parametrize("variant", ["two_node", "fused"])
def test_one_graph_supports_other_numbers_of_rows(variant):
    rest = (*(None,) * 6, torch.float32, False, True, False, variant)

    def forward(x, gate, up):
        return torch.ops.onelaunch.swiglu_forward(x, gate, up, *rest)

    def backward(dh, products):
        return torch.ops.onelaunch.swiglu_gate_backward(dh, products, None)

    weights = torch.randn(2, 40, 32)
    traced = make_fx(forward, tracing_mode="symbolic")(torch.randn(5, 32), *weights)
    x = torch.randn(9, 32)
    h, products = traced(x, *weights)
    for found, expected in zip((h, products), forward(x, *weights), strict=True):
        assert torch.equal(found, expected)
    traced = make_fx(backward, tracing_mode="symbolic")(torch.randn(5, 40), torch.randn(5, 80))
    assert torch.equal(traced(h, products), backward(h, products))


@pytest.mark.parametrize("variant", ["two_node", "fused", "persistent", "stream_k", "small_m"])
@pytest.mark.parametrize("keep", [False, True])
def test_results_on_the_meta_device_have_their_shapes(variant, keep):
    x, gate, up = (torch.empty(rows, 32, dtype=torch.float16, device="meta") for rows in (5, 40, 40))
    rest = (*(None,) * 6, torch.float16, False, keep, False, variant)
    h, products = torch.ops.onelaunch.swiglu_forward(x, gate, up, *rest)
    assert (h.shape, h.dtype, h.device.type) == ((5, 40), torch.float16, "meta")
    assert products.shape == ((5, 80) if keep else (0,))


@pytest.mark.interpret
@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "name"),
    thorough_but(
        ("two_node", "fp8"),
        ("fused", "odd_sizes"),
        of=[
            ("two_node", "odd_sizes"),
            ("two_node", "fp8"),
            ("fused", "odd_sizes"),
            ("fused", "fp8"),
            ("fused", "nvfp4_swizzled"),
        ],
    ),
)
def test_the_operator_compiles_without_graph_breaks(variant, name):
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
def test_rows_longer_than_one_ctas_block():
    case = SWIGLU.case("float16", M=2, N=2500, K=8, stacked=True)
    assert_one_call_correct(SWIGLU, case, "wide")


@pytest.mark.interpret
def test_kernels_take_products_of_any_strides():
    from onelaunch.ops.swiglu import launch

    gate, up, dh = (torch.randn(40, 12).T for _ in range(3))
    # Tolerance here and below: the sigmoid has another formula, with a few more roundings of numbers of unit size.
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
    ("variant", "changes"),
    [
        ("wide", {}),
        ("three_node", {"format": "nvfp4"}),
        ("three_node", {"format": "nvfp4_weights"}),
        ("three_node", {"format": "fp8", "dtype": "float16"}),
        ("three_node", {"format": "fp8", "dtype": "float32", "row_scales": True}),
        ("three_node", {"M": 0}),
        ("two_node", {"format": "nvfp4_weights", "dtype": "float16"}),
        ("two_node", {"format": "fp8", "dtype": "float16"}),
        ("two_node", {}),
        ("fused", {}),
        ("fused", {"format": "nvfp4_weights"}),
        ("fused", {"dtype": "float16", "M": 0}),
        ("fused", {"dtype": "float16", "M": 2**30}),
    ],
)
def test_unsupported_calls_are_refused_with_the_reason(variant, changes, prose):
    case = SWIGLU.case(**{"dtype": "bfloat16", "M": 4, "N": 16, "K": 32, **changes})
    prose(SWIGLU.get(variant).why_not(SWIGLU.query(case, "cpu")))


def test_every_variant_with_portable_kernels_is_tested():
    assert list(RUNS) == triton_variants(SWIGLU)
