"""Tests of ``swiglu`` in one launch on Hopper GPUs: refused calls, order of preference, WGMMA's header, and results on a GPU.

"persistent" gives whole tiles to CTAs. "stream_k" and, for few rows, "small_m" give each CTA a run of k-blocks (steps along K
of all tiles), which may begin and end within tiles; or two CTAs of a cluster divide the k-blocks of a tile.

``prose(text)`` compares a test's texts, in the order of its calls, with its entries in tests/snapshots/prose.txt. A test fails
if it does not compare one of its entries, and ``tests/test_prose.py`` if the test or the parameter of an entry is gone.

``judge`` applies the whole verification gate of the workbench, and ``assert_ok`` requires its verdict to be right.

``device`` is the first GPU, or the CPU. ``BOTH`` are the directions: forward, and forward with gradients.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from onelaunch.device.hardware import processors
from onelaunch.kernels.gemm_sm90.wgmma import wgmma_header
from onelaunch.operation import Query, find_operation
from onelaunch.ops import NVFP4Tensor, quantize_fp8, swiglu
from onelaunch.ops.swiglu.variants import hopper
from tests.ops.cases import BOTH, assert_ok, assert_same_bits_beside_other_work_and_in_graphs, judge

pytest.importorskip("triton")

from onelaunch.ops.swiglu import configure_hopper, launch_hopper
from onelaunch.ops.swiglu.configure_hopper import Formats, configuration

SWIGLU = find_operation("swiglu")
VARIANTS = ("persistent", "stream_k", "small_m")

each_variant = pytest.mark.parametrize("variant", VARIANTS)


def test_every_variant_for_hopper_is_tested_here():
    assert list(VARIANTS) == [
        name for name, variant in SWIGLU.variants.items() if variant.capabilities.architectures == ("sm_90a",)
    ]


# Calls that are refused


def query(M=4, N=64, K=512, dtype=torch.bfloat16, grad=False, flags=()):
    """Return the dispatch key of a call on a GPU; ``flags`` name the operands' format and layout."""
    return Query("swiglu", "cuda:0", dtype, (M, N, K), grad, tuple(flags))


@pytest.mark.parametrize(
    "given",
    [
        {"N": 20},
        {"K": 100},
        {"K": 24, "flags": ["fp8"]},
        {"K": 96, "flags": ["nvfp4_weights"]},
        {"flags": ["nvfp4"]},
        {"flags": ["nvfp4_weights", "swizzled_scales"]},
        {"dtype": torch.float32},
        {"dtype": torch.float32, "flags": ["fp8"]},
        {"M": 0},
        {"M": 2**20, "N": 2**20, "K": 2**10},
        {"M": 2**31 - 1, "N": 8, "K": 8},
    ],
)
def test_unsupported_calls_are_refused_with_the_reason(given, prose):
    prose(hopper.sixteen_bits_or_fewer(query(**given)))


@pytest.mark.parametrize("given", [{}, {"flags": ["fp8", "row_scales"]}, {"flags": ["nvfp4_weights"]}])
def test_supported_calls(given):
    assert hopper.sixteen_bits_or_fewer(query(**given)) is None


def test_the_small_m_variant_refuses_many_rows(prose):
    assert hopper.few_rows(query(M=128)) is None
    prose(hopper.few_rows(query(M=129)))


@pytest.mark.parametrize(
    ("given", "first"),
    [
        ({"M": 1}, "small_m"),
        ({"M": 128, "flags": ["nvfp4_weights"]}, "small_m"),
        ({"M": 129}, "stream_k"),
        ({"M": 513, "grad": True}, "persistent"),
        ({"M": 64, "flags": ["fp8"]}, "small_m"),
    ],
)
def test_the_preferred_variant_without_measurements(given, first):
    assert SWIGLU.preference(query(**given))[0] == first


def test_float8_on_other_gpus_prefers_float8_units_to_plain_pytorch():
    order = SWIGLU.preference(query(flags=["fp8"]))
    assert order.index("wide") < order.index("three_node") < order.index("eager")


@each_variant
def test_without_a_hopper_gpu_it_is_refused(variant, prose):
    case = SWIGLU.case("bfloat16", M=4, N=64, K=64)
    prose(SWIGLU.get(variant).why_not(SWIGLU.query(case, "cpu")))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
@pytest.mark.parametrize("columns", [8, 96, 256])
def test_a_wgmma_instruction_names_a_register_per_accumulator(dtype, columns):
    text = wgmma_header(dtype, [columns])
    assert text.count('"+f"(d[') == columns // 2
    assert f"n{columns}k{32 // dtype.itemsize}." in text


# Results on a GPU

DENSE: dict[str, dict[str, Any]] = {
    "one_row": {"dtype": "bfloat16", "M": 1, "N": 48, "K": 64},
    "one_step_short": {"dtype": "float16", "M": 5, "N": 8, "K": 8},
    "edges_of_tiles": {"dtype": "bfloat16", "M": 127, "N": 200, "K": 136, "stacked": True},
    "sums_in_many_runs": {"dtype": "bfloat16", "M": 16, "N": 72, "K": 4096},
    "many_tiles": {"dtype": "float16", "M": 100, "N": 9000, "K": 72},
}
FP8: dict[str, dict[str, Any]] = {
    "fp8": {"dtype": "bfloat16", "M": 20, "N": 48, "K": 1040, "format": "fp8"},
    "fp8_rows": {"dtype": "float16", "M": 33, "N": 160, "K": 80, "format": "fp8", "row_scales": True},
    "fp8_stacked": {"dtype": "bfloat16", "M": 70, "N": 32, "K": 48, "format": "fp8", "stacked": True, "row_scales": True},
}
NVFP4: dict[str, dict[str, Any]] = {
    "nvfp4": {"dtype": "bfloat16", "M": 17, "N": 40, "K": 320, "format": "nvfp4_weights"},
    "nvfp4_float16": {"dtype": "float16", "M": 1, "N": 200, "K": 1024, "format": "nvfp4_weights", "stacked": True},
    "every_code": {"dtype": "bfloat16", "M": 9, "N": 640, "K": 2048, "format": "nvfp4_weights", "codes": "full"},
    "every_code_24_rows": {"dtype": "bfloat16", "M": 24, "N": 400, "K": 1792, "format": "nvfp4_weights", "codes": "full"},
    "every_code_64_rows": {"dtype": "bfloat16", "M": 64, "N": 200, "K": 1152, "format": "nvfp4_weights", "codes": "full"},
    "every_code_float16": {"dtype": "float16", "M": 120, "N": 64, "K": 256, "format": "nvfp4_weights", "codes": "full"},
}
MANY: dict[str, dict[str, Any]] = {
    "more_rows_than_a_tile": {"dtype": "bfloat16", "M": 300, "N": 328, "K": 520},
    "swaths": {"dtype": "float16", "M": 5000, "N": 400, "K": 64},  # more rows of tiles than a group of the grouped raster
    "fp8_many_rows": {"dtype": "bfloat16", "M": 700, "N": 144, "K": 400, "format": "fp8", "row_scales": True},
    "nvfp4_many_rows": {"dtype": "bfloat16", "M": 200, "N": 136, "K": 768, "format": "nvfp4_weights", "codes": "full"},
    "nvfp4_more_rows_than_a_tile": {"dtype": "float16", "M": 600, "N": 200, "K": 320, "format": "nvfp4_weights", "codes": "full"},
    "columns_in_three": {"dtype": "bfloat16", "M": 256, "N": 3072, "K": 512},  # tiles of 96 columns, for three warpgroups
}
CASES = DENSE | FP8 | NVFP4 | MANY
# Pairs of a variant and the name of a case: "small_m" takes few rows alone
TAKEN = [(variant, name) for variant in VARIANTS for name in CASES if variant != "small_m" or name not in MANY]


def made(device, **given: Any) -> dict[str, Any]:
    """Return random arguments on the GPU, for a case with 24 rows of x changed by ``given``."""
    return SWIGLU.make_inputs(SWIGLU.case(**{"dtype": "bfloat16", "M": 24, "N": 1008, "K": 1024, **given}), device, 0).arguments


@pytest.mark.gpu
@pytest.mark.parametrize(("variant", "name"), TAKEN)
def test_results_are_correct(variant, name, device):
    case = SWIGLU.case(name=name, **CASES[name])
    directions = BOTH if "format" not in CASES[name] else BOTH[:1]
    assert_ok(judge(SWIGLU, case, variant=variant, device=device, directions=directions), SWIGLU, case, variant)


@pytest.mark.gpu
@each_variant
@pytest.mark.parametrize("form", ["dense", "fp8", "nvfp4_weights"])
def test_weights_in_the_opposite_memory_order(form, variant, device):
    arguments = made(device, format=form)
    gate, up = arguments["w_gate"], arguments["w_up"]
    swapped = copied_behind(gate, up)
    assert torch.equal(swiglu(**arguments, variant=variant), swiglu(**{**arguments, **swapped}, variant=variant))


def copied_behind(gate, up):
    """Copy both weights so that the gate lies after up in memory. Block scales keep their order."""
    if isinstance(gate, NVFP4Tensor):
        codes = torch.stack((up.codes, gate.codes))
        return {
            "w_gate": NVFP4Tensor(codes[1], gate.scales, gate.global_scale),
            "w_up": NVFP4Tensor(codes[0], up.scales, up.global_scale),
        }
    if isinstance(gate, torch.Tensor):
        both = torch.stack((up, gate))
        return {"w_gate": both[1], "w_up": both[0]}
    values = torch.stack((up.values.view(torch.uint8), gate.values.view(torch.uint8))).view(torch.float8_e4m3fn)
    return {"w_gate": type(gate)(values[1], gate.scale), "w_up": type(up)(values[0], up.scale)}


@pytest.fixture
def replanned(monkeypatch):
    """Return a function that replaces a function of ``launch_hopper``, by name, with which launch plans are made.

    Cached plans are discarded before and after the test.
    """
    launch_hopper.plan_of.cache_clear()
    yield lambda name, function: monkeypatch.setattr(launch_hopper, name, function)
    launch_hopper.plan_of.cache_clear()


def shared_by(runs):
    """Return a function that divides the k-blocks of all tiles into ``runs`` work units, which end in the middle of tiles."""

    def partition(config, shape, *_):
        rows, columns, channels = shape
        k_blocks = configure_hopper.tile_count(config, rows, columns) * -(-channels // config.k_block)
        count = min(runs, k_blocks)
        return configure_hopper.Partition(count, *divmod(k_blocks, count), 1, splits_tiles=True, microseconds=0.0)

    return partition


@pytest.mark.gpu
@pytest.mark.parametrize("runs", [7, 40, 100, 132])
@pytest.mark.parametrize("form", ["dense", "fp8", "nvfp4_weights"])
@pytest.mark.parametrize("way", ["stream_k", "small_m"])
def test_tiles_shared_by_any_stream_k_units(way, form, runs, device, replanned):
    """Work units end within tiles, leave partial sums and reduce others, repeatedly and in CUDA graphs."""
    arguments = made(device, M=40, N=528, K=9 * 1024, format=form)
    expected = swiglu(**arguments, variant="eager").float()

    replanned("partition_of", shared_by(runs))
    first = swiglu(**arguments, variant=way)
    assert (
        first.float() - expected
    ).norm() / expected.norm() < 5e-3  # tolerance: rounding to 16 bits, and truncation in float8 units
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = [swiglu(**arguments, variant=way) for _ in range(2)]
    for _ in range(5):
        graph.replay()
        assert all(torch.equal(each, first) for each in (*held, swiglu(**arguments, variant=way)))


PAIRS: list[tuple[tuple[int, int, int, int], dict[str, Any]]] = [
    ((64, 64, 1, 1), {"M": 29, "N": 200, "K": 136}),  # all rows belong to the first CTA
    ((64, 64, 1, 1), {"M": 300, "N": 328, "K": 520, "dtype": "float16", "stacked": True}),
    ((64, 64, 2, 1), {"M": 61, "N": 136, "K": 1160}),
    ((128, 96, 1, 1), {"M": 250, "N": 312, "K": 264}),
    ((256, 64, 1, 1), {"M": 384, "N": 64, "K": 128}),
    ((16, 64, 1, 1), {"M": 5, "N": 8, "K": 72}),  # one k-block for each CTA
    ((32, 64, 1, 1), {"M": 20, "N": 48, "K": 64}),  # one k-block: the first CTA has none
    ((64, 64, 1, 1), {"M": 60, "N": 144, "K": 1040, "format": "fp8", "row_scales": True}),
    ((64, 64, 1, 2), {"M": 50, "N": 200, "K": 1152, "format": "nvfp4_weights", "codes": "full"}),
    ((64, 64, 2, 2), {"M": 64, "N": 72, "K": 384, "format": "nvfp4_weights", "codes": "full"}),
    ((128, 64, 1, 1), {"M": 141, "N": 136, "K": 320, "format": "nvfp4_weights", "codes": "full"}),
    ((64, 96, 1, 2), {"M": 64, "N": 200, "K": 256, "dtype": "float16", "format": "nvfp4_weights"}),
]
"""Tiles whose k-blocks two CTAs of a cluster divide between them, and a case for each.

A tile's numbers: rows of x, columns of the result, warpgroups that take turns with k-blocks, and 128-byte pieces of x's rows in a
k-block.
"""


@pytest.mark.gpu
@pytest.mark.parametrize(("tiles", "given"), PAIRS)
def test_pairs_of_ctas(tiles, given, device, monkeypatch):
    case = SWIGLU.case(name="pairs", **{"dtype": "bfloat16", **given})
    rows, columns, split, chunks = tiles

    def forced(variant, shape, formats, multiprocessors):
        return formats.config(rows, columns, split, chunks=chunks, schedule="split_k_cluster")

    monkeypatch.setattr(configure_hopper, "configuration", forced)
    directions = BOTH if "format" not in given else BOTH[:1]
    assert_ok(judge(SWIGLU, case, variant="stream_k", device=device, directions=directions), SWIGLU, case, "stream_k")
    arguments = SWIGLU.make_inputs(case, device, 0).arguments
    expected = swiglu(**arguments, variant="stream_k")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = [swiglu(**arguments, variant="stream_k") for _ in range(3)]
    for _ in range(5):
        graph.replay()
        assert all(torch.equal(each, expected) for each in held)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("form", ["dense", "nvfp4_weights"])
def test_pytorchs_default_dtype_does_not_matter(form, dtype, device, replanned):
    """Partial sums that CTAs exchange are float32, and so is a scale that is not given."""
    arguments = made(device, M=40, N=528, K=9 * 1024, format=form)
    if form != "dense":
        arguments["w_up"] = NVFP4Tensor(arguments["w_up"].codes, arguments["w_up"].scales)
    replanned("partition_of", shared_by(40))
    expected = swiglu(**arguments, variant="stream_k")
    torch.set_default_dtype(dtype)
    try:
        assert torch.equal(swiglu(**arguments, variant="stream_k"), expected)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.gpu
@each_variant
@pytest.mark.parametrize("form", ["dense", "nvfp4_weights"])
def test_any_strides(form, variant, device):
    arguments = made(device, format=form)
    x = arguments["x"]
    wider = torch.cat((x, x), 1)[:, : x.shape[1]]
    turned = x.T.contiguous().T
    expected = swiglu(**arguments, variant=variant)
    one = swiglu(**{**arguments, "x": x[:1].contiguous()}, variant=variant)
    assert torch.equal(swiglu(**{**arguments, "x": x[:1].expand(3, -1)[:1]}, variant=variant), one)
    for other in (wider, turned):
        assert torch.equal(swiglu(**{**arguments, "x": other}, variant=variant), expected)


@pytest.mark.gpu
@each_variant
@pytest.mark.parametrize("form", ["dense", "fp8", "nvfp4_weights"])
def test_equal_to_the_last_bit_beside_other_work_and_in_graphs(form, variant, device):
    arguments = made(device, format=form)
    assert_same_bits_beside_other_work_and_in_graphs(functools.partial(swiglu, **arguments, variant=variant), device)


@pytest.mark.gpu
@each_variant
@pytest.mark.parametrize("per_row", ["x", "w_gate", "w_up"])
def test_row_scales_combined_with_one_tensor_scale(per_row, variant, device):
    matrices = {"x": (24, 1040), "w_gate": (208, 1040), "w_up": (208, 1040)}
    given = {
        name: quantize_fp8(torch.randn(shape, device=device) / shape[1] ** 0.25, per_row=name == per_row)
        for name, shape in matrices.items()
    }
    found, expected = (swiglu(**given, variant=name).float() for name in (variant, "eager"))
    assert (found - expected).norm() / expected.norm() < 5e-3  # tolerance: rounding to bfloat16, and truncation in float8 units


@pytest.mark.gpu
@each_variant
def test_nan_stays_in_its_row_and_infinity_propagates(variant, device):
    arguments = made(device)
    x, w_up = arguments["x"].clone(), arguments["w_up"].clone()
    x[3, 5] = torch.nan
    w_up[7] = torch.inf
    x[4] = x[4].abs()
    h = swiglu(x, arguments["w_gate"], w_up, variant=variant)
    assert h[3].isnan().all()
    assert h[4, 7].isinf()
    others = [row for row in range(len(x)) if row != 3]
    columns = [column for column in range(h.shape[1]) if column != 7]
    assert h[others][:, columns].isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_nan_block_scale_propagates(variant, device):
    arguments = made(device, format="nvfp4_weights")
    gate = arguments["w_gate"]
    scales = gate.scales.clone()
    scales.view(torch.uint8)[11, 3] = 0x7F
    h = swiglu(arguments["x"], NVFP4Tensor(gate.codes, scales, gate.global_scale), arguments["w_up"], variant=variant)
    assert h[:, 11].isnan().all()
    assert h[:, [column for column in range(h.shape[1]) if column != 11]].isfinite().all()


@pytest.mark.gpu
def test_kept_products(device):
    arguments = made(device, M=300, N=200)
    x, gate, up = arguments["x"], arguments["w_gate"], arguments["w_up"]
    for variant in ("stream_k", "persistent"):
        config = configuration(variant, (300, 200, x.shape[1]), Formats(x.dtype, x.dtype), processors(device))
        assert config.schedule == variant
        h, both = launch_hopper.dual_gemm(config, x, (gate, up), None, None, keep=True)
        assert torch.equal(h, swiglu(x, gate, up, variant=variant))
        expected = torch.cat((x @ gate.T, x @ up.T), 1)
        # tolerance: both are rounded to bfloat16, and sums are in another order
        assert torch.allclose(both, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("form", ["dense", "fp8", "nvfp4_weights"])
@pytest.mark.parametrize("rows", [1, 20, 64, 100])
def test_constant_weights(rows, form, early, device, replanned):
    """Constant weights may be read before earlier launches have ended, one of which writes x; x must not.

    ``early`` replaces the estimate of whether that pays off.
    """
    replanned("reads_early", lambda *_: early)
    arguments = made(device, M=rows, N=1024, K=1024, format=form)
    expected = {variant: swiglu(**arguments, variant=variant) for variant in ("stream_k", "small_m")}
    x = arguments["x"]
    plain = x if isinstance(x, torch.Tensor) else x.values
    kept, late = plain.clone(), torch.zeros_like(plain)
    arguments["x"] = late if isinstance(x, torch.Tensor) else type(x)(late, x.scale)

    def again(variant):
        late.view(torch.uint8).zero_()
        late.copy_(kept)
        return [swiglu(**arguments, variant=variant, constant_weights=True) for _ in range(3)]

    for variant, h in expected.items():
        for _ in range(10):
            assert all(torch.equal(each, h) for each in again(variant))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = again(variant)
        for _ in range(10):
            graph.replay()
        assert all(torch.equal(each, h) for each in found)


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["dense", "nvfp4_weights"])
@pytest.mark.parametrize("rows", [1, 32, 100, 300])
def test_many_launches_that_overlap(rows, form, device):
    """Launches begin while earlier ones end. They need the earlier results, and use the same flags between CTAs."""
    arguments = made(device, M=rows, N=512, K=512, format=form)
    weights = {name: arguments[name] for name in ("w_gate", "w_up")}
    variants = ["persistent", "stream_k", *(["small_m"] if rows <= hopper.FEW else [])]

    def chain():
        x = arguments["x"]
        for _ in range(20):
            for variant in variants:
                x = swiglu(x, **weights, variant=variant)
                x = x / x.float().square().mean(1, keepdim=True).sqrt().clamp(min=1e-6).to(x.dtype)
                x = swiglu(x, **weights, variant=variant)
        return x

    first = chain()
    assert first.isfinite().all()
    for _ in range(5):
        assert torch.equal(chain(), first)
