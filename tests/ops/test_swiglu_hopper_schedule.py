"""Who works on what in ``dual_gemm.cu``: tiles that fit, cuts that leave nothing undone, plans of launches."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton")

from onelaunch.ops.swiglu import hopper_launch
from onelaunch.ops.swiglu.hopper_schedule import (
    Tiles,
    configuration,
    cut_for,
    cut_of,
    narrow_tiles,
    reads_early,
    shared_tiles,
    wide_tiles,
)

LARGEST_SHARED = 227 * 1024


def begin(cut, run):
    return (run * cut.each + min(run, cut.more)) * cut.grain


def items(cut, run, steps):
    """The pieces of tiles of a run, as the kernel walks them: tile, first step, last step."""
    unit, end = begin(cut, run), begin(cut, run + 1)
    while unit < end:
        tile, first = divmod(unit, steps)
        last = min(steps, first + end - unit)
        yield tile, first, last
        unit += last - first


def waits_for(cut, run, tile, steps):
    """The runs whose sums the one that began a tile adds."""
    later = run + 1
    while begin(cut, later) < (tile + 1) * steps:
        yield later
        later += 1


@given(st.integers(1, 400), st.integers(1, 130), st.integers(1, 148), st.sampled_from([0.0, 1.0, 10.0]))
def test_every_step_of_every_tile_is_done_once_and_nothing_is_left_waiting(tiles, steps, processors, sharing):
    cut = cut_for(tiles, steps, processors, 0.5, sharing)
    assert cut.runs <= processors
    done, left, added = set(), [], []
    for run in range(cut.runs):
        pieces = list(items(cut, run, steps))
        assert pieces  # a program without work would never be heard of
        for tile, first, last in pieces:
            done |= {(tile, step) for step in range(first, last)}
            if first > 0:
                left.append(run)
            elif last < steps:
                added += waits_for(cut, run, tile, steps)
    assert len(done) == tiles * steps == begin(cut, cut.runs)
    assert sorted(left) == sorted(added)  # each leaves sums once, and somebody takes them: words are zero again
    assert len(set(left)) == len(left)
    assert not left or cut.shares


def test_runs_end_within_tiles_where_whole_ones_would_leave_processors_idle():
    """One wave that fills the chip is whole tiles; of a long one that would idle a quarter, programs share tiles."""
    assert not cut_of(Tiles(256), (512, 4096, 7168), torch.bfloat16, 132).shares
    shared = cut_of(Tiles(256), (512, 3072, 7168), torch.bfloat16, 132)
    assert (shared.runs, shared.shares) == (132, True)


@pytest.mark.parametrize("variant", ["stream_k", "small_m"])
@pytest.mark.parametrize(("inner", "nvfp4", "chunks"), [(7168, False, 1), (7168, True, 2), (320, True, 1)])
def test_two_programs_share_tiles_where_those_fill_the_chip(variant, inner, nvfp4, chunks):
    """Block scales are not padded, so 320 channels leave a step one chunk."""
    tiles, schedule = configuration(variant, (128, 4096, inner), torch.bfloat16, 132, nvfp4=nvfp4)
    assert (schedule, tiles.chunks) == ("pairs", chunks)
    assert configuration("persistent", (128, 4096, inner), torch.bfloat16, 132, nvfp4=nvfp4)[1] == "tiles"
    assert configuration(variant, (64, 4096, inner), torch.bfloat16, 132, nvfp4=nvfp4)[1] == "runs"


@pytest.mark.parametrize(
    ("tiles", "shape", "early"),
    [
        (Tiles(8, 32, 3), (1, 4096, 7168), True),
        (Tiles(64, 32, 2), (64, 12288, 4096), True),
        (Tiles(128, 32, 2), (65, 4096, 7168), False),
        (Tiles(8, 32, 4, nvfp4=True, chunks=4), (1, 3072, 1024), True),  # four steps
        (Tiles(8, 32, 4, nvfp4=True, chunks=4), (1, 3072, 3072), True),  # as many as there are stages
        (Tiles(8, 32, 4, nvfp4=True, chunks=4), (1, 3072, 3328), False),
    ],
)
def test_when_weights_are_read_early(tiles, shape, early):
    assert reads_early(tiles, cut_of(tiles, shape, torch.bfloat16, 132), shape[0]) is early


@pytest.mark.parametrize(
    ("tiles", "schedule", "shape", "expected"),
    [
        # whole tiles by a counter, of two words
        (Tiles(256), "tiles", (8192, 4096, 7168), {"runs": 132, "sums": 0, "words": 1, "numbers": (8192, 4096, 7168, 0, 0, 112)}),
        # two programs for each tile, which leave each other nothing in memory
        (Tiles(128), "pairs", (128, 4096, 7168), {"runs": 128, "sums": 0, "words": 0, "result_rows": 64}),
        # a tile for each program
        (Tiles(8, 32, 3), "runs", (1, 4096, 7168), {"runs": 128, "sums": 0, "words": 0, "weight_box": (64, 8, 2, 4)}),
        # runs that end within tiles leave all sums of one, and a word each
        (Tiles(256), "runs", (512, 3072, 7168), {"runs": 132, "sums": 132 * 256 * 64 * 2, "words": 66, "early": False}),
        (
            Tiles(8, 32, 4, nvfp4=True, chunks=4),
            "runs",
            (1, 3072, 1024),
            {"runs": 96, "weight_box": (128, 8, 2, 4), "early": True},
        ),
    ],
)
def test_plans(tiles, schedule, shape, expected, monkeypatch):
    monkeypatch.setattr(hopper_launch, "function", lambda *_, **__: None)
    monkeypatch.setattr(hopper_launch, "processors", lambda _: 132)
    given = (torch.device("cpu"), shape, torch.bfloat16, torch.bfloat16, schedule, tiles)
    plan = hopper_launch.plan_of.__wrapped__(*given, scaled=tiles.nvfp4, keep=False, constant_weights=True)
    assert {name: getattr(plan, name) for name in expected} == expected


@pytest.mark.parametrize("channels", [64, 128, 192, 7168])
@pytest.mark.parametrize("nvfp4", [False, True])
@pytest.mark.parametrize("rows", [1, 8, 9, 17, 40, 64, 65, 100, 128, 129, 200, 256, 257, 9000])
def test_tiles_fit(rows, nvfp4, channels):
    shared = shared_tiles(rows, channels, nvfp4=nvfp4)
    for tiles in (
        *wide_tiles(rows, channels, nvfp4=nvfp4),
        narrow_tiles(rows, channels, nvfp4=nvfp4),
        *([shared] if shared else []),
    ):
        assert tiles.rows % 8 == 0
        assert tiles.rows >= min(rows, 64)
        assert tiles.threads in (384, 512, 640)
        assert tiles.stages >= 2
        assert tiles.stages % tiles.split == 0  # else a barrier's parity could mean another round
        assert tiles.shared_bytes <= LARGEST_SHARED
        if nvfp4:
            assert channels % tiles.step(torch.bfloat16) == 0  # block scales are not padded


def test_a_tile_of_64_columns_and_256_rows_has_four_stages():
    assert Tiles(256).stages == 4
