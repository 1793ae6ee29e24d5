"""Tests of README: its written part is up to date, it is short, and its three quick starts run as they are shown."""

from __future__ import annotations

import shlex
import sys
import xml.etree.ElementTree as ET
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from onelaunch.cli.application import application
from onelaunch.workbench.report.comparison import compare
from onelaunch.workbench.result import Result
from onelaunch.workbench.study.read import load_study
from tests.browser import PHONE
from tests.integrations.standins import GatedLinearAttention
from tests.test_documents import ROOT, blocks
from tools import write_readme

README = ROOT / "README.md"


def commands(word):
    """Return the words of the commands of README that begin with ``onelaunch WORD``."""
    lines = [
        shlex.split(line.split("#")[0])
        for line in README.read_text(encoding="utf-8").splitlines()
        if line.startswith("    onelaunch ")
    ]
    return [line[1:] for line in lines if line[1] == word]


def test_the_written_part_and_the_pictures_are_up_to_date():
    for path, text in write_readme.files(ROOT).items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: run python -m tools.write_readme"


def test_readme_is_short():
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 120
    for language in ("python", "toml"):
        (block,) = blocks(README, language)
        assert len(block.strip().splitlines()) <= 8


def test_the_picture_is_well_formed_and_no_bar_leaves_it():
    lines = write_readme.entries(ROOT / "results")
    for scheme in write_readme.PICTURES:
        tree = ET.fromstring(write_readme.picture(lines, scheme))
        assert tree[0].tag.endswith("title")
        width, height = map(float, tree.get("viewBox").split()[2:])
        assert width <= PHONE[0] + 10  # where it is shown smaller than it was drawn, its text is too small
        for bar in tree.iter("{http://www.w3.org/2000/svg}rect"):
            assert 0 < float(bar.get("x")) + float(bar.get("width")) <= width
            assert float(bar.get("y")) + float(bar.get("height")) <= height


def test_the_fastest_of_either_side_is_compared():
    """At this shape torch.compile is faster than onelaunch, and the comparison says so."""
    result = Result.load(ROOT / "results" / "nvidia-h200" / "058-output-chain.json")
    found = compare(result, "8x4096x2048", "forward_backward")
    assert (found.ours.variant, found.other.variant) == ("norm_gate", "compiled")
    assert found.gain.median < 1
    assert found.bound_microseconds < found.other_microseconds < found.microseconds
    with pytest.raises(LookupError, match="no shape 'none'"):
        compare(result, "none", "forward")


class Model(nn.Module):
    """Stand-in for fla's model, which needs a GPU: its layers of gated linear attention."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(GatedLinearAttention(64) for _ in range(config.num_hidden_layers))


def test_the_code_of_the_first_quick_start_replaces_the_layers(monkeypatch, capsys):
    models = ModuleType("fla.models")
    models.GLAConfig, models.GLAForCausalLM = (lambda **sizes: SimpleNamespace(**sizes)), Model
    package = ModuleType("fla")
    package.__version__ = "0.6.0"
    package.__spec__ = ModuleSpec("fla", None)
    monkeypatch.setitem(sys.modules, "fla", package)
    monkeypatch.setitem(sys.modules, "fla.models", models)
    names = {"__name__": "readme"}
    (block,) = blocks(README, "python")
    exec(compile(block, "README.md", "exec"), names)
    assert "layers.1" in capsys.readouterr().out
    assert len(names["report"].replaced) == 2
    x = torch.randn(1, 5, 64)
    layer = names["model"].layers[0]
    ours = layer(x)[0]
    names["report"].undo()
    torch.testing.assert_close(ours, layer(x)[0])


def test_the_command_of_the_second_quick_start_runs():
    pytest.importorskip("tokenizers", reason="needs the extra decode")
    (generate,) = commands("generate")
    said = CliRunner().invoke(application, generate)
    assert said.exit_code == 0, said.output
    assert "def main(" in said.output


def test_the_study_of_the_third_quick_start_can_be_run(tmp_path):
    """A run takes seconds and is left to its own tests. All its criteria are asked at the scale that a CPU takes."""
    show, run = commands("study")
    assert (show, run) == (["study", "show", "mine.toml"], ["study", "run", "mine.toml"])
    path = tmp_path / "mine.toml"
    path.write_text(blocks(README, "toml")[0], encoding="utf-8")
    study = load_study(path)
    assert study.name == path.stem
    assert [each.scale for each in study.shapes] == ["small"]
    assert [shape.name for each in study.criteria for shape in study.shapes_of(each)] == ["mine"]
