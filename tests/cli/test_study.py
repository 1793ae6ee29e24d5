"""``onelaunch study ...``: each command, and each way to get it wrong."""

from __future__ import annotations

import json
import logging
import re

import pytest

from onelaunch.cli.study import run as run_module
from onelaunch.workbench.compare import compare
from onelaunch.workbench.decision import concluded
from onelaunch.workbench.result import Result
from onelaunch.workbench.run import Progress
from tests.workbench import results


@pytest.fixture
def stored(tmp_path):
    """Two results on disk: one that proceeds, one that was interrupted."""
    return (
        results.proceed_on_gpu().save(tmp_path / "gpu.json"),
        results.interrupted_on_cpu().save(tmp_path / "cpu.json"),
    )


def test_list_names_the_studies_and_those_that_cannot_be_read(call, here):
    (here / "studies" / "broken.toml").write_text("name = ")
    answer = call("study", "list")
    assert answer.code == 0
    assert "toy-study" in answer.out
    assert "Is the parallel sum faster?" in answer.out
    assert "broken" in answer.out
    assert "not valid TOML" in answer.out


def test_show_says_what_is_declared_and_planned_and_runs_nothing(call, here):
    answer = call("study", "show", "toy-study", "--device", "cpu")
    assert answer.code == 0
    assert "parallel at least 1.01x as fast as eager" in answer.out
    assert "infeasible" in answer.out
    assert "the study asks for at least 1000x" in answer.out
    assert "Reported before (history)" in answer.out
    assert "9.99x" in answer.out
    assert "B=2 T=24 V=8 float32" in answer.out
    assert not (here / "results").exists()


def test_show_of_a_scale_without_shapes_says_so(call):
    assert "has no shapes of scale full" in call("study", "show", "toy-study", "--scale", "full").out


def test_judge_decides_again_by_what_is_stored_and_says_so(call, stored):
    path = stored[0]
    before = concluded(Result.load(path))
    before.model_copy(update={"outcomes": (), "decision": None}).save(path, force=True)
    for _ in range(2):  # a second time, a second note would say the same
        answer = call("study", "judge", str(path))
        assert answer.code == 0
        assert "Decision: proceed" in answer.out
        after = Result.load(path)
        assert (after.outcomes, after.decision) == (before.outcomes, before.decision)
        assert after.cells == before.cells
        (note,) = set(after.notes) - set(before.notes)
        assert f"Measured at {before.provenance.commit}" in note
        assert "judged again at" in note


def test_judge_takes_results_alone(call, here):
    (here / "other.json").write_text("{}")
    answer = call("study", "judge", "other.json")
    assert answer.code != 0
    assert "schema_version" in answer.err


def test_run_ends_in_a_decision_and_says_where_it_is(call, here):
    answer = call("study", "run", "toy-study", "--device", "cpu")
    assert answer.code == 0
    result = Result.load(here / "results" / "cpu" / "toy-study.json")
    assert result.decision
    assert f"Decision: {result.decision.kind.replace('_', ' ')}" in answer.out
    assert "results/cpu/toy-study.json" in answer.out
    assert "reports/cpu/toy-study/report.html" in answer.out
    assert (here / "reports" / "cpu" / "toy-study" / "report.html").read_text().startswith("<!doctype html>")
    assert "[1/1] first, forward: verify" in answer.err
    assert "[1/1]" not in answer.out


def test_run_puts_things_where_it_is_told(call, here):
    assert call("study", "run", "toy-study", "--out", "one.json", "--report-dir", "elsewhere", "--rounds", 4).code == 0
    assert Result.load(here / "one.json").provenance.rounds == 4
    assert (here / "elsewhere" / "report.md").exists()
    assert call("study", "run", "toy-study", "--out", "together").code == 0
    assert {path.name for path in (here / "together").iterdir()} == {"result.json", "report.md", "report.html"}


def test_run_never_replaces_a_result_unasked(call, here):
    kept = results.nothing_ran().save(here / "results" / "cpu" / "toy-study.json")
    answer = call("study", "run", "toy-study")
    assert answer.code == 1
    assert "toy-study.json exists already" in answer.err
    assert "--force" in answer.err
    assert Result.load(kept) == results.nothing_ran()
    assert call("study", "run", "toy-study", "--force").code == 0
    assert Result.load(kept) != results.nothing_ran()


def test_run_says_that_a_report_is_in_the_way_before_it_runs(call, here):
    results.nothing_ran().save(here / "r" / "result.json")
    answer = call("study", "run", "toy-study", "--report-dir", "r")
    assert answer.code == 1
    assert "r/result.json exists already" in answer.err
    assert not (here / "results").exists()


def test_run_hands_its_options_on(call, monkeypatch):
    asked = {}

    def run_study(study, **options):
        asked.update(options, study=study.name)
        options["on_progress"](Progress("first", "forward_backward", "time", 1, 3, 0, 2))
        return results.proceed_on_gpu()

    monkeypatch.setattr(run_module, "run_study", run_study)
    answer = call("study", "run", "toy-study", "--scale", "full", "--rounds", "7", "--no-count", "--device", "cpu")
    assert answer.code == 0
    assert asked["study"] == "toy-study"
    assert (asked["device"], asked["scale"], asked["rounds"], asked["count"]) == ("cpu", "full", 7, False)
    assert "[1/2] first, forward + backward: time" in answer.err
    call("study", "run", "toy-study", "--count-all", "--force")
    assert (asked["scale"], asked["rounds"], asked["count"], asked["force"]) == ("auto", None, "all", True)


def test_ctrl_c_keeps_what_was_measured_and_says_so(call, here, monkeypatch):
    def run_study(study, *, save_to, **options):
        result = results.interrupted_on_cpu()
        result.save(save_to)
        return result

    monkeypatch.setattr(run_module, "run_study", run_study)
    answer = call("study", "run", "toy-study")
    assert answer.code == 130
    assert "Interrupted: 8 of 16 cells were reached" in answer.out
    assert "interrupted: what was measured is kept in results/cpu/toy-study.json" in answer.err
    assert (here / "reports" / "cpu" / "toy-study" / "report.html").exists()


def test_resuming_replaces_the_report_of_what_it_goes_on_with_and_no_other(call, here, monkeypatch):
    asked = {}

    def run_study(study, **options):
        asked.update(options)
        return results.proceed_on_gpu()

    monkeypatch.setattr(run_module, "run_study", run_study)
    result, report = here / "results" / "cpu" / "toy-study.json", here / "reports" / "cpu" / "toy-study" / "result.json"
    results.nothing_ran().save(report)
    answer = call("study", "run", "toy-study", "--resume")  # there is nothing to go on with
    assert answer.code == 1
    assert "toy-study/result.json exists already" in answer.err
    assert asked == {}
    results.interrupted_on_cpu().save(result)
    assert call("study", "run", "toy-study", "--resume").code == 0
    assert (asked["resume"], asked["force"]) == (True, False)
    results.proceed_on_gpu().save(result, force=True)
    answer = call("study", "run", "toy-study", "--resume")
    assert answer.code == 1
    assert "results/cpu/toy-study.json exists already" in answer.err


def test_ctrl_c_before_anything_was_measured_is_no_traceback(call, monkeypatch):
    def run_study(study, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(run_module, "run_study", run_study)
    answer = call("study", "run", "toy-study")
    assert answer.code == 130
    assert answer.err.endswith("interrupted")


@pytest.mark.parametrize("command", ["show", "run"])
def test_an_unknown_study_is_named_with_the_nearest(call, command):
    answer = call("study", command, "toy-studdy")
    assert answer.code == 2
    assert answer.err.startswith("error: There is no study 'toy-studdy'. Did you mean 'toy-study'?")


def test_a_misspelt_key_is_named_with_the_nearest(call, here):
    path = here / "studies" / "toy-study.toml"
    path.write_text(path.read_text().replace("baseline =", "basline ="))
    answer = call("study", "run", "toy-study")
    assert answer.code == 1
    assert "'basline'. Did you mean 'baseline'?" in answer.err


@pytest.mark.parametrize("device", ["cuda:7", "tpu"])
def test_a_device_that_is_not_here(call, device):
    for command in (("study", "run", "toy-study"), ("study", "show", "toy-study"), ("doctor",)):
        answer = call(*command, "--device", device)
        assert answer.code == 1
        assert f"error: There is no device '{device}' here. Present:" in answer.err


@pytest.mark.parametrize("options", [("--rounds", "2"), ("--rounds", "many"), ("--scale", "huge"), ("--colour", "red")])
def test_wrong_options_are_usage_errors(call, options):
    answer = call("study", "run", "toy-study", *options)
    assert answer.code == 2
    assert options[0] in answer.err


def test_report_prints_and_writes(call, here, stored):
    answer = call("study", "report", stored[0], "--report-dir", "out")
    assert answer.code == 0
    assert "Decision: proceed" in answer.out
    assert "traffic halves infeasible" in answer.out
    assert {path.name for path in (here / "out").iterdir()} == {"report.md", "report.html", "result.json"}
    assert "All times, forward" not in answer.out
    assert "All times, forward" in call("study", "report", stored[0], "--full").out
    again = call("study", "report", stored[1], "--report-dir", "out")
    assert again.code == 1
    assert "out/result.json exists already" in again.err
    assert call("study", "report", stored[1], "--report-dir", "out", "--force").code == 0


@pytest.mark.parametrize("width", [80, 120])
def test_what_is_printed_into_a_pipe_fits_and_has_no_codes(call, stored, width):
    for arguments in (("report", stored[0]), ("show", "toy-study"), ("list",), ("compare", *stored, "--all")):
        answer = call("study", *arguments, width=width)
        assert answer.code == 0
        assert "\x1b" not in answer.raw
        lines = [line for line in answer.raw.splitlines() if "toy-study.toml" not in line]
        assert max(map(len, lines)) <= width


CORRUPT = {
    "no JSON": ("{", "Expecting"),
    "another schema": (json.dumps({"schema_version": 99}), "its schema_version is 99"),
    "not a result": (json.dumps([1, 2]), "its schema_version is None"),
    "a field missing": (json.dumps({"schema_version": 1}), "Field required"),
}


@pytest.mark.parametrize("kind", CORRUPT)
@pytest.mark.parametrize("command", ["report", "compare", "adopt"])
def test_a_corrupt_result_says_what_is_wrong(call, here, stored, command, kind):
    text, problem = CORRUPT[kind]
    (here / "bad.json").write_text(text)
    answer = call("study", command, "bad.json", *((stored[0],) if command == "compare" else ()))
    assert answer.code == 1
    assert answer.err.startswith("error: bad.json is not a result of onelaunch")
    assert problem in answer.err


def test_a_result_that_is_not_there(call):
    answer = call("study", "report", "nowhere.json")
    assert answer.code == 1
    assert "nowhere.json" in answer.err
    assert "Traceback" not in answer.err


def test_compare_says_what_changed(call, here, stored):
    before = results.proceed_on_gpu()
    cells = tuple(
        cell.model_copy(
            update={
                "timings": tuple(
                    results.timing(timing.regime, 2 * timing.microseconds.median)
                    if (cell.variant, cell.shape) == ("fused_chunked", "target")
                    else timing
                    for timing in cell.timings
                ),
                "status": "error" if (cell.variant, cell.shape) == ("fla", "wide") else cell.status,
                "reason": "broke" if (cell.variant, cell.shape) == ("fla", "wide") else cell.reason,
                "peak_bytes": 3 * 2**30 if (cell.variant, cell.shape) == ("semi_fused", "wide") else cell.peak_bytes,
            }
        )
        for cell in before.cells
    )
    outcomes = (before.outcomes[0].model_copy(update={"status": "missed"}), *before.outcomes[1:])
    assert before.decision
    decision = before.decision.model_copy(update={"kind": "debug"})
    versions = before.provenance.versions | {"torch": "2.13.0"}
    after = before.model_copy(
        update={
            "cells": cells,
            "outcomes": outcomes,
            "decision": decision,
            "provenance": before.provenance.model_copy(update={"versions": versions}),
        }
    )
    second = after.save(here / "after.json")
    answer = call("study", "compare", stored[0], second)
    found = compare(before, after)
    assert answer.code == 0
    assert "Decision: proceed, then debug." in answer.out
    assert f"{found.count('SLOWER')} slower" in answer.out
    assert found.count("SLOWER") > 0
    assert "fused_chunked target forward cold slower" in answer.out
    assert "2.11.0 2.13.0" in answer.out
    assert "fla wide forward ok error broke" in answer.out
    assert re.search(r"Peak memory .* semi_fused wide forward [\d.]+ MiB 3\.00 GiB [\d.]+x", answer.out)
    assert "fused is faster met missed" in answer.out


def test_compare_of_a_result_with_itself_finds_nothing(call, stored):
    answer = call("study", "compare", stored[0], stored[0])
    assert "0 faster, 0 slower" in answer.out
    assert "Decision: proceed, as before." in answer.out
    assert "Made differently" not in answer.out


def test_compare_of_different_studies_says_so(call, stored):
    answer = call("study", "compare", *stored)
    assert answer.code == 0
    assert "declarations differ" in answer.out
    assert "In the first alone:" in answer.out


def test_adopt_writes_the_dispatcher_s_table(call, here, stored):
    answer = call("study", "adopt", stored[0], "--into", "tables")
    assert answer.code == 0
    assert "tables/nvidia-h200.json" in answer.out
    table = json.loads((here / "tables" / "nvidia-h200.json").read_text())
    assert table["rows"]


def test_adopt_of_two_devices_is_refused(call, stored):
    answer = call("study", "adopt", *stored, "--into", "tables")
    assert answer.code == 1
    assert "error: One table is of one device" in answer.err


def test_a_time_cap_ends_the_rounds_after_three(call, here):
    answer = call("study", "run", "toy-study", "--device", "cpu", "--rounds", "50", "--time-cap", "0.1", "--out", "r")
    assert answer.code == 0
    result = Result.load(here / "r" / "result.json")
    assert any("Stopped by the time cap of 0.1 s" in note for note in result.notes)
    assert "Stopped by the time cap of 0.1 s" in answer.out


def test_a_run_prints_the_decision_and_what_was_found_within_forty_lines(call, here):
    answer = call("study", "run", "toy-study", "--device", "cpu", "--out", "r")
    top = answer.raw.splitlines()[:40]
    (decision,) = [at for at, line in enumerate(top) if line.startswith("Decision: ")]
    (found,) = [at for at, line in enumerate(top) if line.startswith("What was found")]
    assert decision < found
    assert any("µs [" in line or "ms [" in line for line in top[found:])


def test_the_warning_of_a_machine_with_cuda_but_no_gpu_is_left_out(call, caplog):
    call("study", "list")
    logger = logging.getLogger("torch.utils.cpp_extension")
    logger.warning("No CUDA runtime is found, using CUDA_HOME='%s'", "/usr/local/cuda")
    logger.warning("another warning")
    assert [record.getMessage() for record in caplog.records if record.name == logger.name] == ["another warning"]


def test_a_quick_run_measures_the_smallest_shape_alone_and_says_so(call, here):
    path = here / "studies" / "toy-study.toml"
    longer = '[[shapes]]\nname = "longer"\nscale = "small"\ndtype = "float32"\nB = 1\nT = 48\nV = 8\n'
    path.write_text(path.read_text().replace("[[criteria]]", f"{longer}\n[[criteria]]", 1))
    answer = call("study", "run", "toy-study", "--device", "cpu", "--quick", "--out", "r")
    assert answer.code == 0
    result = Result.load(here / "r" / "result.json")
    assert {cell.shape for cell in result.cells} == {"first"}
    assert len(result.study.shapes) == 2
    assert "No shape but first was measured" in answer.out


def test_a_quick_run_that_took_long_begins_no_further_direction(call, here, monkeypatch):
    monkeypatch.setattr("onelaunch.workbench.run.QUICK_SECONDS", 0.0)
    path = here / "studies" / "toy-study.toml"
    path.write_text(path.read_text().replace("rounds = 3", 'rounds = 3\ndirections = ["forward", "forward_backward"]'))
    answer = call("study", "run", "toy-study", "--device", "cpu", "--quick", "--out", "r")
    assert answer.code == 0
    result = Result.load(here / "r" / "result.json")
    assert {cell.direction for cell in result.cells} == {"forward"}
    assert not result.interrupted
    assert "No forward and backward at first was measured" in answer.out
