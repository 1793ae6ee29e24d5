"""Tests of ``onelaunch study models``. The fixture ``call`` of ``conftest.py`` runs a command in this process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

STUDY = """
name = "small"
question = "Does it run?"

[[models]]
name = "tiny"
kind = "gla"
scale = "small"
width = 32
heads = 2
layers = 1
vocabulary = 64
batch = 1
length = 4
precision = "float32"
variants = ["fla", "layers"]
gradient_length = 4

[[criteria]]
name = "gradient"
measure = "gradient_error_ratio"
model = "tiny"
of = "layers"
at_most = 1.0
"""

STORED = "results/cpu/models/small.json"


@pytest.fixture
def small(here):
    folder = Path("studies/models")
    folder.mkdir(parents=True)
    (folder / "small.toml").write_text(STUDY)


@pytest.mark.usefixtures("small")
def test_a_study_of_models_runs_in_parts_and_its_result_is_shown(call):
    answer = call("study", "models", "small", "--device", "cpu", "--in-process", "--only", "alone")
    assert answer.code == 130
    assert "continue with --resume" in answer.err
    assert "tiny: first steps of layers" in answer.err
    answer = call("study", "models", "small", "--device", "cpu", "--in-process")
    assert answer.code == 1
    assert "--resume" in answer.err
    answer = call("study", "models", "small", "--device", "cpu", "--in-process", "--resume", "--only", "gradients")
    assert answer.code == 130
    answer = call("study", "models", STORED)
    assert answer.code == 0
    assert "small: 0 of 1 criterion met (1 not measured) Does it run?" in answer.out
    assert "not measured: fla: fla's kernels do not run on a CPU" in answer.out
    assert {each["task"] for each in json.loads(Path(STORED).read_text())["measurements"]} == {"alone", "gradients"}


def test_a_study_of_models_that_is_not_there(call):
    answer = call("study", "models", "in-modle")
    assert answer.code == 2
    assert "Did you mean 'in-model'?" in answer.err
    assert call("study", "models", "x.json").code == 2
