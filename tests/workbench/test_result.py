"""Tests of stored results: they stay readable and keep their content, and inconsistent or broken files are refused.

A result file has a ``schema_version``. ``results.py`` makes up results; ``proceed_on_gpu`` is complete. ``prose`` compares a
message with its entry in tests/snapshots/prose.txt, whose key is the node id of the test. A test fails if it does not compare
one of its entries, and ``tests/test_prose.py`` if the test or the parameter of an entry is gone.

A test marked ``thorough`` does not run in ``make test``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from onelaunch.errors import OutputUnwritable, ResultCorrupt, ResultMissing, ResultTooNew
from onelaunch.wording import UNSAFE
from onelaunch.workbench.report.details import details
from onelaunch.workbench.report.summary import summarize
from onelaunch.workbench.result import READABLE, SCHEMA, Cell, Result
from tests.workbench import results


def committed(root):
    """Return the paths of the results in the repository."""
    return sorted((root / "results").glob("*/*.json"))


def test_every_committed_result_is_readable_and_matches_its_study(pytestconfig):
    found = committed(pytestconfig.rootpath)
    assert "040-linear-rnn.json" in [path.name for path in found]
    for path in found:
        result = Result.load(path)
        assert result.study.digest() == result.study_digest, path
        assert not [alert for alert in summarize(result).alerts if "digest" in alert], path


def test_a_result_of_version_1_keeps_its_version_when_saved_again(pytestconfig, tmp_path):
    (path,) = [path for path in committed(pytestconfig.rootpath) if path.name == "040-linear-rnn.json"]
    raw = json.loads(path.read_text())
    assert raw["schema_version"] == 1
    again = json.loads(Result.load(path).save(tmp_path / "again.json").read_text())
    # ``overall`` is a later field, which version 1 did not have; the rest is unchanged.
    assert [outcome.pop("overall") for outcome in again["outcomes"]] == [None] * len(raw["outcomes"])
    assert again == raw


def test_every_committed_result_of_version_2_is_unchanged_when_saved_again(pytestconfig, tmp_path):
    found = [path for path in committed(pytestconfig.rootpath) if json.loads(path.read_text())["schema_version"] == 2]
    assert found
    for path in found:
        assert Result.load(path).save(tmp_path / path.name).read_bytes() == path.read_bytes(), path


def test_new_results_have_the_current_version(tmp_path):
    path = results.proceed_on_gpu().save(tmp_path / "new.json")
    assert json.loads(path.read_text())["schema_version"] == SCHEMA == 3
    assert Result.load(path) == results.proceed_on_gpu()


@pytest.mark.parametrize("version", [0, "2", None, True, 1.0])
def test_other_versions_are_refused_with_the_readable_ones(tmp_path, version, prose):
    path = tmp_path / "other.json"
    path.write_text(json.dumps({"schema_version": version}))
    with prose.raises(ResultCorrupt, match=", ".join(map(str, READABLE))):
        Result.load(path)


def test_a_newer_schema_asks_for_an_update_of_onelaunch(tmp_path, prose):
    path = tmp_path / "future.json"
    path.write_text(json.dumps({"schema_version": SCHEMA + 1, "anything": "else"}))
    with prose.raises(ResultTooNew) as told:
        Result.load(path)
    assert (told.value.schema, told.value.newest) == (SCHEMA + 1, SCHEMA)


def test_a_missing_file_is_reported(tmp_path, prose):
    with prose.raises(ResultMissing, match=r"nowhere\.json") as told:
        Result.load(tmp_path / "nowhere.json")
    assert isinstance(told.value, FileNotFoundError)


def changed(*path, value):
    """Return a valid result as plain values, with the one at this path of keys and indices changed."""
    raw = json.loads(results.proceed_on_gpu().model_dump_json())
    here = raw
    for part in path[:-1]:
        here = here[part]
    here[path[-1]] = value
    return raw


# Times of the least positive float64; a ratio of one to an ordinary time is 0 or infinite.
TINY = {"median": 5e-324, "low": 5e-324, "high": 5e-324, "samples": 5}

# Changes that make a result inconsistent, by name: the path of the changed value, and the new value.
SENSELESS = {
    "a slug that climbs": (("provenance", "slug"), "../../pwn"),
    "an absolute slug": (("provenance", "slug"), "/tmp/pwn"),
    "a slug with dots": (("provenance", "slug"), "a..b"),
    "a study's name that climbs": (("study", "name"), "../up"),
    "a shape's name": (("cells", 0, "shape"), 's" onload="alert(1)'),
    "a shape's name that is not declared": (("cells", 0, "shape"), "another"),
    "a variant's name": (("cells", 0, "variant"), "<script>"),
    "a criterion's name": (("outcomes", 0, "criterion", "name"), "a\x1b[2J"),
    "a criterion at another shape": (("outcomes", 0, "criterion", "at"), "another"),
    "a question": (("study", "question"), "\x1b]0;title\x07"),
    "a negative time": (("cells", 0, "timings", 0, "microseconds", "median"), -1.0),
    "a time of zero": (("cells", 0, "timings", 0, "rounds", 0), 0.0),
    "a time that is no number": (("cells", 0, "timings", 0, "microseconds", "median"), "NaN"),
    "the least number above zero": (("cells", 0, "timings", 0, "microseconds"), TINY),
    "a round of 5e-324": (("cells", 0, "timings", 0, "rounds", 0), 5e-324),
    "a time of ages": (("cells", 0, "timings", 0, "microseconds", "high"), 1e300),
    "an infinite bound": (("cells", 0, "timings", 0, "microseconds", "high"), "Infinity"),
    "no samples": (("cells", 0, "timings", 0, "microseconds", "samples"), 0),
    "a negative number of samples": (("cells", 0, "timings", 0, "microseconds", "samples"), -3),
    "no rounds": (("cells", 0, "timings", 0, "rounds"), []),
    "negative bytes": (("cells", 0, "plan", "least_bytes"), -512),
    "a negative bound of the roofline": (("cells", 0, "plan", "floor_microseconds"), -1.0),
    "a roofline bound of ages": (("cells", 0, "plan", "floor_microseconds"), 1e308),
    "a roofline bound of 5e-324": (("cells", 0, "plan", "floor_microseconds"), 5e-324),
    "a peak of zero": (("ceilings", "copy_bytes_per_second"), 0.0),
    "a size beyond tensors": (("study", "shapes", 0, "sizes", "B"), 10**30),
    "an unknown dtype": (("study", "shapes", 0, "dtype"), "int8"),
}


@pytest.mark.parametrize("kind", SENSELESS)
def test_an_inconsistent_result_is_refused_with_the_location(tmp_path, kind):
    place, value = SENSELESS[kind]
    path = tmp_path / "tampered.json"
    path.write_text(json.dumps(changed(*place, value=value)))
    with pytest.raises(ResultCorrupt) as told:
        Result.load(path)
    assert not UNSAFE.search(str(told.value))
    # These two are found by comparing parts of the result, so the message names no single field.
    if kind not in ("a shape's name that is not declared", "a criterion at another shape"):
        assert str(place[0]) in str(told.value)


def test_a_duplicate_measurement_is_refused(tmp_path, prose):
    """Readers of the result could otherwise use different ones of the two. The same holds for two times of one regime."""
    raw = json.loads(results.proceed_on_gpu().model_dump_json())
    path = tmp_path / "twice.json"
    path.write_text(json.dumps(raw | {"cells": [*raw["cells"], raw["cells"][0]]}), encoding="utf-8")
    with prose.raises(ResultCorrupt):
        Result.load(path)
    again = raw["cells"][0] | {"timings": raw["cells"][0]["timings"] * 2}
    path.write_text(json.dumps(raw | {"cells": [again, *raw["cells"][1:]]}), encoding="utf-8")
    with prose.raises(ResultCorrupt):
        Result.load(path)


def test_control_characters_in_free_text_are_written_as_escapes(tmp_path):
    path = tmp_path / "rude.json"
    path.write_text(json.dumps(changed("cells", 0, "reason", value="red \x1b[31m and \ud800\nnext")))
    assert Result.load(path).cells[0].reason == "red \\x1b[31m and \\ud800\nnext"
    assert Cell(shape="a", direction="forward", variant="b", status="error", reason="\x07").reason == "\\x07"


@pytest.mark.thorough
def test_results_are_utf_8_in_every_locale(tmp_path):
    """In some locales a result once raised UnicodeEncodeError, or was unreadable on another machine."""
    code = (
        "import sys; from pathlib import Path; from tests.workbench import results\n"
        "base = results.proceed_on_gpu(); study = base.study.model_copy(update={'question': 'Gr\\u00f6\\u00dfe \\u2265 3?'})\n"
        "base.model_copy(update={'study': study, 'study_digest': study.digest()}).save(Path(sys.argv[1]))"
    )
    ascii_only = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "r.json")], env=ascii_only, check=True, timeout=120)
    assert "Größe ≥ 3?" in (tmp_path / "r.json").read_text(encoding="utf-8")
    assert Result.load(tmp_path / "r.json").study.question == "Größe ≥ 3?"
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe\x00", b"[" * 100_000, b'{"a":' * 100_000, b"9" * 5000, b"null"])
def test_an_invalid_result_file_is_refused(tmp_path, content, prose):
    path = tmp_path / "broken.json"
    path.write_bytes(content)
    with prose.raises(
        ResultCorrupt,
        match=r"broken\.json",
        mask={r"maximum recursion.* unicode string|Exceeds the limit.* the limit": "<reason>"},
    ):
        Result.load(path)


def test_a_file_that_is_too_large_or_endless_is_not_read(tmp_path, prose):
    path = tmp_path / "huge.json"
    with path.open("wb") as file:
        file.truncate(300 << 20)
    for each in (path, tmp_path, Path("/dev/zero")):
        with prose.raises(ResultCorrupt):
            Result.load(each)


def test_a_failed_write_keeps_the_old_file_and_leaves_no_other(tmp_path, monkeypatch, prose):
    path = results.nothing_ran().save(tmp_path / "kept.json")

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("onelaunch.workbench.files.os.fsync", full)
    with prose.raises(OutputUnwritable, match=r"kept\.json"):
        results.proceed_on_gpu().save(path, force=True)
    assert [each.name for each in tmp_path.iterdir()] == ["kept.json"]
    assert Result.load(path) == results.nothing_ran()


def test_a_measured_read_bandwidth_is_stored_and_shown(tmp_path):
    """Results older than this field have none, and their reports no row for it."""
    old = results.proceed_on_gpu()
    peaks = old.ceilings.model_copy(update={"read_bytes_per_second": 4.6e12, "spread": {"read": 0.01}})
    new = old.model_copy(update={"ceilings": peaks})
    again = Result.load(new.save(tmp_path / "new.json"))
    assert (again.ceilings.read_bytes_per_second, again.ceilings.spread) == (4.6e12, {"read": 0.01})

    def shown(result):
        return {row[0]: row[1] for section in details(result) for table in section.tables for row in table.rows if len(row) == 2}

    assert shown(again)["read bandwidth"] == "4.60 TB/s"
    assert "read bandwidth" not in shown(old)
