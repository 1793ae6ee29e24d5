"""Tests of sharded layers and of the sharded example: processes run the checks of ``sharding_ranks.py`` on a CPU, with gloo."""

from __future__ import annotations

import copy
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import distributed, nn

from onelaunch.errors import ArgumentError
from onelaunch.nn import SwiGLU
from tests.nn.layers import NAMES, D, make

ROOT = Path(__file__).parents[2]
needs_gloo = pytest.mark.skipif(
    not distributed.is_available() or not distributed.is_gloo_available(), reason="needs PyTorch with gloo"
)
BY_FOUR = ["layers", "parts_of_time", "heads_and_slices", "state_dicts", "refusals", "training_by_four"]
BY_TWO = ["layers", "caches", "fsdp2_of_packed_weights", "training_by_two"]


@pytest.mark.thorough
@needs_gloo
def test_ranks_compute_what_one_process_does(tmp_path):
    """One process imports PyTorch and forks all ranks, since that takes longer than their checks."""
    command = [sys.executable, "-m", "tests.parallel.sharding_ranks", str(tmp_path)]
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    for group, ranks, checks in (("four", 4, BY_FOUR), ("two", 2, BY_TWO), ("continued", 1, [])):
        for rank in range(ranks):
            assert json.loads((tmp_path / f"{group}-{rank}.json").read_text()) == checks


ON_GPUS = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


@needs_gloo
@pytest.mark.parametrize(
    ("device", "processes", "division", "tolerance"),
    [
        pytest.param("cpu", 4, ("--tensor-parallel", "2", "--fsdp", "--recompute"), 5e-5, marks=pytest.mark.every),
        pytest.param("cpu", 4, ("--tensor-parallel", "2", "--context-parallel", "2", "--fsdp"), 5e-5, marks=pytest.mark.every),
        pytest.param("cuda", 2, ("--fsdp", "--recompute"), 1e-3, marks=ON_GPUS),
        pytest.param("cuda", 2, ("--context-parallel", "2", "--fsdp"), 1e-3, marks=ON_GPUS),
    ],
)
def test_torchrun_trains_the_example_and_other_ranks_continue(tmp_path, device, processes, division, tolerance):
    """Processes train, two others and then one without torchrun continue; the losses are those of one process.

    They are float32. On GPUs cuBLAS and our kernels choose other tiles for products of other sizes, so more sums differ in order.
    """
    short = ["--device", device, "--precision", "float32", "--length", "32", "--warmup", "5", "--sample", "8"]

    def losses(processes, folder, *options):
        launch = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes)] if processes else []
        command = [sys.executable, *launch, "examples/train_lm.py", *short, "--out", str(tmp_path / folder), *options]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False)
        assert done.returncode == 0, done.stderr
        lines = (tmp_path / folder / "log.jsonl").read_text().splitlines()
        return done.stdout, [json.loads(line)["loss"] for line in lines]

    _, wanted = losses(0, "alone", "--steps", "6")
    out, found = losses(processes, "sharded", "--steps", "2", *division)
    assert out.count("def ") == 1  # one process prints
    assert found == pytest.approx(wanted[:2], rel=tolerance)
    continued = ("--tensor-parallel", "2") if "--tensor-parallel" in division else ("--context-parallel", "2", "--fsdp")
    losses(2, "sharded", "--steps", "4", "--resume", *continued)
    assert losses(0, "sharded", "--steps", "6", "--resume")[1] == pytest.approx(wanted, rel=tolerance)


def separated(layer):
    """Return a copy of a layer with separate weights."""
    layer = copy.deepcopy(layer)
    for module in layer.modules():
        if hasattr(module, "separate_weights"):
            module.separate_weights()
            module.separate_weights()  # changes nothing more
    return layer


@pytest.mark.parametrize("name", [*NAMES, "swiglu"])
def test_separate_weights_have_the_names_results_and_state_dict_of_packed_ones(name):
    layer = SwiGLU(D, intermediate_size=96) if name == "swiglu" else make(name)[0]
    apart = separated(layer)
    state = layer.state_dict()
    assert {key: value.shape for key, value in apart.state_dict().items()} == {key: value.shape for key, value in state.items()}
    assert {key for key, _ in apart.named_parameters()} == set(state)
    x = torch.randn(2, 5, D)
    one, other = ([result] if isinstance(result := each(x), torch.Tensor) else result[:1] for each in (layer, apart))
    assert torch.equal(one[0], other[0])
    apart.load_state_dict({key: value * 2 for key, value in state.items()})
    layer.load_state_dict(apart.state_dict())
    assert all(torch.equal(value, apart.state_dict()[key]) for key, value in layer.state_dict().items())


def test_a_reset_draws_separate_weights_from_the_range_of_their_inputs():
    apart = separated(make("gla")[0])
    apart.reset_parameters()
    for key, inputs in (("q_proj.weight", D), ("gk_proj.0.weight", D), ("gk_proj.1.weight", 16), ("gk_proj.1.bias", 16)):
        largest = apart.get_parameter(key).abs().max() * math.sqrt(inputs)
        assert 0.8 < largest <= 1


def test_a_weight_that_is_no_plain_parameter_is_not_separated():
    layer = make("gla")[0]
    layer.in_proj_weight = type("Sharded", (nn.Parameter,), {})(layer.in_proj_weight.data)
    with pytest.raises(ArgumentError, match="in_proj_weight of GatedLinearAttention is a Sharded; separate its weights before"):
        layer.separate_weights()
