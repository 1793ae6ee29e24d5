"""Tests of timing: the order of candidates, the measurements kept after failures, and the times that are accepted.

A candidate is a variant or control of ``toy_sum`` (``toy.py``). In most tests times come from a script. They name samplers in
the order in which these are made: ``eager0``, ``parallel1``, and ``eager2`` for the baseline's second copy, whose ratio to the
first is the noise. ``prose`` compares a text with its entry in tests/snapshots/prose.txt, whose key is the node id of the test.
A test fails if it does not compare one of its entries, and ``tests/test_prose.py`` if the test or the parameter of an entry is
gone.

``ToyCall`` holds the checked arguments of ``toy_sum``. ``toy_case`` returns a small case of ``toy_sum``. A test marked
``thorough`` does not run in ``make test``.
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
import torch

from onelaunch.workbench.measure import rotation, sampling, timing
from onelaunch.workbench.measure.rotation import count_sets, rotate
from onelaunch.workbench.measure.sampling import CpuSampler, GpuSampler
from onelaunch.workbench.measure.timing import Interrupted, measure
from onelaunch.workbench.verify import Judge
from onelaunch.workbench.verify.calls import Candidate, status_of
from tests.workbench.toy import ToyCall, parallel, toy_case, toy_sum


class FakeSampler:
    """Sampler whose times come from a script: ``script(name, regime, n)`` returns the n-th sample, or raises."""

    log: list[tuple[str, str]]

    def __init__(self, name, script, result):
        self.name, self.script, self.result = name, script, result
        self.peak_bytes = 123
        self.refused = {}
        self.note = ""
        self.counts = Counter()

    def prepare(self, regimes):
        self.log.append((self.name, "prepare"))

    def sample(self, regime):
        self.log.append((self.name, regime))
        self.counts[regime] += 1
        return self.script(self.name, regime, self.counts[regime])

    def parts(self, regime):
        yield None
        yield self.sample(regime)

    def outputs(self, regime):
        yield self.result


@pytest.fixture
def scripted(monkeypatch):
    """Return a function that replaces the clock by a script, and returns the log of samples as (sampler, regime)."""
    log = []

    def install(script):
        names = itertools.count()

        def make(candidate, rotation, device):
            made = FakeSampler(f"{candidate.name}{next(names)}", script, candidate(rotation.sets[0]))
            made.log = log
            return made

        monkeypatch.setattr(timing, "make_sampler", make)
        monkeypatch.setattr(timing, "WARM_UP_SECONDS", {"cpu": 0.0})
        monkeypatch.setattr(rotation, "CACHES", 0)  # a script needs no sets that exceed the caches
        return log

    return install


def run(**changes):
    """Measure ``eager`` (the baseline) and ``parallel`` in four rounds; ``changes`` replaces arguments."""
    given: dict[str, Any] = {"variants": ["eager", "parallel"], "rounds": 4, "regimes": ("cold",)} | changes
    return measure(toy_sum, toy_case(), **given)


# Order


def test_candidates_are_interleaved_within_rounds(scripted):
    log = scripted(lambda name, regime, n: 10.0)
    run(regimes=("cold", "eager"))
    sampled = [name for name, regime in log if regime == "cold"][-12:]  # four rounds of three; before them is the warm-up
    assert [sorted(sampled[start : start + 3]) for start in range(0, 12, 3)] == 4 * [["eager0", "eager2", "parallel1"]]
    assert sampled[0:3] == sampled[3:6][::-1]
    assert sampled[0] != sampled[6]


# A/A noise


def test_the_baseline_is_timed_twice_but_shown_once(scripted):
    scripted(lambda name, regime, n: {"eager0": 10.0, "parallel1": 5.0, "eager2": 10.8}[name])
    found = run()
    assert set(found.candidates) == {"eager", "parallel"}
    (noise,) = found.noise
    assert noise.ratio.median == pytest.approx(1.08)
    assert noise.floor == pytest.approx(1.08)
    assert (noise.regime, noise.direction, noise.shape) == ("cold", "forward", str(toy_case()))


def test_the_noise_floor_is_at_least_one_percent(scripted):
    scripted(lambda name, regime, n: 10.0)
    assert run(baseline="parallel").noise[0].floor == 1.01


def test_a_baseline_that_cannot_run_gives_no_noise(scripted):
    scripted(lambda name, regime, n: 10.0)
    assert run(baseline="parallel").noise
    assert run(variants=["gpu_only", "eager"], baseline="gpu_only").noise == ()


def test_the_first_correct_baseline_gives_the_noise(scripted, prose):
    """Three baselines are named in order. ``zeros`` is incorrect, so ``parallel`` is timed twice."""
    scripted(lambda name, regime, n: {"eager0": 10.0, "parallel1": 5.0, "parallel2": 5.5}[name])
    found = run(variants=["zeros", "eager", "parallel"], baseline=("zeros", "parallel", "eager"))
    assert found.candidates["zeros"].status == "incorrect"
    assert found.noise[0].floor == pytest.approx(1.1)
    prose([note for note in found.notes if "zeros" in note])


# Loops of consecutive steps


class FakeLoop:
    """Loop with a given time per step in seconds, which may report a wrong result, or raise (``step=None``)."""

    made: list[str]

    def __init__(self, variant, arguments, step=20e-6, wrong=None):
        self.made.append(variant.name)
        assert set(arguments) == {"x", "weight"}
        self.step, self.wrong = step, wrong

    def seconds(self):
        if self.step is None:
            raise RuntimeError("gave up")
        return self.step

    def problem(self):
        return self.wrong


@pytest.fixture
def loops(monkeypatch):
    """Return a function that gives ``toy_sum`` loops for two regimes, and returns the names of the variants that get one.

    ``facts`` holds arguments of :class:`FakeLoop` for the regime ``served``, by variant.
    """
    monkeypatch.setattr(FakeLoop, "made", [], raising=False)

    def install(**facts):
        makers = {
            "running": FakeLoop,
            "served": lambda variant, arguments: FakeLoop(variant, arguments, **facts.get(variant.name, {})),
        }
        monkeypatch.setattr(toy_sum, "loops", makers)
        return FakeLoop.made

    return install


def test_consecutive_steps_are_timed_in_addition_to_single_calls(scripted, loops):
    scripted(lambda name, regime, n: 10.0)
    made = loops(parallel={"step": 30e-6})
    found = run(regimes=("cold", "running", "served"))
    times = {timing.regime: timing.microseconds.median for timing in found.candidates["parallel"].timings}
    assert times == {"cold": 10.0, "running": pytest.approx(20.0), "served": pytest.approx(30.0)}
    assert {noise.regime for noise in found.noise} == {"cold", "running", "served"}
    assert sorted(made) == sorted(2 * ["eager", "parallel", "eager"]), "one loop per regime, and two for the baseline"


@pytest.mark.parametrize(
    ("facts", "status", "reason"),
    [
        ({"wrong": "token 3 is 5."}, "incorrect", "The steps that were timed (served) are wrong: token 3 is 5."),
        ({"step": None}, "error", "RuntimeError: gave up"),
    ],
)
def test_times_of_wrong_consecutive_steps_are_rejected(scripted, loops, facts, status, reason):
    scripted(lambda name, regime, n: 10.0)
    loops(parallel=facts)
    found = run(regimes=("cold", "served"))
    assert (found.candidates["parallel"].status, found.candidates["parallel"].reason) == (status, reason)
    assert found.candidates["eager"].status == "ok"


def test_controls_and_gradients_have_no_consecutive_steps(scripted, loops):
    scripted(lambda name, regime, n: 10.0)
    made = loops()
    found = run(regimes=("cold", "running"), controls=["product"], rounds=3)
    regimes = {name: len(candidate.timings) for name, candidate in found.candidates.items()}
    assert regimes == {"eager": 2, "parallel": 2, "product": 1}
    made.clear()
    run(regimes=("cold", "running"), direction="forward_backward", rounds=3)
    assert made == []


# Failures and interruptions


def test_ctrl_c_keeps_complete_rounds(scripted):
    def script(name, regime, n):
        if name == "parallel1" and n == 4:  # there is at most one warm-up sample, so that this is in a late round
            raise KeyboardInterrupt
        return 10.0 + n

    scripted(script)
    with pytest.raises(KeyboardInterrupt) as caught:
        run(rounds=50)
    assert isinstance(caught.value, Interrupted)
    candidates = caught.value.measurements.candidates
    kept = {name: len(candidate.timings[0].rounds) for name, candidate in candidates.items()}
    assert kept["eager"] == kept["parallel"] >= 2, "a round counts for all candidates or for none"
    assert {candidate.status for candidate in candidates.values()} == {"interrupted"}
    assert f"after {kept['eager']} rounds" in candidates["eager"].reason
    assert caught.value.measurements.noise[0].ratio.samples == kept["eager"]


def test_ctrl_c_during_verification_keeps_the_statuses_found(monkeypatch):
    def stop(call):
        raise KeyboardInterrupt

    monkeypatch.setattr(toy_sum.get("parallel"), "run", stop)
    with pytest.raises(Interrupted) as caught:
        run(variants=["eager", "zeros", "gpu_only", "parallel"])
    statuses = {name: candidate.status for name, candidate in caught.value.measurements.candidates.items()}
    assert statuses == {"eager": "interrupted", "zeros": "incorrect", "gpu_only": "unsupported", "parallel": "interrupted"}


def test_a_candidate_that_fails_during_timing_does_not_stop_the_others(scripted):
    def script(name, regime, n):
        if name.startswith("parallel") and n == 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return 10.0

    scripted(script)
    found = run(rounds=10)
    assert found.candidates["parallel"].status == "out_of_memory"
    assert len(found.candidates["eager"].timings[0].rounds) == 10
    assert found.candidates["eager"].status == "ok"


def test_statuses_have_reasons():
    candidates = run(variants=["eager", "gpu_only", "missing_package", "raises", "runs_out", "zeros"]).candidates
    assert {name: candidate.status for name, candidate in candidates.items()} == {
        "eager": "ok",
        "gpu_only": "unsupported",
        "missing_package": "not_installed",
        "raises": "error",
        "runs_out": "out_of_memory",
        "zeros": "incorrect",
    }
    assert candidates["gpu_only"].reason == "needs a GPU"
    assert "a_package_that_nobody_has" in candidates["missing_package"].reason
    assert "the kernel fell over" in candidates["raises"].reason
    assert candidates["zeros"].verdict is not None
    assert not candidates["zeros"].verdict.ok
    assert not any(candidate.timings for name, candidate in candidates.items() if name != "eager")


def test_no_runnable_candidate_is_a_valid_result():
    found = run(variants=["zeros", "gpu_only"])
    assert not any(candidate.timings for candidate in found.candidates.values())
    assert found.noise == ()


def test_a_refused_regime_does_not_affect_the_others(scripted, monkeypatch):
    scripted(lambda name, regime, n: 10.0)
    make = timing.make_sampler

    def refusing(candidate, rotation, device):
        made = make(candidate, rotation, device)
        if candidate.name == "parallel":
            made.refused = {"cold": ("error", "cannot be captured in a CUDA graph: it synchronises")}
        return made

    monkeypatch.setattr(timing, "make_sampler", refusing)
    found = run(regimes=("cold", "eager"))
    assert [one.regime for one in found.candidates["parallel"].timings] == ["eager"]
    assert found.candidates["parallel"].status == "error"
    assert "it synchronises" in found.candidates["parallel"].reason
    assert found.candidates["eager"].status == "ok"


@pytest.mark.parametrize(("steady", "rounds"), [({}, 8), ({"steady_eager": False}, 5)])
def test_calls_from_python_get_more_rounds_while_the_noise_is_high(steady, rounds, scripted, monkeypatch):
    scripted(lambda name, regime, n: 10.0)
    asked = []
    monkeypatch.setattr(timing, "is_unsteady", lambda noise, device: asked.append(noise) or len(asked) < 4)
    found = run(regimes=("cold", "eager"), rounds=5, **steady)
    assert {one.regime: len(one.rounds) for one in found.candidates["parallel"].timings} == {"cold": 5, "eager": rounds}
    assert all({each.regime for each in noise} == {"cold", "eager"} for noise in asked)


def test_the_time_limit_stops_after_three_rounds_at_the_earliest():
    found = run(rounds=1000, time_cap_seconds=0.0)
    assert len(found.candidates["eager"].timings[0].rounds) == 3
    # Three rounds are measured whatever the cap.
    assert any("time cap" in note and "3 of 1000" in note for note in found.notes)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), "out_of_memory"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), "out_of_memory"),
        (ModuleNotFoundError("No module named 'fla'"), "not_installed"),
        (ValueError("bad"), "error"),
    ],
)
def test_the_status_of_an_exception(error, status):
    assert status_of(error)[0] == status


def test_a_capture_that_fails_for_lack_of_memory_is_out_of_memory():
    error = sampling.CaptureFailed("cannot be captured in a CUDA graph: CUDA out of memory")
    error.__cause__ = torch.OutOfMemoryError("CUDA out of memory")
    assert status_of(error)[0] == "out_of_memory"


# Real clocks on a CPU


@pytest.mark.thorough
def test_times_and_controls_of_both_directions_are_plausible():
    case = toy_case(T=200)
    forward = measure(toy_sum, case, variants=["eager", "parallel"], controls=["product"], rounds=5)
    backward = measure(toy_sum, case, "forward_backward", variants=["eager", "parallel"], controls=["product"], rounds=5)
    for found in (forward, backward):
        assert {name: candidate.status for name, candidate in found.candidates.items()} == dict.fromkeys(found.candidates, "ok")
        assert [one.regime for one in found.candidates["parallel"].timings] == ["cold", "warm", "eager"]
        times = {name: candidate.timings[0].microseconds.median for name, candidate in found.candidates.items()}
        assert times["eager"] > 5 * times["parallel"] > 5 * 0.5 * times["product"] > 0
        assert found.candidates["product"].control
        assert found.candidates["eager"].verdict is not None
        assert found.clocks == {}
    slower = [found.candidates["eager"].timings[0].microseconds.median for found in (forward, backward)]
    assert slower[1] > 1.5 * slower[0]


def test_progress_is_reported():
    told = []
    run(on_progress=lambda what, done, total: told.append((what, done, total)))
    assert list(dict.fromkeys(what for what, _, _ in told)) == ["verify", "prepare", "time"]
    assert all(0 <= done < total for _, done, total in told)


def test_cold_calls_rotate_through_all_sets_and_warm_calls_use_one(monkeypatch):
    monkeypatch.setattr(sampling, "CPU_SAMPLE_SECONDS", 0.0)
    monkeypatch.setattr(rotation, "CACHES", 0.0005)  # size of all input sets together, in last-level caches
    case = toy_case()
    used = []

    def call(**arguments):
        used.append(arguments["x"].data_ptr())
        return toy_sum(**arguments, variant="parallel")

    rotated = rotate(Judge().reference(toy_sum, case), torch.device("cpu"))
    assert len(rotated.sets) > 4
    candidate = Candidate("parallel", call, toy_sum.outputs)
    one, other = CpuSampler(candidate, rotated), CpuSampler(candidate, rotated)
    one.prepare(("cold", "warm"))
    used.clear()
    for _ in range(len(rotated.sets)):  # candidates alternate, so that none finds the other's inputs in the cache
        one.sample("cold")
        other.sample("cold")
    assert len(set(used[: len(rotated.sets)])) == len(rotated.sets)
    used.clear()
    for _ in range(4):
        one.sample("warm")
    assert set(used) == {rotated.sets[0].arguments["x"].data_ptr()}


def test_rotated_sets_exceed_three_caches_unless_memory_is_short(monkeypatch):
    from onelaunch.device.hardware import describe

    cache = describe("cpu").cache_bytes
    device = torch.device("cpu")
    monkeypatch.setattr(rotation, "free_memory", lambda device: 1 << 40)
    count, full = count_sets(1 << 20, 0, device)  # arguments: bytes of the inputs and outputs of one set
    assert full
    assert (count - 1) << 20 > 3 * cache
    assert count_sets(10 * cache, 0, device) == (2, True)
    monkeypatch.setattr(rotation, "free_memory", lambda device: 40 << 20)
    assert count_sets(1 << 20, 1 << 20, device) == (5, False)  # a quarter of 40 MiB
    assert count_sets(1 << 30, 1 << 20, device) == (1, False)
    assert count_sets(1 << 20, 1 << 20, device, candidates=4) == (2, False)  # each keeps outputs of its own
    assert count_sets(0, 0, device)[0] > 0


def test_every_set_has_its_own_storage_and_the_same_contents():
    rotation = rotate(Judge().reference(toy_sum, toy_case(B=8, T=256, V=256), direction="forward_backward"), torch.device("cpu"))
    pointers = [tensor.data_ptr() for one in rotation.sets for _, tensor in one.named_tensors()]
    assert len(set(pointers)) == len(pointers)
    first, last = rotation.sets[0], rotation.sets[-1]
    for (name, a), (_, b) in zip(first.named_tensors(), last.named_tensors(), strict=True):
        assert torch.equal(a, b), name
    assert first.arguments["x"].requires_grad
    assert last.arguments["x"].is_leaf


# Peak memory


def test_peak_memory_is_the_increase_by_one_call(monkeypatch):
    """1000 bytes were allocated before, and the call reached 5000. PyTorch's counters are replaced, so no GPU is needed."""
    log = []
    memory = {"reset_peak_memory_stats": None, "memory_allocated": 1000, "max_memory_allocated": 5000}
    for name, value in memory.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, name=name, value=value: (log.append(name), value)[1])

    class Stream:
        def synchronize(self):
            log.append("synchronize")

    def call(**arguments):
        log.append("call")
        return parallel(ToyCall(**arguments))

    rotation = rotate(Judge().reference(toy_sum, toy_case()), torch.device("cpu"))
    sampler = GpuSampler(Candidate("mine", call, toy_sum.outputs), rotation, torch.device("cuda"), Stream())
    assert sampler._measure_peak() == 4000
    assert log == ["reset_peak_memory_stats", "memory_allocated", "call", "synchronize", "max_memory_allocated"]


def test_on_a_cpu_peak_memory_is_not_measured():
    assert {candidate.peak_bytes for candidate in run(rounds=3).candidates.values()} == {None}


# On a GPU


@pytest.mark.gpu
def test_peak_memory_includes_results_and_temporaries_but_no_inputs():
    case = toy_case("float16", B=8, T=512, V=64)  # x is 512 KiB, and so is y

    @toy_sum.variant("greedy")
    def greedy(call):
        scratch = torch.empty(64 << 20, dtype=torch.int8, device=call.x.device)
        del scratch
        return parallel(call)

    try:
        found = measure(toy_sum, case, variants=["parallel", "greedy"], baseline="parallel", rounds=3, device="cuda").candidates
        both = measure(toy_sum, case, "forward_backward", variants=["parallel"], rounds=3, device="cuda").candidates
    finally:
        del toy_sum.variants["greedy"]
    y = 8 * 512 * 64 * 2
    assert y <= found["parallel"].peak_bytes < 16 * y
    assert 64 << 20 <= found["greedy"].peak_bytes < 65 << 20
    assert both["parallel"].peak_bytes >= 2 * y  # y and the gradient of x


@pytest.mark.gpu
def test_graphs_are_timed_in_all_regimes_and_directions():
    case = toy_case("float16", B=8, T=512, V=64)
    for direction in ("forward", "forward_backward"):
        found = measure(
            toy_sum, case, direction, variants=["eager", "parallel", "gpu_only"], controls=["product"], rounds=5, device="cuda"
        )
        for candidate in found.candidates.values():
            assert candidate.status == "ok", candidate.reason
            times = {one.regime: one.microseconds.median for one in candidate.timings}
            assert 0 < times["warm"] <= 1.1 * times["cold"]
            assert times["cold"] <= 1.1 * times["eager"], "replay cannot be slower than calls from Python"
            assert candidate.peak_bytes is not None
            assert candidate.peak_bytes > 0
        assert {noise.regime for noise in found.noise} == {"cold", "warm", "eager"}


@pytest.mark.gpu
def test_a_call_that_cannot_be_captured_is_refused_and_the_next_capture_works():
    @toy_sum.variant("synchronises")
    def synchronises(call):
        call.x.sum().item()
        return parallel(call)

    try:
        found = measure(toy_sum, toy_case(), variants=["synchronises", "parallel"], baseline="parallel", rounds=3, device="cuda")
    finally:
        del toy_sum.variants["synchronises"]
    candidate = found.candidates["synchronises"]
    assert candidate.status == "error"
    assert "cannot be captured" in candidate.reason
    assert [one.regime for one in candidate.timings] == ["eager"]
    assert found.candidates["parallel"].status == "ok"
    assert [one.regime for one in found.candidates["parallel"].timings] == ["cold", "warm", "eager"]
