"""Tests of incorrect peers: variants of other projects that a study times although the tests of their own project refuse them.

The study's key ``timed_up_to`` names them, each with the largest error at which it is timed. They are peers outside the gate with
one more limit: their times count in no mean. ``far_off`` computes ``toy_sum`` and is off by about 1.4e-2 norm-wise; its own tests
allow ``OWN``. What else holds of peers outside the gate is tested in ``test_outside_the_gate.py``.
"""

from __future__ import annotations

import pytest

from onelaunch.errors import ResultCorrupt, StudyError
from onelaunch.workbench.decide.decision import concluded
from onelaunch.workbench.decide.recompute import differences, recompute
from onelaunch.workbench.report import markdown
from onelaunch.workbench.result import Result
from onelaunch.workbench.study import Criterion
from onelaunch.workbench.study.read import load_study
from onelaunch.workbench.verify import Judge
from onelaunch.workbench.verify.repeated import examine_once
from tests.workbench.ladder import MEGA, measured, ok_cell, study
from tests.workbench.runs import quick, run, statuses  # noqa: F401 - quick is a fixture that applies to every test here
from tests.workbench.runs import study as toy_study
from tests.workbench.test_outside_the_gate import BOTH, OWN, far_off, one_wrong_element, peer, rounded, writes_its_input
from tests.workbench.toy import toy_case, toy_sum

MOST = 3e-2
"""Largest error at which the peer is timed."""


def test_an_incorrect_peer_is_timed_only_where_it_is_asked_for():
    with peer(far_off) as name:
        asked, not_asked = Judge(timed_up_to={name: MOST}), Judge()
        verdict = asked.judge(toy_sum, toy_case(), variant=name, directions=BOTH)
        assert not not_asked.judge(toy_sum, toy_case(), variant=name, directions=BOTH).outside
        assert examine_once(asked, toy_sum, toy_case(), variant=name, directions=BOTH).outside
    assert not verdict.ok
    assert verdict.outside
    assert (verdict.own_tolerance, verdict.timed_up_to) == (None, MOST)
    assert verdict.status == "peer_outside_the_gate"
    assert verdict.explain().endswith("It is incorrect; the study times it up to an error of 0.03.")


def test_a_peer_that_its_own_tests_allow_is_not_called_incorrect():
    with peer(rounded) as name:
        verdict = Judge(timed_up_to={name: MOST}).judge(toy_sum, toy_case(), variant=name)
    assert (verdict.own_tolerance, verdict.timed_up_to) == (OWN, None)


@pytest.mark.parametrize(("function", "most"), [(far_off, 1e-2), (writes_its_input, MOST)])
def test_other_faults_and_larger_errors_are_not_timed(function, most):
    with peer(function) as name:
        verdict = Judge(timed_up_to={name: most}).judge(toy_sum, toy_case(T=256), variant=name)
    assert verdict.status == "incorrect"


def test_a_variant_of_ours_is_never_timed_though_wrong():
    with peer(one_wrong_element, requires=None, own_tolerance=None) as name:
        verdict = Judge(timed_up_to={name: 0.5}).judge(toy_sum, toy_case(T=256), variant=name)
    assert verdict.status == "incorrect"


def test_a_run_times_an_incorrect_peer_and_says_so():
    with peer(far_off) as name:
        asked = Criterion(name="not slower", measure="speedup", of="parallel", over=name, at="first", at_least=1e-6)
        result = run(toy_study(asked, variants=("eager", "parallel", name), timed_up_to={name: MOST}))
        assert statuses(result)[name] == "peer_outside_the_gate"
        cell = result.cell("first", name)
        assert cell.timings
        assert cell.label == f"{name} (incorrect peer)"
        assert result.outcomes[0].status == "met"
        assert any("is an incorrect peer at" in note and "do not allow it either" in note for note in result.decision.notes)
        assert f"{name} (incorrect peer)" in markdown.render(result)


def incorrect_cell(variant, time, **more):
    """Return a measurement of an incorrect peer: its error is 2e-2, 1e-3 is allowed, and it is timed up to 3e-2."""
    cell = ok_cell(variant, time, error=2e-2, **more)
    verdict = cell.verdict.model_copy(update={"ok": False, "problems": ("y is off by 2.00e-02.",), "timed_up_to": MOST})
    return cell.model_copy(update={"status": "peer_outside_the_gate", "reason": verdict.explain(), "verdict": verdict})


EACH = Criterion(name="not slower", measure="speedup", of="one", over="peer", at="mega", at_least=1.0)
MEAN = EACH.model_copy(update={"name": "mean", "combine": "geomean"})


def decided(*criteria, timed_up_to):
    cells = ok_cell("three", 10.0, spread=0.01), ok_cell("one", 5.0, spread=0.01), incorrect_cell("peer", 4.0, spread=0.01)
    return concluded(measured(study(*criteria, timed_up_to=timed_up_to), *cells))


def test_its_times_show_who_is_slower_and_count_in_no_mean():
    result = decided(EACH, MEAN, timed_up_to={"peer": MOST})
    each, mean = result.outcomes
    assert each.status == "missed", "ours takes longer than the incorrect peer"
    assert "peer (incorrect peer)" in each.evidence
    assert mean.status == "not_measured"
    assert differences(result, recompute(result)) == ()


def test_a_stored_one_needs_the_study_to_ask_for_it(tmp_path):
    path = decided(EACH, timed_up_to={"peer": MOST}).save(tmp_path / "asked.json")
    assert Result.load(path).cell(MEGA.name, "peer", "forward").label == "peer (incorrect peer)"
    path = decided(EACH, timed_up_to={}).save(tmp_path / "not_asked.json")
    with pytest.raises(ResultCorrupt, match="the study does not time it up to"):
        Result.load(path)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("timed_up_to = { nobody = 1e-2 }", "has no variant 'nobody'"),
        ("timed_up_to = { composed = 1e-2 }", "only such variants are timed"),
        ("timed_up_to = { fla = 1.5 }", "below 1"),
    ],
)
def test_a_study_names_peers_alone(line, said, tmp_path):
    path = tmp_path / "mine.toml"
    shape = 'shapes = [{ name = "one", B = 1, T = 64, D = 64, H = 2, K = 32, V = 32 }]'
    path.write_text(f'name = "mine"\nquestion = "Is it?"\noperation = "gla_layer"\nbaseline = "composed"\n{line}\n{shape}\n')
    with pytest.raises(StudyError, match=said):
        load_study(path)
