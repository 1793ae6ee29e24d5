"""Test of ``accelerate`` under DDP and FSDP2: two processes run the checks of ``pair.py`` on a CPU, with gloo as the back end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from torch import distributed

CHECKS = (
    "ddp",
    "ddp_with_checkpointing_and_autocast",
    "fsdp2",
    "fsdp2_checkpoints",
    "fsdp2_with_checkpointing_and_mixed_precision",
    "fsdp2_comes_after_accelerate",
    "a_projection_that_is_sharded_by_itself_runs_the_original",
)


@pytest.mark.thorough
@pytest.mark.skipif(not distributed.is_available() or not distributed.is_gloo_available(), reason="needs PyTorch with gloo")
def test_two_processes_train_as_without_accelerate(tmp_path):
    """One pair of processes runs all checks, since starting it takes longer than they do."""
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "tests.integrations.pair"]
    logs = [(tmp_path / f"{rank}.log").open("w") for rank in range(2)]
    processes = [
        subprocess.Popen([*command, str(rank), str(tmp_path)], cwd=root, stdout=log, stderr=subprocess.STDOUT)
        for rank, log in enumerate(logs)
    ]
    try:
        codes = [each.wait(timeout=240) for each in processes]
    finally:
        for process, log in zip(processes, logs, strict=True):
            process.kill()
            log.close()
    for rank, code in enumerate(codes):
        assert code == 0, (tmp_path / f"{rank}.log").read_text()
        assert tuple(json.loads((tmp_path / f"{rank}.json").read_text())) == CHECKS
