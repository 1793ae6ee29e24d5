"""Tests of the predicted cost of context parallelism, against committed results and the page that shows it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from onelaunch.parallel.cost import INFINIBAND, MEASURED, NVLINK, predict, table
from onelaunch.parallel.exchange import MOST_BYTES
from onelaunch.rank_studies.result import RankResult

ROOT = Path(__file__).parents[2]

RESULT = RankResult.load(ROOT / "results/nvidia-h100/ranks/context-parallel.json")
"""Calls on one GPU against two and four, with messages by stores."""

SHAPE = RESULT.study.shapes[0]
"""Shape that the model knows: it has a decay per channel."""

MEASUREMENTS = [each for each in RESULT.measurements if (each.shape, each.regime) == (SHAPE.name, "graph")]


def predicted(ranks, direction, **options):
    return predict(ranks, NVLINK, length=SHAPE.T, heads=SHAPE.H, keys=SHAPE.K, values=SHAPE.V, direction=direction, **options)


@pytest.mark.parametrize("each", MEASUREMENTS, ids=lambda each: f"{each.direction}-{each.ranks}")
def test_the_model_gives_the_times_that_were_measured(each):
    """Times on two and four H100s within 5 %, and so the speedups, whose time on one GPU is of the same run."""
    found, (one, took) = predicted(each.ranks, each.direction), each.medians()
    assert each.exchange == "stores to peers"
    assert found.stores
    assert found.total == pytest.approx(took, rel=0.05)
    assert found.speedup == pytest.approx(one / took, rel=0.05)


def test_all_forms_of_the_study_are_compared():
    assert {(each.ranks, each.direction) for each in MEASUREMENTS} == {
        (ranks, direction) for ranks in (2, 4) for direction in ("forward", "forward_backward")
    }


def test_the_model_gives_the_times_with_nccl():
    """387 and 1939 us on four H100s with no overlap; docs/notebook/gla.md, 2026-11-27."""
    for direction, took in (("forward", 387), ("forward_backward", 1939)):
        found = predicted(4, direction, stores=False)
        assert (found.stores, found.hidden) == (False, 0)
        assert found.total == pytest.approx(took, rel=0.01)


def test_times_of_one_gpu_are_those_of_committed_results():
    """Times of an H100 at 64 to 131072 steps."""
    cells = [
        (cell["shape"], cell["direction"], timing["microseconds"]["median"])
        for name, variant in (("everyday-calls", "auto"), ("039-overlap", "hopper"))
        for cell in json.loads((ROOT / f"results/nvidia-h100/{name}.json").read_text(encoding="utf-8"))["cells"]
        for timing in cell["timings"] or ()
        if cell["variant"] == variant and timing["regime"] == "cold"
    ]
    found = {(shape, direction): took for shape, direction, took in cells}
    for point, shape in zip(MEASURED, ("1x64x16x128 channel", "1x512x16x128 channel", "1x32768x16x128"), strict=False):
        assert point.forward == pytest.approx(found[shape, "forward"], abs=0.06)
        assert point.trained == pytest.approx(found[shape, "forward_backward"], abs=0.06)
    ones = {each.direction: each.medians()[0] for each in MEASUREMENTS if each.ranks == 4}
    assert MEASURED[-1] == (SHAPE.T, pytest.approx(ones["forward"], abs=0.06), pytest.approx(ones["forward_backward"], abs=0.06))


def test_the_page_shows_the_predictions():
    page = (ROOT / "docs/parallel.md").read_text(encoding="utf-8")
    for link in (NVLINK, INFINIBAND):
        assert "\n".join(table(link, length=131072, heads=16)) in page


def test_more_steps_on_a_rank_hide_the_exchange():
    """The speedup approaches the number of ranks, and one rank has neither messages nor gains."""
    far = [predict(8, INFINIBAND, length=length, heads=16).speedup for length in (1 << 14, 1 << 18, 1 << 26)]
    assert far == sorted(far)
    assert 7.9 < far[-1] < 8
    assert predict(1, NVLINK, length=4096, heads=16)[1:3] == (0, 0)


def test_messages_are_stored_to_peers_of_one_host():
    """Messages of more ranks, of several hosts, and large ones take the collective, as in an exchange."""
    heads = MOST_BYTES // (4 * 128 * 129)
    assert predict(8, NVLINK, length=4096, heads=heads).stores
    assert not predict(8, NVLINK, length=4096, heads=heads + 1).stores
    assert not predict(9, NVLINK, length=4096, heads=1).stores
    assert not predict(2, INFINIBAND, length=4096, heads=1).stores
