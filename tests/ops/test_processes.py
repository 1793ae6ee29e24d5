"""Tests of kernels with mbarriers in shared memory while several processes share a GPU.

The GPU then preempts CTAs and resumes them. Triton once gave the memory of an mbarrier, after its last use, to data that warps
exchange. With several processes such data changed, so gradients differed from call to call or an illegal instruction followed.

``device`` is the first GPU, or the CPU.
"""

from __future__ import annotations

import multiprocessing
import time
from typing import Any

import pytest
import torch

from onelaunch.operation import find_operation

SECONDS = 8.0
"""Seconds for which the processes run side by side."""

LAYER: dict[str, Any] = {"B": 8, "T": 4096, "D": 1024, "H": 8, "K": 128, "V": 128}
"""Sizes of the projections of a GLA layer."""

WORK: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "gla": ("gla", "hopper", "bfloat16", {"B": 8, "T": 4096, "H": 16, "K": 64, "V": 128}),
    "gla, long heads": ("gla", "hopper", "bfloat16", {"B": 8, "T": 4096, "H": 16, "K": 128, "V": 128}),
    # One sequence is split along T into segments that run in parallel.
    "gla, in parts": ("gla", "hopper", "bfloat16", {"B": 1, "T": 16384, "H": 8, "K": 128, "V": 128}),
    "gla, per head": ("gla", "hopper", "bfloat16", {"B": 4, "T": 2048, "H": 16, "K": 256, "V": 256, "decay_per": "head"}),
    "linear_rnn": ("linear_rnn", "fused_hopper", "bfloat16", {"B": 8, "T": 2048, "D": 1024, "V": 1024}),
    "linear_rnn, chunked": ("linear_rnn", "fused_chunked", "float16", {"B": 16, "T": 1024, "D": 256, "V": 64}),
    "projections": ("projections", "epilogue_persistent", "bfloat16", LAYER),
    "projections, clusters": ("projections", "cluster_weight", "bfloat16", LAYER),
    "swiglu": ("swiglu", "persistent", "bfloat16", {"M": 4096, "N": 2048, "K": 2048}),
}
"""Operation, variant, dtype and sizes of the training step that each process repeats."""


def repeat(name: str, begin: Any, reports: Any) -> None:
    """Repeat a training step in a process of its own, and report which results ever differed from the first ones.

    Args:
        name: Key of :data:`WORK`.
        begin: Multiprocessing barrier at which all processes wait after their first step, which compiles.
        reports: Queue for the report: name, number of steps, and what was wrong (empty if nothing was). Wrong results are given
            by position among the outputs, followed by the gradients.
    """
    operation_name, variant, dtype, sizes = WORK[name]
    try:
        operation = find_operation(operation_name)
        given = operation.make_inputs(operation.case(dtype, **sizes), torch.device("cuda:0"), 0).arguments
        leaves = [value.requires_grad_() for value in given.values() if isinstance(value, torch.Tensor)]

        def step() -> list[torch.Tensor]:
            found = operation(**given, variant=variant)
            outputs = [each for each in (found if isinstance(found, tuple) else (found,)) if each is not None]
            gradients_of_outputs = [torch.ones_like(each) for each in outputs]
            return [*(each.detach() for each in outputs), *torch.autograd.grad(outputs, leaves, gradients_of_outputs)]

        expected, calls, differing = step(), 0, set()
        torch.cuda.synchronize()
        begin.wait()
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            # Three steps are queued before their results are compared, since each comparison waits for the GPU.
            for results in [step() for _ in range(3)]:
                calls += 1
                pairs = enumerate(zip(results, expected, strict=True))
                differing |= {index for index, (result, first) in pairs if not torch.equal(result, first)}
        reports.put((name, calls, f"results {sorted(differing)}" if differing else ""))
    except Exception as error:  # noqa: BLE001 - reported to the waiting process
        begin.abort()  # so that the other processes do not wait for this one
        reports.put((name, 0, f"{type(error).__name__}: {error}"[:300]))


@pytest.mark.gpu
def test_training_steps_are_bitwise_repeatable_while_processes_share_a_gpu(device):
    context = multiprocessing.get_context("spawn")
    begin, reports = context.Barrier(len(WORK), timeout=240), context.Queue()
    processes = [context.Process(target=repeat, args=(name, begin, reports)) for name in WORK]
    for process in processes:
        process.start()
    found = [reports.get(timeout=300) for _ in processes]
    for process in processes:
        process.join(30)
    assert {name: wrong for name, _, wrong in found if wrong} == {}
    assert all(calls > 10 for _, calls, _ in found), "each process made some steps while the others ran"
