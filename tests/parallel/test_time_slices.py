"""Test of ``tools/time_slices.py`` with small calls on a CPU."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "time_slices.py"


@pytest.mark.thorough
def test_slices_are_timed_beside_ordinary_calls(monkeypatch, capsys):
    monkeypatch.setattr(
        sys, "argv", [str(TOOL), "--device", "cpu", "--steps", "20", "--size", "16", "--heads", "1", "--rounds", "1"]
    )
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(TOOL), run_name="__main__")
    assert ended.value.code == 0  # results agree
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("ordinary")[0].split()[-2:] for line in lines] == [
        [per, direction] for per in ("channel", "head") for direction in ("forward", "trained")
    ]
    assert all("ratio" in line and "error 0.0e+00" in line for line in lines)
