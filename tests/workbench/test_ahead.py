"""Tests of the processes that compile ahead of a study's measurements: their groups of cases, their checks, and their failures.

``toy_sum`` is the operation of ``toy.py``; its variant ``raises`` always fails. ``study`` declares a study of it at the shapes
``first`` and ``second`` in both directions. ``run`` runs a study on the CPU, with the given ``steps`` in place of the functions
that use the device. ``SLOW_LIGHT`` are made-up peaks of a device. ``prose`` compares a text with its entry in
tests/snapshots/prose.txt, whose key is the node id of the test. A test fails if it does not compare one of its entries, and
``tests/test_prose.py`` if the test or the parameter of an entry is gone.

A test marked ``thorough`` does not run in ``make test``.
"""

from __future__ import annotations

import gc
import os
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace

import pytest
import torch

from onelaunch.operation import Probe
from onelaunch.workbench import probing
from onelaunch.workbench.measure import ahead, checks
from onelaunch.workbench.measure.ahead import FIRST_CASES, GROWTH, Done, Groups, Made, compile_ahead
from onelaunch.workbench.measure.checks import ExamineCall, ProbeCall, check_once, code_of_variant
from onelaunch.workbench.measure.compiling import Called, CompileCall
from onelaunch.workbench.options import WHOLE
from onelaunch.workbench.probing import calls_ahead, calls_at_probes, calls_to_examine, code_of, to_probe
from onelaunch.workbench.result import ProbeReport, Verdict
from onelaunch.workbench.study.plan import plan_study
from tests.workbench import toy
from tests.workbench.runs import SLOW_LIGHT, quick, run, steps
from tests.workbench.test_compiling import BOTH, study

__all__ = ["quick"]  # an automatic fixture: an empty working directory, short samples, no warm-up

GPU = torch.device("cuda")

PLACES = [(f"shape {index}", "forward") for index in range(30)]


def cells_of(declared):
    """Return the planned measurements of a study on the CPU."""
    return plan_study(declared, SLOW_LIGHT, "cpu", "small").cells


@pytest.fixture
def probed(monkeypatch):
    """Give ``toy_sum`` two probes and one that the contract refuses."""
    probes = [Probe(toy.toy_case(T=length, name=f"{length} steps"), refused=length == 7) for length in (1, 5, 7)]
    monkeypatch.setattr(toy.toy_sum, "listed_probes", lambda: probes)


# Groups


def test_groups_grow_and_each_begins_with_the_case_that_is_measured_next():
    groups, sizes = Groups(2), []
    for place in PLACES:
        group = groups.next(place, PLACES[PLACES.index(place) :])
        sizes += [len(group)] if group else []
        assert not group or group[0] == place
    assert sizes == [FIRST_CASES, GROWTH * FIRST_CASES, len(PLACES) - (1 + GROWTH) * FIRST_CASES]


def test_the_first_group_needs_no_case():
    groups = Groups(2)
    assert groups.next(None, PLACES) == PLACES[:FIRST_CASES]
    assert groups.next(PLACES[0], PLACES) == []
    assert groups.next(PLACES[FIRST_CASES], PLACES)[0] == PLACES[FIRST_CASES]


def test_a_group_goes_on_with_the_first_cases_that_wait_if_the_measured_one_is_late():
    assert Groups(2).next(PLACES[2], PLACES[:3]) == [PLACES[2], *PLACES[:2]]


@pytest.mark.parametrize("why", ["no processes", "not of this part", "compiled by an earlier process", "given up"])
def test_some_cases_are_compiled_by_the_process_that_measures(why):
    groups = Groups(0 if why == "no processes" else 2, PLACES[:2] if why.startswith("compiled") else ())
    if why == "given up":
        groups.add(Made([], {}, given_up=True), 1.0, [])
    place = PLACES[-1] if why.startswith("not") else PLACES[1]
    assert groups.next(place, PLACES[:5]) == []


def test_all_cases_of_a_part_are_one_group():
    groups = Groups(2, at_once=True)
    assert groups.next(None, PLACES) == PLACES
    assert groups.next(PLACES[3], PLACES) == []


def test_notes_name_the_longest_calls_of_all_groups(prose):
    groups, notes = Groups(2), ["another note"]
    assert groups.note() == ""
    first = {CompileCall("small", "forward", "fla", part, 2): 3.0 + part for part in range(2)}
    probes = {ProbeCall("small", "forward", "fused", "fused", "", ("forward",), probe, 2): 9.0 for probe in range(2)}
    notes = groups.add(Made(["eager failed"], {**first, **probes}), 10.0, notes)
    second = {
        CompileCall("large", "forward_backward", "compiled"): 51.2,
        ExamineCall("large", "forward", "fused", "fused", ""): 4.5,
    }
    notes = groups.add(Made([], second), 60.0, notes)
    assert notes[:2] == ["another note", "eager failed"]
    (note,) = notes[2:]
    prose(note)


# Calls


@pytest.mark.parametrize("directions", [("forward",), BOTH])
def test_variants_are_judged_on_each_probe_by_a_call_of_its_own(directions, probed):
    declared = study(directions=directions, variants=("eager", "parallel", "auto"))
    asked, codes = to_probe(declared, cells_of(declared), WHOLE), code_of(declared)
    assert [each.label for each in asked] == ["eager", "parallel"]
    assert list(calls_at_probes(asked, codes, GPU)) == [
        ProbeCall("first", directions[-1], variant, variant, codes[variant], directions, probe, 3)
        for variant in ("eager", "parallel")
        for probe in range(3)
    ]
    assert not list(calls_at_probes(asked, codes, torch.device("cpu"))), "the process that measures judges on a CPU"


def test_variants_are_examined_at_their_first_case_in_each_direction():
    declared = study(variants=("eager", "parallel", "auto"))
    cells, codes = cells_of(declared), code_of(declared)
    asked = list(calls_to_examine(declared, cells, {("eager", "forward")}, codes, GPU))
    assert {(call.direction, call.variant) for call in asked} == {
        ("forward", "parallel"), ("forward_backward", "eager"), ("forward_backward", "parallel")
    }  # fmt: skip
    assert {call.shape for call in asked} == {"first"}
    assert {call.code for call in asked} == {codes["eager"], codes["parallel"]} - (
        {codes["eager"]} - {codes["parallel"]} and set()
    )
    assert not list(calls_to_examine(declared, cells, (), codes, torch.device("cpu")))


def test_a_large_case_is_examined_by_the_process_that_measures_alone(monkeypatch):
    """Also if a later case is smaller, since variants are examined at their first case."""
    declared = study(variants=("eager", "parallel"), directions=("forward",))
    first, *others = cells_of(declared)
    monkeypatch.setattr(probing, "LARGEST_CHECKED", first.plan.least_bytes)
    asked = lambda cells: [(call.shape, call.variant) for call in calls_to_examine(declared, cells, (), {}, GPU)]  # noqa: E731
    assert asked([first, *others]) == [("first", "eager"), ("first", "parallel")]
    larger = replace(first, plan=first.plan.model_copy(update={"least_bytes": first.plan.least_bytes + 1}))
    assert asked([larger, *others]) == [("first", "parallel")]


def test_a_variant_that_autotunes_is_checked_by_the_process_that_measures(probed, monkeypatch):
    """Other processes would disturb the times by which it chooses."""
    parallel = toy.toy_sum.get("parallel")
    monkeypatch.setattr(parallel, "capabilities", replace(parallel.capabilities, tunes=True))
    declared = study(variants=("eager", "parallel"))
    cells = cells_of(declared)
    made = calls_ahead(declared, cells, (), to_probe(declared, cells, WHOLE), (), {}, GPU, 2)
    assert {call.variant for call in made if isinstance(call, (ProbeCall, ExamineCall))} == {"eager"}


def test_calls_that_take_long_come_first_and_examinations_last(probed, monkeypatch):
    for name, flag in (("parallel", "tunes"), ("raises", "recompiles")):
        variant = toy.toy_sum.get(name)
        monkeypatch.setattr(variant, "capabilities", replace(variant.capabilities, **{flag: True}))
    declared = study(directions=("forward",))
    cells = cells_of(declared)
    made = calls_ahead(declared, cells, (), to_probe(declared, cells, WHOLE), (), {}, GPU, 2)
    order = [(type(call), call.variant) for call in made]
    assert list(dict.fromkeys(order)) == [
        (CompileCall, "parallel"), (CompileCall, "raises"), (ProbeCall, "eager"), (CompileCall, "eager"), (ExamineCall, "eager"),
        (ExamineCall, "raises"),
    ]  # fmt: skip


def at_probe(variant, probe=0, directions=("forward",), code=None):
    """Return the call that judges a variant of ``toy_sum`` on a probe."""
    own = code_of_variant(toy.toy_sum.get(variant)) if code is None else code
    return ProbeCall("first", "forward", variant, variant, own, directions, probe, 3)


def examination(variant, code=None, direction="forward"):
    """Return the call that examines a variant of ``toy_sum``."""
    own = code_of_variant(toy.toy_sum.get(variant)) if code is None else code
    return ExamineCall("first", direction, variant, variant, own)


def test_a_check_that_finds_nothing_counts(probed):
    assert (at_probe("parallel").step, examination("parallel").step) == ("probe", "examine")
    assert check_once(study(), at_probe("parallel", 1, BOTH), "cpu") == ProbeReport(passed=2, directions=BOTH)
    assert check_once(study(), examination("parallel", direction="forward_backward"), "cpu") == Verdict(ok=True)


@pytest.mark.parametrize("call", [at_probe, examination])
@pytest.mark.parametrize("code", ["", "of other files"])
def test_a_check_of_other_code_than_is_measured_does_not_count(call, code, probed):
    assert check_once(study(), call("parallel", code=code), "cpu") is None


@pytest.mark.parametrize("call", [at_probe, examination])
@pytest.mark.parametrize("error", [RuntimeError("fell over"), SystemExit(1)])
def test_a_check_of_a_variant_that_fails_is_made_again(call, error, probed, monkeypatch):
    def fails(*_, **__):
        raise error

    asked = call("raises")
    assert check_once(study(), asked, "cpu") is None
    for name in ("run_probes", "examine_once"):
        monkeypatch.setattr(checks, name, fails)
    assert check_once(study(), asked, "cpu") is None


def test_an_examination_with_notes_is_made_again(monkeypatch):
    """A note says that something was left out, such as for lack of the memory that other processes have taken."""
    monkeypatch.setattr(checks, "examine_once", lambda *_, **__: Verdict(ok=True, notes=("Only 2 of 20 calls were made.",)))
    assert check_once(study(), examination("parallel"), "cpu") is None


def test_the_report_of_a_variant_is_that_of_all_its_probes():
    reports = probing.ReportsAtProbes()
    first, second, third = (at_probe("parallel", probe) for probe in range(3))
    assert reports.add(second, ProbeReport(passed=2)) is None
    assert reports.add(first, ProbeReport(passed=1, refused=1)) is None
    assert reports.add(at_probe("eager"), ProbeReport(passed=7)) is None
    assert reports.add(third, ProbeReport(passed=1)) == ProbeReport(passed=4, refused=1, code=third.code)


# Processes


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_calls_are_made_in_other_processes(processes, prose):
    declared, told = study("output_chain"), []
    asked = [
        CompileCall("first", "forward", "unfused"),
        CompileCall("second", "forward_backward", "unfused"),
        CompileCall("first", "forward", "no"),  # no such variant
    ]
    made = compile_ahead(declared, asked, "cpu", processes, lambda call, done, total: told.append((call, done, total)))
    assert [done for _, done, _ in told] == [1, 2, 3]
    assert {call for call, *_ in told} == set(asked) == set(made.seconds)
    assert all(seconds > 0 for seconds in made.seconds.values())
    assert not made.given_up
    (line,) = made.failed
    prose(line, name="failed")


def test_checks_are_made_in_other_processes():
    declared, found = study("output_chain"), {}
    codes = code_of(declared)
    (probe, *_) = calls_at_probes(to_probe(declared, cells_of(declared), WHOLE), codes, GPU)
    (examined, *_) = calls_to_examine(declared, cells_of(declared), (), codes, GPU)
    asked = [probe._replace(directions=("forward",)), examined]
    made = compile_ahead(declared, asked, "cpu", 1, lambda *_: None, found.__setitem__)
    assert made.failed == []
    assert found == {asked[0]: ProbeReport(passed=1, directions=("forward",)), examined: Verdict(ok=True)}


@pytest.mark.parametrize(("most", "times"), [(0, 1), (10**9, 0)])
def test_a_process_whose_calls_have_imported_much_looks_for_garbage_only_among_the_rest(most, times, monkeypatch):
    frozen = []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append("once"))
    monkeypatch.setattr(ahead, "MANY", most)
    done = ahead._timed(study(), CompileCall("first", "forward", "raises"), "cpu")
    assert done.problem == "RuntimeError: the kernel fell over"
    assert done.seconds > 0
    assert len(frozen) == times


def test_without_calls_no_process_starts():
    assert compile_ahead(study(), [], "cpu", 4, lambda *_: None) == Made([], {})


@pytest.fixture
def threads(monkeypatch):
    """Make calls on one thread in place of processes."""
    pools = []

    def pool(number, **_):
        pools.append(number)
        return ThreadPoolExecutor(1)

    monkeypatch.setattr(ahead, "ProcessPoolExecutor", pool)
    return pools


@pytest.mark.parametrize(("parts", "numbers"), [(1, [0]), (3, [0, 1, 2])])
def test_other_parts_of_a_tuning_follow_unless_all_its_choices_are_stored(parts, numbers, threads, monkeypatch):
    made, told = [], []

    def call_once(study, call, device):
        made.append(call)
        return Called(parts=parts if call.part == 0 and call.variant == "fla" else call.parts)

    monkeypatch.setattr(ahead, "call_once", call_once)
    monkeypatch.setattr(gc, "freeze", lambda: None)
    asked = [CompileCall("first", "forward", "fla", 0, 4), CompileCall("first", "forward", "eager")]
    seconds = compile_ahead(study(), asked, "cpu", 9, lambda call, done, total: told.append((done, total))).seconds
    assert sorted(call.part for call in made if call.variant == "fla") == numbers
    assert {call.parts for call in made if call.part} <= {parts}
    assert set(seconds) == set(made)
    assert told[-1] == (parts + 1, parts + 1)
    assert threads == [5], "as many processes as there may be calls"


@pytest.mark.parametrize("end", ["dead", "stuck"])
def test_processes_that_die_or_are_stuck_leave_the_rest_to_the_measurement(end, monkeypatch, prose):
    asked = [CompileCall(shape, "forward", "eager") for shape in ("first", "second")]

    class Pool(ThreadPoolExecutor):
        """Stand-in for processes of which the first call ends, and the next never or with the death of its process."""

        def __init__(self, *_, **__):
            super().__init__(1)
            self.made = 0

        def submit(self, *_):
            future, self.made = Future(), self.made + 1
            if self.made == 1:
                future.set_result(Done(2.0))
            elif end == "dead":
                future.set_exception(BrokenProcessPool())
            return future

    monkeypatch.setattr(ahead, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(ahead, "PATIENCE", 0.01)
    made = compile_ahead(study(), asked, "cpu", 2, lambda *_: None)
    assert made.given_up
    assert set(made.seconds) <= {asked[0]}
    (note,) = made.failed
    prose(note)


# Runs


def test_a_run_compiles_a_group_before_it_measures_the_first_of_its_cases(probed, monkeypatch, prose):
    monkeypatch.setattr(ahead, "FIRST_CASES", 1)
    order = []

    def compiled(declared, asked, device, processes, tell, take):
        order.append(sorted({(call.shape, call.direction) for call in asked}))
        tell(asked[-1], 1, len(asked))
        return Made(["eager at first: too large"], {asked[-1]: 2.0})

    def told(step):
        if step.step == "verify" and step.done == 0:
            order.append((step.shape, step.direction))

    result = run(study(), processes=3, steps=steps(compile=compiled), on_progress=told)
    first, *others = [(shape, direction) for shape in ("first", "second") for direction in BOTH]
    assert order == [[first], first, others, *others]
    assert [note for note in result.notes if "Compiling ahead" in note]
    prose([note for note in result.notes if "too large" in note])


def test_a_run_makes_only_the_checks_that_other_processes_have_not_made(probed, monkeypatch):
    """``parallel`` passed one of its probes only, so all are judged again."""
    monkeypatch.setattr(
        probing, "calls_at_probes", lambda *_: [at_probe(name, probe) for name in toy.HONEST for probe in range(3)]
    )
    monkeypatch.setattr(probing, "calls_to_examine", lambda *_: [examination("eager")])
    judged, examined = [], []

    def compiled(declared, asked, device, processes, tell, take):
        for call in asked:
            if isinstance(call, ProbeCall) and (call.variant == "eager" or call.probe == 0):
                take(call, ProbeReport(passed=1, directions=BOTH))
            elif isinstance(call, ExamineCall):
                take(call, Verdict(ok=True))
        return Made([], {})

    def probe(judge, operation, name, *_):
        judged.append(name)
        return ProbeReport(passed=5)

    def measured(operation, case, direction, *, examine, **given):
        examined.append((case.name, direction, *examine))
        return ahead_measure(operation, case, direction, examine=examine, **given)

    ahead_measure = steps().measure
    replaced = steps(compile=compiled, probe=probe, measure=measured)
    result = run(study(variants=("eager", "parallel")), processes=2, steps=replaced)
    assert judged == ["parallel"]
    assert (result.probes["eager"].passed, result.probes["parallel"].passed) == (3, 5)
    assert result.probes["eager"].code == at_probe("eager").code
    assert examined[:2] == [("first", "forward", "parallel"), ("first", "forward_backward", "eager", "parallel")]


def test_a_run_compiles_nothing_ahead_unless_asked():
    def never(*_):
        os._exit(1)  # ends the whole test run: this step must not be called

    assert run(study(), steps=steps(compile=never)).cells
