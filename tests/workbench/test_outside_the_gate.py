"""Tests of peers outside the gate: variants of other projects whose errors the gate refuses and their own tests allow.

Such a peer is judged incorrect and timed all the same, others may be compared with it, and reports name it so. It is never the
variant to use, never adopted and never chosen. ``rounded`` below computes ``toy_sum`` and is off by about 7e-4 norm-wise,
where the gate allows less than 1e-6 in float32. The times in the sections "Decisions and reports" and "Stored results" are made
up by ``ladder.py``; those in "A run" are measured. ``prose`` and ``prose.raises`` compare wording with the test's entries in
``tests/snapshots/prose.txt``. A test fails if it does not compare one of its entries, and ``tests/test_prose.py`` if the test
or the parameter of an entry is gone.

``MEGA`` is a shape of full scale. ``study`` declares a study of all variants, with ``three`` as the baseline. ``ok_cell`` makes
up a correct measurement. ``bad_cell`` makes up a measurement without times. ``statuses`` returns the status of each variant at a
shape. ``toy_study`` declares a study of ``toy_sum``. ``parallel`` is a correct variant of ``toy_sum``. ``toy_case`` returns a
small case of ``toy_sum``.
"""

from __future__ import annotations

import contextlib
import html
import io
import json

import pytest
import torch
from rich.console import Console

from onelaunch import dispatch
from onelaunch.errors import AdoptNotice, ArgumentError, ResultCorrupt, ResultMismatch
from onelaunch.operation import Capabilities, Query, find_operation
from onelaunch.workbench.adopt import adopt
from onelaunch.workbench.decide.compare import compare
from onelaunch.workbench.decide.decision import concluded
from onelaunch.workbench.decide.recompute import differences, recompute
from onelaunch.workbench.measure import timing
from onelaunch.workbench.report import markdown, page
from onelaunch.workbench.report.documents import docs_overview, docs_section
from onelaunch.workbench.report.headline import headline
from onelaunch.workbench.report.summary import fastest, summarize
from onelaunch.workbench.report.terminal import show
from onelaunch.workbench.result import Result, Verdict
from onelaunch.workbench.study import Criterion
from onelaunch.workbench.verify import Judge, judge, judge_outputs
from onelaunch.workbench.verify.repeated import examine_once
from tests.workbench import rogues_calls as rogues
from tests.workbench.ladder import MEGA, bad_cell, measured, ok_cell, study
from tests.workbench.runs import quick, run, statuses  # noqa: F401 - quick is a fixture that applies to every test here
from tests.workbench.runs import study as toy_study
from tests.workbench.toy import parallel, toy_case, toy_sum

BOTH = ("forward", "forward_backward")
OWN = 5e-3
"""Tolerance of the peer's own tests."""


def scaled(call, size):
    """Return the outputs with a relative error of at most ``size``, a different one for each element."""
    sums, state = parallel.run(call)
    errors = 1 + size * torch.cos(torch.arange(sums.numel(), device=sums.device) * 1.7).reshape(sums.shape)
    return sums * errors.to(sums.dtype), state * errors[:, 0]


def rounded(call):
    """Return outputs that are off by about 7e-4 norm-wise.

    The gradient of the weight cancels, so that for about one in a thousand contents its error is four times that of the outputs.
    The contents that a run times are drawn anew in each run, and this error stays below ``OWN`` there too.
    """
    return scaled(call, 1e-3)


def far_off(call):
    return scaled(call, 2e-2)


def one_wrong_element(call):
    """Return outputs of which one of 4096 is off by 0.15 of their root mean square: norm-wise 2.3e-3, as an element too much."""
    sums, state = parallel.run(call)
    sums, wrong = sums.clone(), torch.zeros_like(sums)
    wrong[0, 5, 0] = 0.15 * sums.detach().square().mean().sqrt()
    return sums + wrong, state


def writes_its_input(call):
    results = rounded(call)
    call.x.mul_(2)
    return results


@contextlib.contextmanager
def peer(run, **tags):
    """Register a variant of ``toy_sum`` by another project, and yield its name. The package that it needs is installed."""
    with rogues.registered(run, **{"requires": "torch", "own_tolerance": OWN, **tags}) as name:
        yield name


# The registration and the verdict


@pytest.mark.parametrize("value", [0.0, 1.5, "much", True, -1e-3])
def test_an_own_tolerance_is_a_number_between_0_and_1(value):
    with pytest.raises(ArgumentError, match="own_tolerance of variant 'theirs' of layer is"):
        Capabilities.of("layer", "theirs", {"requires": "their_package", "own_tolerance": value})


def test_only_a_variant_of_another_project_may_have_a_tolerance_of_its_own(prose):
    with prose.raises(ArgumentError):
        Capabilities.of("layer", "ours", {"own_tolerance": OWN})
    capabilities = Capabilities.of("layer", "theirs", {"requires": "their_package", "own_tolerance": OWN})
    assert capabilities.own_tolerance == OWN
    assert not capabilities.automatic


def test_fla_states_the_tolerance_of_its_tests():
    for name in ("gla", "linear_rnn", "rms_norm"):
        assert find_operation(name).get("fla").capabilities.own_tolerance == 5e-3
        assert "own_tolerance" not in find_operation(name).get("fla").tags, "studies do not select by it"


def test_a_peer_within_its_own_tolerance_fails_the_gate_and_says_so():
    with peer(rounded) as name:
        verdict = judge(toy_sum, toy_case(), variant=name, directions=BOTH)
    assert not verdict.ok
    assert verdict.outside
    assert verdict.own_tolerance == OWN
    assert verdict.status == "peer_outside_the_gate"
    errors = {part.name: part for part in verdict.components}
    assert errors["y"].allowed < 1e-6 < errors["y"].error < OWN, "limits and errors are those of the gate"
    assert verdict.explain().endswith("The tests of its own project allow 0.005.")
    assert Verdict.model_validate_json(verdict.model_dump_json()) == verdict


@pytest.mark.parametrize("run", [far_off, one_wrong_element, writes_its_input])
def test_a_peer_with_another_fault_is_incorrect(run):
    """A tolerance allows errors up to it alone: no larger ones, no single wrong element, and no changed input."""
    with peer(run) as name:
        verdict = judge(toy_sum, toy_case(T=256), variant=name)
    assert not verdict.ok
    assert verdict.own_tolerance is None
    assert verdict.status == "incorrect"
    known = run is far_off  # whose errors alone say so
    assert known or "It fails with errors of up to 0.005 allowed too: " in verdict.explain()


def test_a_correct_peer_passes_as_before():
    with peer(parallel.run) as name:
        verdict = judge(toy_sum, toy_case(), variant=name, directions=BOTH)
    assert verdict.ok
    assert verdict.own_tolerance is None
    assert verdict.status == "ok"
    assert "own_tolerance" not in json.loads(verdict.model_dump_json()), "results of correct variants keep their bytes"


def test_without_a_stated_tolerance_a_peer_is_incorrect():
    with peer(rounded, own_tolerance=None) as name:
        assert judge(toy_sum, toy_case(), variant=name).status == "incorrect"


def test_many_calls_and_given_outputs_are_judged_by_the_tolerance_too():
    with peer(rounded) as name:
        assert examine_once(Judge(), toy_sum, toy_case(), variant=name, directions=BOTH).outside
    reference = Judge().reference(toy_sum, toy_case())
    outputs = {"y": reference.expected["y"] * (1 + 1e-3), "final_state": reference.expected["final_state"]}
    outputs = {name: value.float() for name, value in outputs.items()}
    assert judge_outputs(reference, outputs).status == "incorrect"
    assert judge_outputs(reference, outputs, OWN).outside
    assert judge_outputs(reference, outputs, 1e-4).status == "incorrect"


# A run


FASTER = Criterion(name="faster than the peer", measure="speedup", of="parallel", at="first", at_least=1e-6)


def test_a_peer_outside_the_gate_is_timed_and_may_be_the_baseline(tmp_path):
    with peer(rounded) as name:
        declared = toy_study(FASTER, variants=("eager", "parallel", name), baseline=name, directions=BOTH)
        result = run(declared)
    for direction in BOTH:
        assert statuses(result, direction=direction) == {"eager": "ok", "parallel": "ok", name: "peer_outside_the_gate"}
    cell = result.cell("first", name)
    assert {timed.regime for timed in cell.timings} == set(declared.regimes)
    assert cell.verdict.own_tolerance == OWN
    assert "is off by" in cell.reason
    assert cell.traffic is not None
    assert result.noise_at("first", "forward", "cold") is not None, "the A/A run is of the baseline"
    (outcome,) = result.outcomes
    assert outcome.values["first"].samples == 3
    assert f"as fast as {name} (peer outside the gate) at first" in outcome.evidence
    path = result.save(tmp_path / "result.json")
    assert Result.load(path) == result


def test_a_peer_that_leaves_the_gate_on_the_timed_contents_only_is_outside_too(monkeypatch):
    """The peer passes where it is verified. The contents that are timed are others, and there it rounds."""
    seen = []

    def first_exact(call):
        seen.append(None)
        return rounded(call) if timed else parallel.run(call)

    timed = []
    original = timing._Session.prepare
    monkeypatch.setattr(timing._Session, "prepare", lambda self: (timed.append(1), original(self))[1])
    with peer(first_exact) as name:
        found = timing.measure(toy_sum, toy_case(), variants=["parallel", name], baseline="parallel", rounds=3)
    result = found.candidates[name]
    assert result.status == "peer_outside_the_gate"
    assert result.reason.startswith("The outputs of the timed calls (cold) do not pass: ")
    assert result.verdict.outside
    assert result.timings
    assert seen


def test_the_aa_run_of_a_peer_outside_the_gate_gives_the_noise():
    with peer(rounded) as name:
        found = timing.measure(toy_sum, toy_case(), variants=[name], rounds=3)
    assert found.candidates[name].status == "peer_outside_the_gate"
    assert found.noise


# Decisions and reports


def outside_cell(variant, time, **more):
    """Return a measurement of a peer outside the gate: its error is 2e-3, 1e-3 is allowed, and its own tests allow 5e-3."""
    cell = ok_cell(variant, time, error=2e-3, **more)
    verdict = cell.verdict.model_copy(update={"ok": False, "problems": ("y is off by 2.00e-03.",), "own_tolerance": OWN})
    return cell.model_copy(update={"status": "peer_outside_the_gate", "reason": verdict.explain(), "verdict": verdict})


OVER_PEER = Criterion(name="beats the peer", measure="speedup", of="one", over="peer", at="mega", at_least=1.3)
OF_PEER = Criterion(name="the peer is fast", measure="speedup", of="peer", over="three", at="mega", at_least=1.3)
ANY_PEER = Criterion(
    name="beats all peers", measure="speedup", of="one", over={"requires": "a_package_that_nobody_has"}, at_least=1.3
)
FASTEST = Criterion(name="the fastest", measure="speedup", of={}, over="three", at="mega", at_least=1.3)


def decided(*criteria, peer_time=8.0, **more):
    cells = ok_cell("three", 10.0, spread=0.01), ok_cell("one", 5.0, spread=0.01), outside_cell("peer", peer_time, spread=0.01)
    return concluded(measured(study(*criteria, **more), *cells))


@pytest.mark.parametrize("criterion", [OVER_PEER, ANY_PEER], ids=lambda criterion: criterion.name)
def test_a_peer_outside_the_gate_may_be_what_others_are_compared_with(criterion):
    result = decided(criterion)
    (outcome,) = result.outcomes
    assert outcome.status == "met"
    assert outcome.values["mega"].median == pytest.approx(1.6)
    assert "as fast as peer (peer outside the gate) at mega" in outcome.evidence
    assert result.decision.kind in ("proceed", "measure_more")
    assert "(peer outside the gate) at mega" in headline(result).sentence


def test_a_peer_outside_the_gate_is_never_the_judged_variant(prose):
    result = decided(OF_PEER, FASTEST, peer_time=2.0)
    first, second = result.outcomes
    assert first.status == "not_measured"
    prose(first.evidence)
    assert second.evidence.startswith("one is 2x as fast as three"), "the fastest of the correct variants"
    assert result.decision.kind != "debug", "nothing of ours is wrong"


def test_the_error_of_a_peer_outside_the_gate_misses_a_criterion():
    exact = Criterion(name="exact", measure="error", of="peer", at="mega", at_most=1.0)
    (outcome,) = decided(exact).outcomes
    assert outcome.status == "missed"
    assert "peer (peer outside the gate) at mega" in outcome.evidence


def test_a_decision_notes_the_peer_with_its_worst_error(prose):
    result = decided(OVER_PEER)
    prose(result.decision.notes)
    assert differences(result, recompute(result)) == ()


def test_a_baseline_outside_the_gate_explains_savings():
    result = decided(OVER_PEER, baseline="peer")
    assert [saving.variant for saving in result.decision.savings] == ["one"]
    slow = concluded(measured(study(baseline="peer"), outside_cell("peer", 2.0), ok_cell("one", 5.0)))
    assert slow.decision.savings == (), "the peer itself is never the variant that saves"


def test_a_faster_peer_outside_the_gate_is_named():
    cells = ok_cell("three", 20.0), ok_cell("one", 5.0), outside_cell("peer", 4.5)
    result = concluded(measured(study(Criterion(name="faster", measure="speedup", of="one", at_least=1.3)), *cells))
    assert any(
        "peer (peer outside the gate) (by a_package" in note and "is faster than" in note for note in result.decision.notes
    )


def test_every_report_names_the_peer_so_and_recommends_others():
    result = decided(OVER_PEER, peer_time=2.0, baseline="peer")
    assert fastest(result, "mega", "forward").variant == "one"
    summary = summarize(result)
    assert summary.missing is None, "its times are not missing"
    assert [row[2] for table in summary.use for row in table.rows] == ["one"]
    assert "Speed is over peer (peer outside the gate)" in summary.use[0].note
    console = Console(file=io.StringIO(), width=200)
    show(result, console)
    forms = {
        "terminal": console.file.getvalue(),
        "markdown": markdown.render(result),
        "page": page.render(result),
        "documentation": docs_section(result, "result.json"),
    }
    for form, text in forms.items():
        plain = " ".join(html.unescape(text.replace("\\", "")).split())
        assert "peer outside the gate" in plain, form
        assert "2.0" in plain, form
    assert "(outside the gate)" in html.unescape(forms["page"]), "names in plots"
    assert "outside the gate at 1" in docs_overview([decided(OVER_PEER)], lambda name: name)


def test_a_comparison_of_results_names_the_peer():
    first, second = decided(OVER_PEER), decided(OVER_PEER, peer_time=4.0)
    second = second.model_copy(update={"provenance": second.provenance.model_copy(update={"commit": "other"})})
    found = compare(first, second)
    changes = {time.variant: time for time in found.times}
    assert changes["peer"].outside
    assert changes["peer"].before == pytest.approx(8.0)
    assert not changes["one"].outside
    right = measured(study(OVER_PEER), ok_cell("peer", 8.0))
    (status,) = [each for each in compare(right, second).statuses if each.variant == "peer"]
    assert (status.before, status.after) == ("ok", "peer_outside_the_gate")


@pytest.mark.filterwarnings("ignore::onelaunch.errors.AdoptNotice")
def test_a_peer_outside_the_gate_is_not_adopted(tmp_path):
    with pytest.warns(AdoptNotice, match="peer of ladder-study is not adopted where it is a peer outside the gate"):
        path = adopt([decided(OVER_PEER)], tmp_path)
    (row,) = json.loads(path.read_text())["rows"]
    assert row["microseconds"].keys() == {"three", "one"}
    alone = measured(study(), outside_cell("peer", 8.0))
    with pytest.raises(ResultMismatch, match="no cold time of a correct variant"):
        adopt([alone], tmp_path)


def test_auto_never_chooses_a_peer_with_a_tolerance_of_its_own():
    with peer(rounded) as name:
        query = Query("toy_sum", "cpu", torch.float32, (2, 24, 8))
        assert toy_sum.get(name).why_not(query) is None
        assert not toy_sum.get(name).capabilities.automatic
        assert dispatch.choose(query).name == "parallel"


# Stored results


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"own_tolerance": None}, "names no tolerance of its own tests"),
        ({"ok": True, "problems": []}, "the verdict on 'peer' at 'mega', forward is ok"),
        ({"components": []}, "no verdict that compares its outputs"),
        ({"own_tolerance": 1e-3}, "the error of y is 2.0e-03, where its own tests allow 1.0e-03"),
    ],
)
def test_a_stored_peer_outside_the_gate_needs_a_verdict_that_says_so(changes, why, tmp_path):
    result = decided(OVER_PEER)
    path = result.save(tmp_path / "result.json")
    raw = json.loads(path.read_text())
    stored = next(cell for cell in raw["cells"] if cell["variant"] == "peer")
    assert stored["verdict"]["own_tolerance"] == OWN
    stored["verdict"] |= changes
    path.write_text(json.dumps(raw))
    with pytest.raises(ResultCorrupt, match=why):
        Result.load(path)


def test_a_failed_variant_without_a_tolerance_is_stored_as_before():
    cell = bad_cell("two", "incorrect", "off", verdict=Verdict(ok=False, problems=("y is off.",)))
    assert "own_tolerance" not in measured(study(), cell).stored()
    assert MEGA.name in measured(study(), cell).stored()
