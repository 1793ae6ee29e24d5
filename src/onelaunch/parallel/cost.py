"""Prediction of what context parallelism costs for ``gla``: bytes and times on several GPUs from the measured times of one.

``docs/parallel.md`` shows its tables, and the study ``context-parallel`` declares what it predicts for two and four GPUs; tests
compare both with it. On two and four H100s calls took longer than predicted (docs/parallel.md, Measured).
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Literal, NamedTuple


class Link(NamedTuple):
    """Connection between the GPUs of a group."""

    name: str
    bytes_per_us: float
    """Bytes that a GPU receives per microsecond."""
    first_us: float
    """Assumed latency of a collective, in microseconds, its launch included."""
    rank_us: float
    """Assumed latency that every further rank adds, in microseconds."""


NVLINK = Link("NVLink", 450e3, 15, 1)
"""NVLink 4 of an H100 or H200: 450 GB/s each way (NVIDIA's data sheet of the H100). The latencies are assumptions."""

INFINIBAND = Link("InfiniBand", 50e3, 15, 5)
"""InfiniBand NDR with a port of 400 Gb/s for each GPU. The latencies are assumptions."""


class Point(NamedTuple):
    """Times of ``gla`` on one GPU at a number of steps."""

    steps: int
    forward: float
    """Microseconds of a forward pass."""
    trained: float
    """Microseconds of a forward and a backward pass."""


MEASURED_HEADS = 16
"""Heads of the measured calls."""

MEASURED = (Point(64, 6.7, 31.0), Point(512, 18.0, 77.7), Point(32768, 300.5, 1612.1), Point(131072, 979.1, 5730.2))
"""Times of ``hopper`` for one sequence, 16 heads, K = V = 128, bfloat16, a decay per channel, as a CUDA graph over cold caches.

The last two are those of an H200 (results/nvidia-h200/039-chunkwise-gla.json), the others of an H100
(results/nvidia-h100/everyday-calls.json)."""

LAUNCH_US = 3.0
"""Assumed microseconds of a short launch within a graph."""

MEMORY_BYTES_PER_US = 3.0e6
"""Bytes per microsecond at which segment states and messages are read and written; an assumption."""

SEGMENTS = 8
"""Segments of a slice whose states a rank combines to its message: the launches' choice at 16 heads on a chip of 132 SMs."""

STATES_SHARE = 0.6
"""Time of the pass that computes states alone, relative to a forward pass (docs/notebook/gla.md). The backward pass begins with
it, and needs no message for it."""

Direction = Literal["forward", "forward_backward"]


class Prediction(NamedTuple):
    """Predicted cost of one ``gla`` call on the slowest of a number of ranks. Times are in microseconds."""

    ranks: int
    message: int
    """Bytes that a rank sends in each direction of time."""
    received: int
    """Bytes that a rank receives in each direction, one message from every other rank."""
    call: float
    """Time of the ordinary call on a slice."""
    local: float
    """Time that local passes and scans add: segment states to a message, and messages to the state before the slice."""
    exchange: float
    """Time of the all-gathers."""
    hidden: float
    """Part of it that overlaps with the pass that recomputes states for the backward pass."""
    speedup: float
    """Time on one GPU over ``call + local + exchange - hidden``."""


def time_of(steps: float, heads: int, direction: Direction) -> float:
    """Return the microseconds of a call on one GPU, from the times of :data:`MEASURED`, linear between and beyond them.

    Other numbers of heads count as so many more steps. Fewer steps than the first point's take as long.
    """
    equivalent = steps * heads / MEASURED_HEADS
    points = [(each.steps, each.forward if direction == "forward" else each.trained) for each in MEASURED]
    if equivalent <= points[0][0]:
        return points[0][1]
    low, high = next((pair for pair in pairwise(points) if equivalent <= pair[1][0]), (points[-2], points[-1]))
    slope = (high[1] - low[1]) / (high[0] - low[0])
    return low[1] + (equivalent - low[0]) * slope


def predict(
    ranks: int, link: Link, *, length: int, heads: int, keys: int = 128, values: int = 128,
    direction: Direction = "forward_backward",
) -> Prediction:  # fmt: skip
    """Return the predicted cost of one call of ``gla`` with a decay per channel and a batch of one.

    Args:
        ranks: Number of ranks, at least 1, with equal slices.
        link: Connection between the GPUs.
        length: Steps of the whole sequence.
        heads: Number of heads.
        keys: Channels of a key, K.
        values: Channels of a value, V.
        direction: ``forward``, or ``forward_backward`` for both passes.
    """
    message = 4 * heads * (keys * values + keys)
    alone = time_of(length, heads, direction)
    if ranks == 1:
        return Prediction(1, 0, 0, alone, 0.0, 0.0, 0.0, 1.0)
    received = (ranks - 1) * message
    call = time_of(length / ranks, heads, direction)
    moved = (SEGMENTS + 1) * message + (ranks + 1) * message  # segment states to a message, messages to a state
    local = 3 * LAUNCH_US + moved / MEMORY_BYTES_PER_US
    exchange = link.first_us + (ranks - 1) * link.rank_us + received / link.bytes_per_us
    hidden = 0.0
    if direction == "forward_backward":
        hidden = min(exchange, STATES_SHARE * time_of(length / ranks, heads, "forward"))
        local, exchange = 2 * local, 2 * exchange
    speedup = alone / (call + local + exchange - hidden)
    return Prediction(ranks, message, received, call, local, exchange, hidden, speedup)


def table(link: Link, *, length: int, heads: int, counts: Iterable[int] = (2, 4, 8, 16, 32, 64)) -> list[str]:
    """Return the lines of a Markdown table of predictions for a forward and a backward pass."""
    lines = [
        "| ranks | received, MB | call, us | local, us | exchange, us | hidden, us | speedup |",
        "|---|---|---|---|---|---|---|",
    ]
    for ranks in counts:
        found = predict(ranks, link, length=length, heads=heads)
        times = " | ".join(f"{each:.0f}" for each in (found.call, found.local, found.exchange, found.hidden))
        lines.append(f"| {ranks} | {found.received / 1e6:.1f} | {times} | {found.speedup:.2f} |")
    return lines


def main() -> None:
    """Print the tables of ``docs/parallel.md``."""
    for link in (NVLINK, INFINIBAND):
        print(f"{link.name}:", "", *table(link, length=131072, heads=16), "", sep="\n")  # noqa: T201 - it is what is asked for


if __name__ == "__main__":
    main()
