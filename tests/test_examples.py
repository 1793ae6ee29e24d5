"""Tests that the examples run and print the results that they describe.

A test marked ``thorough`` does not run in ``make test``.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"

# Both examples train on Python source and print the loss before and after, in bits per byte: 8 for uniform guesses. After so few
# steps it must be far lower, and the generated text must look like Python.


@pytest.mark.slow
@pytest.mark.thorough
def test_the_text_model_learns_and_writes():
    command = [sys.executable, str(EXAMPLES / "train_text.py"), "--steps", "60", "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    first, last = map(float, re.findall(r"([\d.]+) -> ([\d.]+) bits per byte", done.stdout)[0])
    assert first > 7
    assert last < 4
    assert done.stdout.splitlines()[-1]
    assert "    def " in done.stdout


def test_the_gla_model_learns_and_writes():
    command = [sys.executable, str(EXAMPLES / "tiny_gla_lm.py"), "--steps", "7", "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    first, last = map(float, re.findall(r"([\d.]+) -> ([\d.]+) bits per byte", done.stdout)[0])
    assert first > 7
    assert last < 5.5
    assert "    def " in done.stdout


def test_every_example_is_tested():
    named = (Path(__file__)).read_text()
    assert all(f'"{example.name}"' in named for example in EXAMPLES.glob("*.py"))
