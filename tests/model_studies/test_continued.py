"""Tests of continuing a study of models: at another commit, with a changed study, and with tasks to carry out anew."""

from __future__ import annotations

import pytest

from onelaunch.errors import ArgumentError, ResultExists, ResultMismatch
from onelaunch.model_studies import child, continued, training
from onelaunch.model_studies.declare import ModelStudy
from onelaunch.model_studies.result import ModelResult
from onelaunch.model_studies.run import run_model_study
from onelaunch.model_studies.tasks import tasks_of
from onelaunch.model_studies.training import training as train
from tests.model_studies import tiny

SHORT = {"variants": ["layers", "fla"], "activities": ["training"], "steps": 0}
"""Four tasks: first steps of two variants, times, gradients."""

FIRST, SECOND, THIRD = (digit * 12 for digit in "abc")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "tiny-study.json"


@pytest.fixture(autouse=True)
def at(monkeypatch):
    """Return a function that sets the commit of the checkout; it is the first one at the beginning."""

    def at(commit):
        monkeypatch.setenv("ONELAUNCH_COMMIT", commit)

    at(FIRST)
    return at


def run(path, study, **more):
    return run_model_study(study, device="cpu", save_to=path, in_process=True, **more)


@pytest.mark.usefixtures("standin")
def test_a_run_is_continued_at_another_commit_and_says_what_was_measured_where(path, at):
    study = tiny.measuring(**SHORT)
    first = run(path, study, only=["tiny/alone"])
    at(SECOND)
    with pytest.raises(ResultMismatch, match=f"commit was {FIRST}, is {SECOND}. Pass across_commits=True to keep"):
        run(path, study, resume=True)
    second = run(path, study, resume=True, across_commits=True, only=["timed"])
    assert second.measurements[:2] == first.measurements
    (entry,) = second.provenance.earlier
    names = ("tiny: first steps of layers", "tiny: first steps of fla")
    assert (entry.commit, entry.date, entry.measured) == (FIRST, first.provenance.date, names)
    at(THIRD)
    third = run(path, study, resume=True, across_commits=True)
    assert not third.interrupted
    assert [(each.commit, each.measured) for each in third.provenance.earlier] == [
        (FIRST, names),
        (SECOND, ("tiny: times of training",)),
    ]
    assert ModelResult.load(path) == third


@pytest.mark.usefixtures("standin")
def test_tasks_of_a_finished_result_are_carried_out_anew(path, at):
    study, seen = tiny.measuring(**SHORT), []
    first = run(path, study)
    assert not first.interrupted
    at(SECOND)
    with pytest.raises(ResultExists):
        run(path, study, resume=True, across_commits=True)
    with pytest.raises(ArgumentError, match="resume is off"):
        run(path, study, anew=["timed"])
    removed = run(path, study, resume=True, across_commits=True, anew=["timed", "tiny/gradients"], time_limit=0)
    assert removed.interrupted
    assert [each.task for each in removed.measurements] == ["alone", "alone"]
    again = run(path, study, resume=True, on_progress=seen.append)  # at the commit of the file, whose tasks are left
    assert seen == ["tiny: times of training", "tiny: gradients"]
    assert [each.measured for each in again.provenance.earlier] == [("tiny: first steps of layers", "tiny: first steps of fla")]
    at(FIRST)
    back = run(path, study, resume=True, across_commits=True, anew=["timed"])
    assert [(each.commit, each.measured) for each in back.provenance.earlier] == [(SECOND, ("tiny: gradients",))]


@pytest.mark.usefixtures("standin")
def test_parts_of_several_commits_are_put_together(path, at, tmp_path):
    study, part = tiny.measuring(**SHORT), tmp_path / "part.json"
    run(path, study, only=["alone"])
    at(SECOND)
    run(part, study, only=["timed", "gradients"])
    whole = run(path, study, resume=True, across_commits=True, also=[part], time_limit=0)
    assert not whole.interrupted
    assert [(each.commit, len(each.measured)) for each in whole.provenance.earlier] == [(FIRST, 2)]
    at(THIRD)
    other = run(tmp_path / "x.json", study, across_commits=True, also=[part, path], time_limit=0)
    assert [(each.commit, each.date) for each in other.provenance.earlier] == [
        (SECOND, ModelResult.load(part).provenance.date),
        (FIRST, whole.provenance.earlier[0].date),
    ]


@pytest.mark.usefixtures("standin")
@pytest.mark.parametrize(("then", "now"), [(f"{FIRST}-dirty", SECOND), (FIRST, f"{SECOND}-dirty"), ("", SECOND)])
def test_measurements_of_a_dirty_commit_are_not_taken_over(then, now, path, at, monkeypatch):
    study = tiny.measuring(**SHORT)
    at(then or FIRST)
    found = run(path, study, only=["timed"], time_limit=0)
    if not then:
        found.model_copy(update={"provenance": found.provenance.model_copy(update={"commit": ""})}).save(path, force=True)
    at(now)
    with pytest.raises(ResultMismatch, match="only commits without changes can be told apart later"):
        run(path, study, resume=True, across_commits=True)
    with pytest.raises(ResultMismatch, match="commit was") as raised:
        run(path, study, resume=True)
    assert "across_commits" not in str(raised.value)


@pytest.mark.usefixtures("standin")
@pytest.mark.parametrize(
    ("fact", "words"),
    [
        ({"device": "another GPU"}, "device was another GPU, is "),
        ({"driver": "1.2"}, "driver was 1.2, is none"),
        ({"versions": {}}, "python was none, is "),
        ({"rounds": 4}, "rounds was 4, is 3"),
        ({"scale": "full"}, "scale was full, is small"),
    ],
)
def test_everything_but_the_commit_must_be_alike(fact, words, path, at):
    study = tiny.measuring(**SHORT)
    found = run(path, study, time_limit=0)
    found.model_copy(update={"provenance": found.provenance.model_copy(update=fact)}).save(path, force=True)
    at(SECOND)
    with pytest.raises(ResultMismatch, match=words):
        run(path, study, resume=True, across_commits=True)


@pytest.mark.usefixtures("standin")
def test_a_changed_criterion_changes_no_measurement(path):
    short = {**SHORT, "variants": ["accelerated", "layers", "fla"]}
    first = run(path, tiny.measuring(**short))
    (model,) = tiny.measuring(**short).models
    study = ModelStudy(name="tiny-study", question="Q", rounds=3, models=(model,), criteria=tiny.study().criteria[:1])
    seen = []
    second = run(path, study, resume=True, on_progress=seen.append)
    assert (seen, second.measurements) == ([], first.measurements)
    assert [outcome.status for outcome in second.outcomes] == ["met"]


@pytest.mark.usefixtures("standin")
def test_more_controls_and_seeds_of_gradients_are_measured_beside_those_that_are_there(path, at):
    facts = {"variants": ["fla"], "activities": ["training"], "steps": 10, "seeds": [0], "precision": "autocast"}
    first, seen = run(path, tiny.measuring(**facts)), []
    assert "index" not in path.read_text()  # files of older versions keep their bytes and digests
    assert "gradient_seeds" not in path.read_text()
    at(SECOND)
    study = tiny.measuring(**facts, controls=3, gradient_seeds=3)
    second = run(path, study, resume=True, across_commits=True, on_progress=seen.append)
    control = "tiny: training run of fla, seed 0, again from weights one rounding away (control 2)"
    assert seen == ["tiny: gradients, seed 1, and 1 more", f"{control}, and 1 more"]
    assert all(each in second.measurements for each in first.measurements)
    assert [len(each.measured) for each in second.provenance.earlier] == [len(first.measurements)]
    losses = [each.losses for each in (*second.controls("tiny"), second.training("tiny", "fla", 0))]
    assert len(set(losses)) == 4
    errors = [second.find("gradients", "tiny", "", seed) for seed in range(3)]
    assert len({each.loss for each in errors}) == 3
    assert all(each.errors["fla"].error < 0.1 for each in errors)
    assert ModelResult.load(path) == second


@pytest.mark.usefixtures("standin")
def test_gradients_with_another_epsilon_are_left_to_do_and_all_else_is_kept(path, at, tmp_path):
    """A result of the time before ``gradient_eps`` was declared is continued, and so is one with another value."""
    facts = {"variants": ["fla", "layers"], "activities": ["training"], "steps": 10, "seeds": [0]}
    first, part = run(path, tiny.measuring(**facts)), tmp_path / "part.json"
    assert '"eps"' not in path.read_text()  # as in files of older versions
    first.save(part)
    at(SECOND)
    study, seen = tiny.measuring(**facts, gradient_eps=1e-2), []
    left = run(path, study, resume=True, across_commits=True, time_limit=0)
    assert left.interrupted
    assert left.measurements == tuple(each for each in first.measurements if each.task != "gradients")
    said = "since they were taken with another gradient_eps."
    assert left.notes[-1] == f"Gradients of tiny by a run that ended on {first.provenance.date} are left out, {said}"
    whole = run(path, study, resume=True, across_commits=True, on_progress=seen.append)
    assert seen == ["tiny: gradients"]
    before, after = (each.find("gradients", "tiny") for each in (first, whole))
    assert (before.eps, after.eps) == (1e-6, 1e-2)
    assert after.loss != before.loss
    assert ModelResult.load(path) == whole
    other = run(tmp_path / "x.json", study, across_commits=True, also=[part], time_limit=0)  # as of another machine
    assert (other.measurements, other.notes[-1][-len(said) :]) == (left.measurements, said)
    again = run(path, tiny.measuring(**facts, gradient_eps=1e-3), resume=True, time_limit=0)
    assert again.interrupted
    assert again.measurements == left.measurements


@pytest.mark.usefixtures("standin")
def test_tasks_after_one_that_was_stopped_or_late_are_left(tmp_path, monkeypatch):
    study = tiny.measuring(controls=3)
    first, *more = (task for task in tasks_of(study, study.models[0]) if task.control)
    assert [task.index for task in (first, *more)] == [0, 1, 2]
    job = child.Job(study=study, task=first, more=tuple(more), device="cpu", state=tmp_path)
    monkeypatch.setattr(training, "READ_EVERY", 10)
    (found,) = child.carry_out_all(job, lambda: True)
    assert found.missing.reason == "stopped after 10 of 20 steps"
    first, *more = (task for task in tasks_of(study, study.models[0]) if task.task == "alone")
    late = child.Job(study=study, task=first, more=tuple(more), device="cpu", state=tmp_path, deadline=0.0)
    assert len(child.carry_out_all(late)) == 1


@pytest.mark.usefixtures("standin")
def test_measurements_of_a_changed_model_are_left_out(path):
    (model,) = tiny.measuring(**SHORT).models
    other = model.model_copy(update={"name": "other"})

    def study(*models):
        return ModelStudy(name="tiny-study", question="Q", rounds=3, models=models)

    first = run(path, study(model, other), only=["alone"])
    changed = other.model_copy(update={"width": 64})
    second = run(path, study(model, changed), resume=True, time_limit=0)
    assert second.measurements == first.measurements[:2]
    assert second.notes[-1].startswith("Measurements of other by a run that ended on ")
    more = model.model_copy(update={"activities": ("training", "forward")})  # which changes no measurement
    assert run(path, study(more, changed), resume=True, time_limit=0).measurements == first.measurements[:2]
    with pytest.raises(ResultMismatch, match="declares no model as it did then"):
        run(path, study(changed), resume=True)


@pytest.mark.usefixtures("standin")
def test_a_training_run_of_another_commit_begins_again(tmp_path, monkeypatch, at):
    model = tiny.study().models[0]
    monkeypatch.setattr(training, "READ_EVERY", 10)
    facts = (model, "layers", 0, tiny.CPU, tmp_path / "run.pt")
    for commit, steps in ((FIRST, 10), (SECOND, 10), (SECOND, 20)):
        at(commit)
        found = train(*facts, lambda: True)
        assert found.losses if steps == 20 else found.missing.reason == f"stopped after {steps} of 20 steps"


def test_tasks_are_named_by_model_by_kind_and_by_both():
    models = [model.model_copy(update={"name": name}) for name in ("one", "two") for model in tiny.study().models]
    study = ModelStudy(name="x", question="Q", models=tuple(models))
    tasks = [task for model in models for task in tasks_of(study, model)]

    def named(*names):
        return [(task.model, task.key[0]) for task in dict.fromkeys(continued.select(tasks, study, names, "only"))]

    assert len(named()) == len(tasks)
    assert named("gradients", "two") == [("two", "gradients")]
    assert named("gradients") == [("one", "gradients"), ("two", "gradients")]
    assert named("one/gradients", "two/control") == [("one", "gradients"), ("two", "control")]
    assert named("one/gradients", "two", "alone") == [("one", "gradients"), *3 * [("two", "alone")]]
    assert ("one", "control") in named("one/training")
    with pytest.raises(ArgumentError, match="only is 'three'; it takes kinds"):
        named("three")
