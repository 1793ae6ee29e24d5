"""Tests of how a study of models times its variants: by turns, by the median part of a decoding, in rounds until it is steady."""

from __future__ import annotations

import contextlib
import gc
import itertools
from types import SimpleNamespace

import pytest
import torch

from onelaunch.model_studies import tasks
from tests.model_studies import tiny

GPU = torch.device("cuda")
"""Device that decides about rounds; nothing runs on it here."""


class Decoder:
    """Trainer of a model that takes declared seconds for each token behind the prompt."""

    device = tiny.CPU

    def __init__(self, clock, seconds):
        self.clock, self.seconds = clock, iter(seconds)

    def logits(self, rows, past_key_values=None, *, use_cache=False):
        assert use_cache
        if past_key_values is not None:
            assert past_key_values.tolist() == list(range(past_key_values.shape[0]))  # no token is missing before this one
            self.clock[0] += next(self.seconds)
        seen = 0 if past_key_values is None else past_key_values.shape[0]
        return SimpleNamespace(logits=torch.zeros(1, rows.shape[1], 7), past_key_values=torch.arange(seen + rows.shape[1]))


def runs_of(name, seconds, turns):
    def run():
        for _ in range(2):
            turns.append(name)
            yield None
        assert not gc.isenabled()
        yield next(seconds)

    return run


def test_a_decoding_counts_as_all_tokens_taking_the_median_time(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(tasks.time, "perf_counter", lambda: clock[0])
    slow = [100.0 if token < tasks.PART else 1.0 for token in range(tasks.DECODED)]  # the host is busy during the first part
    *between, seconds = tasks._decode(Decoder(clock, slow), torch.zeros(1, 4, dtype=torch.int64))
    assert between == [None] * (tasks.DECODED // tasks.PART)
    assert seconds == 1.0
    *_, steady = tasks._decode(Decoder(clock, [2.0] * tasks.DECODED), torch.zeros(1, 4, dtype=torch.int64))
    assert steady == 2.0


def test_variants_take_their_parts_by_turns_in_every_order():
    turns = []
    runs = {name: runs_of(name, itertools.count(1.0), turns) for name in ("theirs", "ours")}
    frozen = gc.get_freeze_count()
    found = tasks._in_turn(runs, 6, tiny.CPU)
    assert gc.isenabled()
    assert bool(gc.get_freeze_count()) == bool(frozen)
    assert {name: len(each) for name, each in found.items()} == {"theirs": 6, "ours": 6, "": 6}
    assert found["ours"][:2] == [1e6, 2e6]
    rounds = [tuple(turns[at : at + 6]) for at in range(0, 36, 6)]
    assert all(sorted(each[:3]) == sorted(each[3:]) == ["ours", "theirs", "theirs"] for each in rounds)
    assert {each[:3].index("ours") for each in rounds} == {0, 1, 2}


@pytest.mark.parametrize(
    ("device", "again", "seconds", "rounds"),
    [
        (GPU, itertools.repeat(1.0), 1e9, 5),  # steady
        (GPU, itertools.chain([1.5, 0.9, 1.3, 0.8, 1.4], itertools.repeat(1.0)), 1e9, None),  # steady after some more
        (GPU, itertools.cycle([1.5, 0.7]), 0.0, 5),  # no time is left
        (tiny.CPU, itertools.cycle([1.5, 0.7]), 1e9, 5),  # host times of a CPU are what is measured
    ],
)
def test_more_rounds_follow_on_a_gpu_while_the_noise_is_high(device, again, seconds, rounds, monkeypatch):
    monkeypatch.setattr(tasks, "MORE_SECONDS", seconds)
    monkeypatch.setattr(tasks, "one_core", contextlib.nullcontext)
    monkeypatch.setattr(tasks, "by_turns", lambda samples: {name: 1.0 if name else next(again) for name in samples})
    found = tasks._in_turn(dict.fromkeys(("theirs", "ours"), lambda: iter(())), 5, device)
    if rounds is None:
        assert 5 < len(found[""]) < 200
    else:
        assert len(found[""]) == rounds
    assert len({len(each) for each in found.values()}) == 1
