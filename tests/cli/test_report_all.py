"""Tests of ``onelaunch report --all``: a report on all results of a folder.

The fixtures are those of ``conftest.py``: ``call`` runs ``onelaunch`` in this process, and ``here`` is an empty working folder.
``prose`` compares a text with its entry in tests/snapshots/prose.txt, whose key is the node id of the test.
"""

from __future__ import annotations

import pytest

from onelaunch.model_studies.result import ModelResult
from tests.model_studies import tiny
from tests.workbench import results


@pytest.fixture
def folder(here):
    """Write results of two devices, one of a study of models, and a damaged file into ``results``."""
    results.proceed_on_gpu().save(here / "results" / "gpu" / "040.json")
    results.interrupted_on_cpu().save(here / "results" / "cpu" / "040.json")
    study = tiny.study()
    facts = results.provenance("AMD EPYC", "cpu", "x86_64")
    ModelResult(study=study, study_digest=study.digest(), provenance=facts, interrupted=True).save(
        here / "results" / "cpu" / "models" / "tiny.json"
    )
    (here / "results" / "damaged.json").write_text("{")
    return here / "results"


@pytest.mark.parametrize("command", [("report",), ("study", "report")], ids=" ".join)
def test_all_results_of_the_folder_of_runs_are_reported(call, folder, command):
    answer = call(*command, "--all")
    assert answer.code == 0
    for said in ("040-linear-rnn on", ": proceed", "tiny-study on AMD EPYC: not decided", "tasks are left", "damaged.json"):
        assert said in answer.out, said
    assert call(*command, str(folder / "gpu"), "--all").out.count("040-linear-rnn on") == 1


def test_one_page_and_the_report_on_each_result_are_written(call, folder, here):
    answer = call("report", "--all", "--report-dir", "out")
    assert answer.code == 0
    written = {path.relative_to(here / "out").as_posix() for path in (here / "out").rglob("*") if path.is_file()}
    names = ("report.md", "report.html", "result.json")
    assert written == {"report.md", "report.html", *(f"{device}/040/{name}" for device in ("gpu", "cpu") for name in names)}
    assert 'href="gpu/040/report.html"' in (here / "out" / "report.html").read_text()
    assert call("report", "--all", "--report-dir", "out").code == 0  # the same results again
    assert "1 file left out" in call("report", str(here / "out"), "--all").out or call("report", "out", "--all").code == 0


def test_the_report_on_another_result_is_not_replaced_unless_asked(call, folder, here):
    assert call("report", str(folder / "gpu" / "040.json"), "--report-dir", "out").code == 0
    refused = call("report", "--all", "--report-dir", "out")
    assert refused.code == 1
    assert "out/result.json exists already" in refused.err
    assert "--report-dir" in refused.err
    assert call("report", "--all", "--report-dir", "out", "--force").code == 0


def test_full_prints_the_first_screen_of_each_result(call, folder):
    assert "Which variant to use" not in (short := call("report", "--all").out)
    long = call("report", "--all", "--full").out
    assert len(long) > len(short)
    assert "Not measured or unexplained" in long


@pytest.mark.parametrize(
    "arguments",
    [("report",), ("report", "nowhere", "--all"), ("report", "results/damaged.json", "--all"), ("report", "--all", "--log", "x")],
    ids=" ".join,
)
def test_wrong_calls_are_usage_errors(call, folder, arguments, prose):
    answer = call(*arguments)
    assert answer.code == 2
    prose(answer.err)
