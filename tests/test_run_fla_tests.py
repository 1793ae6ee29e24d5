"""Tests of tools/run_fla_tests.py with a checkout whose tests call a stand-in for fla."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tools import run_fla_tests

ROOT = Path(__file__).parents[1]

TEST = """
import functools

import pytest


@functools.wraps(print)  # fla's functions are decorated
def chunk_gla(q, k, v, g, **kwargs):
    return "fla"


def chunk_retention(q):
    return "fla"


def test_ours():
    with pytest.raises(Exception, match="torch.Tensor"):  # an error of ours
        chunk_gla(1, 2, 3, 4)


def test_theirs():
    assert chunk_gla(1, 2, 3, 4, unknown=5) == "fla"
    assert chunk_retention(1) == "fla"
"""


@pytest.fixture
def checkout(tmp_path):
    folder = tmp_path / "tests" / "ops"
    folder.mkdir(parents=True)
    for name in run_fla_tests.FILES:
        (folder / name).write_text(TEST if name == "test_gla.py" else "", encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("more", [[], ["-n", "1"]])
def test_functions_are_replaced_and_calls_counted_in_all_processes(checkout, more):
    command = [sys.executable, "-m", "tools.run_fla_tests", str(checkout), *more]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "1 calls were onelaunch's, 1 with arguments that it does not take were fla's." in found.stdout
    assert "2 passed" in found.stdout


def test_every_function_has_one_of_ours():
    from onelaunch import ops

    assert all(callable(getattr(ops, own)) for own in run_fla_tests.OURS.values())


@pytest.mark.parametrize("given", [[], ["nowhere"]])
def test_a_folder_that_is_no_checkout_is_refused(given, capsys):
    assert run_fla_tests.main(given) == 2
    assert "checkout" in capsys.readouterr().err
