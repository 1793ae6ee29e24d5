"""Measurements of a study of ranks, by the processes of a group.

Every process makes the same inputs of the whole sequence. It makes the ordinary call on all steps, on its own GPU, and the call
with a context on its slice. Outputs and gradients are compared, then both are timed in turns.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed

from onelaunch import cuda
from onelaunch.model_studies.run import provenance
from onelaunch.ops import gla
from onelaunch.parallel import Context, context
from onelaunch.rank_studies.declare import Direction, RankShape, RankStudy, Regime
from onelaunch.rank_studies.result import Measured
from onelaunch.workbench.result import Provenance
from onelaunch.workbench.result.provenance import spelled
from onelaunch.workbench.study import Scale

CALLS = {"cuda": 20, "cpu": 1}
"""Calls in a row of a timing, by the type of the device: the launches of one hide behind the work of another, and what the ranks
begin apart is divided by their number."""

NAMES = ("o", "q", "k", "v", "g")
"""Names of what is compared: the outputs, then gradients of the inputs."""

Results = list[torch.Tensor]


def measure(study: RankStudy, device: torch.device, scale: Scale) -> list[Measured]:
    """Measure all shapes of a scale on the ranks of the default process group; a collective call.

    Returns:
        The same measurements on every rank, but for the provenance of the rank's own device.
    """
    command = spelled(["onelaunch", *sys.argv[1:]])
    run = provenance(study.rounds, device, scale, command)
    directions: tuple[Direction, ...] = ("forward", "forward_backward")
    return [
        each
        for shape in study.at_scale(scale)
        for direction in directions
        for each in _measured(study, shape, direction, device, run)
    ]


def inputs_of(shape: RankShape, device: torch.device) -> Results:
    """Return q, k, v and g of the whole sequence, with decays as models produce them, the same on every rank."""
    random = torch.Generator(device).manual_seed(0)
    dtype = getattr(torch, shape.dtype)

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, device=device, generator=random)

    q, k = (normal(shape.B, shape.T, shape.H, shape.K).to(dtype) for _ in range(2))
    v = normal(shape.B, shape.T, shape.H, shape.V).to(dtype)
    channels = (shape.K,) if shape.decay_per == "channel" else ()
    g = torch.nn.functional.logsigmoid(normal(shape.B, shape.T, shape.H, *channels)) / 16
    return [q, k * shape.K**-0.5, v, g.to(dtype)]


def call_of(tensors: Results, do: torch.Tensor, direction: Direction, mesh: Context | None) -> Callable[[], Results]:
    """Return a function that makes the call, and returns o, and with the backward pass the gradients of the inputs."""
    named: dict[str, Any] = {} if mesh is None else {"mesh": mesh}
    if direction == "forward":

        def forward() -> Results:
            with torch.no_grad():
                return [gla(*tensors, **named)[0]]

        return forward
    leaves = [each.detach().requires_grad_() for each in tensors]

    def both() -> Results:
        o, _ = gla(*leaves, **named)
        return [o.detach(), *torch.autograd.grad(o, leaves, do)]

    return both


def _measured(study: RankStudy, shape: RankShape, direction: Direction, device: torch.device, run: Provenance) -> list[Measured]:
    """Measure a shape in a direction, in each regime of the device."""
    ranks, rank = distributed.get_world_size(), distributed.get_rank()
    length = shape.T // ranks
    mine = slice(rank * length, (rank + 1) * length)
    whole = inputs_of(shape, device)
    do = torch.randn(whole[2].shape, device=device, generator=torch.Generator(device).manual_seed(1)).to(whole[2].dtype)
    made = context(distributed.group.WORLD, length, device=device)
    one = call_of(whole, do, direction, None)
    sliced = call_of([each[:, mine].contiguous() for each in whole], do[:, mine].contiguous(), direction, made)
    differences = _differences(one(), sliced(), mine)
    found = []
    regimes: tuple[Regime, ...] = ("graph", "eager") if device.type == "cuda" else ("eager",)
    for regime in regimes:
        known: dict[str, Any] = {"shape": shape.name, "direction": direction, "regime": regime, "ranks": ranks, "provenance": run}
        made.collectives.used.clear()
        clocks, why = _clocks(regime, one, sliced, device)
        if why:
            found.append(Measured(**known, missing=why))
            continue
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(study.rounds):
            for clock, taken in zip(clocks, times, strict=True):
                distributed.barrier()
                taken.append(clock())
        first, slowest = (torch.tensor(each, dtype=torch.float64, device=device) for each in times)
        distributed.broadcast(first, 0)
        distributed.all_reduce(slowest, distributed.ReduceOp.MAX)
        times_of = {"one": tuple(first.tolist()), "sliced": tuple(slowest.tolist())}
        exchange = "; ".join(sorted(made.collectives.used))
        found.append(Measured(**known, **times_of, differences=differences, exchange=exchange))
    return found


def _differences(one: Results, sliced: Results, mine: slice) -> dict[str, float]:
    """Return the norm-wise differences of a rank's results from its slice of those of one GPU, the largest of all ranks."""
    parts = [each[:, mine].double() for each in one]
    off = [(each.double() - part).norm() / part.norm() for each, part in zip(sliced, parts, strict=True)]
    worst = torch.stack(off)
    distributed.all_reduce(worst, distributed.ReduceOp.MAX)
    return dict(zip(NAMES, worst.tolist(), strict=False))


def _clocks(
    regime: Regime, one: Callable[[], Results], sliced: Callable[[], Results], device: torch.device
) -> tuple[list[Callable[[], float]], str]:
    """Return functions that return the microseconds of the two calls, or why they cannot be timed, the same on every rank."""
    clocks: list[Callable[[], float]] = []
    why = ""
    try:
        clocks = [_clock(_captured(call, device) if regime == "graph" else call, device) for call in (one, sliced)]
    except Exception as error:  # noqa: BLE001 - such as a collective that this version cannot capture
        why = f"{type(error).__name__}: {error}"[:300]
    reasons: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(reasons, why)
    return clocks, next((f"rank {rank}: {each}" for rank, each in enumerate(reasons) if each), "")


def _captured(call: Callable[[], Results], device: torch.device) -> Callable[[], object]:
    """Return a function that replays a call as a CUDA graph."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.synchronize(device)
    kept = cuda.capture(call, graph, stream)

    def replay() -> object:
        graph.replay()
        return kept

    return replay


def _clock(call: Callable[[], object], device: torch.device) -> Callable[[], float]:
    """Return a function that makes some calls in a row, and returns the microseconds of one."""
    count = CALLS[device.type]
    call()

    def on_gpu() -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(count):
            call()
        end.record()
        end.synchronize()
        return 1e3 * start.elapsed_time(end) / count

    def on_cpu() -> float:
        begun = time.perf_counter()
        for _ in range(count):
            call()
        return 1e6 * (time.perf_counter() - begun) / count

    return on_gpu if device.type == "cuda" else on_cpu
