"""Tests of the sampler for a GPU on a machine without one: PyTorch's streams, events and graphs are replaced by simple stand-ins.

A replay of a stand-in graph makes the captured calls again. So what a sample changes, poisons, copies and compares can be tested;
that it does so in the order of a stream is left to the tests on a GPU. The honest variant is
``parallel`` of ``toy.py``. The rogue variants are those of ``rogues_timing.py``, and one is in a test below.

``ToyCall`` holds the checked arguments of ``toy_sum``. ``toy_case`` returns a small case of ``toy_sum``.
"""

from __future__ import annotations

import contextlib
import weakref

import pytest
import torch

from onelaunch.workbench.measure import rotation, sampling
from onelaunch.workbench.measure.contents import InputsChanged
from onelaunch.workbench.measure.rotation import Rotation
from onelaunch.workbench.measure.sampling import GpuSampler
from onelaunch.workbench.verify import Judge, judge_outputs
from onelaunch.workbench.verify.calls import Candidate
from tests.workbench import rogues_timing as rogues
from tests.workbench.toy import ToyCall, parallel, toy_case, toy_sum

CPU = torch.device("cpu")
REGIMES = ("cold", "warm", "eager")


class Stream:
    """Stand-in for a stream, on which everything is done at once."""

    def wait_stream(self, other):
        pass

    def synchronize(self):
        pass


class Event:
    """Stand-in for an event: a millisecond passes between any two."""

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        pass

    def synchronize(self):
        pass

    def elapsed_time(self, end):
        return 1.0


class Graph:
    """Stand-in for a graph: ``replay`` makes the captured calls again, whose outputs replace those of the capture."""

    def replay(self):
        self.calls()


@pytest.fixture(autouse=True)
def pretended(monkeypatch):
    """Replace what the sampler uses of CUDA."""
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)
    for name in ("reset_peak_memory_stats", "memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda device: 0)
    for name in ("GPU_SAMPLE_SECONDS", "EAGER_SAMPLE_SECONDS"):
        monkeypatch.setattr(sampling, name, 1e-4)
    monkeypatch.setattr(sampling, "CACHES", 0)  # flushing the caches of a CPU takes a tenth of a second

    def capture(call_all, graph, stream):
        graph.calls = call_all
        call_all()

    monkeypatch.setattr(sampling.cuda, "capture", capture)


def sampled(function, direction="forward", samples=12, **more):
    """Return a sampler of a function of the checked call, after some samples in every regime, and the reference of its case.

    ``more`` are further arguments of the candidate.
    """
    reference = Judge().reference(toy_sum, toy_case(), direction=direction, seed=5)
    other = Judge().reference(toy_sum, toy_case(), direction=direction, seed=6).inputs
    rotation = Rotation(reference, [reference.inputs.clone() for _ in range(6)], full=True, stream=Stream(), other=other)
    candidate = Candidate("mine", lambda **given: function(ToyCall(**given)), toy_sum.outputs, **more)
    sampler = GpuSampler(candidate, rotation, CPU, Stream())
    sampler.prepare(REGIMES)
    for _ in range(samples):
        for regime in REGIMES:
            assert sampler.sample(regime) > 0
    return sampler, reference


@pytest.mark.parametrize("direction", ["forward", "forward_backward"])
def test_an_honest_variant_passes_in_every_regime(direction):
    sampler, reference = sampled(parallel, direction)
    for regime in REGIMES:
        judged = list(sampler.outputs(regime))
        assert 1 <= len(judged) <= rotation.JUDGED_CALLS
        assert all(judge_outputs(reference, outputs).ok for outputs in judged)


def test_outputs_of_a_part_are_freed_before_other_candidates_take_theirs():
    made = []

    def watched(call):
        outputs = parallel(call)
        made.extend(weakref.ref(output) for output in outputs)
        return outputs

    sampler, _ = sampled(watched, samples=0)
    parts = sampler.parts("eager")
    made.clear()
    next(parts)
    assert made
    assert not any(output() is not None for output in made)


@pytest.fixture
def no_capture(monkeypatch):
    """Let every capture fail, as that of a call that reads values on the host does."""

    def capture(call_all, graph, stream):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(sampling.cuda, "capture", capture)


@pytest.mark.parametrize("direction", ["forward", "forward_backward"])
def test_a_peer_that_no_graph_can_capture_is_called_over_cold_caches(direction, no_capture, prose):
    sampler, reference = sampled(parallel, direction, samples=0, foreign=True)
    assert set(sampler.refused) == {"warm"}
    assert sampler.sample("cold") > 0
    assert all(judge_outputs(reference, outputs).ok for outputs in sampler.outputs("cold"))
    if direction == "forward":
        prose([sampler.note])


def test_a_peer_that_cheats_in_calls_over_cold_caches_is_found(no_capture):
    sampler, reference = sampled(rogues.CountThenStash(), samples=0, foreign=True)
    for _ in range(40):
        sampler.sample("cold")
    assert not all(judge_outputs(reference, outputs).ok for _ in range(3) for outputs in sampler.outputs("cold"))


def test_a_variant_of_ours_must_be_captured(no_capture):
    sampler, _ = sampled(parallel, samples=0)
    assert set(sampler.refused) == {"cold", "warm"}
    assert sampler.note == ""


def test_a_memo_by_a_few_numbers_of_the_input_finds_nothing_in_eager_calls():
    memo = rogues.ContentMemo()
    sampler, _ = sampled(memo, samples=0)
    before = memo.hits
    for _ in range(20):
        sampler.sample("eager")
    assert memo.hits == before


@pytest.mark.parametrize("make", [rogues.CountThenStash, rogues.EveryTenth, rogues.SeedZeroOnly], ids=lambda make: make.__name__)
def test_outputs_that_are_not_computed_from_these_inputs_are_incorrect(make):
    sampler, reference = sampled(make(), samples=40)
    verdicts = [judge_outputs(reference, outputs) for _ in range(3) for regime in REGIMES for outputs in sampler.outputs(regime)]
    assert not all(verdict.ok for verdict in verdicts)


@pytest.mark.parametrize("regime", REGIMES)
def test_a_variant_that_works_in_place_is_found_and_its_inputs_are_restored(regime):
    rogue = rogues.CarelessMutation()
    sampler, _ = sampled(rogue, samples=0)
    sampler.sample(regime)
    rogue.calls = rogues.VERIFYING_CALLS
    with pytest.raises(InputsChanged, match="its input x"):
        list(sampler.outputs(regime))
    sampler._rotation.check(sampler._rotation.sets)


@pytest.mark.parametrize("regime", REGIMES)
def test_outputs_are_poisoned_before_those_of_a_last_sample_are_judged(regime):
    """This variant writes half of an output, into memory that it keeps. The other half is what was there before."""
    kept = torch.zeros_like(toy_inputs().arguments["x"])

    def half(call):
        y, state = parallel(call)
        kept[:1] = y[:1]
        return kept, state

    sampler, _ = sampled(half)
    assert all(outputs["y"][1:].isnan().all() for outputs in sampler.outputs(regime))


def toy_inputs():
    return Judge().reference(toy_sum, toy_case()).inputs


@pytest.mark.parametrize(("seconds", "parts"), [(1e-9, 40), (6e-4, 7), (0.04, 3)])
def test_eager_samples_of_all_candidates_have_parts_of_as_many_calls(seconds, parts):
    """What the device still has to do after a part's last call is then counted alike."""
    sampler, _ = sampled(parallel, samples=0)
    sampler._rotation.sets = sampler._rotation.sets[:1] * 5
    sampler._choose_eager_calls(seconds, 0.02)
    assert (sampler._eager_part, sampler._eager_calls) == (5, 5 * parts)
    sampler._choose_eager_calls(0.06, 0.02)
    assert (sampler._eager_part, sampler._eager_calls) == (1, 1)


def test_a_slow_start_makes_eager_samples_shorter(monkeypatch):
    sampler, _ = sampled(parallel, samples=0)
    sampler._eager_calls = 40
    monkeypatch.setattr(Event, "elapsed_time", lambda self, end: 4000.0)
    sampler.sample("eager")
    assert sampler._eager_calls == 1
