"""Tests of the parts of tools/time_first_visit.py that need no GPU: what it runs, and where."""

from __future__ import annotations

import ast
import subprocess

import pytest

from tools import time_first_visit


def test_readme_s_first_quick_start_makes_what_the_steps_behind_it_use():
    made = {
        target.id
        for statement in ast.parse(time_first_visit.quick_start()).body
        if isinstance(statement, ast.Assign)
        for target in statement.targets
        if isinstance(target, ast.Name)
    }
    assert {"model", "report"} <= made
    ast.parse(time_first_visit.STEPS)


def test_programs_run_with_empty_caches_and_without_the_repository(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", "somewhere")
    monkeypatch.setenv("ONELAUNCH_REPLAY", "0")
    found = time_first_visit.environment(tmp_path)
    assert "PYTHONPATH" not in found
    assert "ONELAUNCH_REPLAY" not in found
    assert found["HOME"] == str(tmp_path)
    assert found["TRITON_CACHE_DIR"].startswith(str(tmp_path))


@pytest.mark.thorough
def test_an_environment_sees_the_packages_of_this_one(tmp_path):
    time_first_visit.make_environment(tmp_path / "env")
    command = [str(tmp_path / "env" / "bin" / "python"), "-c", "import importlib.util as u; print(u.find_spec('torch').origin)"]
    found = subprocess.run(command, env=time_first_visit.environment(tmp_path), capture_output=True, text=True, check=True)
    assert "torch" in found.stdout


def test_a_folder_without_the_wheel_is_an_error(tmp_path, capsys):
    with pytest.raises(SystemExit):
        time_first_visit.main(["--wheels", str(tmp_path)])
    assert "has no wheel of onelaunch" in capsys.readouterr().err
