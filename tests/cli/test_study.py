"""Tests of ``onelaunch study`` and its commands list, show, run and report, and of errors of all of them.

The fixtures are those of ``conftest.py``. ``call`` runs ``onelaunch`` with arguments in this process and returns its exit
``code``, its stdout (``out`` with single blanks, ``raw`` unchanged) and its stderr (``err``, ``raw_err``). The working
directory ``here`` is an empty folder with the study studies/toy-study.toml (its text is in ``conftest.py``), whose only shape
is of small scale. ``stored`` are paths of two made-up results: a GPU's that proceeds, and a CPU's that was interrupted.
``prose`` compares a text with tests/snapshots/prose.txt, whose key is the node id of the test. A test fails if it does not
compare one of its entries, and ``tests/test_prose.py`` if the test or the parameter of an entry is gone.

``lines_with`` returns the lines of an output that hold some words. A test marked ``thorough`` does not run in ``make test``.
"""

from __future__ import annotations

import itertools
import json
import logging
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from onelaunch.cli.study import report as report_module
from onelaunch.cli.study import run as run_module
from onelaunch.errors import OutputUnwritable
from onelaunch.wording import UNSAFE
from onelaunch.workbench import files
from onelaunch.workbench.result import SCHEMA, Result
from onelaunch.workbench.result import saved as result_module
from onelaunch.workbench.run import Progress
from tests.prose import lines_with
from tests.workbench import results

NEVER = "measured although the output cannot be written"


@pytest.fixture
def never_measured(monkeypatch):
    """Make the test fail if the command begins to measure."""
    monkeypatch.setattr(run_module, "run_study", lambda *_, **__: pytest.fail(NEVER))


def test_list_names_the_studies_and_those_that_cannot_be_read(call, here):
    (here / "studies" / "broken.toml").write_text("name = ")
    answer = call("study", "list", width=200)  # on a narrow one, cells beside the question interrupt it
    assert answer.code == 0
    assert "toy-study" in answer.out
    assert "Is the parallel sum faster?" in answer.out  # quoted from the declaration
    assert "broken" in answer.out
    assert "not valid TOML" in answer.out


def test_show_prints_declaration_and_plan_and_runs_nothing(call, here, prose):
    answer = call("study", "show", "toy-study", "--device", "cpu", width=300)
    assert answer.code == 0
    prose(lines_with(answer.raw, "1.01x"))
    prose(lines_with(answer.raw, "1000x"))
    assert "infeasible" in answer.out
    assert "Reported before (history)" in answer.out
    assert "9.99x" in answer.out
    assert "B=2 T=24 V=8 float32" in answer.out
    assert not (here / "results").exists()


def test_show_reports_a_scale_without_shapes(call, prose):
    prose(lines_with(call("study", "show", "toy-study", "--scale", "full").raw, "scale full"))


def test_run_ends_in_a_decision_and_names_its_files(call, here):
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


def test_run_writes_to_the_given_paths(call, here):
    assert call("study", "run", "toy-study", "--out", "one.json", "--report-dir", "elsewhere", "--rounds", 4).code == 0
    assert Result.load(here / "one.json").provenance.rounds == 4
    assert (here / "elsewhere" / "report.md").exists()
    assert call("study", "run", "toy-study", "--out", "together").code == 0
    assert {path.name for path in (here / "together").iterdir()} == {"result.json", "report.md", "report.html"}


def test_run_does_not_replace_a_result_unless_asked(call, here):
    kept = results.nothing_ran().save(here / "results" / "cpu" / "toy-study.json")
    answer = call("study", "run", "toy-study")
    assert answer.code == 1
    assert "toy-study.json exists already" in answer.err
    assert "--force" in answer.err
    assert Result.load(kept) == results.nothing_ran()
    assert call("study", "run", "toy-study", "--force").code == 0
    assert Result.load(kept) != results.nothing_ran()


def test_run_refuses_an_existing_report_before_it_runs(call, here):
    results.nothing_ran().save(here / "r" / "result.json")
    answer = call("study", "run", "toy-study", "--report-dir", "r")
    assert answer.code == 1
    assert "r/result.json exists already" in answer.err
    assert not (here / "results").exists()


def test_run_explains_how_to_resume_an_interrupted_run(call, here, never_measured):
    results.interrupted_on_cpu().save(here / "r" / "result.partial.json")
    answer = call("study", "run", "toy-study", "--out", "r")
    assert answer.code == 1
    assert "r/result.partial.json exists already" in answer.err
    assert "--resume" in answer.err
    assert "--force" in answer.err


def test_outputs_are_opened_before_anything_is_measured(call, here, never_measured, prose):
    (here / "tiny.toml").write_text("precious")
    for options, name in (
        (("--out", "tiny.toml"), "tiny.toml"),
        (("--out", "tiny.toml/r.json"), "tiny.toml"),
        (("--report-dir", "tiny.toml"), "tiny.toml"),
        (("--out", "/proc/nothing/r.json"), "/proc/nothing/r.json"),
    ):
        answer = call("study", "run", "toy-study", *options)
        assert answer.code == 1
        assert name in answer.err
        prose(answer.err)
    assert (here / "tiny.toml").read_text() == "precious"
    assert sorted(path.name for path in here.iterdir()) == ["studies", "tiny.toml"]


def test_a_full_disk_is_noticed_before_anything_is_measured(call, here, never_measured, monkeypatch, prose):
    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("onelaunch.workbench.files.os.fsync", full)
    answer = call("study", "run", "toy-study")
    assert answer.code == 1
    prose(answer.err)
    assert [path.name for path in here.iterdir()] == ["studies"]


def test_a_disk_that_becomes_full_loses_neither_decision_nor_result(call, here, monkeypatch, prose):
    written = files.write_text

    def write(path, text):
        if here in path.resolve().parents:
            raise OutputUnwritable(path, "No space left on device")
        written(path, text)

    monkeypatch.setattr(result_module, "write_text", write)
    answer = call("study", "run", "toy-study")
    assert answer.code == 1
    assert "Decision: " in answer.out
    rescued = Path(re.search(r"saved as (\S+) instead", answer.err)[1])
    assert Result.load(rescued).study.name == "toy-study"
    prose([note for note in Result.load(rescued).notes if "saved" in note])
    assert not list(here.rglob("*.partial*"))
    shutil.rmtree(rescued.parent)


@pytest.mark.parametrize(("problem", "code"), [(BrokenPipeError(32, "Broken pipe"), 141), (OSError(28, "No space left"), 1)])
@pytest.mark.parametrize("command", ["run", pytest.param("report", marks=pytest.mark.thorough)])
def test_a_closed_pipe_does_not_prevent_the_report(call, here, monkeypatch, command, problem, code):
    """Once, everything was measured and printed, but no report was written."""
    if command == "report":
        assert call("study", "run", "toy-study", "--out", "measured.json").code == 0
        shutil.rmtree(here / "reports")

    def gone(*_, **__):
        raise problem

    monkeypatch.setattr(f"onelaunch.cli.study.{command}.show", gone)  # prints the report
    folder = ("--report-dir", here / "reports")
    answer = call("study", *(("run", "toy-study") if command == "run" else ("report", "measured.json")), *folder)
    assert answer.code == code
    assert {path.name for path in (here / "reports").iterdir()} == {"report.html", "report.md", "result.json"}


def test_a_report_that_cannot_be_written_loses_neither_decision_nor_result(call, here, monkeypatch, prose):
    def fail(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(report_module, "write_report", fail)
    answer = call("study", "run", "toy-study")
    assert answer.code == 1
    assert "Decision: " in answer.out
    assert "Result: results/cpu/toy-study.json" in answer.out
    prose(answer.err[answer.err.index("error: ") :])
    assert Result.load(here / "results" / "cpu" / "toy-study.json").decision


def test_a_newer_result_suggests_an_update(call, here):
    (here / "future.json").write_text(json.dumps({"schema_version": SCHEMA + 1}))
    answer = call("study", "report", "future.json")
    assert answer.code == 1
    assert "newer onelaunch" in answer.err


def test_text_from_a_file_cannot_control_the_terminal(call, here):
    text = (here / "studies" / "toy-study.toml").read_text()
    for old, new in (
        ('name = "first"', 'name = "\\u001b[2J"'),
        ('question = "Is', 'question = "\\u001b]0;title\\u0007Is'),
        ('operation = "toy_sum"', 'operation = "\\u001b[2J"'),
        ("rounds = 3", "'\\u001b\\u202e' = 3".replace("\\u001b", "\x7f")),
        ("B = 2", '"\\u001b[31mB" = 2'),
    ):
        assert old in text
        (here / "studies" / "evil.toml").write_text(text.replace(old, new))
        for command in (("show", "evil"), ("list",), ("run", "studies/evil.toml")):
            answer = call("study", *command)
            assert not UNSAFE.search(answer.raw + answer.raw_err)
    (here / "studies" / "\x1b[2J.toml").write_text(text)
    answer = call("study", "list")
    assert not UNSAFE.search(answer.raw)
    (here / "\x1b[2J.json").write_text("{")
    answer = call("study", "report", "\x1b[2J.json")
    assert not UNSAFE.search(answer.raw_err)
    assert "\\x1b[2J.json" in answer.err


def test_a_study_without_shapes_for_this_machine_lists_its_scales(call, here, prose):
    path = here / "studies" / "toy-study.toml"
    path.write_text(path.read_text().replace('scale = "small"\n', ""))
    answer = call("study", "run", "toy-study", "--device", "cpu")
    assert answer.code == 1
    prose(answer.err[answer.err.index("error: ") :])
    assert "--scale full" in answer.err


def test_sigterm_keeps_the_finished_shapes_and_names_the_file(here):
    text = (here / "studies" / "toy-study.toml").read_text()
    second = text[text.index("[[shapes]]") : text.index("[[criteria]]")].replace('"first"', '"second"')
    (here / "studies" / "toy-study.toml").write_text(text.replace("[[criteria]]", f"{second}\n[[criteria]]", 1))
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r})\n{TERMINATED}"
    child = subprocess.Popen(
        [sys.executable, "-c", code], cwd=here, stderr=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8"
    )
    out, err = child.communicate(timeout=120)
    assert child.returncode == 143, err
    assert "results/cpu/toy-study.partial.json" in err
    assert "--resume" in err
    assert "Traceback" not in out + err
    assert Result.load(here / "results" / "cpu" / "toy-study.partial.json").interrupted


# Runs the study, and terminates it when the partial result is saved for the first time, which is before the first shape. The
# signal reaches the process that measures, a fork of this one; it passes SIGTERM on to its parent.
TERMINATED = """
import os, signal, sys
from tests.workbench import toy
from onelaunch.device import quick_look
from onelaunch.workbench import run, running
from onelaunch.workbench.measure import rotation, sampling, timing
from onelaunch.cli.main import app
quick_look.implausible = lambda device, found: ""  # the peaks are made up; measuring them takes seconds
timing.WARM_UP_SECONDS["cpu"] = 0.0
rotation.CACHES, sampling.CPU_SAMPLE_SECONDS = 0, 1e-4
run.TIME_CAP_SECONDS = {"small": 2.0, "full": 2.0}
keep = running.Run.save_partial
def keep_and_be_terminated(self):
    keep(self)
    os.kill(os.getpid(), signal.SIGTERM)
running.Run.save_partial = keep_and_be_terminated
sys.argv = ["onelaunch", "study", "run", "toy-study", "--device", "cpu"]
app()
"""


def test_run_passes_its_options_on(call, monkeypatch, prose):
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
    prose(lines_with(answer.raw_err, "1/2"), mask={r"\d+ s (?=\[)": "<seconds> s "})
    call("study", "run", "toy-study", "--count-all", "--force")
    assert (asked["scale"], asked["rounds"], asked["count"], asked["force"]) == ("auto", None, "all", True)


def test_ctrl_c_keeps_the_measurements_and_reports_it(call, here, monkeypatch, prose):
    def run_study(study, *, save_to, **options):
        result = results.interrupted_on_cpu()
        result.save(save_to)
        return result

    monkeypatch.setattr(run_module, "run_study", run_study)
    answer = call("study", "run", "toy-study")
    assert answer.code == 130
    prose(lines_with(answer.raw, "8 of 16"))
    prose(answer.err)
    assert (here / "reports" / "cpu" / "toy-study" / "report.html").exists()


def test_resuming_replaces_only_the_report_of_the_resumed_run(call, here, monkeypatch):
    asked = {}

    def run_study(study, **options):
        asked.update(options)
        return results.proceed_on_gpu()

    monkeypatch.setattr(run_module, "run_study", run_study)
    result, report = here / "results" / "cpu" / "toy-study.json", here / "reports" / "cpu" / "toy-study" / "result.json"
    results.nothing_ran().save(report)
    answer = call("study", "run", "toy-study", "--resume")  # there is no run to resume
    assert answer.code == 1
    assert "toy-study/result.json exists already" in answer.err
    assert asked == {}
    results.interrupted_on_cpu().save(result)
    assert call("study", "run", "toy-study", "--resume", "--across-commits", "--anew", "first").code == 0
    assert (asked["resume"], asked["force"], asked["across_commits"], asked["anew"]) == (True, False, True, ["first"])
    results.proceed_on_gpu().save(result, force=True)
    monkeypatch.setattr("onelaunch.workbench.run.changed_shapes", lambda earlier, now: set())
    answer = call("study", "run", "toy-study", "--resume")
    assert answer.code == 1
    assert "results/cpu/toy-study.json exists already" in answer.err


def test_ctrl_c_before_any_measurement_gives_no_traceback(call, monkeypatch):
    def run_study(study, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(run_module, "run_study", run_study)
    answer = call("study", "run", "toy-study")
    assert answer.code == 130
    assert answer.err.endswith("interrupted")


@pytest.mark.parametrize("command", ["show", "run"])
def test_an_unknown_study_is_named_with_the_nearest(call, command, prose):
    answer = call("study", command, "toy-studdy")
    assert answer.code == 2
    prose(answer.err)


def test_a_misspelt_key_is_named_with_the_nearest(call, here, prose):
    path = here / "studies" / "toy-study.toml"
    path.write_text(path.read_text().replace("baseline =", "basline ="))
    answer = call("study", "run", "toy-study")
    assert answer.code == 1
    prose(answer.err)


@pytest.mark.parametrize("device", ["cuda:7", "tpu"])
def test_a_missing_device_is_refused(call, device, prose):
    for command in (("study", "run", "toy-study"), ("study", "show", "toy-study"), ("doctor",)):
        answer = call(*command, "--device", device)
        assert answer.code == 2
        prose(answer.err, mask={"Present: [^.]*": "Present: <devices>"})


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
    assert "--report-dir" in again.err
    assert "--out" not in again.err
    assert call("study", "report", stored[1], "--report-dir", "out", "--force").code == 0


@pytest.mark.parametrize("width", [80, 120])
def test_output_to_a_pipe_fits_the_width_and_has_no_escape_codes(call, stored, width):
    for arguments in (("report", stored[0]), ("show", "toy-study"), ("list",), ("compare", *stored, "--all")):
        answer = call("study", *arguments, width=width)
        assert answer.code == 0
        assert "\x1b" not in answer.raw
        lines = [line for line in answer.raw.splitlines() if "toy-study.toml" not in line]
        assert max(map(len, lines)) <= width


# Contents of a file that is no result, with a part of the message.
CORRUPT = {
    "no JSON": ("{", "Expecting"),
    "another schema": (json.dumps({"schema_version": 0}), "its schema_version is 0"),
    "not a result": (json.dumps([1, 2]), "its schema_version is None"),
    "a field missing": (json.dumps({"schema_version": 1}), "Field required"),
}


@pytest.mark.parametrize("kind", CORRUPT)
@pytest.mark.parametrize("command", ["report", "compare", "adopt"])
def test_a_corrupt_result_is_reported(call, here, stored, command, kind, prose):
    text, problem = CORRUPT[kind]
    (here / "bad.json").write_text(text)
    answer = call("study", command, "bad.json", *((stored[0],) if command == "compare" else ()))
    assert answer.code == 1
    prose(answer.err)
    assert problem in answer.err


def test_a_missing_result_is_reported(call, prose):
    answer = call("study", "report", "nowhere.json")
    assert answer.code == 2
    prose(answer.err)
    assert "Traceback" not in answer.err


@pytest.mark.parametrize("command", ["compare", "adopt", "run"])
def test_lines_of_help_are_filled_before_they_break(call, command):
    text = call("study", command, "--help", width=100).raw.partition("Arguments")[0]
    lines = [line.strip() for line in text.splitlines()]
    for line, after in itertools.pairwise(lines):
        assert not line or not after or len(line) + len(after.split()[0]) > 90, (line, after)


def test_a_time_limit_ends_the_rounds_after_three(call, here, prose):
    answer = call("study", "run", "toy-study", "--device", "cpu", "--rounds", "5000", "--time-cap", "0.1", "--out", "r")
    assert answer.code == 0
    rounds = {r"\d+ of 5000": "<number> of 5000"}
    result = Result.load(here / "r" / "result.json")
    prose([note for note in result.notes if "0.1 s" in note], mask=rounds)
    prose(lines_with(answer.raw, "0.1 s"), mask=rounds)


def test_a_run_prints_decision_and_findings_within_forty_lines(call, here):
    answer = call("study", "run", "toy-study", "--device", "cpu", "--out", "r")
    top = answer.raw.splitlines()[:40]
    (decision,) = [at for at, line in enumerate(top) if line.startswith("Decision: ")]
    (found,) = [at for at, line in enumerate(top) if line.startswith("What was found")]
    assert decision < found
    assert any("µs [" in line or "ms [" in line for line in top[found:])


def test_the_warning_of_a_machine_with_cuda_but_no_gpu_is_left_out(call, caplog):
    call("study", "list")  # every command installs the filter
    logger = logging.getLogger("torch.utils.cpp_extension")
    logger.warning("No CUDA runtime is found, using CUDA_HOME='%s'", "/usr/local/cuda")
    logger.warning("another warning")
    assert [record.getMessage() for record in caplog.records if record.name == logger.name] == ["another warning"]


def test_a_quick_run_measures_only_the_first_direction_and_reports_it(call, here, prose):
    path = here / "studies" / "toy-study.toml"
    path.write_text(path.read_text().replace("rounds = 3", 'rounds = 3\ndirections = ["forward", "forward_backward"]'))
    answer = call("study", "run", "toy-study", "--device", "cpu", "--quick", "--out", "r")
    assert answer.code == 0
    result = Result.load(here / "r" / "result.json")
    assert {cell.direction for cell in result.cells} == {"forward"}
    assert {cell.shape for cell in result.cells} == {shape.name for shape in result.study.shapes if shape.scale == "small"}
    assert not result.interrupted
    prose(lines_with(answer.raw, "direction"))


@pytest.mark.parametrize("path", ["./nofile.toml", "nofile.toml", "studies/nofile", "studies/toy-stdy.toml"])
def test_a_path_without_a_file_is_reported(call, path, prose):
    answer = call("study", "run", path)
    assert answer.code == 2
    prose(answer.err)
    assert ("mean 'toy-study'" in answer.err) == (path == "studies/toy-stdy.toml")
