"""Tests of the file that keeps the choices of Triton's autotuner from run to run."""

from __future__ import annotations

import json

import pytest

from onelaunch.errors import ArgumentError
from onelaunch.workbench.measure import tuning
from onelaunch.workbench.run import run_study
from tests.workbench.test_compiling import study
from tests.workbench.test_run import quick, steps

__all__ = ["quick"]  # an automatic fixture: an empty working directory, short samples, no warm-up

CHOSEN = [{"kwargs": {"BK": 64}, "num_warps": 4}, [0.1, 0.09, 0.2]]
OTHER = [{"kwargs": {"BK": 32}, "num_warps": 2}, [0.3, 0.29, 0.4]]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Return a folder that serves as Triton's cache, with one tuned kernel."""
    pytest.importorskip("triton", reason="without Triton there are no choices")
    folder = tmp_path / "cache"
    (folder / "HASH").mkdir(parents=True)
    (folder / "HASH" / "kernel.autotune.json").write_text(json.dumps({"key": [64], "configs_timings": [OTHER, CHOSEN]}))
    (folder / "HASH" / "kernel.json").write_text("{}")  # of the compiled kernel
    monkeypatch.setattr(tuning, "_cache_folder", lambda: folder)
    return folder


def test_choices_are_put_back_without_the_other_configurations(cache, tmp_path):
    path = tmp_path / "kept" / "tuning.json"
    assert tuning.keep(path, "a GPU") == ""
    stored = cache / "HASH" / "kernel.autotune.json"
    stored.unlink()
    assert "1 choices" in tuning.restore(path, "a GPU")
    assert json.loads(stored.read_text()) == {"key": [64], "configs_timings": [CHOSEN]}
    stored.write_text("of this machine")
    tuning.restore(path, "a GPU")
    assert stored.read_text() == "of this machine"


def test_choices_of_runs_add_up_on_one_device_alone(cache, tmp_path):
    path = tmp_path / "tuning.json"
    tuning.keep(path, "a GPU")
    (cache / "HASH").rename(cache / "NEXT")
    tuning.keep(path, "a GPU")
    assert sorted(json.loads(path.read_text())["choices"]) == ["HASH/kernel.autotune.json", "NEXT/kernel.autotune.json"]
    assert "a GPU" in tuning.restore(path, "another GPU")
    tuning.keep(path, "another GPU")
    assert list(json.loads(path.read_text())["choices"]) == ["NEXT/kernel.autotune.json"]


@pytest.mark.parametrize(
    "content",
    [
        "{", "[]", '{"schema": 2, "device": "a GPU", "choices": {}}',
        '{"schema": 1, "device": "a GPU", "choices": {"../kernel.autotune.json": {}}}',
        '{"schema": 1, "device": "a GPU", "choices": {"HASH/kernel.cubin": {}}}',
    ],
)  # fmt: skip
def test_a_damaged_file_is_refused_and_stays_as_it_is(content, cache, tmp_path):
    path = tmp_path / "tuning.json"
    path.write_text(content)
    with pytest.raises(ArgumentError, match=r"tuning\.json"):
        tuning.restore(path, "a GPU")
    assert "could not be kept" in tuning.keep(path, "a GPU")
    assert path.read_text() == content


def test_a_run_reads_and_writes_the_file(cache, tmp_path):
    path = tmp_path / "tuning.json"
    run_study(study(), device="cpu", steps=steps(), save_to=tmp_path / "first.json", tuning=path)
    again = run_study(study(), device="cpu", steps=steps(), save_to=tmp_path / "second.json", tuning=path)
    assert any("1 choices" in note for note in again.notes)
