"""What was stored stays readable, and says what it said."""

from __future__ import annotations

import json

import pytest

from onelaunch.errors import ResultCorrupt
from onelaunch.workbench.report.details import details
from onelaunch.workbench.report.summary import summarize
from onelaunch.workbench.result import SCHEMA, Result
from tests.workbench import results


def committed(root):
    return sorted((root / "results").glob("*/*.json"))


def test_every_committed_result_is_read_and_its_study_is_the_one_that_ran(pytestconfig):
    found = committed(pytestconfig.rootpath)
    assert "040-linear-rnn.json" in [path.name for path in found]
    for path in found:
        result = Result.load(path)
        assert result.study.digest() == result.study_digest, path
        assert not [alert for alert in summarize(result).alerts if "digest" in alert], path


def test_a_result_of_version_1_stays_one_when_it_is_saved_again(pytestconfig, tmp_path):
    (path,) = [path for path in committed(pytestconfig.rootpath) if path.name == "040-linear-rnn.json"]
    raw = json.loads(path.read_text())
    assert raw["schema_version"] == 1
    again = json.loads(Result.load(path).save(tmp_path / "again.json").read_text())
    assert [outcome.pop("overall") for outcome in again["outcomes"]] == [None] * len(raw["outcomes"])
    assert again == raw


def test_every_committed_result_of_version_2_is_the_same_when_it_is_saved_again(pytestconfig, tmp_path):
    found = [path for path in committed(pytestconfig.rootpath) if json.loads(path.read_text())["schema_version"] == 2]
    assert found
    for path in found:
        assert Result.load(path).save(tmp_path / path.name).read_bytes() == path.read_bytes(), path


def test_new_results_have_the_version_that_this_one_writes(tmp_path):
    path = results.proceed_on_gpu().save(tmp_path / "new.json")
    assert json.loads(path.read_text())["schema_version"] == SCHEMA == 3
    assert Result.load(path) == results.proceed_on_gpu()


@pytest.mark.parametrize("version", [0, 4, "2", None])
def test_other_versions_are_refused_with_those_that_can_be_read(tmp_path, version):
    path = tmp_path / "other.json"
    path.write_text(json.dumps({"schema_version": version}))
    with pytest.raises(ResultCorrupt, match="this onelaunch reads 1, 2, 3"):
        Result.load(path)


def test_a_read_bandwidth_is_stored_and_shown_where_it_was_measured(tmp_path):
    old = results.proceed_on_gpu()
    peaks = old.ceilings.model_copy(update={"read_bytes_per_second": 4.6e12, "spread": {"read": 0.01}})
    new = old.model_copy(update={"ceilings": peaks})
    again = Result.load(new.save(tmp_path / "new.json"))
    assert (again.ceilings.read_bytes_per_second, again.ceilings.spread) == (4.6e12, {"read": 0.01})

    def shown(result):
        return {row[0]: row[1] for section in details(result) for table in section.tables for row in table.rows if len(row) == 2}

    assert shown(again)["read bandwidth"] == "4.60 TB/s"
    assert "read bandwidth" not in shown(old)
