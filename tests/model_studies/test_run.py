"""Tests of runs of a study of models, with a stand-in for fla's model on a CPU: measurements, stops, and processes."""

from __future__ import annotations

import contextlib
import copy
import os
import sys

import pytest
import torch
from torch import nn

from onelaunch.errors import ArgumentError, ResultCorrupt, ResultExists, ResultMismatch
from onelaunch.model_studies import ahead, build, child, tasks, training
from onelaunch.model_studies import run as run_module
from onelaunch.model_studies.report import to_document
from onelaunch.model_studies.result import Alone, ModelResult
from onelaunch.model_studies.run import run_model_study
from onelaunch.model_studies.tasks import Task, gradients
from onelaunch.model_studies.training import training as train
from tests.model_studies import tiny


@pytest.fixture
def path(tmp_path):
    return tmp_path / "models" / "tiny-study.json"


@pytest.mark.usefixtures("standin")
def test_a_study_measures_every_variant_and_judges_every_criterion(path):
    seen = []
    result = run_model_study(tiny.study(), device="cpu", save_to=path, in_process=True, on_progress=seen.append)
    assert not result.interrupted
    assert len(seen) == len(result.measurements) == 3 + 2 + 1 + 6 + 1
    assert {outcome.criterion.name: outcome.status for outcome in result.outcomes} == {
        "faster": "met",
        "memory": "not_measured",  # on a CPU
        "first": "not_measured",  # the caches were not emptied
        "losses": "met",
        "end": "met",
        "gradient": "met",
    }
    found = result.find("gradients", "tiny")
    assert set(found.errors) == {"fla", "accelerated", "layers"}
    assert all(each.error < 1e-5 for each in found.errors.values())
    assert all(each.loss == pytest.approx(found.loss, rel=1e-5) for each in found.errors.values())
    accelerated = result.find("alone", "tiny", "accelerated")
    assert (accelerated.replaced, accelerated.refused, accelerated.fallbacks) == (2, (), {})
    assert result.find("alone", "tiny", "fla").replaced == 0
    run = result.find("training", "tiny", "accelerated", 1)
    assert run.losses[-1] < run.losses[0]
    (control,), first = result.controls("tiny"), result.training("tiny", "fla", 0)
    assert (control.perturbation, first.perturbation) == (2**-24, 0)
    assert max(control.apart(first)) < 1e-5
    assert ModelResult.load(path) == result
    assert not path.with_name("tiny-study.state").exists()
    text = to_document(result, "results/x.json")
    assert all(f"**{title}**" in text for title in ("Criteria", "Training steps", "Inference", "Training losses", "Gradients"))
    with pytest.raises(ResultExists):
        run_model_study(tiny.study(), device="cpu", save_to=path, in_process=True)


@pytest.mark.parametrize("empty", [True, False])
def test_tasks_keep_choices_of_autotuners_and_read_them_unless_caches_are_empty(empty, tmp_path, monkeypatch):
    done = []
    monkeypatch.setattr(child, "restore", lambda path, device: done.append(("restore", path)))
    monkeypatch.setattr(child, "keep", lambda path, device: done.append(("keep", path)) or "")
    monkeypatch.setattr(
        child, "carry_out", lambda job, stop: done.append(("run", job.task.task)) or Alone(model="tiny", variant="fla")
    )
    study, kept = tiny.study(), tmp_path / "choices"
    task = Task(task="alone", model="tiny", variant="fla")
    job = child.Job(study=study, task=task, device="cpu", state=tmp_path, empty_caches=empty, tuning=kept)
    (tmp_path / "job.json").write_text(job.model_dump_json())
    child.main(str(tmp_path / "job.json"), str(tmp_path / "answer.json"))
    assert done == [*([] if empty else [("restore", kept)]), ("run", "alone"), ("keep", kept)]


def test_first_steps_begin_with_empty_caches_but_for_tuned_ones_of_the_library():
    study = tiny.study()
    model = study.models[0]
    found = {
        (task.task, task.variant, tuned): run_module.begins_empty(task, model, tuned=tuned)
        for task in tasks.tasks_of(study, model)
        for tuned in (False, True)
    }
    assert {key for key, empty in found.items() if empty} == {
        ("alone", "fla", False),
        *[("alone", ours, tuned) for ours in ("accelerated", "layers") for tuned in (False, True)],
    }


@pytest.mark.usefixtures("standin")
def test_a_part_of_the_configurations_is_compiled_by_steps_of_one_layer(tmp_path, monkeypatch):
    seen = []

    class Recorded(ahead.Trainer):
        def loss(self, rows):
            seen.append((self.variant, len(self.module.model.layers), "loss", tuple(rows.shape)))
            return super().loss(rows)

        def logits(self, rows, **more):
            seen.append((self.variant, self.module.training, "logits", tuple(rows.shape)))
            return super().logits(rows, **more)

    @contextlib.contextmanager
    def part_of_tuning(*part):
        seen.append(part)
        yield
        seen.append("end")

    monkeypatch.setattr(ahead, "Trainer", Recorded)
    monkeypatch.setattr(ahead, "part_of_tuning", part_of_tuning)
    job = ahead.AheadJob(model=tiny.study(layers=3).models[0], device="cpu", parts=4)
    (tmp_path / "job.json").write_text(job.model_dump_json())
    ahead.main(str(tmp_path / "job.json"), "2")
    step = [("fla", 1, "loss", (2, 12)), ("fla", False, "logits", (2, 12)), ("fla", 1, "loss", (1, 8))]
    assert seen == [(2, 4), *step, "end"]


@pytest.mark.parametrize("works", [True, False])
def test_processes_that_compile_ahead_and_fail_are_noted(works, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/true" if works else "/bin/false")
    ended = []
    job = ahead.AheadJob(model=tiny.study().models[0], device="cpu", parts=2)
    notes = ahead.compile_ahead(job, tmp_path / "state", dict(os.environ), 60.0, ended.append)
    assert ended == [1, 2]
    said = [f"Not compiled ahead: part {part} of 2 of tiny: its process ended with code 1" for part in (1, 2)]
    assert sorted(notes) == ([] if works else said)


def test_processes_that_compile_ahead_for_too_long_are_stopped(tmp_path, monkeypatch):
    real = ahead.subprocess.Popen
    monkeypatch.setattr(ahead.subprocess, "Popen", lambda command, **more: real(["sleep", "60"], **more))
    job = ahead.AheadJob(model=tiny.study().models[0], device="cpu", parts=1)
    (note,) = ahead.compile_ahead(job, tmp_path, dict(os.environ), 0.0, lambda _: None)
    assert note.endswith("of tiny: stopped after 0 s")


@pytest.mark.usefixtures("standin")
def test_configurations_are_compiled_ahead_once_into_the_caches_of_the_library_s_variant(path, monkeypatch):
    """First steps of fla's own model then do not begin with empty caches, and those of the others do."""
    done, jobs = [], []

    def compile_ahead(job, folder, environment, limit, report):
        done.append((job.model.name, job.parts, environment["TRITON_CACHE_DIR"]))
        report(1)
        return ["Not compiled ahead: part 1"] if len(done) == 1 else []

    def in_a_child(run, job):
        jobs.append((job.task.task, job.task.variant, job.empty_caches))
        return child.carry_out_all(job)

    monkeypatch.setattr(run_module, "compile_ahead", compile_ahead)
    monkeypatch.setattr(run_module._Run, "_compiles", True)
    monkeypatch.setattr(run_module._Run, "_in_a_child", in_a_child)
    study, seen = tiny.measuring(activities=["training"], steps=0, variants=["fla", "accelerated"]), []
    facts = {"device": "cpu", "save_to": path, "on_progress": seen.append, "processes": 4}
    result = run_model_study(study, only=["alone"], **facts)
    triton = path.with_name("tiny-study.state") / "caches" / "tiny" / "fla" / "triton"
    assert done == [("tiny", 4, str(triton))]
    assert result.notes == ("Not compiled ahead: part 1",)
    said = "tiny: configurations of fla's autotuners"
    assert seen[:3] == [f"{said}, compiled in 4 processes", f"{said}, 1/4 parts", "tiny: first steps of fla"]
    assert jobs == [("alone", "fla", False), ("alone", "accelerated", True)]
    run_model_study(study, only=["timed"], resume=True, **facts)  # again, since a process failed
    assert not run_model_study(study, resume=True, **facts).interrupted  # not again
    assert done == 2 * [("tiny", 4, str(triton))]
    with pytest.raises(ArgumentError, match="at least 0"):
        run_model_study(study, processes=-1)


@pytest.mark.usefixtures("standin")
def test_a_wrong_gradient_is_seen(monkeypatch):
    """An error in one parameter of one variant shows in that variant's error, with the parameter's name."""
    model, right = tiny.measuring(variants=["fla", "accelerated"]).models[0], tasks._gradient

    def wrong(trainer):
        found = right(trainer)
        if trainer.report is not None:
            found["lm_head.weight"] = 1.1 * found["lm_head.weight"]
        return found

    monkeypatch.setattr(tasks, "_gradient", wrong)
    errors = gradients(model, tiny.CPU).errors
    assert errors["accelerated"].worst == "lm_head.weight"
    assert errors["accelerated"].worst_error == pytest.approx(0.1, rel=1e-3)
    assert errors["fla"].error < 1e-5 < errors["accelerated"].error


@pytest.mark.usefixtures("standin")
def test_the_declared_epsilon_is_that_of_heads_norms_in_the_comparison_of_gradients_alone(monkeypatch):
    """Gradients agree with the reference at either epsilon, so all variants have that of the reference."""
    seen, right = {}, tasks.Trainer

    def recorded(model, variant, *more, **named):
        trainer = right(model, variant, *more, **named)
        norms = {name: each.eps for name, each in trainer.module.named_modules() if isinstance(getattr(each, "eps", None), float)}
        heads = {eps for name, eps in norms.items() if name.endswith(build.HEAD_NORM)}
        seen[variant] = heads, {eps for name, eps in norms.items() if not name.endswith(build.HEAD_NORM)}
        return trainer

    monkeypatch.setattr(tasks, "Trainer", recorded)
    model, declared = tiny.measuring().models[0], tiny.measuring(gradient_eps=1e-2).models[0]
    usual, other = (gradients(each, tiny.CPU) for each in (model, declared))
    assert seen == dict.fromkeys(("fla", "accelerated", "layers"), ({1e-2}, {1e-6}))
    assert (usual.eps, other.eps) == (1e-6, 1e-2)
    assert abs(other.loss / usual.loss - 1) > 1e-4  # far more than an error
    for found in (usual, other):
        assert found.missing == {}
        assert all(each.error < 1e-5 for each in found.errors.values())
        assert all(each.loss == pytest.approx(found.loss, rel=1e-6) for each in found.errors.values())
    tasks.timed(declared, "training", 1, tiny.CPU)
    assert seen == dict.fromkeys(("fla", "accelerated", "layers"), ({1e-6}, {1e-6}))


def test_a_time_is_the_mean_of_several_steps_in_a_row(monkeypatch):
    taken, waited = [], []
    step = tasks.Trainer.step

    def counted(trainer, rows):
        taken.append(len(waited))
        return step(trainer, rows)

    monkeypatch.setattr(tasks.Trainer, "step", counted)
    monkeypatch.setattr(tasks, "wait_for", lambda _: waited.append(None))
    found = tasks.timed(tiny.measuring().models[0], "training", 3, tiny.CPU)
    assert [len(each) for each in found.rounds.values()] == [3] * len(found.rounds)
    runs = tasks.WARM_UP * len(found.rounds) + 3 * (len(found.rounds) + 1)  # the first variant is timed twice in a round
    assert taken == [2 * run + 1 for run in range(runs) for _ in range(tasks.STEPS)]


def test_an_epsilon_that_reaches_no_norm_is_refused():
    with pytest.raises(ValueError, match="no module of the model has a norm g_norm_swish_gate"):
        build.set_head_eps(nn.Linear(2, 2), 1e-2)


@pytest.mark.gpu
@pytest.mark.usefixtures("untuned_processes")
def test_the_epsilon_of_heads_norms_reaches_fla_s_kernels():
    """Gradients and losses agree with the reference that has the epsilon; the loss with another is ten times further off."""
    pytest.importorskip("fla", reason="the norm is one of fla")
    changes = {"width": 256, "length": 128, "gradient_length": 128, "steps": 0}
    model = tiny.measuring(**changes, gradient_eps=1e-1).models[0]
    usual, other = (gradients(each, torch.device("cuda")) for each in (tiny.measuring(**changes).models[0], model))
    apart = abs(other.loss - usual.loss)
    assert apart > 1e-4
    for variant, error in other.errors.items():
        assert error.error < 0.05, variant
        assert abs(error.loss - other.loss) < 0.1 * apart, variant


def test_a_control_begins_with_weights_that_differ_by_one_rounding():
    torch.manual_seed(0)
    norm, linear = nn.LayerNorm(300), nn.Linear(300, 300)
    module = nn.Sequential(norm, linear)
    before = [each.detach().clone() for each in module.parameters()]
    build.perturb(module, build.ROUNDINGS["float32"])
    weight, moved = before[2], linear.weight.detach()
    up, down = (weight.nextafter(torch.tensor(end)) for end in (torch.inf, -torch.inf))
    assert bool(((moved == up) | (moved == down)).all())
    assert 0.45 < float((moved == up).float().mean()) < 0.55
    assert not norm.bias.any()
    again = copy.deepcopy(module)
    for each, saved in zip(again.parameters(), before, strict=True):
        each.data.copy_(saved)
    build.perturb(again, build.ROUNDINGS["float32"])
    assert again[1].weight.equal(linear.weight)
    other = copy.deepcopy(module)
    for each, saved in zip(other.parameters(), before, strict=True):
        each.data.copy_(saved)
    build.perturb(other, build.ROUNDINGS["float32"], 1)
    assert 0.45 < float((other[1].weight == linear.weight).float().mean()) < 0.55  # signs of its own
    build.perturb(again, build.ROUNDINGS["bfloat16"])
    steps = (again[1].weight.bfloat16().view(torch.int16) - linear.weight.bfloat16().view(torch.int16)).abs()
    assert int(steps.max()) == 1
    assert 0.25 < float(steps.float().mean()) < 0.5


@pytest.mark.usefixtures("standin")
def test_a_control_has_a_checkpoint_of_its_own(tmp_path):
    """It begins with other weights than the run which it is compared with, and goes on with its own."""
    study = tiny.study(steps=10, precision="autocast")
    task = tasks.tasks_of(study, study.models[0])[-4]
    assert (task.key, task.words) == (
        ("control", "tiny", "fla", 0, 0),
        "tiny: training run of fla, seed 0, again from weights one rounding away",
    )
    job = child.Job(study=study, task=task, device="cpu", state=tmp_path)
    job = child.Job.model_validate_json(job.model_dump_json())
    whole = child.carry_out(job)
    assert (whole.control, whole.perturbation) == (True, 2**-9)
    plain = job.model_copy(update={"task": task._replace(control=False)})
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(training, "READ_EVERY", 5)
        for each in (plain, job):
            assert child.carry_out(each, lambda: True).missing.status == "interrupted"
    assert child.carry_out(job).losses == whole.losses
    assert child.carry_out(plain).losses != whole.losses


@pytest.mark.usefixtures("standin")
def test_a_stopped_training_run_goes_on_with_the_same_bits(tmp_path, monkeypatch):
    model = tiny.study().models[0]
    monkeypatch.setattr(training, "READ_EVERY", 7)
    whole = train(model, "accelerated", 0, tiny.CPU, tmp_path / "whole.pt", lambda: False)
    parts = [train(model, "accelerated", 0, tiny.CPU, tmp_path / "parts.pt", lambda: True) for _ in range(3)]
    assert [each.missing.reason for each in parts[:2]] == ["stopped after 7 of 20 steps", "stopped after 14 of 20 steps"]
    assert parts[2].missing is None
    assert parts[2].losses == whole.losses
    assert not list(tmp_path.iterdir())
    train(model, "accelerated", 0, tiny.CPU, tmp_path / "parts.pt", lambda: True)
    other = train(model, "layers", 0, tiny.CPU, tmp_path / "parts.pt", lambda: False)  # not from this checkpoint
    assert len(other.losses) == 20


@pytest.mark.usefixtures("standin")
def test_an_interrupted_run_goes_on_with_the_tasks_that_are_left(path, monkeypatch):
    facts = {"device": "cpu", "save_to": path, "in_process": True}
    short = tiny.measuring(variants=["layers", "fla"], activities=["training"], seeds=[0], gradient_length=0)
    first = run_model_study(short, only=["alone", "timed"], **facts)
    assert first.interrupted
    assert [each.task for each in first.measurements] == ["alone", "alone", "timed"]
    with pytest.raises(ResultExists, match="resume"):
        run_model_study(short, **facts)

    def stop(*_):
        raise KeyboardInterrupt

    seen = []
    with monkeypatch.context() as patched:
        patched.setattr(run_module, "carry_out_all", stop)
        second = run_model_study(short, resume=True, on_progress=seen.append, **facts)
    assert second.interrupted
    assert seen == ["tiny: training run of layers, seed 0"]
    assert (second.measurements[-1].variant, second.measurements[-1].control) == ("layers", False)
    assert second.measurements[-1].missing.status == "interrupted"
    third = run_model_study(short, resume=True, **facts)
    assert not third.interrupted
    assert third.measurements[:3] == first.measurements
    assert third.spent.wall_seconds > first.spent.wall_seconds
    edited = path.read_text().replace('"rounds": 3', '"rounds": 4', 1)
    path.write_text(edited)
    with pytest.raises(ResultCorrupt, match="was changed"):
        ModelResult.load(path)


@pytest.mark.usefixtures("standin")
def test_parts_of_a_run_are_put_together(path, tmp_path):
    study = tiny.measuring(variants=["layers", "fla"], activities=["training"], steps=0)
    facts = {"device": "cpu", "in_process": True}
    part = tmp_path / "part.json"
    run_model_study(study, save_to=part, only=["alone"], **facts)
    other = run_model_study(study, save_to=path, only=["timed", "gradients"], **facts)
    seen = []
    whole = run_model_study(study, save_to=path, resume=True, also=[part], time_limit=0, on_progress=seen.append, **facts)
    assert not whole.interrupted
    assert seen == []
    assert {each.task for each in whole.measurements} == {"alone", "timed", "gradients"}
    assert whole.find("gradients", "tiny") == other.find("gradients", "tiny")
    with pytest.raises(ResultMismatch, match="declares no model as it did then"):
        run_model_study(tiny.measuring(), save_to=tmp_path / "new.json", also=[part], **facts)


@pytest.mark.usefixtures("standin")
def test_a_variant_that_raises_gets_a_status(path, monkeypatch):
    right = tasks.Trainer

    def failing(model, variant, *more):
        if variant == "accelerated":
            raise torch.OutOfMemoryError("2 GiB are missing")
        return right(model, variant, *more)

    monkeypatch.setattr(tasks, "Trainer", failing)
    facts = {"device": "cpu", "save_to": path, "in_process": True, "only": ["alone", "timed", "gradients"]}
    result = run_model_study(tiny.study(), **facts)
    assert result.find("alone", "tiny", "accelerated").missing.status == "out_of_memory"
    assert set(result.find("timed", "tiny", "training").rounds) == {"fla", "layers"}
    assert "2 GiB" in result.outcomes[0].evidence
    assert "2 GiB" in to_document(result, "results/x.json")


def test_a_process_that_ends_early_gets_a_status(path, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    result = run_model_study(tiny.measuring(variants=["layers"], gradient_length=0, steps=0), device="cpu", save_to=path)
    assert not result.interrupted
    assert result.find("alone", "tiny", "layers").missing.status == "crashed"
    assert result.find("timed", "tiny", "forward").missing["layers"].status == "crashed"


@pytest.mark.slow
@pytest.mark.thorough
def test_a_task_runs_in_a_process_of_its_own(path):
    result = run_model_study(tiny.measuring(variants=["layers"]), device="cpu", save_to=path, only=["alone"])
    found = result.find("alone", "tiny", "layers")
    assert found.missing is None
    assert found.first_step_seconds > 0


@pytest.mark.gpu
@pytest.mark.usefixtures("untuned_processes")
def test_the_gradient_of_an_accelerated_model_is_no_further_off_than_that_of_fla(path):
    pytest.importorskip("fla", reason="the accelerated model is one of fla")
    sizes = {"width": 256, "layers": 2, "batch": 4, "length": 256, "gradient_length": 256, "steps": 0}
    study = tiny.measuring(precision="bfloat16", variants=["fla", "accelerated"], **sizes)
    only = ["alone", "gradients"]
    result = run_model_study(
        study, device="cuda", scale="small", save_to=path, only=only, processes=8
    )  # which compile fla's kernels
    errors = result.find("gradients", "tiny").errors
    assert errors["accelerated"].error <= 1.1 * errors["fla"].error
    alone = result.find("alone", "tiny", "accelerated")
    assert alone.empty_caches
    assert alone.peak_bytes > 0
    assert (alone.replaced, alone.fallbacks) == (4, {})


@pytest.mark.slow
@pytest.mark.thorough
def test_a_llama_is_timed_in_every_activity(path):
    pytest.importorskip("transformers", reason="the Llama is one of transformers")
    changes = {"kind": "llama", "width": 32, "kv_heads": 1, "intermediate": 48, "activities": ["training", "forward", "decoding"]}
    study = tiny.measuring(**changes, steps=0, gradient_length=0)
    result = run_model_study(study, device="cpu", save_to=path, in_process=True)
    assert result.find("alone", "tiny", "accelerated").replaced == 1
    for activity in ("training", "forward", "decoding"):
        times = result.find("timed", "tiny", activity)
        assert (set(times.rounds), times.missing) == ({"transformers", "accelerated"}, {})
    assert "decoding" in to_document(result, "results/x.json")
