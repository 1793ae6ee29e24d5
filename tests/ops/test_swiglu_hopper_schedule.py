"""Tests of the schedules of the Hopper matrix product for ``swiglu``: tiles, stream-K work units, and plans of launches.

Shapes are (M, N, K), and the GPU has 132 SMs. ``tiles_of(rows, columns, split, chunks=...)`` configures tiles of rows of x and
columns of the result (64 by default), with k-blocks of 128 bytes of x, or as many times more as there are chunks. ``split``
consumer warpgroups (1 by default) take turns with the k-blocks of a tile. k-blocks are numbered over all tiles; a work unit is
the run of k-blocks that one CTA computes.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton")

from onelaunch.ops.swiglu import launch_hopper
from onelaunch.ops.swiglu.configure_hopper import (
    Formats,
    choose_partition,
    cluster_config,
    configuration,
    narrow_config,
    partition_of,
    reads_early,
    tile_columns,
    wide_configs,
)

BFLOAT16 = Formats(torch.bfloat16, torch.bfloat16)
NVFP4 = Formats(torch.bfloat16, torch.bfloat16, nvfp4=True)
tiles_of, nvfp4_tiles = BFLOAT16.config, NVFP4.config

LARGEST_SHARED = 227 * 1024
"""Largest shared memory of a CTA on Hopper, in bytes."""


def begin(partition, run):
    """Return the number of the first k-block of the work unit with the index ``run``."""
    return (run * partition.unit_granules + min(run, partition.longer_units)) * partition.granule


def items(partition, run, steps):
    """Return the pieces of tiles in a work unit, as the kernel visits them: tile, its first k-block, and the one after the last.

    A tile has ``steps`` k-blocks.
    """
    k_block, end = begin(partition, run), begin(partition, run + 1)
    while k_block < end:
        tile, first = divmod(k_block, steps)
        last = min(steps, first + end - k_block)
        yield tile, first, last
        k_block += last - first


def waits_for(partition, run, tile, steps):
    """Return the units whose partial sums of a tile are added by the unit ``run``, which has the tile's first k-block."""
    later = run + 1
    while begin(partition, later) < (tile + 1) * steps:
        yield later
        later += 1


@given(st.integers(1, 400), st.integers(1, 130), st.integers(1, 148), st.sampled_from([0.0, 1.0, 10.0]))
def test_every_k_block_is_done_once_and_every_partial_sum_is_used(tiles, steps, processors, sharing):
    # A k-block takes 0.5 us, and adding another unit's partial sums takes ``sharing`` us.
    partition = choose_partition(tiles, steps, processors, 0.5, sharing)
    assert partition.units <= processors
    done, left, added = set(), [], []
    for run in range(partition.units):
        pieces = list(items(partition, run, steps))
        assert pieces  # a CTA without work would never signal its end
        for tile, first, last in pieces:
            done |= {(tile, step) for step in range(first, last)}
            if first > 0:
                left.append(run)
            elif last < steps:
                added += waits_for(partition, run, tile, steps)
    assert len(done) == tiles * steps == begin(partition, partition.units)
    # each unit leaves partial sums once and another takes them, so that flags are zero again
    assert sorted(left) == sorted(added)
    assert len(set(left)) == len(left)
    assert not left or partition.splits_tiles


@pytest.mark.parametrize(
    ("tiles", "shape", "runs", "shares"),
    [
        (tiles_of(256), (512, 4096, 7168), 128, False),  # one wave that fills the chip
        (tiles_of(8, 32, 3), (1, 12288, 4096), 128, False),  # three whole tiles each
        (tiles_of(256), (256, 4096, 7168), 128, True),  # two CTAs for each tile
        (tiles_of(256), (512, 3072, 7168), 132, True),  # a long wave that would idle a quarter
        (tiles_of(8, 32, 3), (1, 3072, 1024), 96, False),  # a short one that does not pay
        (nvfp4_tiles(8, 64, 2, chunks=4), (1, 4096, 7168), 128, True),  # k-blocks of four times as many channels
    ],
)
def test_work_units_of_well_known_shapes(tiles, shape, runs, shares):
    """``runs`` is the number of work units, and ``shares`` whether they may end within tiles."""
    partition = partition_of(tiles, shape, 132)
    assert (partition.units, partition.splits_tiles) == (runs, shares)


@pytest.mark.parametrize(
    ("shape", "rows", "columns"),
    [
        ((512, 4096, 7168), 256, 64),  # the most reuse, and one wave
        ((512, 3072, 7168), 128, 96),  # 128 CTAs for 132 SMs; tiles of 256 x 64 would make only 96
        ((256, 4096, 7168), 128, 64),
        ((8192, 4096, 7168), 256, 64),
    ],
)
@pytest.mark.parametrize("variant", ["persistent", "stream_k"])
def test_tiles_of_well_known_shapes(variant, shape, rows, columns):
    config = configuration(variant, shape, BFLOAT16, 132)
    assert (config.b_rows, tile_columns(config)) == (rows, columns)


@pytest.mark.parametrize("variant", ["stream_k", "small_m"])
@pytest.mark.parametrize(
    ("shape", "nvfp4", "tiles"),
    [
        ((128, 4096, 7168), False, tiles_of(128, 64)),
        ((65, 4096, 7168), False, tiles_of(128, 64)),
        ((128, 4096, 7168), True, nvfp4_tiles(128, 64, 1, chunks=2)),
        ((100, 4096, 320), True, nvfp4_tiles(128, 64, 1, chunks=1)),
    ],
)
def test_two_ctas_share_tiles_if_that_fills_the_gpu(variant, shape, nvfp4, tiles):
    formats = NVFP4 if nvfp4 else BFLOAT16
    assert configuration(variant, shape, formats, 132) == replace(tiles, schedule="split_k_cluster")
    assert configuration("persistent", shape, formats, 132).schedule == "persistent"


@pytest.mark.parametrize(
    ("shape", "element", "nvfp4", "schedule"),
    [
        ((256, 3072, 4096), torch.bfloat16, False, "split_k_cluster"),
        ((256, 4096, 7168), torch.bfloat16, True, "split_k_cluster"),
        ((256, 3072, 4096), torch.float8_e4m3fn, False, "stream_k"),  # slower
        ((256, 4096, 7168), torch.bfloat16, False, "stream_k"),  # more CTAs than SMs
        ((128, 12288, 4096), torch.bfloat16, False, "stream_k"),
        ((128, 1024, 4096), torch.bfloat16, False, "stream_k"),  # too few
        ((64, 4096, 7168), torch.bfloat16, False, "stream_k"),
        ((257, 3072, 4096), torch.bfloat16, False, "stream_k"),
    ],
)
def test_schedules_of_well_known_shapes(shape, element, nvfp4, schedule):
    assert configuration("stream_k", shape, Formats(element, torch.bfloat16, nvfp4), 132).schedule == schedule


@pytest.mark.parametrize(
    ("tiles", "shape", "early"),
    [
        (tiles_of(8, 32, 3), (1, 4096, 7168), True),
        (tiles_of(64, 32, 2), (64, 12288, 4096), True),
        (tiles_of(128, 32, 2), (65, 4096, 7168), False),
        (nvfp4_tiles(8, 32, 4, chunks=4), (1, 3072, 1024), True),  # four k-blocks
        (nvfp4_tiles(8, 32, 4, chunks=4), (1, 3072, 3072), True),  # as many as there are stages
        (nvfp4_tiles(8, 32, 4, chunks=4), (1, 3072, 3328), False),
    ],
)
def test_conditions_for_reading_weights_early(tiles, shape, early):
    assert reads_early(tiles, partition_of(tiles, shape, 132), shape[0]) is early


@pytest.mark.parametrize(
    ("tiles", "schedule", "shape", "expected"),
    [
        # whole tiles, distributed by two 32-bit counters in one 64-bit word
        (
            tiles_of(256),
            "persistent",
            (8192, 4096, 7168),
            {"units": 132, "workspace_floats": 0, "counter_words": 1, "sizes": (8192, 4096, 7168, 0, 0, 112)},
        ),
        # two CTAs of a cluster per tile, which exchange nothing through global memory
        (
            tiles_of(128),
            "split_k_cluster",
            (128, 4096, 7168),
            {"units": 128, "workspace_floats": 0, "counter_words": 0, "result_rows": 64},
        ),
        # one tile per CTA
        (
            tiles_of(8, 32, 3),
            "stream_k",
            (1, 4096, 7168),
            {"units": 128, "workspace_floats": 0, "counter_words": 0, "weight_box": (64, 8, 2, 4)},
        ),
        # work units that end within tiles leave one tile's partial sums (of two products) and one 32-bit flag each
        (
            tiles_of(256),
            "stream_k",
            (512, 3072, 7168),
            {"units": 132, "workspace_floats": 132 * 256 * 64 * 2, "counter_words": 66, "early": False},
        ),
        (
            nvfp4_tiles(8, 32, 4, chunks=4),
            "stream_k",
            (1, 3072, 1024),
            {"units": 96, "weight_box": (128, 8, 2, 4), "early": True},
        ),
    ],
)
def test_plans(tiles, schedule, shape, expected):
    config = replace(tiles, schedule=schedule)
    plan = launch_hopper.plan_of(config, shape, 132, scaled=tiles.nvfp4, keep=False, constant_weights=True)
    assert {name: getattr(plan, name) for name in expected} == expected


@pytest.mark.parametrize("channels", [64, 128, 192, 7168])
@pytest.mark.parametrize("nvfp4", [False, True])
@pytest.mark.parametrize("rows", [1, 8, 9, 17, 40, 64, 65, 100, 128, 129, 200, 256, 257, 9000])
def test_tiles_fit(rows, nvfp4, channels):
    formats = NVFP4 if nvfp4 else BFLOAT16
    shared = cluster_config(rows, channels, formats)
    for tiles in (
        *wide_configs(rows, channels, formats),
        narrow_config(rows, channels, formats),
        *([shared] if shared else []),
    ):
        assert tiles.b_rows % 8 == 0
        assert tiles.b_rows >= min(rows, 64)
        assert tiles.threads in (384, 512, 640)
        assert tiles.stages >= 2
        assert tiles.stages % tiles.split == 0  # otherwise a barrier's parity could be that of another round
        assert tiles.shared_bytes <= LARGEST_SHARED
        if nvfp4:
            assert channels % tiles.k_block == 0  # block scales are not padded


def test_a_tile_of_64_columns_and_256_rows_has_four_stages():
    assert tiles_of(256).stages == 4
