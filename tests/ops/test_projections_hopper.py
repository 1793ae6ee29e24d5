"""Tests of ``projections`` in one launch on Hopper GPUs: tiles of columns, launch arguments, and results on a GPU.

The variants differ in which operand a cluster of two CTAs loads once for both (``MULTICAST``): "nothing", "a" or "b", where A
are the rows of x and B those of the weight.

``prose(text)`` compares a test's texts, in the order of its calls, with its entries in tests/snapshots/prose.txt. A test fails
if it does not compare one of its entries, and ``tests/test_prose.py`` if the test or the parameter of an entry is gone.

``judge`` applies the whole verification gate of the workbench, and ``assert_ok`` requires its verdict to be right.

``device`` is the first GPU, or the CPU. ``BOTH`` are the directions: forward, and forward with gradients.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from onelaunch import dispatch
from onelaunch.cuda.module import _layout
from onelaunch.cuda.tensor_maps import _unaddressable
from onelaunch.launch.launch import CudaLaunch
from onelaunch.ops import Segment, projections
from onelaunch.ops.projections.configure_hopper import FEW, WIDEST, config_for, configuration, counts, header, tile_columns
from onelaunch.ops.projections.layout import ACTIVATIONS, Layout, layout_of
from onelaunch.ops.projections.variants import hopper
from tests.ops.cases import BOTH, assert_ok, assert_same_bits_beside_other_work_and_in_graphs, judge
from tests.ops.projections_cases import PROJECTIONS

pytest.importorskip("triton")

from onelaunch.kernels.gemm_sm90 import kernel
from onelaunch.ops.projections import launch_hopper

VARIANTS = tuple(hopper.MULTICAST)
LARGEST_SHARED = 227 * 1024
"""Largest shared memory of a CTA on Hopper, in bytes."""

each_variant = pytest.mark.parametrize("variant", VARIANTS)


def chain_058(heads: int = 16) -> Layout:
    """Return the layout of experiment 058, the write-up's chain: q, k, v and a gate with heads of 128, and a decay per head."""
    parts = [("q", "l2norm"), ("k", "l2norm"), ("v", "none"), ("gate", "silu")]
    return layout_of((*(Segment(name, heads, 128, how) for name, how in parts), Segment("decay", heads, 1, "sigmoid")))


# Tiles of columns


def columns_in(text: str) -> list[tuple[int, ...]]:
    """Return the tile table of the generated header: kind, row, count, column, norm, kept, bias of each tile.

    ``kind`` is an index into :func:`kinds_in`, ``count`` the number of rows of the weight. The others are offsets of the tile,
    as those of a segment in ``SegmentSpan``.
    """
    found, tile = [], 0
    for end, begin, *numbers in re.findall(r"if \(tile < (\d+)\) return at\(tile - (\d+), " + ", ".join([r"(\d+)"] * 9), text):
        step, kind, row, width, column, norm, heads, kept, bias = map(int, numbers)
        assert int(begin) == tile
        for first in range(0, (int(end) - tile) * step, step):
            span = (
                row + first,
                min(step, width - first),
                column + first,
                norm + first // step * heads,
                kept + first,
                bias + first,
            )
            found.append((kind, *span))
        tile = int(end)
    assert f"COLUMN_TILES = {tile};" in text
    return found


def kinds_in(text: str) -> list[tuple[int, int, bool]]:
    """Return the table of kinds in the generated header: activation as a number, head size, and whether there is a bias."""
    return [
        (int(how), int(head), bias == "true")
        for how, head, bias in re.findall(r"\{(\d), (\d+), (true|false), (?:true|false), [\d.e+-]+f\}", text)
    ]


KINDS = st.tuples(st.integers(1, 40), st.sampled_from([1, 7, 8, 24, 64]), st.sampled_from(ACTIVATIONS), st.booleans())


@hypothesis.given(st.lists(KINDS, min_size=1, max_size=5), st.sampled_from([64, 96, 128, 160, 192, 224, 256]))
def test_tiles_cover_every_column_once_with_its_kind(kinds_given, columns):
    parts = [Segment(f"s{at}", *kind[:3], bias=kind[3]) for at, kind in enumerate(kinds_given)]
    layout = layout_of(tuple(parts))
    text = header(layout, columns)
    tiles, kinds = columns_in(text), kinds_in(text)
    assert [count for _, _, count, *_ in tiles] == list(counts(layout, columns))
    assert [row for _, row, *_ in tiles] == [sum(count for _, _, count, *_ in tiles[:at]) for at in range(len(tiles))]
    for span in layout.spans:
        segment = span.segment
        own = [tile for tile in tiles if span.row <= tile[1] < span.row + segment.width]
        for kind, row, count, column, norm, kept, bias in own:
            behind = row - span.row
            assert count <= columns
            assert (column, kinds[kind][2]) == (span.column + behind, segment.bias)
            if segment.activation == "l2norm":
                assert (norm, count % segment.head_size) == (span.norm + behind // segment.head_size, 0)
                assert kinds[kind][1] == segment.head_size
            if segment.activation == "silu":
                assert kept == span.kept + behind
            if segment.bias:
                assert bias == span.bias + behind


@pytest.mark.parametrize("multicast", hopper.MULTICAST.values())
@pytest.mark.parametrize("rows", [1, 128, 1024, 32768, 10**6])
@pytest.mark.parametrize("head", [8, 24, 64, 96, 128, 160, 200, 256])
def test_tiles_fit(head, rows, multicast):
    """The configuration is that of a GPU with 132 SMs for x ``[rows, 2048]``; heads that are normalized are never split."""
    layout = layout_of((Segment("q", 7, head, "l2norm"), Segment("v", 3, 100), Segment("decay", 7, 1, "sigmoid")))
    config = configuration(layout, rows, 2048, torch.bfloat16, 132, multicast)
    assert head <= config.b_rows <= WIDEST
    assert config.b_rows % (16 if multicast == "b" else 8) == config.narrow % 8 == 0
    assert config.stages >= 3
    assert config.shared_bytes <= LARGEST_SHARED
    few = min(FEW, config.b_rows - 8)
    assert all(count <= config.narrow or few < count <= config.b_rows for count in counts(layout, config.b_rows))
    assert {tile_columns(span, config.b_rows) % head for span in layout.spans if span.norm is not None} == {0}


def test_the_write_ups_chain_has_wide_tiles_and_narrow_ones_for_the_decay():
    config = configuration(chain_058(), 32768, 2048, torch.bfloat16, 132, "nothing")
    assert (config.b_rows, config.narrow) == (256, 16)
    assert len(list(counts(chain_058(), 256))) == 33


def test_few_rows_get_more_tiles():
    assert configuration(chain_058(4), 128, 2048, torch.bfloat16, 132, "nothing").b_rows < WIDEST


def test_a_wave_for_the_decay_alone_costs_as_much_as_its_tiles():
    """With eight tiles of rows and 4104 columns, 128 wide and 8 narrow tiles are slightly more than a wave of 132 CTAs."""
    assert configuration(chain_058(8), 1024, 1024, torch.bfloat16, 132, "nothing").b_rows == 128


@pytest.mark.parametrize(
    ("rows", "multicast", "ctas"),
    [
        (32768, "nothing", 132), (32768, "a", 132), (32768, "b", 132),
        (100, "nothing", 33), (100, "a", 34), (100, "b", 66),
    ],
)  # fmt: skip
def test_a_launch_has_ctas_for_every_sm_or_every_tile(rows, multicast, ctas):
    """100 rows make one tile of rows and 33 of columns.

    A cluster's two CTAs share rows of x between tiles of columns (a), or rows of the weight between tiles of rows (b).
    """
    config = config_for(chain_058(), 256, torch.bfloat16, multicast)
    assert launch_hopper.ctas_of(chain_058(), config, rows, 132) == ctas


# Calls that are refused


@pytest.mark.parametrize(
    "given",
    [
        {"dtype": "float32"},
        {"D": 20},
        {"B": 0},
        {"K": 100},
        {"K": 264},
        {"B": 2**20, "T": 2**20},
    ],
)
def test_unsupported_calls_are_refused_with_the_reason(given, prose):
    case = PROJECTIONS.case(**{"dtype": "bfloat16", "B": 2, "T": 64, "D": 64, "H": 2, "K": 64, "V": 64, **given})
    prose(hopper.why_tiles_cannot_hold(PROJECTIONS.query(case, "cuda:0")))


@pytest.mark.parametrize("chain", ["normalized", "gla", "3x7:silu:bias,2x100:none,5x1:sigmoid"])
def test_supported_calls(chain):
    case = PROJECTIONS.case("float16", B=1, T=3, D=24, H=2, K=96, V=100, segments=chain)
    assert hopper.why_tiles_cannot_hold(PROJECTIONS.query(case, "cuda:0")) is None


def test_auto_prefers_one_launch_on_hopper_and_two_on_other_gpus():
    case = PROJECTIONS.case("bfloat16", B=8, T=4096, D=2048, H=16, K=128, V=128)
    first = PROJECTIONS.preference(PROJECTIONS.query(case, "cuda:0"))
    assert first[:3] == ["epilogue_persistent", "wide_activated", "wide"]


@each_variant
def test_without_a_hopper_gpu_the_variant_is_refused(variant, prose):
    case = PROJECTIONS.case("bfloat16", B=1, T=4, D=64, H=2, K=64, V=64)
    prose(PROJECTIONS.get(variant).why_not(PROJECTIONS.query(case, "cpu")))


# Arguments of a launch


@pytest.fixture
def launched(monkeypatch):
    """Return a list to which a call adds the grid and arguments of its launch, as for a GPU of 132 SMs, without any GPU.

    Arguments are packed as in a launch, and tensor maps are checked by TMA's rules.
    """
    calls, (layout, _) = [], _layout(launch_hopper.KINDS)

    def launch(grid, *arguments):
        pairs = list(zip(launch_hopper.KINDS, arguments, strict=True))
        values = [value if kind != "pointer" else 0 if value is None else value.data_ptr() for kind, value in pairs]
        layout.pack(*values)
        calls.append((grid, values))

    def tensor_map(dtype, address, sizes, strides, box, *, swizzle=128):
        assert _unaddressable(dtype, address, sizes, strides, box, swizzle) is None
        return bytes(128)

    monkeypatch.setattr(CudaLaunch, "run", lambda self: launch(self.grid, *self.arguments))
    monkeypatch.setattr(kernel, "tensor_map", tensor_map)
    monkeypatch.setattr(launch_hopper, "processors", lambda _: 132)
    # Without its conditions, a variant runs without a Hopper GPU.
    for name in VARIANTS:
        monkeypatch.setattr(PROJECTIONS.get(name), "_supports", [])
    yield calls
    dispatch.forget()  # that these variants could run on a CPU


@each_variant
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("chain", ["normalized", "gla", "3x7:silu:bias,2x100:none,5x1:sigmoid"])
def test_a_call_becomes_one_launch(chain, grad, variant, launched):
    case = PROJECTIONS.case("bfloat16", B=2, T=30, D=72, H=3, K=64, V=40, segments=chain)
    given = PROJECTIONS.make_inputs(case, torch.device("cpu"), 0).arguments
    given["x"] = given["x"].mT.contiguous().mT.requires_grad_(grad)  # strides that TMA does not support
    found = projections(**given, variant=variant)
    ((grid, values),) = launched
    bias, rstd, _, kept, rows, channels, x_bytes, eps = values[5:]
    assert (rows, channels, eps) == (60, 72, 1e-6)
    # A k-block has 128 bytes of each row of x. 60 rows need half a tile of 128; "cluster" also gets the other CTA's rows.
    assert x_bytes == (128 if variant == "cluster" else 64) * 128
    assert grid[0] % (1 if variant == "epilogue_persistent" else 2) == 0
    layout = layout_of(tuple(given["segments"]))
    assert (bool(bias), bool(rstd), bool(kept)) == (bool(layout.biases), grad and bool(layout.norms), grad and bool(layout.kept))
    assert [each.shape for each in found] == [(2, 30, *segment.shape) for segment in given["segments"]]
    assert all(each.requires_grad == grad for each in found)


# Results on a GPU

CASES: dict[str, dict[str, Any]] = {
    "rows_of_half_a_tile": {"dtype": "bfloat16", "B": 1, "T": 57, "D": 200, "H": 2, "K": 128, "V": 128},
    "an_odd_number_of_tiles_of_rows": {"dtype": "bfloat16", "B": 1, "T": 300, "D": 320, "H": 40, "K": 128, "V": 128},
    "one_row": {"dtype": "bfloat16", "B": 1, "T": 1, "D": 64, "H": 2, "K": 64, "V": 64},
    "one_step_short": {"dtype": "float16", "B": 1, "T": 5, "D": 8, "H": 1, "K": 8, "V": 8},
    "edges_of_tiles": {"dtype": "bfloat16", "B": 3, "T": 99, "D": 136, "H": 3, "K": 96, "V": 100},
    "heads_of_256": {"dtype": "float16", "B": 1, "T": 130, "D": 200, "H": 3, "K": 256, "V": 256},
    "heads_of_160": {"dtype": "bfloat16", "B": 2, "T": 64, "D": 264, "H": 5, "K": 160, "V": 32},
    "many_small_heads": {"dtype": "bfloat16", "B": 1, "T": 200, "D": 128, "H": 40, "K": 16, "V": 24},
    "gla": {"dtype": "bfloat16", "B": 2, "T": 150, "D": 512, "H": 4, "K": 64, "V": 128, "segments": "gla"},
    "widths_that_no_panel_divides": {
        "dtype": "float16", "B": 2, "T": 77, "D": 96, "H": 1, "K": 8, "V": 8,
        "segments": "1x77:silu:bias,3x65:sigmoid,5x33,2x24:l2norm:bias,1x131:logsigmoid:bias,1x300:logsigmoid/16,3x1:silu",
    },
    "many_tiles": {"dtype": "bfloat16", "B": 4, "T": 1100, "D": 192, "H": 12, "K": 128, "V": 128},
    "the_write_up_s": {"dtype": "bfloat16", "B": 1, "T": 2048, "D": 2048, "H": 16, "K": 128, "V": 128},
}  # fmt: skip


@pytest.mark.gpu
@each_variant
@pytest.mark.parametrize("name", CASES)
def test_results_are_correct(name, variant, device):
    case = PROJECTIONS.case(name=name, **CASES[name])
    assert_ok(judge(PROJECTIONS, case, variant=variant, device=device, directions=BOTH), PROJECTIONS, case, variant)


def made(device, **given: Any) -> dict[str, Any]:
    """Return random arguments on the GPU, for a case of 600 rows changed by ``given``."""
    case = PROJECTIONS.case(**{"dtype": "bfloat16", "B": 2, "T": 300, "D": 256, "H": 4, "K": 128, "V": 128, **given})
    return PROJECTIONS.make_inputs(case, device, 0).arguments


@pytest.mark.gpu
@each_variant
def test_equal_to_the_last_bit_beside_other_work_and_in_graphs(variant, device):
    given = made(device)
    assert_same_bits_beside_other_work_and_in_graphs(functools.partial(projections, **given, variant=variant), device)


@pytest.mark.gpu
@each_variant
def test_any_strides(variant, device):
    given = made(device)
    expected = projections(**given, variant=variant)
    x, weight = given["x"], given["weight"]
    wider = torch.cat((weight, weight), 1)[:, : weight.shape[1]]
    for changed in ({"x": x.mT.contiguous().mT}, {"weight": wider}, {"weight": weight.mT.contiguous().mT}):
        found = projections(**{**given, **changed}, variant=variant)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.gpu
@each_variant
def test_nan_and_infinity_stay_in_their_rows(variant, device):
    given = made(device, segments="normalized")
    x = given["x"].clone()
    x[0, 3, 5] = torch.nan
    x[1, 7] = 3e38
    found = projections(**{**given, "x": x}, variant=variant)
    expected = projections(**given, variant=variant)
    for one, other in zip(found, expected, strict=True):
        assert one[0, 3].isnan().all()
        one[0, 3], one[1, 7] = other[0, 3], other[1, 7]
        assert torch.equal(one, other)


@pytest.mark.gpu
@each_variant
def test_large_and_small_values_of_every_activation(variant, device):
    """Cover exponentials that overflow or vanish, and a head whose sum of squares is 0."""
    parts = tuple(Segment(how, 1, 64, how) for how in ("l2norm", "silu", "sigmoid", "logsigmoid"))
    x = torch.zeros(1, 128, 64, device=device, dtype=torch.bfloat16)
    x[0, :, 0] = torch.linspace(-300, 300, 128)
    x[0, 5] = 0
    weight = torch.zeros(4 * 64, 64, device=device, dtype=torch.bfloat16)
    weight[:, 0] = 1
    found = projections(x, weight, parts, variant=variant)
    expected = PROJECTIONS.reference(x=x.double(), weight=weight.double(), segments=parts)
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one.double(), other, rtol=1e-2, atol=1e-30)
