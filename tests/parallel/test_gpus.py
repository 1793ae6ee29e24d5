"""Tests of context parallelism on GPUs: with NCCL on two or four, and on one that takes the parts of all ranks in turn."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from onelaunch import cuda
from onelaunch.device.hardware import is_hopper
from onelaunch.ops import gla
from onelaunch.parallel.simulated import simulated
from tests.ops.cases import GLA, arguments_of, assert_near
from tests.parallel.gpu_ranks import TIMEOUT
from tests.parallel.test_passes import BOUND, by_ranks, expected
from tests.thorough import thorough_but


def gpus(ranks):
    """Return the mark of tests that need this number of GPUs."""
    return pytest.mark.skipif(torch.cuda.device_count() < ranks, reason=f"needs {ranks} GPUs")


NUMBERS = [pytest.param(ranks, marks=gpus(ranks)) for ranks in (2, 4)]
"""Numbers of ranks."""

a_hopper = pytest.mark.skipif(not torch.cuda.is_available() or not is_hopper(torch.device("cuda:0")), reason="needs a Hopper GPU")


def run(folder, check, ranks, **environment):
    """Run a check in a process for each GPU, and return their exit codes and outputs."""
    command = [sys.executable, "-m", "tests.parallel.gpu_ranks", str(folder), check]
    processes = [
        subprocess.Popen(
            command,
            cwd=Path(__file__).parents[2],
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": str(ranks), **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        outputs = [process.communicate(timeout=200)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [process.returncode for process in processes], outputs


def passes(folder, check, ranks, **environment):
    """Assert that a check passes on every rank."""
    codes, outputs = run(folder, check, ranks, **environment)
    assert codes == [0] * ranks, "\n".join(outputs)
    assert all((folder / f"{rank}.passed").exists() for rank in range(ranks))


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", NUMBERS)
@pytest.mark.parametrize("check", ["results", "layers", "graphs", "exchanges", "scans", "tensors_on_another_device"])
def test_ranks_with_nccl(check, ranks, tmp_path):
    """All-gathers are stores to the memory of peers where NVLink connects the GPUs."""
    passes(tmp_path, check, ranks, ONELAUNCH_PEER_STORES="1")


@pytest.mark.gpu
@gpus(2)
@pytest.mark.parametrize("check", ["results", "graphs", "exchanges"])
def test_ranks_without_stores_to_peers(check, tmp_path):
    passes(tmp_path, check, 2, ONELAUNCH_PEER_STORES="0")


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", NUMBERS)
@pytest.mark.parametrize("stores", ["0", "1"])
def test_a_rank_that_dies_ends_the_others(stores, ranks, tmp_path):
    """Others end with an error in twice the time-out, which leaves time for starting, and do not hang."""
    begun = time.monotonic()
    codes, outputs = run(tmp_path, "death", ranks, ONELAUNCH_PEER_STORES=stores)
    assert codes[-1] == 0
    assert all(code != 0 for code in codes[:-1]), "\n".join(outputs)
    assert time.monotonic() - begun < 60 + 2 * TIMEOUT


CASES = {
    "per_channel": {"T": 1500, "H": 4, "initial_state": True, "final_state": True},
    "per_head": {"T": 1500, "H": 4, "decay_per": "head"},
    "packed": {"T": 1500, "H": 2, "lengths": (300, 0, 900, 300), "initial_state": True, "final_state": True},
    "shared_heads": {"T": 1500, "H": 4, "k_heads": 2, "v_heads": 2, "g_heads": 2},
    "other_sizes": {"T": 1500, "H": 2, "K": 96, "V": 80, "final_state": True},
    "float32_decay": {"T": 1500, "H": 2, "log_decay_dtype": "float32"},
}


@pytest.mark.gpu
@a_hopper
@pytest.mark.parametrize("name", thorough_but("per_channel", "packed", of=CASES))
def test_hopper_kernels_on_slices_give_what_they_give_on_whole_sequences(name):
    made = arguments_of(GLA, **{"B": 1, "K": 128, "V": 128, "dtype": "bfloat16", **CASES[name]})
    arguments = {key: each.cuda() if isinstance(each, torch.Tensor) else each for key, each in made.items()}
    wanted, incoming = expected(arguments)
    found = by_ranks((500, 700, 300), arguments, incoming, variant="hopper")
    assert_near({key: found[key] for key in wanted}, wanted, BOUND)


@pytest.mark.gpu
@a_hopper
def test_a_call_on_a_slice_is_captured():
    tensors = [torch.randn(1, 640, 4, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    tensors.append(-torch.rand(1, 640, 4, 128, device="cuda", dtype=torch.bfloat16))
    for each in tensors:
        each.requires_grad_()
    made = simulated(1, (640, 640, 640), device="cuda")
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()

    def call():
        o, _ = gla(*tensors, mesh=made, variant="hopper")
        return [o.detach(), *torch.autograd.grad(o, tensors, torch.ones_like(o))]

    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.synchronize()
    found = cuda.capture(call, graph, stream)
    with torch.no_grad():
        tensors[2].mul_(0.5)
    graph.replay()
    for one, other in zip(found, call(), strict=True):
        assert torch.equal(one, other)
