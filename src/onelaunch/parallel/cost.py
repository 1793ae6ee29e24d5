"""Prediction of what context parallelism costs for ``gla``: bytes and times on several GPUs from the measured times of one.

The predicted time of the slowest rank is that of the ordinary call on its slice, of local passes, and of an exchange of messages
in each direction: by stores to the memory of peers, or by a collective such as NCCL's all-gather (``exchange.py``).

The constants are fitted to calls on four H100s, or assumed; each docstring says which. ``tests/parallel/test_cost.py`` compares
the model with the committed result of the study ``context-parallel`` on two and four H100s. Constants are fitted to one time of
an earlier result, the forward call on four at commit 6e2aa043. ``docs/parallel.md`` shows the model's tables.

The predictions that the study declares are not of this model: they rest on an H200's times, assumed latencies, and one of two
all-gathers hidden, and were made before any run on several GPUs.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Literal, NamedTuple

from onelaunch.parallel.exchange import MOST_BYTES, MOST_RANKS


class Link(NamedTuple):
    """Connection between the GPUs of a group."""

    name: str
    bytes_per_us: float
    """Bytes per microsecond that a GPU can send, and receive at the same time."""
    first_us: float
    """Latency of a collective, in microseconds, its launch included."""
    rank_us: float
    """Assumed latency that every further rank adds to a collective, in microseconds."""
    ranks_by_stores: int
    """Largest number of ranks that exchange by stores to the memory of peers; 0 if GPUs cannot write each other's memory."""


NVLINK = Link("NVLink", 450e3, 29, 1, MOST_RANKS)
"""NVLink 4 of an H100 or H200: 450 GB/s each way (NVIDIA's data sheet of the H100). NCCL's all-gather of 1.06 MB from each of
four H100s took 39 us alone: 29 is what is left without 7 for the bytes and 1 for each further rank."""

INFINIBAND = Link("InfiniBand", 50e3, 29, 5, 0)
"""InfiniBand NDR with a port of 400 Gb/s for each GPU. Nothing is measured: its first latency is that of NVLink."""


class Point(NamedTuple):
    """Times of ``gla`` on one GPU at a number of steps."""

    steps: int
    forward: float
    """Microseconds of a forward pass."""
    trained: float
    """Microseconds of a forward and a backward pass."""


MEASURED_HEADS = 16
"""Heads of the measured calls."""

MEASURED = (Point(64, 6.7, 30.9), Point(512, 18.0, 77.7), Point(32768, 313.5, 1716.2), Point(131072, 1110.7, 6394.3))
"""Times of ``hopper`` on an H100 for one sequence, 16 heads, K = V = 128, bfloat16, a decay per channel, as a CUDA graph.

The first two are from results/nvidia-h100/everyday-calls.json and the third from results/nvidia-h100/039-overlap.json, over cold
caches. The last is one GPU's time in the run on four of results/nvidia-h100/ranks/context-parallel.json."""

MEMORY_BYTES_PER_US = 3.0e6
"""Bytes per microsecond at which segment states and messages are read and written; an assumption."""

SEGMENTS = 8
"""Segments of a slice whose states a rank combines to its message: the launches' choice at 16 heads on a chip of 132 SMs."""

LOCAL_US = 14.0
"""Microseconds of the last segment's sum and of the two launches that combine states, without the bytes that these move.

Fitted: a forward call on four H100s took 332 us without a transfer, of which the ordinary call takes 313.5 and the bytes 5. The
backward pass adds only the bytes, since it repeats no sums of the forward pass: calls with both passes took 1700 to 1767 us
without a transfer, and the ordinary one takes 1716. The 1767 were those of the last rank, which summed its segments once more
than the others and does so no longer (commit 2a19a847): now the slowest rank takes 1708, by a script that simulates its
neighbours, and the model gives 1740. Forward that script gives 340."""

STORES_US = 25.0
"""Microseconds of an exchange by stores without the transfer: the launch of the send, flags, waits for late ranks.

Fitted: a forward call on four H100s took 362 us (6e2aa043; 364 in results/nvidia-h100/ranks/context-parallel.json), of which the
call and the local pass take 332 and two messages 5."""

SEND_US = 3.0
"""Part of :data:`STORES_US` that the backward pass does not hide: the launch of the send; an assumption.

Measured calls with both passes do not determine it: they leave -13 us for it on four H100s and -92 on two, 1 and
3 % of a call."""

Direction = Literal["forward", "forward_backward"]
Pass = Literal["forward", "backward"]

LATE_US: dict[Pass, float] = {"forward": 16.0, "backward": 105.0}
"""Microseconds by which a collective takes longer in a call's forward or backward pass with ``hopper`` than alone.

Fitted: with NCCL and no overlap four H100s took 387 us for the forward pass and 1939 us for both passes, by a script
(docs/notebook/gla.md). Why it is so much more in the backward pass is unknown."""

STATES_SHARE = 0.6
"""Time of the pass that computes states alone, relative to a forward pass (docs/notebook/gla.md). The backward pass begins with
it, and needs no message for it."""


class Prediction(NamedTuple):
    """Predicted cost of one ``gla`` call on the slowest of a number of ranks. Times are in microseconds."""

    ranks: int
    message: int
    """Bytes of the message of a rank in each direction of time."""
    received: int
    """Most bytes that a rank receives in each direction, one message from every other rank."""
    call: float
    """Time of the ordinary call on a slice."""
    local: float
    """Time that local passes and scans add: segment states to a message, and messages to the state before the slice."""
    exchange: float
    """Time of the exchanges, one in each direction."""
    hidden: float
    """Part of :attr:`exchange` that overlaps with the pass that recomputes states for the backward pass."""
    speedup: float
    """Time on one GPU over ``call + local + exchange - hidden``."""
    stores: bool
    """Flag that messages are exchanged by stores to the memory of peers, else by a collective."""

    @property
    def total(self) -> float:
        """Predicted time of the call in microseconds."""
        return self.call + self.local + self.exchange - self.hidden


def time_of(steps: float, heads: int, direction: Direction) -> float:
    """Return the microseconds of a call on one GPU, from the times of :data:`MEASURED`, linear between and beyond them.

    The time depends on the product of steps and heads. Calls smaller than the first point take as long as that one.
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
    direction: Direction = "forward_backward", stores: bool = True,
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
        stores: Flag that messages are exchanged by stores to the memory of peers where the link, the number of ranks and the size
            of a message allow it. A rank then sends only to its readers, the nearest first. The decays of a slice are assumed
            to be so strong that a rank reads only the nearest message.
    """
    message = 4 * heads * (keys * values + keys)
    alone = time_of(length, heads, direction)
    if ranks == 1:
        return Prediction(1, 0, 0, alone, 0.0, 0.0, 0.0, 1.0, stores=False)
    call = time_of(length / ranks, heads, direction)
    moved = (SEGMENTS + 1) * message + (ranks + 1) * message  # segment states to a message, messages to a state
    stores = stores and ranks <= link.ranks_by_stores and message <= MOST_BYTES
    passes: tuple[Pass, ...] = ("forward",) if direction == "forward" else ("forward", "backward")
    local = LOCAL_US + len(passes) * moved / MEMORY_BYTES_PER_US
    exchange = sum(_exchange(ranks, link, message, each, stores=stores) for each in passes)
    hidden = 0.0
    if stores and direction == "forward_backward":
        hidden = min(STORES_US - SEND_US, STATES_SHARE * time_of(length / ranks, heads, "forward"))
    speedup = alone / (call + local + exchange - hidden)
    return Prediction(ranks, message, (ranks - 1) * message, call, local, exchange, hidden, speedup, stores)


def _exchange(ranks: int, link: Link, message: int, within: Pass, *, stores: bool) -> float:
    """Return the time of an exchange on the slowest rank within a pass.

    A launch that sends ends when all its messages are stored, before the next launch of its stream begins. So by stores the
    second rank is the slowest: it sends to all later ranks, all but two, and then reads the message of the first. With two ranks
    it sends nothing and waits for the one message.
    """
    if stores:
        return STORES_US + max(ranks - 2, 1) * message / link.bytes_per_us
    return link.first_us + (ranks - 1) * (link.rank_us + message / link.bytes_per_us) + LATE_US[within]


def table(link: Link, *, length: int, heads: int, counts: Iterable[int] = (2, 4, 8, 16, 32, 64)) -> list[str]:
    """Return the lines of a Markdown table of predictions for a forward and a backward pass."""
    lines = [
        "| ranks | exchange by | received, MB | call, us | local, us | exchange, us | hidden, us | speedup |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for ranks in counts:
        found = predict(ranks, link, length=length, heads=heads)
        way = "stores" if found.stores else "collective"
        times = " | ".join(f"{each:.0f}" for each in (found.call, found.local, found.exchange, found.hidden))
        lines.append(f"| {ranks} | {way} | {found.received / 1e6:.1f} | {times} | {found.speedup:.2f} |")
    return lines


def main() -> None:
    """Print the tables of ``docs/parallel.md``."""
    for link in (NVLINK, INFINIBAND):
        print(f"{link.name}:", "", *table(link, length=131072, heads=16), "", sep="\n")  # noqa: T201 - it is what is asked for


if __name__ == "__main__":
    main()
