"""Time gla's passes over one rank's slice of a sequence beside an ordinary call on the same slice, with simulated neighbours.

    python tools/time_slices.py                                      # on a Hopper GPU, the figures that docs/parallel.md predicts
    python tools/time_slices.py --device cpu --steps 64 --heads 1    # whether it runs at all

One process stands for rank 1 of four (``--rank``, ``--ranks``), which has neighbours on both sides. Its local pass, its part of
the all-gather (a copy of its message) and the merge of the others' messages belong to the time; the transfer does not. For each
number of heads, decay and direction the script prints the median time of both calls, as CUDA graphs over a flushed L2 cache in
turns, their ratio, and the ratio that is allowed. The neighbours send zeros, so both calls have the same results. The script
exits with 1 where they differ by more than rounding, or where a ratio is too large.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from onelaunch import cuda
from onelaunch.ops import gla
from onelaunch.parallel.simulated import simulated

ALLOWED = {(16, "forward"): 1.2, (160, "forward"): 1.6, (16, "trained"): 1.1, (160, "trained"): 1.3}
"""Largest ratio by the number of heads and direction, for a decay per channel and 8192 of 32768 steps."""

FLUSHED_BYTES = 256 << 20
"""Bytes that are written before each replay, several L2 caches."""

LARGEST_ERROR = 6e-3
"""Largest norm-wise difference of bfloat16 results."""


def captured(call: Callable[[], object]) -> Callable[[], float]:
    """Return a function that replays a call as a CUDA graph over a flushed L2 cache, and returns its microseconds."""
    flushed = torch.empty(FLUSHED_BYTES, dtype=torch.uint8, device="cuda")
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    kept = cuda.capture(call, graph, stream)
    torch.cuda.synchronize()

    def replay() -> float:
        flushed.zero_()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return 1e3 * start.elapsed_time(end)

    replay.kept = kept  # pyrefly: ignore[missing-attribute]
    return replay


def timed(call: Callable[[], object]) -> Callable[[], float]:
    """Return a function that makes a call, and returns its microseconds."""

    def run() -> float:
        begun = time.perf_counter()
        call()
        return 1e6 * (time.perf_counter() - begun)

    return run


def calls_of(tensors: list[torch.Tensor], context: Any, *, trained: bool) -> dict[str, Callable[[], list[torch.Tensor]]]:
    """Return the ordinary call and that of a rank; with ``trained`` they return outputs and gradients."""
    do = torch.randn_like(tensors[2])

    def run(**named: Any) -> list[torch.Tensor]:
        if not trained:
            with torch.no_grad():
                return [gla(*tensors, **named)[0]]
        o, _ = gla(*tensors, **named)
        return [o.detach(), *torch.autograd.grad(o, tensors, do)]

    return {"ordinary": run, "slice": lambda: run(mesh=context)}


def report(given: argparse.Namespace, heads: int, per: str, direction: str) -> bool:
    """Print the line of one measurement, and return whether it is as it should be."""
    torch.manual_seed(0)
    shape = (1, given.steps, heads, given.size)
    dtype = torch.bfloat16 if given.device == "cuda" else torch.float32
    tensors = [torch.randn(shape, device=given.device, dtype=dtype) for _ in range(3)]
    z = torch.randn(shape if per == "channel" else shape[:3], device=given.device)
    tensors.append((torch.nn.functional.logsigmoid(z) / 16).to(dtype))
    trained = direction == "trained"
    for each in tensors:
        each.requires_grad_(trained)
    context = simulated(given.rank, [given.steps] * given.ranks, device=given.device)
    calls = calls_of(tensors, context, trained=trained)
    results = [call() for call in calls.values()]
    errors = [float((one - other).float().norm() / other.float().norm()) for other, one in zip(*results, strict=True)]
    clocks = {name: (captured if given.device == "cuda" else timed)(call) for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in clocks}
    for _ in range(given.rounds):
        for name, clock in clocks.items():
            times[name].append(clock())
    ordinary, own = (statistics.median(each) for each in times.values())
    asked = given.device == "cuda" and (given.steps, given.size, per) == (8192, 128, "channel")
    allowed = ALLOWED.get((heads, direction)) if asked else None
    right = max(errors) <= LARGEST_ERROR
    good = right and (allowed is None or own <= allowed * ordinary)
    said = f"of {allowed} allowed" if allowed else "no limit"
    name = f"{heads:4} heads, decay per {per:7} {direction:8}"
    took = f"ordinary {ordinary:8.1f} us, slice {own:8.1f} us, ratio {own / ordinary:.3f}"
    sys.stdout.write(f"{name} {took} {said}, error {max(errors):.1e}{'' if good else '  WRONG' if not right else '  TOO SLOW'}\n")
    sys.stdout.flush()
    return good


def main() -> None:
    """Time all calls."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--steps", type=int, default=8192, help="steps of the slice")
    parser.add_argument("--size", type=int, default=128, help="channels of a head, K = V")
    parser.add_argument("--heads", type=int, nargs="+", default=[16, 160])
    parser.add_argument("--ranks", type=int, default=4, help="number of ranks with slices of this length")
    parser.add_argument("--rank", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=21, help="number of replays of each call")
    given = parser.parse_args()
    if given.device == "cuda":
        sys.stdout.write(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}\n")
    good = [
        report(given, heads, per, direction)
        for heads in given.heads
        for per in ("channel", "head")
        for direction in ("forward", "trained")
    ]
    sys.exit(not all(good))


if __name__ == "__main__":
    main()
