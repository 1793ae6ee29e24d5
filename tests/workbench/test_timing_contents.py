"""Tests that times are of work: on contents that were never verified, with inputs that stay as they are, and with honest clocks.

Variants are those of ``rogues_timing.py``, registered for a test beside ``eager`` and ``parallel`` of ``toy_sum``. ``prose``
compares a text with its entry in tests/snapshots/prose.txt, whose key is the node id of the test. A test fails if it does not
compare one of its entries, and ``tests/test_prose.py`` if the test or the parameter of an entry is gone.

``ToyCall`` holds the checked arguments of ``toy_sum``. ``toy_case`` returns a small case of ``toy_sum``.
"""

from __future__ import annotations

import time

import pytest
import torch

from onelaunch.errors import ArgumentError
from onelaunch.workbench.measure import rotation, sampling, timing
from onelaunch.workbench.measure.contents import POSITIONS, Contents, InputsChanged
from onelaunch.workbench.measure.rotation import rotate
from onelaunch.workbench.measure.sampling import CpuSampler
from onelaunch.workbench.measure.timing import measure
from onelaunch.workbench.verify import Judge
from onelaunch.workbench.verify.calls import Candidate
from tests.workbench import rogues_timing as rogues
from tests.workbench.rogues_timing import registered
from tests.workbench.toy import ToyCall, parallel, toy_case, toy_sum

SIZES = {"B": 4, "T": 64, "V": 32}
"""Sizes at which ``parallel`` takes some tens of microseconds, so that a sample has many calls."""


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Rotate through a few sets, and do not warm up for long."""
    monkeypatch.setitem(timing.WARM_UP_SECONDS, "cpu", 0.02)
    monkeypatch.setattr(rotation, "CACHES", 0.02)
    monkeypatch.setattr(sampling, "CPU_SAMPLE_SECONDS", 2e-3)


def timed(name, function, **changes):
    """Measure a variant after the two honest ones, or before them with ``rogue_first``, and return the candidates."""
    given = {"variants": [name, "eager", "parallel"], "baseline": "parallel", "rounds": 4} | changes
    if "rogue_first" not in changes:
        given["variants"] = ["eager", "parallel", name]
    given.pop("rogue_first", None)
    with registered(**{name.replace("-", "_"): function}):
        return measure(toy_sum, toy_case(**SIZES), **given).candidates


def honest_pass(found):
    return {found["eager"].status, found["parallel"].status} == {"ok"}


# Contents


def test_a_memo_by_a_few_numbers_of_the_input_finds_nothing_while_it_is_timed(monkeypatch):
    """Samples are longer than in the other tests, since a slow machine makes fewer than 200 calls in those."""
    monkeypatch.setattr(sampling, "CPU_SAMPLE_SECONDS", 8e-3)
    memo = rogues.ContentMemo()
    found = timed("content-memo", memo)
    assert honest_pass(found)
    assert len(memo.kept) > 200, "hundreds of calls are timed"
    assert memo.hits <= 20, "none but the judged contents, and those of verification, come twice"


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("count-then-stash", rogues.CountThenStash),
        ("stack-inspection", rogues.StackInspection),
        ("every-tenth", rogues.EveryTenth),
        ("newest-only", rogues.NewestOnly),
        ("seed-zero-only", lambda: rogues.SeedZeroOnly(**SIZES)),
    ],
)
@pytest.mark.parametrize("regimes", [("cold", "warm", "eager"), ("cold",)], ids=len)
def test_a_variant_that_is_correct_only_while_it_is_verified_is_incorrect(name, make, regimes, monkeypatch):
    made = make()
    found = timed(name, made, regimes=regimes)
    if getattr(made, "calls", 2 * rogues.VERIFYING_CALLS) < 2 * rogues.VERIFYING_CALLS:
        # The machine was so busy that timing made too few calls to tell it. Longer samples have more.
        monkeypatch.setattr(sampling, "CPU_SAMPLE_SECONDS", 8e-3)
        found = timed(name, make(), regimes=regimes)
    if name == "every-tenth" and regimes == ("cold",) and found[name].status == "ok":
        found = timed(name, make(), regimes=regimes)  # both judged calls of a sample are honest ones in a try of a hundred
    assert found[name].status == "incorrect"
    assert found[name].reason.startswith("The outputs of the timed calls (")
    assert honest_pass(found)


def test_a_variant_that_works_in_place_when_it_is_warm_is_blamed_and_not_its_rivals(prose):
    for first in ({}, {"rogue_first": True}):
        found = timed("careless-mutation", rogues.CarelessMutation(), **first)
        assert found["careless-mutation"].status == "incorrect"
        assert honest_pass(found)
    prose(found["careless-mutation"].reason)


def test_a_variant_that_works_in_place_is_found_without_the_warm_regime_too():
    found = timed("careless-mutation", rogues.CarelessMutation(), regimes=("cold",))
    assert found["careless-mutation"].status == "incorrect"
    assert "changed its input x" in found["careless-mutation"].reason
    assert honest_pass(found)


@pytest.mark.parametrize("first", [{}, {"rogue_first": True}], ids=["last", "first"])
def test_a_variant_that_overwrites_the_inputs_of_earlier_calls_is_blamed_and_not_its_rivals(first):
    found = timed("sabotage", rogues.Sabotage(), **first)
    assert found["sabotage"].status == "incorrect"
    assert honest_pass(found)


def test_a_baseline_whose_second_copy_is_incorrect_is_incorrect():
    """Both copies are one variant, of which the second is judged later: here after it became wrong."""
    judged = []

    def late(call: ToyCall):
        y, state = parallel(call)
        return (y, state) if not judged else (y + 1, state)

    class Spy(CpuSampler):
        def outputs(self, regime):
            yield from super().outputs(regime)
            judged.append(regime)

    with registered(late=late), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "CpuSampler", Spy)
        found = measure(toy_sum, toy_case(), variants=["late"], rounds=3, regimes=("cold",)).candidates
    assert found["late"].status == "incorrect"


def test_the_seed_of_timed_inputs_is_drawn_and_can_be_given(monkeypatch):
    seeds = []
    reference = Judge.reference
    monkeypatch.setattr(
        Judge, "reference", lambda self, *given, seed=0, **more: seeds.append(seed) or reference(self, *given, seed=seed, **more)
    )
    for given in ({}, {}, {"timing_seed": 77}):
        seeds.clear()
        measure(toy_sum, toy_case(), variants=["parallel"], rounds=3, regimes=("cold",), **given)
        (drawn,) = set(seeds) - {0}
        assert drawn == given.get("timing_seed", drawn)
    assert len({timing.new_seed() for _ in range(8)}) > 1


# The contents of the sets


def two_seeds():
    drawn = Judge().reference(toy_sum, toy_case(), seed=3).inputs
    return drawn, Judge().reference(toy_sum, toy_case(), seed=4).inputs


def test_each_use_of_a_set_has_new_contents_that_are_known():
    drawn, other = two_seeds()
    contents, one = Contents(drawn, other, seed=1), drawn.clone()
    assert contents.changed(one) == []
    seen = [one.arguments["x"].clone()]
    for _ in range(5):
        contents.renew([one])
        assert contents.changed(one) == []
        assert not any(torch.equal(one.arguments["x"], before) for before in seen)
        seen.append(one.arguments["x"].clone())
    one.arguments["x"][0, 0, 0] += 1
    one.arguments["weight"][-1] = float("nan")
    assert contents.changed(one) == ["x", "weight"]
    contents.load(one, drawn)
    assert contents.changed(one) == []
    assert torch.equal(one.arguments["x"], drawn.arguments["x"])


def test_contents_stay_new_after_all_positions_were_used():
    drawn, other = two_seeds()
    contents, one, waiting = Contents(drawn, other), drawn.clone(), drawn.clone()
    contents.renew([waiting])
    contents.renew([one])
    early = one.arguments["x"].clone()
    contents._position = POSITIONS
    contents.renew([one])
    assert contents.changed(one) == []
    assert not torch.equal(one.arguments["x"], early)
    assert contents.changed(waiting) == [], "what it was filled with is not known any more"


def test_structure_and_integers_keep_their_contents_and_are_restored():
    drawn, other = two_seeds()
    other.arguments["weight"].copy_(drawn.arguments["weight"])  # equal in both seeds, as a table would be
    contents, one = Contents(drawn, other), drawn.clone()
    contents.renew([one])
    assert torch.equal(one.arguments["weight"], drawn.arguments["weight"])
    one.arguments["weight"].zero_()
    assert contents.changed(one) == ["weight"]
    contents.renew([one], all_of_it=True)
    assert contents.changed(one) == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_contents_of_every_dtype_change(dtype):
    drawn = Judge().reference(toy_sum, toy_case()).inputs
    drawn.arguments["x"] = drawn.arguments["x"].to(dtype)
    contents, one = Contents(drawn), drawn.clone()
    contents.renew([one])
    assert contents.changed(one) == []
    assert not torch.equal(one.arguments["x"].view(torch.int8), drawn.arguments["x"].view(torch.int8))


def test_outputs_of_timed_calls_are_poisoned_unless_they_are_inputs():
    kept, rotation = [], rotate(Judge().reference(toy_sum, toy_case()), torch.device("cpu"))

    def call(**arguments):
        kept.append((parallel(ToyCall(**arguments))[0], arguments["x"]))
        return kept[-1]

    sampler = CpuSampler(Candidate("mine", call, toy_sum.outputs), rotation)
    sampler.prepare(("cold",))
    sampler.sample("cold")
    assert kept[-1][0].isnan().all()
    assert not kept[-1][1].isnan().any()
    kept.clear()
    list(sampler.outputs("cold"))
    assert all(y.isnan().all() for y, _ in kept), "in the sample that is judged, those of every call"


def test_outputs_are_judged_at_once(monkeypatch):
    """The copies are taken before the next call begins."""
    log, rotated = [], rotate(Judge().reference(toy_sum, toy_case()), torch.device("cpu"))
    duplicate = sampling.duplicate
    monkeypatch.setattr(sampling, "duplicate", lambda outputs: log.append("copied") or duplicate(outputs))

    def call(**arguments):
        log.append("called")
        return parallel(ToyCall(**arguments))

    sampler = CpuSampler(Candidate("mine", call, toy_sum.outputs), rotated)
    sampler.prepare(("cold",))
    sampler.sample("cold")
    log.clear()
    assert len(list(sampler.outputs("cold"))) == log.count("copied") == min(rotation.JUDGED_CALLS, log.count("called"))


def test_changed_inputs_are_restored_for_the_next_candidate():
    rotation = rotate(Judge().reference(toy_sum, toy_case()), torch.device("cpu"))
    rotation.begin()
    rotation.sets[0].arguments["x"].zero_()
    with pytest.raises(InputsChanged, match="changed its input x"):
        rotation.check(rotation.sets)
    rotation.check(rotation.sets)


# Time that one takes from the others, names, and clocks


def test_a_slow_start_does_not_take_the_rounds_of_the_others_silently(prose):
    start = time.perf_counter()
    found = measure_slow(rounds=5, time_cap_seconds=60.0)
    assert time.perf_counter() - start < 20, "its samples are cut to single calls"
    assert {len(one.timings[0].rounds) for one in found.candidates.values()} == {5}
    short = measure_slow(rounds=50, time_cap_seconds=0.5)
    (note,) = (note for note in short.notes if "time cap" in note)
    prose(note, mask={r"\d+ of 50": "<number> of 50", r"\d+%": "<share>"})


def measure_slow(**more):
    with registered(slow_start=rogues.SlowStart()):
        return measure(toy_sum, toy_case(**SIZES), variants=["parallel", "slow-start"], regimes=("cold",), **more)


def test_a_control_named_like_a_variant_is_refused(prose, monkeypatch):
    """Registration refuses the name, so the control gets into the operation's table by hand."""
    monkeypatch.setitem(toy_sum.controls, "parallel", toy_sum.controls["product"])
    with prose.raises(ArgumentError):
        measure(toy_sum, toy_case(), variants=["parallel"], controls=["parallel"])


def test_a_variant_named_like_the_second_copy_is_measured_as_any_other():
    with registered(parallel_again=parallel), pytest.MonkeyPatch.context() as patch:
        # Registration allows no blank in a name, but a table of variants in Python does.
        again = toy_sum.variants["parallel-again"]
        patch.setattr(again, "name", "parallel again")
        patch.setitem(toy_sum.variants, "parallel again", again)
        found = measure(toy_sum, toy_case(), variants=["parallel", "parallel again"], rounds=3, regimes=("cold",))
    assert {name: one.status for name, one in found.candidates.items()} == {"parallel": "ok", "parallel again": "ok"}
    assert found.noise


def test_a_clock_that_goes_backwards_costs_the_round_and_nothing_else(monkeypatch, prose):
    backwards = []

    class Spy(CpuSampler):
        def sample(self, regime):
            taken = super().sample(regime)
            backwards.append(1)
            return -3.0 if len(backwards) == 8 else taken

    monkeypatch.setitem(timing.WARM_UP_SECONDS, "cpu", 0.0)
    monkeypatch.setattr(sampling, "CpuSampler", Spy)
    found = measure(toy_sum, toy_case(), variants=["eager", "parallel"], rounds=6, regimes=("cold",))
    assert {len(one.timings[0].rounds) for one in found.candidates.values()} == {5}
    assert {one.status for one in found.candidates.values()} == {"ok"}
    prose([note for note in found.notes if "clock" in note], mask={r"while \w+ was": "while <name> was"})


def test_without_a_forward_clock_there_are_no_times(monkeypatch):
    ticks = iter(range(10**9, 0, -1))
    monkeypatch.setattr(sampling.time, "perf_counter", lambda: float(next(ticks)))
    found = measure(toy_sum, toy_case(), variants=["parallel"], rounds=3, regimes=("cold",)).candidates["parallel"]
    assert (found.status, found.reason) == ("error", "the clock went backwards in every round")


@pytest.mark.parametrize("end", ["exit", "status"])
def test_a_variant_that_calls_sys_exit_is_recorded_and_the_others_continue(end, prose):
    """It leaves in its first call (``exit``), or in its 40th."""
    found = timed("leaves", rogues.at_count(1 if end == "exit" else 40, lambda: exit_with(0)))
    assert found["leaves"].status == "crashed"
    assert honest_pass(found)
    prose(found["leaves"].reason)


def exit_with(code):
    raise SystemExit(code)


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["count-then-stash", "careless-mutation", "seed-zero-only"])
def test_rogues_of_the_timing_are_caught_on_a_gpu(name):
    make = {
        "count-then-stash": rogues.CountThenStash,
        "careless-mutation": rogues.CarelessMutation,
        "seed-zero-only": lambda: rogues.SeedZeroOnly(**SIZES),
    }[name]
    with registered(**{name.replace("-", "_"): make()}):
        found = measure(
            toy_sum,
            toy_case(**SIZES),
            variants=["parallel", name],
            baseline="parallel",
            regimes=("eager",),
            rounds=20,
            device="cuda",
        ).candidates
    assert found[name].status in ("incorrect", "error")
    assert found["parallel"].status == "ok"


@pytest.mark.gpu
def test_a_memo_by_contents_finds_nothing_in_eager_calls_on_a_gpu():
    memo = rogues.ContentMemo()
    with registered(content_memo=memo):
        found = measure(
            toy_sum, toy_case(**SIZES), variants=["parallel", "content-memo"], regimes=("eager",), rounds=5, device="cuda"
        ).candidates
    assert found["parallel"].status == "ok"
    assert len(memo.kept) > 5 * memo.hits
