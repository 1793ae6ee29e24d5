"""Tests of the arithmetic of slices against a count of steps, and of the predicted cost against the page that shows it."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from onelaunch.parallel.cost import INFINIBAND, NVLINK, predict, table
from onelaunch.parallel.local_slice import local_slice_of, starts_of


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=5), st.lists(st.integers(0, 14), max_size=4), st.integers(1, 3))
def test_local_slices_are_what_counting_steps_gives(lengths, inner, past):
    starts, lengths = starts_of(tuple(lengths)), tuple(lengths)
    total = starts[-1]
    offsets = (0, *sorted(min(each, total) for each in inner), total)
    owner = [n for n, (a, b) in enumerate(pairwise(offsets)) for _ in range(a, b)]
    shares = [local_slice_of(rank, lengths, offsets) for rank in range(len(lengths))]
    for name in ("begins", "ends"):  # each sequence once
        found = [n for share in shares for n, flag in zip(share.sequences, getattr(share, name), strict=True) if flag]
        assert sorted(found) == list(range(len(offsets) - 1))
    for rank, share in enumerate(shares):
        mine = owner[share.start : share.stop]
        assert (share.offsets[0], share.offsets[-1]) == (0, share.length)
        held = [n for n, (a, b) in zip(share.sequences, pairwise(share.offsets), strict=True) for _ in range(a, b)]
        assert held == mine
        if not mine:
            assert (share.before, share.after) == ((), ())
            assert share.sources(past, starts) == (None,) * past
            continue
        holders = [{r for r in range(len(lengths)) if n in owner[starts[r] : starts[r + 1]]} for n in (mine[0], mine[-1])]
        assert share.before == tuple(sorted(r for r in holders[0] if r < rank))
        assert share.after == tuple(sorted(r for r in holders[1] if r > rank))
        for step, source in zip(range(share.start - past, share.start), share.sources(past, starts), strict=True):
            if step < 0 or owner[step] != mine[0]:
                assert source is None
            else:
                assert starts[source[0] + 1] - source[1] == step
                assert starts[source[0]] <= step


def test_the_page_shows_the_predictions():
    page = (Path(__file__).parents[2] / "docs/parallel.md").read_text(encoding="utf-8")
    for link in (NVLINK, INFINIBAND):
        assert "\n".join(table(link, length=131072, heads=16)) in page


def test_more_steps_on_a_rank_hide_the_exchange():
    """The speedup approaches the number of ranks, and one rank has neither messages nor gains."""
    far = [predict(8, INFINIBAND, length=length, heads=16).speedup for length in (1 << 14, 1 << 18, 1 << 26)]
    assert far == sorted(far)
    assert 7.9 < far[-1] < 8
    assert predict(1, NVLINK, length=4096, heads=16)[1:3] == (0, 0)
