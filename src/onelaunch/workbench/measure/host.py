"""Host time of a call: how long Python, PyTorch and the driver need for it, while nobody waits for the device.

A call is timed on its own by the host's clock. On a GPU it returns once its kernels are enqueued. The device is awaited after
every few calls, outside of what is timed, so that its queue never fills and the host never waits for a place in it.

PyTorch's matrix product of two small matrices, and its backward pass, are timed in turn with the calls. Host times depend on the
machine's CPU and on its clocks; the ratio to the product depends much less on them. ``measures/host.py`` calls
:func:`host_time` for its measures.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from onelaunch.operation import Operation
from onelaunch.workbench import stats
from onelaunch.workbench.measure.count import Request
from onelaunch.workbench.result import Beside
from onelaunch.workbench.verify.calls import Candidate, Inputs, draw_gradients, make_inputs

ROUNDS = 20
"""Number of rounds in which the calls and PyTorch's product take turns.

With 5 rounds of 200 calls, what else the host did decided single rounds: on an H100's host an interval reached from 3.8 to 5.3
where the ratio was 4.2.
"""

CALLS = 50
"""Number of calls in a row in a round, of each of the two: 1,000 in all rounds."""

_QUEUED = 10
"""Number of calls after which the device is awaited. A call of up to a hundred launches then never fills a queue of 1,024."""

WARM_UP_CALLS = 20
"""Number of untimed calls of each before the first round."""

SIZE = 64
"""Rows and columns of the matrices of PyTorch's product."""

Prepare = Callable[[], None]
Call = Callable[[], object]


def host_time(operation: Operation[..., Any], request: Request, device: torch.device, seed: int = 0) -> Beside:
    """Return the host time of a variant's call beside that of PyTorch's product, both with the backward pass if it is asked for.

    Args:
        operation: Operation whose public function is called.
        request: Case, variant and direction.
        device: Device of the tensors. On a CPU the time holds the computation too.
        seed: Seed of the inputs.
    """
    inputs = make_inputs(operation, request.case, device, seed, request.direction)
    with torch.set_grad_enabled(bool(inputs.differentiable)):
        both = call_of(operation, request, inputs, seed), product(device, backward=bool(inputs.differentiable))
        for prepare, call in both:
            _timed(prepare, call, WARM_UP_CALLS, device)
        rounds = [[_timed(prepare, call, CALLS, device) for prepare, call in both] for _ in range(ROUNDS)]
    calls, products = ([1e-3 * each for found in side for each in found] for side in zip(*rounds, strict=True))
    medians = [[statistics.median(found) for found in side] for side in zip(*rounds, strict=True)]
    return Beside(microseconds=stats.estimate(calls), product=stats.estimate(products), ratio=stats.ratio(medians[0], medians[1]))


def call_of(operation: Operation[..., Any], request: Request, inputs: Inputs, seed: int) -> tuple[Prepare, Call]:
    """Return what a variant's call needs before it, which is not timed, and the call as a user makes it."""
    forward = partial(operation, **inputs.arguments, variant=request.variant)
    if not inputs.differentiable:
        return _nothing, forward
    candidate = Candidate.variant(operation, request.variant)
    gradients = draw_gradients(candidate(Inputs(inputs.arguments)), request.case.dtype, seed, inputs.through)
    outputs = candidate.forward(inputs)
    names = [name for name in gradients if (output := outputs.get(name)) is not None and output.requires_grad]
    places = [list(outputs).index(name) for name in names]
    seeds = [gradients[name] for name in names]

    def call() -> None:
        result = forward()
        results = result if isinstance(result, tuple) else (result,)
        torch.autograd.backward([results[place] for place in places], seeds)

    return partial(_forget, [inputs.arguments[name] for name in inputs.differentiable]), call


def product(device: torch.device, *, backward: bool) -> tuple[Prepare, Call]:
    """Return what PyTorch's product needs before it, which is not timed, and the product, with its backward pass if asked for."""
    a, b = (torch.ones(SIZE, SIZE, dtype=torch.bfloat16, device=device, requires_grad=backward) for _ in range(2))
    if not backward:
        return _nothing, partial(torch.mm, a, b)
    ones = torch.ones(SIZE, SIZE, dtype=torch.bfloat16, device=device)
    return partial(_forget, [a, b]), lambda: (a @ b).backward(ones)


def _forget(leaves: list[torch.Tensor]) -> None:
    """Drop the gradients of the last call, so that the next one need not add to them."""
    for leaf in leaves:
        leaf.grad = None


def _nothing() -> None:
    """Prepare nothing."""


def _timed(prepare: Prepare, call: Call, count: int, device: torch.device) -> list[int]:
    """Return the nanoseconds of each of so many calls in a row."""
    clock, found = time.perf_counter_ns, []
    for index in range(count):
        if index % _QUEUED == 0 and device.type == "cuda":
            torch.cuda.synchronize(device)
        prepare()
        start = clock()
        call()
        found.append(clock() - start)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return found
