"""Tests of ``onelaunch study judge``.

The fixtures are those of ``conftest.py``: ``call`` runs ``onelaunch`` with arguments in this process, ``stored`` are paths of two
made-up results, and ``here`` is the working directory, a folder with one study. ``prose`` compares a text with its entry in
tests/snapshots/prose.txt.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from onelaunch.errors import ResultMismatch
from onelaunch.workbench.decide.decision import concluded
from onelaunch.workbench.decide.recompute import declared_again
from onelaunch.workbench.result import Result
from tests.workbench import results

REPOSITORY = Path(__file__).parents[2]


def test_judge_decides_again_from_the_stored_result_and_notes_it(call, stored, prose):
    path = stored[0]
    before = concluded(Result.load(path))
    before.model_copy(update={"outcomes": (), "decision": None}).save(path, force=True)
    for _ in range(2):  # judging again adds no second, equal note
        answer = call("study", "judge", str(path))
        assert answer.code == 0
        assert "Decision: proceed" in answer.out
        after = Result.load(path)
        assert (after.outcomes, after.decision) == (before.outcomes, before.decision)
        assert after.cells == before.cells
        (note,) = set(after.notes) - set(before.notes)
        assert f"Measured at {before.provenance.commit}" in note
        prose(note, mask={r"again at [^ ]+": "again at <date>"})


def test_judge_accepts_only_results(call, here):
    (here / "other.json").write_text("{}")
    answer = call("study", "judge", "other.json")
    assert answer.code != 0
    assert "schema_version" in answer.err


def test_a_result_is_judged_by_the_criteria_that_its_study_declares_now(call, here, prose):
    assert call("study", "run", "toy-study", "--device", "cpu").code == 0
    path = here / "results" / "cpu" / "toy-study.json"
    before = Result.load(path)
    study = here / "studies" / "toy-study.toml"
    text = study.read_text(encoding="utf-8")
    assert "at_least = 1000" in text
    study.write_text(text.replace("at_least = 1000", "at_least = 0.001"), encoding="utf-8")
    assert call("study", "judge", str(path)).code == 0
    assert Result.load(path).outcomes == before.outcomes
    assert call("study", "judge", str(path), "--declared").code == 0
    after = Result.load(path)
    assert after.cells == before.cells
    assert after.study_digest != before.study_digest
    changed = [one.criterion.name for one, other in zip(after.outcomes, before.outcomes, strict=True) if one != other]
    assert len(changed) == 1
    (note,) = set(after.notes) - set(before.notes)
    prose(note, mask={r"(Measured at|again at) [^ ,]+": r"\1 <commit>"})


def test_a_criterion_on_a_shape_that_was_not_measured_is_refused(prose):
    stored = results.proceed_on_gpu()
    criterion = stored.study.criteria[0].model_copy(update={"at": ["a new shape"]})
    study = stored.study.model_copy(update={"criteria": (criterion,)})
    with prose.raises(ResultMismatch, match="a new shape"):
        declared_again(stored, study)
    with pytest.raises(ResultMismatch, match="the study is another"):
        declared_again(stored, study.model_copy(update={"name": "another"}))


@pytest.mark.parametrize(
    ("command", "file", "right"),
    [
        ("judge", "models/in-model.json", "models"),
        ("report", "ranks/context-parallel.json", "ranks"),
        ("compare", "models/in-model.json", "models"),
        ("models", "ranks/context-parallel.json", "ranks"),
        ("models", "rms-norm.json", "report"),
        ("ranks", "models/in-model.json", "models"),
        ("ranks", "rms-norm.json", "report"),
    ],
)
def test_results_of_other_kinds_of_studies_are_named(call, command, file, right):
    path = str(REPOSITORY / "results" / "nvidia-h100" / file)
    answer = call("study", command, path, *([path] if command == "compare" else []))
    assert answer.code != 0
    assert "it is the result of a study of" in answer.err
    assert f"The command onelaunch study {right} shows it." in answer.err
