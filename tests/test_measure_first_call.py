"""Tests of ``tools/measure_first_call.py``: small calls on a CPU, in this process and in processes of their own."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import time

import pytest

from tools import measure_first_call


def test_a_measurement_holds_times_and_provenance(monkeypatch):
    monkeypatch.setattr(measure_first_call, "_note_kernels", list)  # it sets a listener of Triton for the whole process
    found = measure_first_call.measure("gla", "cpu", small=True)
    assert all(found[key] > 0 for key in ("seconds", "import_seconds", "device_seconds", "input_seconds"))
    assert {"python", "torch", "onelaunch"} <= found["versions"].keys()
    assert found["device"]
    shown = measure_first_call.listing([{"caches": "empty", **found}, {"caches": "filled", **found}]).splitlines()
    assert found["versions"]["torch"] in shown[0]
    assert [line.split()[:2] for line in shown[2:]] == [["gla", "empty"], ["gla", "filled"]]
    assert [line.split()[4] for line in shown[2:]] == ["12.0", "1.5"]


def test_imports_within_a_call_are_counted_apart(tmp_path, monkeypatch):
    """Those of this thread, one within another once."""
    (tmp_path / "slow_inner.py").write_text("import time; time.sleep(0.05)")
    (tmp_path / "slow_outer.py").write_text("import slow_inner, time; time.sleep(0.05)")
    monkeypatch.syspath_prepend(str(tmp_path))
    begun = time.perf_counter()
    with measure_first_call._Imports() as imports:
        __import__("slow_outer")
        importlib.import_module("slow_inner")
        time.sleep(0.05)
    seconds = time.perf_counter() - begun
    assert 0.1 <= imports.seconds <= seconds - 0.05


def test_each_measurement_has_a_process_of_its_own_and_two_share_caches(monkeypatch):
    """The process is replaced; it would import PyTorch for seconds."""
    seen = []

    def run(command, *, env, **_):
        seen.append((command, env))
        return subprocess.CompletedProcess(command, 0, stdout='a line of something else\n{"case": "layer"}\n', stderr="")

    monkeypatch.setattr(subprocess, "run", run)
    found = [*measure_first_call.measure_twice("layer", "cpu"), *measure_first_call.measure_twice("layer", "cpu")]
    assert [each["caches"] for each in found] == ["empty", "filled"] * 2
    assert all(command[:2] == [sys.executable, measure_first_call.__file__] for command, _ in seen)
    for variable in ("TRITON_CACHE_DIR", "ONELAUNCH_CACHE"):
        folders = [env[variable] for _, env in seen]
        assert folders[0] == folders[1] != folders[2] == folders[3]


def test_a_process_that_fails_is_an_error(monkeypatch):
    done = subprocess.CompletedProcess([], 1, stdout="", stderr="no such device")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    with pytest.raises(RuntimeError, match="gla with empty caches failed: no such device"):
        measure_first_call.measure_twice("gla", "cpu")


@pytest.mark.every
def test_the_script_measures_on_a_cpu(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["measure_first_call.py", "--device", "cpu", "--small", "--json"])
    measure_first_call.main()
    found = json.loads(capsys.readouterr().out)
    assert [(each["case"], each["caches"]) for each in found] == [
        ("gla", "empty"), ("gla", "filled"), ("layer", "empty"), ("layer", "filled"),
    ]  # fmt: skip
