"""Tests of the order of candidates in rounds, and of when a measurement takes more rounds."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch

from onelaunch.workbench.measure.rounds import by_turns, is_unsteady, order
from onelaunch.workbench.result import Noise
from onelaunch.workbench.stored import Estimate


@pytest.mark.parametrize(
    ("device", "regime", "floor", "unsteady"),
    [("cuda", "eager", 1.06, True), ("cuda", "eager", 1.02, False), ("cuda", "cold", 1.2, False), ("cpu", "eager", 1.2, False)],
)
def test_only_calls_from_python_on_a_gpu_get_more_rounds(device, regime, floor, unsteady):
    ratio = Estimate(median=1.0, low=1 / floor, high=floor, samples=5)
    noise = Noise(shape="one", direction="forward", regime=regime, ratio=ratio, floor=floor)
    assert is_unsteady([noise], torch.device(device)) == unsteady


def test_parts_of_samples_are_taken_by_turns():
    """Every second time backwards; a sample with fewer parts ends earlier, and one without any has no value."""
    log = []

    def parts(name, count):
        for index in range(count):
            log.append(name)
            yield 10.0 * count if index == count - 1 else None

    found = by_turns({name: parts(name, count) for name, count in (("a", 3), ("b", 2), ("c", 0), ("d", 3))})
    assert "".join(log) == "abd" + "dba" + "ad"
    assert found == {"a": 30.0, "b": 20.0, "c": None, "d": 30.0}


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_every_candidate_takes_every_position_equally_often(count):
    names = tuple("abcdefgh"[:count])
    rounds = [order(names, index) for index in range(2 * count)]
    assert all(sorted(one) == list(names) for one in rounds)
    for place in range(count):
        assert Counter(one[place] for one in rounds) == dict.fromkeys(names, 2)


def test_each_candidate_also_precedes_those_that_it_follows():
    pairs = Counter(pair for index in range(6) for pair in itertools.pairwise(order("abc", index)))
    assert all(pairs[pair] == pairs[pair[::-1]] for pair in pairs)
