"""Tests with the numbers of the original write-up 040, which said "proceed".

From these numbers the workbench must decide otherwise, and each of the write-up's faults alone must be enough. The write-up
compared fused variants of a linear-RNN layer with ``three_launch`` on a Tesla T4. Its faults: two measurements of one shape
that contradict each other, bytes that were not counted, a bound on bytes that arithmetic refutes, and no control with the same
GEMM library. ``prose`` compares a text with its entry in tests/snapshots/prose.txt, whose key is the node id of the test. A
test fails if it does not compare one of its entries, and ``tests/test_prose.py`` if the test or the parameter of an entry is
gone.
"""

from __future__ import annotations

from typing import Any

import pytest

from onelaunch.workbench.result import Result
from onelaunch.workbench.study.read import load_study
from tests.workbench import original_040
from tests.workbench.original_040 import FIGURES, TARGET


def original(**as_if: Any) -> Any:
    """Return the write-up's numbers as a judged and decided result, with some faults repaired.

    ``steady=True``: twenty equal rounds. ``counted=True``: counted bytes. ``control``: milliseconds of the missing control,
    three launches with the library's GEMM. ``ratio``: a bound on bytes in place of its 2.0, of which 1.2 is feasible.
    """
    return original_040.original(**as_if)


def said(result: Any) -> str:
    """Return all sentences of the decision."""
    return " ".join((*result.decision.because, *result.decision.unexplained))


def status(result: Result) -> dict[str, str]:
    return {outcome.criterion.name: outcome.status for outcome in result.outcomes}


def test_the_original_numbers_do_not_proceed(prose):
    result = original()
    assert FIGURES["verdict"] == "proceed"
    assert result.decision.kind == "measure_more"
    assert status(result) == {"faster": "inconclusive", "correct": "met", "traffic": "infeasible"}
    prose(said(result))


def test_complete_and_steady_numbers_would_proceed():
    """With steady rounds, counted bytes, a feasible bound and the control. Other tests leave some of these out."""
    result = original(steady=True, counted=True, control=1.25, ratio=1.2)
    assert status(result) == {"faster": "met", "correct": "met", "traffic": "met"}
    assert result.decision.kind == "proceed", said(result)


def test_the_contradiction_of_headline_and_sweep_alone_prevents_proceed():
    result = original(steady=False, counted=True, control=1.25, ratio=1.2)
    assert status(result) == {"faster": "inconclusive", "correct": "met", "traffic": "met"}
    assert result.decision.kind == "measure_more"
    (noise,) = result.noise
    assert noise.floor == pytest.approx(1.38 / 0.85, rel=0.01)


def test_its_noise_alone_prevents_proceed_even_with_many_rounds():
    result = original(steady=True, counted=True, control=1.25, ratio=1.2)
    noisy = result.noise[0].model_copy(update={"floor": 1.38 / 0.85})
    from onelaunch.workbench.decide.criteria import evaluate
    from onelaunch.workbench.decide.decision import decide

    again = result.model_copy(update={"noise": (noisy,), "decision": None})
    again = again.model_copy(update={"outcomes": evaluate(again, {})})
    assert {outcome.criterion.name: outcome.status for outcome in again.outcomes}["faster"] == "inconclusive"
    assert decide(again).kind == "measure_more"


def test_uncounted_bytes_alone_prevent_proceed():
    for ratio in (1.2, 2.0):  # both with a feasible bound and with the write-up's
        result = original(steady=True, counted=False, control=1.25, ratio=ratio)
        assert status(result)["faster"] == "met"
        assert status(result)["traffic"] == ("not_measured" if ratio == 1.2 else "infeasible")
        assert result.decision.kind == "measure_more"


def test_a_saving_that_bytes_do_not_explain_alone_prevents_proceed(prose):
    """The write-up claims 520 us for 2 MiB saved: 7 us at the T4's bandwidth, and 3 us for one launch.

    The matrix product's library changed as well as the fusion.
    """
    result = original(steady=True, counted=True, control=None, ratio=1.2)
    assert status(result) == {"faster": "met", "correct": "met", "traffic": "met"}
    assert result.decision.kind == "measure_more"
    (saving,) = [saving for saving in result.decision.savings if saving.shape == TARGET]
    assert saving.saved_microseconds == pytest.approx(520)
    assert saving.by_bytes == pytest.approx(2 * 2**20 / 320e9 * 1e6)
    assert saving.by_launches == pytest.approx(3)
    assert saving.unexplained / saving.saved_microseconds > 0.98
    prose(said(result))
    assert "(98%) stay unexplained" in said(result)  # 510 of 520 us


def test_a_control_without_a_gain_does_not_allow_proceed():
    """The control takes 0.865 ms, and the fused variant 0.86 ms: the library gained, not the fusion."""
    assert original(steady=True, counted=True, control=0.865, ratio=1.2).decision.kind == "measure_more"


def test_an_impossible_criterion_never_counts_as_met(prose):
    """The bound on bytes is the write-up's own 2.0, and all other faults are repaired."""
    result = original(steady=True, counted=True, control=1.25)
    assert status(result)["traffic"] == "infeasible"
    prose(said(result))


def test_the_replayed_result_can_be_saved_and_read(tmp_path):
    result = original()
    assert Result.load(result.save(tmp_path / "original.json")) == result


def test_todays_study_quotes_the_original_figures(study_040):
    for figure in ("90.13", "1.38", "0.86", "9.64", "1.61x", "0.97x", "0.0078", "0.85/0.88", "1.27/0.98"):
        assert figure in study_040.notes


def test_todays_study_has_the_original_criteria(study_040):
    sweep = {(row["B"], row["T"]) for row in FIGURES["sweep"]}
    full = {(shape.sizes["B"], shape.sizes["T"]) for shape in study_040.at_scale("full") if shape.sizes["D"] == 256}
    assert full == sweep
    asked = {criterion.name: criterion for criterion in study_040.criteria}
    assert asked["fused is faster"].at_least == FIGURES["criteria"]["speedup_at_least"]
    assert asked["traffic halves"].at_least == FIGURES["criteria"]["dram_bytes_ratio_at_least"]
    assert {asked[name].over for name in ("fused is faster", "traffic halves")} == {"three_launch"}


@pytest.fixture
def study_040(pytestconfig):
    return load_study(pytestconfig.rootpath / "studies" / "040-linear-rnn.toml")
