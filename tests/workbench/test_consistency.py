"""Tests of result files that were edited by hand: one part no longer fits the others, and the file is refused.

An edited decision is not refused: ``differences`` finds it by recomputing. One test checks that names cannot collide when they
are registered.

``honest`` is a result of the made-up operation of ``ladder.py``, judged and decided: ``one`` takes 5 us at the shape ``mega``,
the baseline ``three`` 10 us, and the control ``product`` 4.2 us; the roofline bound is 4 us. ``refused`` edits the file and
reads it. ``prose`` compares a text with its entry in tests/snapshots/prose.txt, whose key is the node id of the test. A test
fails if it does not compare one of its entries, and ``tests/test_prose.py`` if the test or the parameter of an entry is gone.

``ok_cell`` makes up a correct measurement.
"""

from __future__ import annotations

import json
from copy import deepcopy

import pytest

from onelaunch.errors import ArgumentError, ResultCorrupt
from onelaunch.operation import Cost, find_operation
from onelaunch.workbench.decide.decision import concluded
from onelaunch.workbench.decide.recompute import differences, recompute
from onelaunch.workbench.result import Result
from onelaunch.workbench.result.consistency import AGAIN, BELOW_BOUND
from onelaunch.workbench.study import Criterion
from tests.workbench import toy
from tests.workbench.ladder import measured, ok_cell, study

FASTER = Criterion(name="faster", measure="speedup", of="one", at_least=1.3)
MUCH_FASTER = Criterion(name="much faster", measure="speedup", of="one", at_least=2.4)


def honest(*criteria):
    """Return a consistent result with these criteria, of which ``FASTER`` is met and ``MUCH_FASTER`` is missed."""
    cells = ok_cell("three", 10.0, spread=0.01), ok_cell("one", 5.0, spread=0.01)
    return concluded(measured(study(*(criteria or (FASTER, MUCH_FASTER))), *cells, ok_cell("product", 4.2)))


@pytest.fixture
def refused(tmp_path):
    """Return a function that lets ``edit`` change the stored values of a result, and returns why the file is refused."""

    def read(edit, result=None):
        raw = json.loads((result or honest()).save(tmp_path / "result.json", force=True).read_text())
        assert Result.load(tmp_path / "result.json")
        before = deepcopy(raw)
        edit(raw)
        assert raw != before
        (tmp_path / "edited.json").write_text(json.dumps(raw))
        with pytest.raises(ResultCorrupt) as told:
            Result.load(tmp_path / "edited.json")
        return str(told.value)

    return read


def cell(raw, variant):
    """Return the stored measurement of a variant."""
    return next(each for each in raw["cells"] if each["variant"] == variant)


def test_a_bound_that_is_moved_in_the_result_file(refused, prose):
    """The bound is moved in the declaration and in its outcome, so only the stored digest contradicts the edit.

    ``study judge`` once decided by the moved bound, and *debug* became *proceed*. The digest is checked before the outcomes.
    """

    def move(raw):
        raw["study"]["criteria"][1]["at_least"] = 1.1
        raw["outcomes"][1]["criterion"]["at_least"] = 1.1

    prose(refused(move))


def test_a_missed_criterion_that_is_deleted_from_the_declaration(refused):
    """The decision once became "Every criterion is met"."""

    def drop(raw):
        del raw["study"]["criteria"][1], raw["outcomes"][1]

    assert "study_digest" in refused(drop)


def test_a_missed_criterion_that_is_deleted_from_the_outcomes(refused, prose):
    def drop(raw):
        del raw["outcomes"][1]

    prose(refused(drop))


def test_an_outcome_of_another_bound_than_the_declared_one(refused, prose):
    def move(raw):
        raw["outcomes"][1]["criterion"]["at_least"] = 1.1

    prose(refused(move))


def test_a_median_that_is_not_that_of_its_rounds(refused, prose):
    """0.5 us once counted as the time, beside rounds of 5 us. The same holds for the interval and the number of samples."""

    def median(raw):
        cell(raw, "three")["timings"][0]["microseconds"] |= {"median": 20.0, "low": 19.0, "high": 21.0}

    def low(raw):
        cell(raw, "one")["timings"][0]["microseconds"] |= {"low": 4.0}

    def samples(raw):
        cell(raw, "one")["timings"][0]["microseconds"] |= {"samples": 200}

    for edit in (median, low, samples):
        prose(refused(edit))


def test_times_that_are_edited_to_lie_below_the_roofline_bound(refused, prose):
    """All numbers of the time are changed alike, so only the bound of 4 us contradicts them."""

    def faster(raw):
        found = cell(raw, "one")["timings"][0]
        found["rounds"] = [0.01] * 20
        found["microseconds"] |= {"median": 0.01, "low": 0.01, "high": 0.01}

    prose(refused(faster))


def test_a_time_within_the_tolerance_of_the_peaks_is_read(tmp_path):
    """The bound is 4 us. Up to 5 % below it lie within the error of the measured peaks, as in a run."""
    assert BELOW_BOUND == 0.95
    near = concluded(measured(study(), ok_cell("three", 10.0), ok_cell("one", 4.0 * BELOW_BOUND)))
    assert Result.load(near.save(tmp_path / "near.json")).cells == near.cells


def test_a_measurement_that_stands_twice_as_variant_and_as_control(refused, prose):
    """A control called like a variant once replaced the variant's time by its own, which was 29.8 times as fast."""

    def rename(raw):
        cell(raw, "product")["variant"] = "one"

    prose(refused(rename))


def test_a_measurement_that_stands_twice(refused):
    assert "twice" in refused(lambda raw: raw["cells"].append(raw["cells"][1]))
    assert "two A/A runs" in refused(lambda raw: raw["noise"].append(raw["noise"][0]))


def test_a_variant_with_the_name_of_the_second_copy_of_another(refused, prose):
    def rename(raw):
        cell(raw, "product").update(variant="one" + AGAIN, control=False)

    prose(refused(rename))


def test_a_noise_floor_below_its_run(refused, prose):
    """A smaller noise turns *inconclusive* into *met*."""
    varied = honest()
    ratio = varied.noise[0].ratio.model_copy(update={"low": 0.9, "high": 1.2})
    wide = varied.model_copy(update={"noise": (varied.noise[0].model_copy(update={"ratio": ratio, "floor": 1.2}),)})

    def lower(raw):
        raw["noise"][0]["floor"] = 1.01

    prose(refused(lower, concluded(wide)))


def test_a_verdict_that_is_edited(refused, prose):
    def nothing(raw):
        cell(raw, "one")["verdict"] = {"ok": True}

    def missing(raw):
        del cell(raw, "one")["verdict"]

    def error(raw):
        cell(raw, "one")["verdict"]["components"][0]["error"] = 0.5

    def problems(raw):
        cell(raw, "one")["verdict"]["problems"] = ["y is wrong"]

    for edit in (nothing, missing, error, problems):
        prose(refused(edit))


def test_a_control_cannot_be_registered_under_the_name_of_a_variant(prose):
    """Nor a variant under the name of a control, or under that of the second copy of a variant in an A/A run."""
    ladder = find_operation("ladder")
    with prose.raises(ArgumentError):
        ladder.control("one", oracle=lambda x: x, cost=lambda case: Cost(0, 0, 1))(lambda call: call.x)
    with prose.raises(ArgumentError):
        ladder.variant("product")(lambda call: (call.x,))
    with pytest.raises(ArgumentError, match="parallel again"):
        toy.toy_sum.variant("parallel" + AGAIN)(toy.parallel.run)
    assert "product" not in ladder.variants
    assert "one" not in ladder.controls


def test_an_edited_decision_is_contradicted_by_its_measurements(prose):
    """The report once said *proceed* above rows that were missed."""
    result = honest()
    assert result.decision.kind == "debug"
    assert differences(result, recompute(result)) == ()
    edited = result.model_copy(update={"decision": result.decision.model_copy(update={"kind": "proceed"})})
    prose(differences(edited, recompute(edited)))
    met = result.outcomes[1].model_copy(update={"status": "met"})
    edited = result.model_copy(update={"outcomes": (result.outcomes[0], met)})
    prose(differences(edited, recompute(edited)))
    value = result.outcomes[0].values["mega"].model_copy(update={"median": 3.0, "low": 2.9, "high": 3.1})
    edited = result.model_copy(update={"outcomes": (result.outcomes[0].model_copy(update={"values": {"mega": value}}), met)})
    assert len(differences(edited, recompute(edited))) == 2
    dropped = result.model_copy(update={"outcomes": result.outcomes[:1]})
    prose(differences(dropped, recompute(dropped)))


def test_a_decision_is_not_recomputed_without_the_operation():
    result = honest()
    elsewhere = result.model_copy(update={"study": result.study.model_copy(update={"operation": "not_installed"})})
    assert "not_installed" in recompute(elsewhere)


def test_committed_results_are_consistent_and_give_the_same_outcomes_and_decisions(pytestconfig):
    paths = sorted((pytestconfig.rootpath / "results").glob("*/*.json"))
    assert len(paths) >= 7
    for path in paths:
        result = Result.load(path)
        again = recompute(result)
        assert isinstance(again, Result)
        assert differences(result, again) == (), path
        assert [one.status for one in again.outcomes] == [one.status for one in result.outcomes], path
        assert again.decision.kind == result.decision.kind, path
        assert not [line for line in again.decision.because if "vacuous" in line], path
        assert result.decision.notes in ((), again.decision.notes), path  # older results have none
