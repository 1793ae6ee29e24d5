"""Tests of the arithmetic of slices against a count of steps."""

from __future__ import annotations

from itertools import pairwise, product

from hypothesis import given, settings
from hypothesis import strategies as st

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
    for reader, sender in product(range(len(lengths)), repeat=2):  # a message is sent to all ranks that read it, and to no other
        assert (sender in shares[reader].before) == (reader in shares[sender].after)
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
