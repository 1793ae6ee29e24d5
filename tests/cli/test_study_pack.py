"""Tests of ``onelaunch study pack`` and ``import``.

``call`` and ``here`` are fixtures of ``conftest.py``: ``call`` runs ``onelaunch`` with arguments in the folder ``here``, which
holds the study toy-study. ``stored`` holds paths of two made-up results. ``tests/workbench/test_pack.py`` tests packs themselves.
"""

from __future__ import annotations

import json
import zipfile

import pytest

from onelaunch.cli.study import pack as pack_module
from onelaunch.workbench.result import Result
from tests.workbench import results


@pytest.fixture
def written(monkeypatch):
    """Replace what gathers wheels and writes a pack, and return the list of its calls."""
    calls = []

    def write(path, study, out, machine, *, peers):
        calls.append((path.name, study.name, out.name, machine.python, machine.platform, peers))
        out.write_bytes(b"pack")
        return ["a.whl", "b.whl"]

    monkeypatch.setattr(pack_module, "write", write)
    return calls


def test_pack_writes_one_file_and_says_how_to_run_it(call, here, written, prose):
    answer = call("study", "pack", "toy-study", "--python", "3.12", "--platform", "manylinux_2_28_x86_64", "--peers")
    assert answer.code == 0
    prose(answer.raw)
    assert written == [("toy-study.toml", "toy-study", "toy-study.pyz", "3.12", "manylinux_2_28_x86_64", True)]
    again = call("study", "pack", "toy-study")
    assert again.code == 1
    prose(again.err)
    assert call("study", "pack", "toy-study", "--force").code == 0
    assert call("study", "pack", "toy-study", "--out", "other.pyz").code == 0
    assert [each[2] for each in written] == ["toy-study.pyz", "toy-study.pyz", "other.pyz"]
    wrong = call("study", "pack", "toy-study", "--platform", "win32", "--out", "third.pyz")
    assert (wrong.code, len(written)) == (2, 3)


def test_a_study_of_variants_of_another_package_is_not_packed(call, prose):
    """toy_sum is an operation of these tests."""
    answer = call("study", "pack", "toy-study")
    assert answer.code == 1
    prose(answer.err)


def test_import_stores_a_result_where_a_run_would_have(call, here, stored, prose):
    answer = call("study", "import", stored[0])
    assert answer.code == 0
    prose(answer.raw)
    result = Result.load(stored[0])
    path = here / "results" / result.provenance.slug / f"{result.study.name}.json"
    assert path.read_text() == stored[0].read_text()
    again = call("study", "import", stored[0])
    assert again.code == 1
    assert f"{path.relative_to(here)} exists already" in again.err
    assert call("study", "import", stored[0], "--force").code == 0
    assert call("study", "import", stored[0], "--out", "mine.json").code == 0
    assert (here / "mine.json").read_text() == stored[0].read_text()


def test_import_says_what_limits_a_result(call, here, prose):
    """A study of this name with another declaration is here, the code was not committed, and the run was interrupted."""
    made = results.interrupted_on_cpu()
    provenance = made.provenance.model_copy(update={"commit": "0123456789ab-dirty"})
    made.model_copy(update={"provenance": provenance}).save(here / "result.json")
    text = (here / "studies" / "toy-study.toml").read_text()
    (here / "studies" / f"{made.study.name}.toml").write_text(text.replace("toy-study", made.study.name))
    answer = call("study", "import", "result.json")
    assert answer.code == 0
    prose([line for line in answer.raw.splitlines() if line.startswith("!")])


def test_import_refuses_other_schemas_and_packs(call, here, stored, prose):
    """Results of a newer schema, packs of this and of another one, and other zip files."""
    result = json.loads(stored[0].read_text())
    (here / "newer.json").write_text(json.dumps({**result, "schema_version": 99}))
    for name, manifest in (("this", '{"schema_version": 1}'), ("another", '{"schema_version": 2}'), ("no", "[]")):
        with zipfile.ZipFile(here / f"{name}.pyz", "w") as archive:
            archive.writestr("manifest.json", manifest)
    for name in ("newer.json", "this.pyz", "another.pyz"):
        answer = call("study", "import", name)
        assert answer.code == 1
        prose(answer.err)
    assert "no.pyz is not a result of onelaunch" in call("study", "import", "no.pyz").err
    assert not (here / "results").exists()
