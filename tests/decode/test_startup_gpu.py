"""Tests of the time until ``onelaunch generate`` writes its first tokens in a new process, at a first and at later starts.

The time includes imports.

``device`` is the first GPU, or the CPU. ``write`` writes weights and configuration as a Hugging Face folder.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from onelaunch.decode import ModelConfig, load_weights, random_weights
from onelaunch.decode.model.hub import BUNDLED, find_model
from onelaunch.device.hardware import is_hopper
from tests.decode.models import write

pytest.importorskip("tokenizers", reason="needs the extra decode")

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

FIRST, LATER = 20.0, 2.0
"""Limits in seconds: of the first start, with nothing compiled yet, and of later ones, without reading the weights."""

RUNS = 3

QWEN3_06B = ModelConfig(151_936, 1024, 3072, 28, 16, 8, 128, tie_word_embeddings=True, eos_token_ids=(0,))


@pytest.fixture(autouse=True)
def hopper(device):
    if not is_hopper(device):
        pytest.skip("needs a Hopper GPU")


@pytest.fixture(scope="module", params=[BUNDLED, "0.6B"])
def folder(request, device, tmp_path_factory) -> Path:
    """Return a model's folder: the bundled model, or random weights of Qwen3-0.6B's shape with the bundled tokenizer."""
    bundled = find_model(BUNDLED)
    if request.param == BUNDLED:
        return bundled
    made = write(tmp_path_factory.mktemp("models") / "random", random_weights(QWEN3_06B, 0, device).map(torch.Tensor.cpu))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(bundled / name, made / name)
    return made


def test_a_start_is_short(folder, device, tmp_path):
    cache = tmp_path / "cache"
    first, said = start(folder, cache)
    assert list(cache.glob("cubins/*.cubin")), "the kernel was compiled and cached"
    assert first < FIRST, said
    reading = min(seconds_to_read(folder, device) for _ in range(2))
    later = [start(folder, cache) for _ in range(RUNS)]
    took = statistics.median(seconds for seconds, _ in later) - reading
    alone = statistics.median(seconds_of(cache, "-c", "import torch; torch.zeros(1, device='cuda')") for _ in range(RUNS))
    parts = f"{took:.2f} s besides {reading:.2f} s to read; PyTorch and CUDA alone take {alone:.2f} s; {later[-1][1]}"
    assert took < LATER, parts


def environment(cache: Path) -> dict[str, str]:
    """Return the environment of a process, with Python's bytecode cached.

    Pip compiles bytecode when it installs. Without it each start would compile PyTorch's thousand modules.
    """
    return os.environ | {
        "ONELAUNCH_CACHE": str(cache),
        "PYTHONPYCACHEPREFIX": str(cache / "bytecode"),
        "PYTHONDONTWRITEBYTECODE": "",
    }


def start(folder: Path, cache: Path) -> tuple[float, str]:
    """Return the seconds until two tokens are written, and the command's messages.

    The prompt is so short that the kernel reads it too, without PyTorch's prefill. The sampler chooses the first token from the
    kernel's logits, and the kernel chooses the second.
    """
    command = ["generate", "def main(", "-n", "2", "-t", "0", "--ignore-end", "--model", str(folder), "--variant", "streaming"]
    begin = last = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, "-m", "onelaunch", *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(cache)
    ) as process:
        while os.read(process.stdout.fileno(), 4096):
            last = time.perf_counter()
        said = process.stderr.read().decode()
    assert process.returncode == 0, said
    assert "2 tokens" in said
    return last - begin, said


def seconds_of(cache: Path, *arguments: str) -> float:
    """Return the seconds that a Python process takes to run some code."""
    begin = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, env=environment(cache))
    return time.perf_counter() - begin


def seconds_to_read(folder: Path, device: torch.device) -> float:
    """Return the seconds that a process with CUDA takes to read the weights."""
    torch.cuda.synchronize(device)
    begin = time.perf_counter()
    load_weights(folder, ModelConfig.from_pretrained(folder), device)
    torch.cuda.synchronize(device)
    return time.perf_counter() - begin
