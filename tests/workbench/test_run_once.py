"""Tests of what a run asks once per variant: probes of the operation before anything is measured, and checks of many calls.

The studies are those of ``runs.py``: ``toy_sum`` at the equal shapes ``first`` and ``second``. ``rogues_calls.racy`` is a variant
that is wrong in a part of its calls, drawn from a seed.

``quick`` is a fixture that makes runs fast in an empty folder, for every test of the file. ``statuses`` returns the status of
each variant at a shape. ``steps`` replaces functions that use the device. ``study`` declares a study of ``toy_sum``. ``toy_case``
returns a small case of ``toy_sum``.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace

import pytest

from onelaunch.operation import Probe
from onelaunch.workbench.adopt import AdoptNotice, adopt
from onelaunch.workbench.measure import timing
from onelaunch.workbench.measure.ahead import Made
from onelaunch.workbench.result import ProbeReport, Verdict
from tests.workbench import rogues_calls as rogues
from tests.workbench.runs import quick, run, statuses, steps, study
from tests.workbench.toy import toy_case, toy_sum

__all__ = ["quick"]  # an automatic fixture: an empty working directory, short samples, no warm-up


@pytest.fixture
def probed(monkeypatch):
    """Give ``toy_sum`` one probe: a sequence of a single step."""
    monkeypatch.setattr(toy_sum, "listed_probes", lambda: (Probe(toy_case(T=1, name="one step")),))


def test_a_race_found_by_many_calls_makes_a_variant_incorrect_at_every_shape():
    """A variant that is wrong in one call of five is right in the two judged calls of many cases."""
    with rogues.registered(rogues.racy(0.2, seed=3)) as name:
        result = run(study(variants=("eager", "parallel", name)))
    assert [statuses(result, shape)[name] for shape in ("first", "second")] == ["incorrect", "incorrect"]
    assert [statuses(result, shape)["parallel"] for shape in ("first", "second")] == ["ok", "ok"]


def test_many_calls_are_made_at_the_first_shape_of_each_direction_alone(monkeypatch):
    asked = []

    def examine(judge, operation, case, *, variant, directions, **rest):
        asked.append((case.name, variant, *directions))
        return Verdict(ok=True)

    monkeypatch.setattr(timing, "examine_once", examine)
    run(study(directions=("forward", "forward_backward")))
    both = [(variant, direction) for direction in ("forward", "forward_backward") for variant in ("eager", "parallel")]
    assert asked == [("first", *each) for each in both]


def test_a_run_notes_which_outputs_of_a_case_tell_nothing(monkeypatch):
    monkeypatch.setattr(timing, "trivial_passes", lambda reference: ("This case tells nothing about y: zeros would pass.",))
    notes = run(study()).notes
    assert "first, forward: This case tells nothing about y: zeros would pass." in notes


def test_a_run_stores_the_outcomes_of_probes(probed):
    result = run(study())
    assert {name: report.met for name, report in result.probes.items()} == {"eager": True, "parallel": True}


def test_probes_are_judged_in_the_directions_that_are_measured(probed):
    asked = []

    def probe(judge, operation, name, device, directions):
        asked.append((name, *directions))
        return ProbeReport(passed=1)

    run(study(directions=("forward", "forward_backward")), steps=steps(probe=probe))
    run(study(directions=("forward", "forward_backward")), steps=steps(probe=probe), quick=True, force=True)
    run(study(directions=("forward",)), steps=steps(probe=probe), force=True)
    both = [(name, "forward", "forward_backward") for name in ("eager", "parallel")]
    assert sorted(asked[:2]) == both
    assert sorted(asked[2:]) == sorted([(name, "forward") for name in ("eager", "parallel")] * 2)


def test_a_run_asks_the_probes_again_in_directions_that_a_quick_run_left_out(probed, monkeypatch):
    from onelaunch.workbench.running import Run

    asked = []

    def probe(judge, operation, name, device, directions):
        asked.append((name, *directions))
        return ProbeReport(passed=1, directions=directions)

    def after_a_quick_run(self):
        self.probes = {"eager": ProbeReport(passed=1, directions=("forward",)), "parallel": ProbeReport(passed=1)}
        real(self)

    real = Run.probe_variants
    monkeypatch.setattr(Run, "probe_variants", after_a_quick_run)
    result = run(study(directions=("forward", "forward_backward")), steps=steps(probe=probe))
    assert asked == [("eager", "forward", "forward_backward")]
    assert result.probes["eager"].directions == ("forward", "forward_backward")


def test_variants_of_other_packages_meet_no_probes(probed):
    asked = []

    def probe(judge, operation, name, device, directions):
        asked.append(name)
        return ProbeReport(passed=1)

    run(study(variants=("eager", "missing_package")), steps=steps(probe=probe))
    assert asked == ["eager"]


def test_variants_that_are_compiled_for_each_set_of_sizes_meet_no_probes_and_are_adopted(probed, monkeypatch, tmp_path):
    """Each probe would be compiled for many seconds. ``auto`` chooses a plug-in's variant at the measured sizes alone then."""
    monkeypatch.setenv("ONELAUNCH_COMMIT", "abc")
    variant = toy_sum.get("parallel")
    monkeypatch.setattr(variant, "capabilities", replace(variant.capabilities, recompiles=True))
    result = run(study())
    assert list(result.probes) == ["eager"]
    (row, *_) = json.loads(adopt([result], into=tmp_path / "tables").read_text())["rows"]
    assert set(row["microseconds"]) == {"eager", "parallel"}
    assert row["probes"] == ["eager"]


def test_a_variant_that_ended_a_process_is_not_probed_again(probed, monkeypatch):
    """The process that is started after it would end at the same probe."""
    from onelaunch.workbench.running import Run

    def failed(self):
        self.failures = {("first", "forward", "parallel", False): ("crashed", "It was killed by SIGSEGV.")}
        real(self)

    real = Run.probe_variants
    monkeypatch.setattr(Run, "probe_variants", failed)
    result = run(study())
    assert result.probes["parallel"].failed == ("It was killed by SIGSEGV.",)
    assert statuses(result)["parallel"] == "crashed"
    assert statuses(result, "second")["parallel"] == "ok"


def test_the_reports_of_variants_that_were_judged_before_an_interruption_are_kept(probed, tmp_path):
    asked, path = [], tmp_path / "mine.json"

    def probe(judge, operation, name, device, directions):
        asked.append(name)
        if asked == ["eager", "parallel"]:
            raise KeyboardInterrupt
        return ProbeReport(passed=7)

    stopped = run(study(), save_to=path, steps=steps(probe=probe))
    assert stopped.interrupted
    assert list(stopped.probes) == ["eager"]
    result = run(study(), save_to=path, resume=True, steps=steps(probe=probe))
    assert asked == ["eager", "parallel", "parallel"]
    assert list(result.probes) == ["eager", "parallel"]


@pytest.mark.skipif(sys.platform != "linux", reason="the child must be forked, to know its variants")
@pytest.mark.parametrize("given_up", [True, False])
def test_a_crash_at_a_probe_loses_no_report_and_the_next_process_compiles_what_is_left(given_up, probed, tmp_path):
    """The next process compiles if the one before it had given up, as after a crash of a process that compiled."""
    seen = tmp_path / "seen"

    def note(what):
        with seen.open("a") as file:
            file.write(f"{what}\n")

    def probe(judge, operation, name, device, directions):
        note(name)
        if name == "parallel":
            os._exit(3)
        return ProbeReport(passed=1)

    def compiled(declared, calls, *_):
        note(" ".join(["compile", *(call.variant for call in calls if call.shape == "first")]))
        return Made([], {}, given_up=given_up)

    declared = study(variants=("eager", "parallel", "raises"))
    replaced = steps(probe=probe, compile=compiled)
    result = run(declared, save_to=tmp_path / "mine.json", in_process=False, processes=2, steps=replaced)
    again = ["compile eager raises"] if given_up else []
    assert seen.read_text().splitlines() == ["compile eager parallel raises", "eager", "parallel", *again, "raises"]
    assert result.probes["eager"].met
    assert result.probes["parallel"].failed == ("The measuring process ended with exit code 3 while parallel was probed.",)


def test_a_variant_that_fails_its_probes_is_not_adopted(probed, monkeypatch, tmp_path):
    def probe(judge, operation, name, device, directions):
        return ProbeReport(passed=1, failed=("one step, forward: It is wrong.",) if name == "parallel" else ())

    monkeypatch.setenv("ONELAUNCH_COMMIT", "abc")
    result = run(study(), steps=steps(probe=probe))
    with pytest.warns(AdoptNotice, match="parallel"):
        path = adopt([result], into=tmp_path / "tables")
    assert "parallel" not in path.read_text()
