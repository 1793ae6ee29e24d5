"""Tests of the snapshot file of wording: its content, the report of a difference, and updates.

The fixture ``prose`` compares a text with its entry in ``tests/snapshots/prose.txt``. ``prose_of`` makes a comparison with the
small file of the fixture ``file`` in its place.
"""

from __future__ import annotations

import warnings

import pytest

from tests.prose import ROOT, Prose, Snapshot, read, written

HERE = "tests/test_prose.py::test_a_text_is_compared_with_its_entry"
"""Test id that the tests give to a comparison. The test exists, so that its entries are not dropped as stale."""
FAILED = pytest.fail.Exception


@pytest.fixture
def file(tmp_path):
    """Return a snapshot file with two texts of the test ``HERE``."""
    path = tmp_path / "prose.txt"
    path.write_text(written({HERE: "One line.\n\n  Another of <tmp>.", f"{HERE} # 2": "More."}), encoding="utf-8")
    return path


def prose_of(file, *, update=False):
    """Return what the fixture ``prose`` would be in the test ``HERE``, for a snapshot file."""
    return Prose(Snapshot(file, update=update), HERE, {str(file.parent): "<tmp>"})


def test_every_entry_has_a_test(request):
    """Without this check, the entry of a renamed or removed test would stay until the next update."""
    snapshot = request.config.pluginmanager.get_plugin("prose")
    assert snapshot.entries
    assert snapshot.without_a_test() == set(), "--update-prose drops these"


def test_the_file_is_read_as_written():
    entries = {f"{HERE}[a] # 10": "ten", f"{HERE}[a] # 9": "nine", f"{HERE}[a]": "x\n    y\n\nz", f"{HERE}[b]": "x\n    y\n\nz"}
    text = written(entries)
    assert text.startswith(f"{HERE}[a]\n{HERE}[b]\n    x\n        y\n\n    z\n"), (
        "a text shared by two parameters is written once"
    )
    assert text.index("# 9") < text.index("# 10")
    path = ROOT / "tests" / "snapshots" / "prose.txt"
    assert written(read(path)) == path.read_text(encoding="utf-8")


def test_a_text_is_compared_with_its_entry(file):
    prose = prose_of(file)
    prose(f"One line.\n\n  Another of {file.parent}.  ")
    with pytest.raises(FAILED, match=r"(?s)--update-prose.*-More\.\n\+Less\."):
        prose("Less.")
    with pytest.raises(FAILED, match=r"(?s)no entry .*# 3.*--update-prose.*Third\."):
        prose("Third.")
    for nothing in ("", None):
        with pytest.raises(AssertionError):
            prose(nothing)


def test_entries_that_a_test_does_not_compare_make_it_fail(file):
    prose = prose_of(file)
    prose(["One line.", "", "  Another of <tmp>."])
    with pytest.raises(FAILED, match="# 2"):
        prose.snapshot.finish(HERE)
    prose("More.")
    prose.snapshot.finish(HERE)


def test_an_update_changes_only_entries_of_tests_that_ran(file):
    other, gone = f"{HERE}[other]", "tests/test_prose.py::test_that_was_removed"
    file.write_text(written(read(file) | {other: "Stays.", gone: "Goes."}), encoding="utf-8")
    prose = prose_of(file, update=True)
    prose("Reworded.")
    prose.snapshot.finish(HERE)
    prose("Of all parameters.", name="shared")
    prose.snapshot.pytest_sessionfinish()
    assert read(file) == {HERE: "Reworded.", other: "Stays.", f"{HERE} # shared": "Of all parameters."}


def test_a_test_that_fails_in_an_update_keeps_its_other_entries(file):
    prose = prose_of(file, update=True)
    prose("Reworded.")
    prose.snapshot.pytest_sessionfinish()
    assert read(file) == {HERE: "Reworded.", f"{HERE} # 2": "More."}


def test_one_name_has_one_text(file):
    prose = prose_of(file, update=True)
    prose("Of all parameters.", name="shared")
    with pytest.raises(FAILED, match="shared"):
        prose("Of others.", name="shared")


def test_errors_and_warnings_are_compared_by_their_message(prose, tmp_path):
    with prose.raises(ValueError, match="seven", foreign=True) as caught:
        try:
            int("seven")
        except ValueError as error:
            raise ValueError(f"seven is no number: {error}") from error
    assert caught.type is ValueError
    with prose.warns(UserWarning):
        warnings.warn(f"{tmp_path / 'file'} is not there", stacklevel=1)
