"""Prediction of what context parallelism costs for ``gla``: bytes and times on several GPUs from the measured times of one.

``docs/parallel.md`` shows its tables; a test compares them. Nothing here has been compared with a measurement on several GPUs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


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


class Measured(NamedTuple):
    """Times of ``gla`` on one GPU for a step of one head, in nanoseconds."""

    forward: float
    trained: float
    """Time of the forward and the backward pass."""


H200 = Measured(0.458e6 / (8192 * 96), 2.38e6 / (8192 * 96))
"""Times of ``hopper`` on one H200 at 1x8192x96, K = V = 128, bfloat16: 0.458 and 2.38 ms, from docs/notebook/gla.md."""

LEAST_US = 50.0
"""Least time that a call is taken to need, in microseconds: with few steps its chunks no longer fill the GPU."""


class Prediction(NamedTuple):
    """Predicted cost of one training step of one ``gla`` call on a number of ranks. Times are in microseconds."""

    ranks: int
    message: int
    """Bytes that a rank sends in each direction."""
    received: int
    """Bytes that a rank receives in each direction, one message from every other rank."""
    calls: float
    """Time of the ordinary forward and backward pass on a slice."""
    states: float
    """Time of the two further passes that compute states, each as long as a forward pass."""
    exchange: float
    """Time of the two all-gathers. Nothing overlaps with them except on the first rank."""
    speedup: float
    """Time on one GPU over the sum of these three."""


def predict(
    ranks: int, link: Link, *, length: int, heads: int, keys: int = 128, values: int = 128, measured: Measured = H200
) -> Prediction:
    """Return the predicted cost of training one call of ``gla`` with a decay per channel and a batch of one.

    Args:
        ranks: Number of ranks, at least 1, with equal slices.
        link: Connection between the GPUs.
        length: Steps of the whole sequence.
        heads: Number of heads.
        keys: Channels of a key, K.
        values: Channels of a value, V.
        measured: Times on one GPU.
    """
    message = 4 * heads * (keys * values + keys)
    alone = max(length * heads * measured.trained / 1e3, LEAST_US)
    if ranks == 1:
        return Prediction(1, 0, 0, alone, 0.0, 0.0, 1.0)
    steps = length / ranks * heads / 1e3
    calls = max(steps * measured.trained, LEAST_US)
    states = 2 * max(steps * measured.forward, LEAST_US)
    received = (ranks - 1) * message
    exchange = 2 * (link.first_us + (ranks - 1) * link.rank_us + received / link.bytes_per_us)
    return Prediction(ranks, message, received, calls, states, exchange, alone / (calls + states + exchange))


def table(link: Link, *, length: int, heads: int, counts: Iterable[int] = (2, 4, 8, 16, 32, 64)) -> list[str]:
    """Return the lines of a Markdown table of predictions."""
    lines = ["| ranks | received, MB | call, us | states, us | exchange, us | speedup |", "|---|---|---|---|---|---|"]
    for ranks in counts:
        found = predict(ranks, link, length=length, heads=heads)
        times = f"{found.calls:.0f} | {found.states:.0f} | {found.exchange:.0f}"
        lines.append(f"| {ranks} | {found.received / 1e6:.1f} | {times} | {found.speedup:.1f} |")
    return lines
