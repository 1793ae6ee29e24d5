"""Tests of the example ``train_lm.py``: it learns, resumes with the same bits, writes its files, and exchanges weights with fla.

The example is imported, since each process that starts would import PyTorch again.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[1] / "examples"

SHORT = ["--device", "cpu", "--length", "32", "--warmup", "5", "--sample", "20"]
"""Options of short runs on a CPU."""


@pytest.fixture(scope="module")
def example():
    """Module of the example, run on one thread: on a busy machine several would spend CPU time waiting for each other."""
    spec = importlib.util.spec_from_file_location("train_lm", EXAMPLES / "train_lm.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_lm"] = module  # where dataclasses looks up the module of a class
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    spec.loader.exec_module(module)
    yield module
    torch.set_num_threads(threads)
    del sys.modules["train_lm"]


@pytest.fixture(scope="module")
def trained(example, tmp_path_factory):
    """Folder of a run of 14 steps without a stop."""
    folder = tmp_path_factory.mktemp("trained")
    example.main([*SHORT, "--steps", "14", "--out", str(folder)])
    return folder


def log_of(folder):
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def test_the_loss_falls_and_the_files_are_written(trained):
    log = log_of(trained)
    assert [entry["step"] for entry in log] == list(range(14))
    assert log[0]["loss"] > 5.4  # uniform guesses of a byte have 5.55 nats
    assert log[-1]["loss"] < 4.5
    summary = json.loads((trained / "summary.json").read_text())
    assert summary["loss"] == log[-1]["loss"]
    assert summary["held_out_loss"] < 4.5
    assert summary["tokens_per_second"] > 0
    assert summary["peak_bytes"] > 1 << 20
    curve = {path.name for path in trained.iterdir()} - {"checkpoint.pt", "log.jsonl", "summary.json"}
    assert curve in ({"loss.png"}, {"loss.txt"})


def test_a_stopped_and_resumed_run_gives_the_same_bits(example, trained, tmp_path, capsys):
    example.main([*SHORT, "--steps", "6", "--out", str(tmp_path)])
    example.main([*SHORT, "--steps", "14", "--resume", "--out", str(tmp_path)])
    assert "def " in capsys.readouterr().out
    once, twice = (torch.load(folder / "checkpoint.pt", weights_only=True) for folder in (trained, tmp_path))
    assert once["step"] == twice["step"] == 14
    assert once["settings"] == twice["settings"]
    assert once["model"].keys() == twice["model"].keys()
    assert all(torch.equal(value, twice["model"][name]) for name, value in once["model"].items())
    for index, state in once["optimizer"]["state"].items():
        assert all(torch.equal(value, twice["optimizer"]["state"][index][name]) for name, value in state.items())
    assert [entry["loss"] for entry in log_of(trained)] == [entry["loss"] for entry in log_of(tmp_path)]


def test_a_run_is_not_overwritten_or_resumed_with_other_settings(example, trained):
    with pytest.raises(SystemExit, match="--resume"):
        example.main([*SHORT, "--steps", "1", "--out", str(trained)])
    with pytest.raises(SystemExit, match="no checkpoint"):
        example.main([*SHORT, "--steps", "1", "--resume", "--out", str(trained / "other")])
    with pytest.raises(SystemExit, match="seed 0"):
        example.main([*SHORT, "--steps", "15", "--resume", "--seed", "1", "--out", str(trained)])


def test_the_loss_is_that_of_pytorch(example):
    logits = torch.randn(3000, 7, dtype=torch.float32, requires_grad=True)
    targets = torch.randint(7, (3000,))
    targets[::5] = -100
    want = torch.nn.functional.cross_entropy(logits, targets)
    (gradient,) = torch.autograd.grad(want, logits)
    copy = logits.detach().clone().requires_grad_()
    got = example.CrossEntropy.apply(copy * 1, targets, (targets >= 0).sum())
    got.backward()
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(copy.grad, gradient)


def test_without_matplotlib_the_curve_is_text(example, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    drawn = example.draw([4.0 / (step + 1) for step in range(100)], tmp_path)
    assert drawn == tmp_path / "loss.txt"
    lines = drawn.read_text().splitlines()
    assert 10 < len(lines) <= 24
    assert lines[0].split() == ["4.000", "#" * 60]
    assert lines[-1].count("#") < 3


def test_words_become_tokens_and_text_again(example):
    text = example.Text.__new__(example.Text)
    text.pieces = [bytes([byte]) for byte in range(256)] + [b"def", b" self", b"\n    "]
    text.ids = {piece: at for at, piece in enumerate(text.pieces)}
    source = "def f(self, ä):\n    return self\n"
    tokens = text.encode(source.encode())
    assert {256, 257, 258} <= set(tokens.tolist())
    assert text.decode(tokens.tolist()) == source


def test_the_sizes_have_the_parameters_that_their_names_say(example):
    counts = {}
    for name, size in example.SIZES.items():
        with torch.device("meta"):
            counts[name] = sum(parameter.numel() for parameter in example.Model(size).parameters())
    assert counts["30m"] == pytest.approx(30e6, rel=0.05)
    assert counts["350m"] == pytest.approx(350e6, rel=0.05)


def test_fla_is_asked_for_by_its_name(example, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "fla", None)
    with pytest.raises(SystemExit, match="pip install flash-linear-attention"):
        example.main([*SHORT, "--impl", "fla", "--out", str(tmp_path)])


def test_processes_are_counted_before_they_meet(example, monkeypatch, tmp_path, capsys):
    """``sharding.py`` refuses what it cannot divide. ``tests/parallel`` trains with several processes."""
    monkeypatch.syspath_prepend(EXAMPLES)
    with pytest.raises(SystemExit, match="need torchrun"):
        example.main([*SHORT, "--fsdp", "--out", str(tmp_path)])
    with pytest.raises(SystemExit):
        example.main([*SHORT, "--precision", "mixed"])
    assert "--precision mixed needs --fsdp" in capsys.readouterr().err
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(SystemExit, match=r"3 and .* 1; their product must divide the number of processes, 4"):
        example.main([*SHORT, "--tensor-parallel", "3", "--out", str(tmp_path)])
    for options in (["--tensor-parallel", "2"], ["--tensor-parallel", "2", "--context-parallel", "2"]):
        with pytest.raises(SystemExit, match="with 4 processes: add --fsdp"):
            example.main([*SHORT, *options, "--out", str(tmp_path)])


def test_every_example_is_tested():
    assert {example.name for example in EXAMPLES.glob("*.py")} == {"train_lm.py", "sharding.py"}
