"""Tests of runs of a study: from plan to decision, files, failures of variants, interruption, resuming, and provenance.

The helpers are those of ``runs.py``. ``study`` declares ``toy_sum`` (of ``toy.py``) at the small-scale shapes ``first`` and
``second``; its baseline is ``eager`` and its other variant ``parallel``. ``run`` runs it on the CPU and saves the result in
results/cpu/toy-study.json. ``steps(name=function)`` replaces a function that uses the device. ``interrupted_at("begin")``
presses Ctrl-C when the second shape begins. ``prose`` compares a text with its entry in tests/snapshots/prose.txt, whose key is
the node id of the test. A test fails if it does not compare one of its entries, and ``tests/test_prose.py`` if the test or the
parameter of an entry is gone.

``FASTER`` asks that ``parallel`` is faster. ``SLOW_LIGHT`` are made-up peaks, so high that no time is below its bound.
``statuses`` returns the status of each variant at a shape.
"""

from __future__ import annotations

import gc
import importlib.metadata
import re
import shutil

import pytest
import torch

from onelaunch.device import peaks, quick_look
from onelaunch.device.hardware import Ceilings
from onelaunch.errors import NoDeviceError, OutputUnwritable, ResultExists, ResultMismatch, StudyError
from onelaunch.workbench import files
from onelaunch.workbench.measure import timing
from onelaunch.workbench.result import Result
from onelaunch.workbench.result import saved as result_module
from onelaunch.workbench.result.provenance import _distributions, commit, merge_clocks, spelled
from onelaunch.workbench.run import ResultUnsaved, Steps, default_path, partial_path
from onelaunch.workbench.study import Criterion, Shape
from tests.workbench import toy
from tests.workbench.runs import FASTER, SLOW_LIGHT, interrupted_at, quick, run, statuses, steps, study

__all__ = ["quick"]  # an automatic fixture: an empty working directory, short samples, no warm-up


def test_a_study_runs_from_plan_to_decision(tmp_path):
    told = []
    result = run(study(FASTER, controls=("product",), directions=("forward", "forward_backward")), on_progress=told.append)
    assert statuses(result) == {"eager": "ok", "parallel": "ok", "product": "ok"}
    assert statuses(result, "second", "forward_backward") == {"eager": "ok", "parallel": "ok"}
    cell = result.cell("first", "parallel")
    assert cell.verdict.ok
    assert [taken.regime for taken in cell.timings] == ["cold", "warm", "eager"]
    assert len(cell.timing("cold").rounds) == 3
    assert cell.plan.bytes == 2 * 2 * 24 * 8 * 4  # x and y, of B x T x V float32 elements
    assert (cell.traffic.source, cell.traffic.total) == ("analytic", cell.plan.bytes)
    assert {(noise.shape, noise.direction) for noise in result.noise} == {
        (shape, direction) for shape in ("first", "second") for direction in ("forward", "forward_backward")
    }
    (faster,) = result.outcomes
    assert faster.status != "not_measured"
    assert result.decision is not None
    assert not result.interrupted
    assert result.study_digest == result.study.digest()
    assert result.ceilings.copy_bytes_per_second == 1e12
    assert any("input sets" in note for note in result.notes)
    assert {(step.shape, step.direction) for step in told} >= {("first", "forward"), ("second", "forward_backward")}
    assert {step.step for step in told} >= {"verify", "time"}
    assert [step.cases_done for step in told] == sorted(step.cases_done for step in told)
    assert {step.cases for step in told} == {4}  # two shapes in two directions


def test_the_result_is_saved_at_the_given_path_and_readable(tmp_path):
    result = run(study(FASTER))
    assert default_path(study(), "cpu").as_posix() == "results/cpu/toy-study.json"
    assert Result.load(tmp_path / "results" / "cpu" / "toy-study.json") == result
    assert [path.name for path in (tmp_path / "results" / "cpu").iterdir()] == ["toy-study.json"]


@pytest.mark.parametrize("frozen", [0, 1])
def test_what_a_run_has_frozen_is_unfrozen_unless_the_caller_had_frozen_objects(frozen, monkeypatch):
    unfrozen = []
    monkeypatch.setattr(gc, "get_freeze_count", lambda: frozen)
    monkeypatch.setattr(gc, "unfreeze", lambda: unfrozen.append("once"))
    run(study())
    assert unfrozen == ([] if frozen else ["once"])


def test_an_existing_result_is_refused_before_anything_runs(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text("precious")
    never = steps(measure=lambda *_, **__: pytest.fail("measured"), ceilings=lambda _: pytest.fail("measured"))
    with pytest.raises(ResultExists, match=r"save_to.*force=True"):
        run(study(), save_to=path, steps=never)
    assert path.read_text() == "precious"
    run(study(), save_to=path, force=True)
    assert Result.load(path).study.name == "toy-study"


def test_a_killed_runs_partial_result_is_not_replaced_unasked(tmp_path, prose):
    """While a run measures, its result so far is in the partial file beside the path."""
    path = tmp_path / "mine.json"
    partial_path(path).write_text("half")
    with prose.raises(ResultExists, match=r"mine\.partial\.json"):
        run(study(), save_to=path)
    run(study(), save_to=path, force=True)
    assert not partial_path(path).exists()


def test_a_study_without_shapes_for_this_device_is_refused(tmp_path, prose):
    with prose.raises(StudyError):
        run(study(), scale="full")
    assert not (tmp_path / "results").exists()


def test_an_output_that_cannot_be_written_is_found_before_anything_is_measured(tmp_path):
    never = steps(measure=lambda *_, **__: pytest.fail("measured"), ceilings=lambda _: pytest.fail("measured"))
    (tmp_path / "file").write_text("precious")
    for path in (tmp_path / "file" / "r.json", tmp_path, tmp_path / ("x" * 300), tmp_path / "a\0b.json"):
        with pytest.raises(OutputUnwritable) as told:
            run(study(), save_to=path, steps=never, force=True)
        assert isinstance(told.value, OSError)
        assert told.value.path == path
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_study_made_in_python_follows_the_rules_of_names_before_it_runs(tmp_path):
    never = steps(measure=lambda *_, **__: pytest.fail("measured"), ceilings=lambda _: pytest.fail("measured"))
    for wrong in (study(name="../up"), study(question="\x1b[2J"), study(FASTER.model_copy(update={"name": "a\nb"}))):
        with pytest.raises(StudyError):
            run(wrong, steps=never)
    assert not list(tmp_path.iterdir())


def test_the_error_about_a_partial_result_suggests_resuming(tmp_path):
    path = tmp_path / "mine.json"
    run(study(), save_to=path, steps=interrupted_at("begin", "second"))
    with pytest.raises(ResultExists, match=r"resume=True.*force=True") as told:
        run(study(), save_to=path)
    assert told.value.resumable
    assert "--" not in str(told.value)  # names of options belong to the command line


def test_a_result_that_cannot_be_saved_at_its_path_is_saved_elsewhere(tmp_path, monkeypatch, prose):
    path = tmp_path / "r" / "mine.json"
    written = files.write_text

    def write(to, text):
        if to.parent == path.parent:
            raise OutputUnwritable(to, "No space left on device")
        written(to, text)

    monkeypatch.setattr(result_module, "write_text", write)
    with prose.raises(ResultUnsaved, mask={r"/\S*/onelaunch-\w+/": "<elsewhere>/"}) as told:
        run(study(FASTER), save_to=path)
    assert told.value.result.decision is not None
    assert Result.load(told.value.rescued) == told.value.result
    assert str(told.value.rescued) in str(told.value)
    shutil.rmtree(told.value.rescued.parent)


def test_a_user_s_package_is_named_with_its_version(monkeypatch):
    _distributions.cache_clear()
    # ``toy_sum`` is defined in the package ``tests``, here one of an installed distribution.
    owners = {"tests": ["my-kernels"], "onelaunch": ["onelaunch"]}
    monkeypatch.setattr("importlib.metadata.packages_distributions", lambda: owners)
    version = importlib.metadata.version
    monkeypatch.setattr("importlib.metadata.version", lambda name: "1.2.3" if name == "my-kernels" else version(name))
    assert run(study()).provenance.versions["my-kernels"] == "1.2.3"
    _distributions.cache_clear()


def test_a_missing_device_is_refused():
    with pytest.raises(NoDeviceError):
        run(study(), device="cuda:7")


def test_a_failing_variant_is_recorded_and_the_others_continue():
    names = ("eager", "parallel", "gpu_only", "missing_package", "zeros", "mutates", "raises", "runs_out")
    result = run(study(FASTER, variants=names))
    expected = {
        "eager": "ok",
        "parallel": "ok",
        "gpu_only": "unsupported",
        "missing_package": "not_installed",
        "zeros": "incorrect",
        "mutates": "incorrect",
        "raises": "error",
        "runs_out": "out_of_memory",
    }
    for shape in ("first", "second"):
        assert statuses(result, shape) == expected
    reasons = {cell.variant: cell.reason for cell in result.cells}
    assert reasons["gpu_only"] == "needs a GPU"
    assert "a_package_that_nobody_has" in reasons["missing_package"]
    assert reasons["raises"] == "RuntimeError: the kernel fell over"
    assert "1 TiB" in reasons["runs_out"]
    zeros = result.cell("first", "zeros")
    assert zeros.timings == ()
    assert not zeros.verdict.ok
    assert zeros.plan is not None


def test_a_criterion_on_a_wrong_variant_ends_in_debug():
    wrong = Criterion(name="zeros are fast", measure="speedup", of="zeros", at="first", at_least=1.1)
    result = run(study(wrong, variants=("eager", "zeros")))
    assert result.outcomes[0].status == "not_measured"
    assert result.decision.kind == "debug"


def test_a_shape_that_does_not_fit_is_recorded_and_the_next_one_runs():
    def measure(operation, case, *args, **more):
        if case.name == "first":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 TiB")
        return timing.measure(operation, case, *args, **more)

    result = run(study(), steps=steps(measure=measure))
    assert set(statuses(result).values()) == {"out_of_memory"}
    assert set(statuses(result, "second").values()) == {"ok"}
    assert "9 TiB" in result.cell("first", "eager").reason


@pytest.mark.parametrize("when", ["begin", "within"])
def test_ctrl_c_keeps_and_judges_the_measurements(tmp_path, when):
    result = run(study(FASTER), steps=interrupted_at(when))
    assert result.interrupted
    assert set(statuses(result).values()) == {"ok"}
    assert set(statuses(result, "second").values()) == {"interrupted"}
    assert result.outcomes[0].values["first"].samples == 3
    assert result.decision is not None
    assert any("interrupted" in sentence for sentence in result.decision.unexplained)
    assert Result.load(tmp_path / "results" / "cpu" / "toy-study.json") == result
    kept = result.cell("second", "parallel").timings  # of the rounds that were complete
    assert bool(kept) == (when == "within")


def test_ctrl_c_at_the_first_shape_leaves_a_result(tmp_path):
    result = run(study(FASTER), steps=interrupted_at("begin", "first"))
    assert result.interrupted
    assert result.outcomes[0].status == "not_measured"
    assert result.decision.kind == "measure_more"
    assert Result.load(tmp_path / "results" / "cpu" / "toy-study.json") == result


def test_an_interruption_keeps_the_reasons_of_unsupported_variants():
    result = run(study(variants=("eager", "gpu_only")), steps=interrupted_at("begin", "first"))
    assert statuses(result, "second") == {"eager": "interrupted", "gpu_only": "unsupported"}


def test_every_finished_shape_is_on_disk_before_the_next_begins(tmp_path):
    path = tmp_path / "kept.json"
    seen = []

    def measure(operation, case, *args, **more):
        if case.name == "second":
            seen.append(Result.load(partial_path(path)))
        return timing.measure(operation, case, *args, **more)

    run(study(), save_to=path, steps=steps(measure=measure))
    assert statuses(seen[0]) == {"eager": "ok", "parallel": "ok"}
    assert seen[0].interrupted
    assert not partial_path(path).exists()


def test_an_interrupted_run_resumes_where_it_stopped(tmp_path, prose):
    first = run(study(FASTER), steps=interrupted_at("begin", "second"))
    assert statuses(first, "second") == {"eager": "interrupted", "parallel": "interrupted"}
    measured = []

    def measure(operation, case, *args, **more):
        measured.append(case.name)
        return timing.measure(operation, case, *args, **more)

    result = run(study(FASTER), resume=True, steps=steps(measure=measure))
    assert measured == ["second"]
    assert not result.interrupted
    assert result.cell("first", "parallel") == first.cell("first", "parallel")
    assert statuses(result, "second") == {"eager": "ok", "parallel": "ok"}
    assert {noise.shape for noise in result.noise} == {"first", "second"}
    assert result.outcomes[0].status != "not_measured"
    prose([note for note in result.notes if first.provenance.date in note], mask={re.escape(first.provenance.date): "<date>"})
    assert Result.load(tmp_path / "results" / "cpu" / "toy-study.json") == result
    with pytest.raises(ResultExists):
        run(study(FASTER), resume=True)
    run(study(FASTER), resume=True, force=True, steps=steps(measure=measure))
    assert measured == ["second", "first", "second"]  # a finished run starts anew


def test_a_killed_run_can_be_resumed(tmp_path):
    path = tmp_path / "mine.json"
    run(study(), save_to=path, steps=interrupted_at("begin", "second"))
    path.rename(partial_path(path))  # a killed run leaves only this file
    result = run(study(), save_to=path, resume=True)
    assert statuses(result) == statuses(result, "second") == {"eager": "ok", "parallel": "ok"}
    assert not partial_path(path).exists()


def test_resuming_without_an_earlier_run_starts_a_new_one(tmp_path):
    assert not run(study(), save_to=tmp_path / "mine.json", resume=True).interrupted


def test_a_resumed_run_keeps_the_peaks_of_its_roofline_bounds():
    run(study(), steps=interrupted_at("begin", "second"))
    twice = Ceilings(2e12, {"float32": 2e13, "float16": 2e13}, 1e-6, "2026-11-21T12:00:00+00:00", "made up")
    result = run(study(), resume=True, steps=steps(ceilings=lambda _: twice))
    floors = {cell.plan.floor_microseconds for cell in result.cells}
    assert len(floors) == 1
    assert result.ceilings.copy_bytes_per_second == SLOW_LIGHT.copy_bytes_per_second


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rounds": 4}, "rounds 3 then, 4 now"),
        ({"study": study(regimes=("cold",))}, "study "),
    ],
)
def test_a_run_with_other_settings_is_not_resumed(change, said, prose):
    """``said`` is part of the test's id only; the snapshot holds the message."""
    run(study(), steps=interrupted_at("begin", "second"))
    declared = change.pop("study", study())
    with prose.raises(ResultMismatch, match=r"toy-study\.json.*force=True"):
        run(declared, resume=True, **change)


def test_a_time_below_the_roofline_bound_is_rejected():
    slow = Ceilings(1.0, {"float32": 1.0}, 1e-6, "", "made up")  # one byte per second: every time is below the roofline bound
    result = run(study(FASTER), steps=steps(ceilings=lambda _: slow))
    assert set(statuses(result).values()) == {"invalid"}
    assert result.decision.kind == "debug"
    reasons = {cell.reason for cell in result.cells}
    assert all("roofline bound" in reason and "onelaunch doctor --refresh" in reason for reason in reasons)


LOADED = Ceilings(1.0, {"float32": 1.0}, 1e-6, "then", peaks.software("cpu"), spread={"copy": 0.02})
"""Peaks as measured on a loaded machine: one byte per second, so that every time is below its roofline bound."""

FREE = Ceilings(1e12, {"float32": 1e13}, 1e-6, "now", peaks.software("cpu"), 2e12, {"copy": 0.02})
"""Peaks of the same machine without load: 1 TB/s."""


def test_peaks_measured_under_load_are_measured_again(monkeypatch):
    """This happens before a time that seems impossibly short is called invalid."""
    peaks.remember("cpu", LOADED)
    monkeypatch.setattr(quick_look, "implausible", lambda device, found: "")  # the load is not over when the run begins
    measured = []
    monkeypatch.setattr(peaks, "measure", lambda device: measured.append(device) or FREE)
    result = run(study(FASTER), steps=Steps())
    assert measured == ["cpu"]
    assert {cell.status for cell in result.cells} == {"ok"}
    assert result.decision.kind != "debug"
    assert result.ceilings.copy_bytes_per_second == 1e12
    assert {cell.plan.floor_microseconds for cell in result.cells} == {2 * 2 * 24 * 8 * 4 / 1e6}  # bytes over 1e6 per us
    assert any("measured again" in note for note in result.notes)
    assert peaks.stored("cpu").copy_bytes_per_second == 1e12
    assert Result.load(default_path(study())) == result


def test_rejected_times_are_accepted_once_the_peaks_are_corrected():
    """At the first shape the repeated peaks are as low as before. At the second the load is over, and both are judged again."""
    answers = iter([LOADED, FREE])
    result = run(study(FASTER), steps=steps(ceilings=lambda _: LOADED, remeasure=lambda *_: next(answers)))
    assert {cell.status for cell in result.cells} == {"ok"}
    assert {cell.reason for cell in result.cells} == {""}
    assert all(cell.traffic is not None and cell.plan.floor_microseconds < 0.01 for cell in result.cells)


def test_ctrl_c_while_peaks_are_measured_again_keeps_the_times():
    def remeasure(*_):
        raise KeyboardInterrupt

    result = run(study(FASTER), steps=steps(ceilings=lambda _: LOADED, remeasure=remeasure))
    assert result.interrupted
    assert result.cell("first", "parallel").status == "interrupted"
    assert result.cell("first", "parallel").timing("cold") is not None


def test_if_the_baseline_cannot_run_another_variant_gives_the_noise():
    result = run(study(baseline="gpu_only", variants=("eager", "parallel")))
    assert statuses(result)["gpu_only"] == "unsupported"
    assert result.noise


def test_rounds_and_scale_can_be_chosen():
    full = Shape(name="full", dtype="float32", sizes={"B": 1, "T": 8, "V": 4})
    declared = study(shapes=(*study().shapes, full))
    small = run(declared, rounds=4)
    assert len(small.cell("first", "eager").timing("cold").rounds) == 4
    assert small.cell("full", "eager") is None
    assert (small.provenance.scale, small.provenance.rounds) == ("small", 4)
    large = run(declared, scale="full", force=True)
    assert {cell.shape for cell in large.cells} == {"full"}


def test_provenance_names_machine_and_versions(monkeypatch):
    monkeypatch.delenv("ONELAUNCH_COMMIT")  # as set by the fixture quick, so that Git is asked
    facts = run(study(), command="onelaunch study run toy-study").provenance
    assert facts.slug == "cpu"
    assert facts.driver == ""
    assert facts.versions["torch"] == torch.__version__
    assert {"python", "onelaunch"} <= facts.versions.keys()
    assert facts.command == "onelaunch study run toy-study"
    assert facts.commit == commit()
    assert facts.date.endswith("+00:00")


def test_the_commit_is_marked_if_the_checkout_differs(monkeypatch):
    from onelaunch.workbench.result import provenance

    monkeypatch.delenv("ONELAUNCH_COMMIT")
    # Output of git by subcommand: whether the file is tracked, the commit, and the changed files.
    answers: dict[str, str | None] = {"ls-files": "__init__.py", "rev-parse": "abc123", "status": " M errors.py"}
    monkeypatch.setattr(provenance, "_git", lambda *arguments: answers[arguments[0]])
    assert commit() == "abc123-dirty"
    answers["status"] = ""
    assert commit() == "abc123"
    answers["ls-files"] = None  # git fails: the code is in no checkout
    assert commit() == ""


def test_clock_samples_of_all_shapes_are_merged():
    samples = [{"sm_mhz": 1980.0, "sm_mhz_lowest": 1900.0}, {"sm_mhz": 1970.0, "sm_mhz_lowest": 1500.0}, {"sm_mhz": 1975.0}]
    assert merge_clocks(samples) == {"sm_mhz": 1975.0, "sm_mhz_lowest": 1500.0}


def test_the_toy_operation_is_registered():
    assert toy.toy_sum.name == "toy_sum"


def test_the_stored_command_omits_folders_of_this_machine():
    given = ["/somewhere/bin/onelaunch", "study", "run", "x.toml", "--out", "/elsewhere/a/r.json", "--tuning=/elsewhere/t"]
    assert spelled(given) == "onelaunch study run x.toml --out r.json --tuning=t"
