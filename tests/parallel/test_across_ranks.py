"""Tests of context parallelism: four processes run the checks of ``ranks.py`` on a CPU, with gloo as the back end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import distributed

from onelaunch.errors import ArgumentError
from onelaunch.ops import gated_scan

CHECKS = (
    "scans",
    "attention_with_both_decays",
    "attention_with_shared_heads_and_value_gates",
    "packed_sequences",
    "low_precision_and_resets",
    "layers",
    "order_of_events",
    "meshes_and_contexts",
    "data_parallel_modules_and_activation_checkpointing",
    "compiled_code",
    "study_of_ranks",
    "wrong_calls_are_errors_on_every_rank",
    "a_rank_that_does_not_come_ends_the_others",
    "a_rank_that_dies_ends_the_others",
)
RANKS = 4


@pytest.mark.thorough
@pytest.mark.skipif(not distributed.is_available() or not distributed.is_gloo_available(), reason="needs PyTorch with gloo")
def test_slices_give_what_one_process_gives(tmp_path):
    """One set of processes runs all checks, since starting it takes longer than most of them."""
    command = [sys.executable, "-m", "tests.parallel.ranks", str(RANKS), str(tmp_path)]
    done = subprocess.run(
        command,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    for rank in range(RANKS):
        log = tmp_path / f"{rank}.log"
        assert done.returncode == 0, f"{done.stderr}\n{log.read_text() if log.exists() else ''}"
        assert tuple(json.loads((tmp_path / f"{rank}.json").read_text())) == CHECKS


def test_a_mesh_needs_torch_distributed_to_be_initialized():
    v = torch.zeros(1, 4, 3)
    with pytest.raises(ArgumentError, match="init_process_group"):
        gated_scan(v, v, mesh="cp")
