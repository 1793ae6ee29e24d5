"""Configurations of the passes along time of ``gla``'s Hopper kernels: warpgroups and stages of a CTA, segments of T.

``launch_hopper.py`` asks for them. A configuration depends on sizes, dtypes and the number of SMs alone, so it is remembered.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from onelaunch.kernels.common.layout import cdiv
from onelaunch.operation import remembered
from onelaunch.ops.gla.padding import PANEL


@dataclass(frozen=True, slots=True)
class PassTiles:
    """Configuration of a CTA of ``chunk_state_kernel`` or ``segment_sum_kernel``."""

    groups: int
    """Warpgroups that multiply, each with 64 values of the state or sum in registers. One more warpgroup prepares a chunk."""
    stages: int = 3
    """Chunks whose operands are in shared memory at a time."""
    scores: int = 3
    """Shared-memory buffers for the scores of a chunk; ``segment_sum_kernel`` has none."""
    staged: bool = True
    """Flag that stored states leave through shared memory, by TMA."""
    leave: str = "values"
    """Place from which outputs leave: "values", "tile", "state" or "registers", see LEAVE in kernels/hopper_chunk_state.py."""
    multiply_registers: int = 160
    """Registers per thread of a warpgroup that multiplies."""
    prepare_registers: int = 184
    """Registers per thread of the warpgroup that prepares chunks: it decays keys, or with a decay per head computes factors."""

    def options(self) -> dict[str, int]:
        """Return the constants that both kernels take from this configuration."""
        return {
            "GROUPS": self.groups, "STAGES": self.stages,
            "MULTIPLY_REGISTERS": self.multiply_registers, "PREPARE_REGISTERS": self.prepare_registers,
        }  # fmt: skip


@remembered
def pass_tiles(keys: int, groups: int, *, scalar: bool, wide: bool, store_states: bool, output: bool) -> PassTiles:
    """Return the configuration of ``chunk_state_kernel`` with ``groups`` warpgroups that multiply.

    The numbers of registers are those with which ptxas does not serialize the products. With K beyond 128 only two stages fit,
    or three with a decay per head. Stored states leave through shared memory, for which a pass that also makes outputs has one
    stage less; with K beyond 128 it stores them from registers. float32 log-decays per channel (``wide``) take twice the bytes:
    with K beyond 64 two stages fit. With a decay per head (``scalar``) stages hold no log-decays, and one more fits. It is
    needed because chunks take less time there: with three stages the loads of a chunk, issued about a chunk before it, would
    arrive late.

    Where a stage fewer fits than a pass needs, outputs leave from elsewhere than the tiles of the values, so that a stage is
    refilled a chunk earlier. It is a tile of its own where shared memory has 8192 bytes more for each group; float32 log-decays
    with two groups and stored states leave less than that, and there outputs take turns with states in their tile. Per channel
    with K beyond 128 neither is there, and outputs leave from registers.
    """
    both = store_states and output
    if keys > 2 * PANEL:
        leave = "values" if scalar or not output else "registers"
        return PassTiles(1, 3 if scalar else 2, scores=1, staged=not output, leave=leave, prepare_registers=240)
    large = wide and keys > PANEL
    if scalar:
        stages = 3 if both and groups == 2 else 4
        early = stages == 3
    else:
        stages = 2 if both or large else 3
        early = output and stages == 2
    leave = "values" if not early else "state" if large and both and groups == 2 else "tile"
    if groups == 1:
        return PassTiles(1, stages, stages, leave=leave, prepare_registers=232)
    if scalar:
        return PassTiles(2, stages, stages, leave=leave, multiply_registers=200, prepare_registers=104)
    if wide and not (large and both):
        return PassTiles(2, stages, stages, leave=leave, multiply_registers=152, prepare_registers=200)
    return PassTiles(2, stages, stages, leave=leave)


@remembered
def segment_tiles(keys: int, groups: int, *, scalar: bool, wide: bool) -> PassTiles:
    """Return the configuration of ``segment_sum_kernel``, which makes no outputs, so that more stages fit.

    ``scalar`` says that there is a log-decay per head, and ``wide`` that log-decays are float32 and one per channel.
    """
    stages = 3 if wide and keys > PANEL else 4
    if keys > 2 * PANEL:
        return PassTiles(1, stages=4 if scalar else 2, prepare_registers=240)
    return PassTiles(1, stages, prepare_registers=232) if groups == 1 else PassTiles(2, stages)


class ChunkTimes(NamedTuple):
    """Times of a chunk in a CTA of a pass with outputs, in microseconds, by the warpgroups that multiply.

    They are rounded from cold passes of 32 chunks on an NVIDIA H100 80GB (docs/notebook/gla.md), where one wave of CTAs ran.
    """

    one: float
    two: float


_CHUNK_TIMES = {
    ("head", 64): ChunkTimes(1.2, 1.4), ("head", 128): ChunkTimes(1.5, 2.3), ("head", 256): ChunkTimes(1.8, 1.8),
    ("channel", 64): ChunkTimes(1.8, 2.2), ("channel", 128): ChunkTimes(3.0, 3.7), ("channel", 256): ChunkTimes(5.7, 5.7),
    ("wide", 64): ChunkTimes(2.4, 3.0), ("wide", 128): ChunkTimes(4.2, 4.5),
}  # fmt: skip
"""Times by what the log-decays are, one per head, 16-bit ones per channel or float32 ones per channel, and by padded K.

With K of 256 there is only one warpgroup. Those of K = 64 with two of them or with float32 log-decays are estimates, and so is
that of K = 128 with float32 log-decays and one."""

_WIDE_WITH_STATES = ChunkTimes(4.6, 6.0)
"""Times with float32 log-decays and K = 128 in a pass that stores states, from the time of a backward pass."""

_SEGMENT_SUM_COST = 0.5
"""Time of ``segment_sum_kernel`` relative to a pass that makes outputs over the same steps."""

_SEGMENTS_TIME = 10.0
"""Microseconds that more than one segment takes besides: the second launch, and loads of sums before a CTA's first chunk."""

_SUM_TIME = 2.5
"""Microseconds to load and add the sum of each segment before the last."""

SHARES = 1024
"""Denominator of the first segment's share of a sequence, as in kernels/hopper_recompute.py."""

PARTS = 16
"""Denominator of the time of a chunk without outputs relative to one with them, as in kernels/hopper_recompute.py."""


_RECOMPUTE_TIME = 2.0
"""Microseconds by which recomputing states must be predicted to be faster. Times of chunks differ by as much at small grids."""


class RecomputedChunk(NamedTuple):
    """Times of a chunk without outputs, in 1/PARTS of one with them, by the warpgroups that multiply.

    0 where a pass does not recompute the states at the starts of segments.
    """

    one: int
    two: int


NOT_RECOMPUTED = RecomputedChunk(0, 0)
"""Times for a pass that cannot leave outputs out: one that stores states, or goes back in time."""

_RECOMPUTED_CHUNK = {
    ("head", 64): RecomputedChunk(14, 14), ("head", 128): RecomputedChunk(11, 11), ("head", 256): RecomputedChunk(10, 10),
    ("channel", 64): RecomputedChunk(11, 0), ("channel", 128): RecomputedChunk(10, 0), ("channel", 256): NOT_RECOMPUTED,
    ("wide", 64): RecomputedChunk(12, 0), ("wide", 128): RecomputedChunk(11, 0), ("wide", 256): NOT_RECOMPUTED,
}  # fmt: skip
"""Times by what the log-decays are and by padded K, as in :data:`_CHUNK_TIMES`, from cold passes with one warpgroup on an H100.

Those with two warpgroups, and with float32 log-decays and K = 128, are estimates. Per channel, with two groups or K beyond 128,
``prepare`` with loops for both kinds of chunks would spill registers."""


@remembered
def chunk_times(keys: int, *, scalar: bool, wide: bool, store_states: bool) -> ChunkTimes:
    """Return the times of a chunk with K padded to ``keys``, see :func:`pass_tiles` for the other arguments."""
    if wide and store_states and keys == 2 * PANEL:
        return _WIDE_WITH_STATES
    return _CHUNK_TIMES["head" if scalar else "wide" if wide else "channel", keys]


def recomputed_chunk(keys: int, *, scalar: bool, wide: bool) -> RecomputedChunk:
    """Return the times of a chunk without outputs with K padded to ``keys``, see :func:`pass_tiles` for the other arguments."""
    return _RECOMPUTED_CHUNK["head" if scalar else "wide" if wide else "channel", keys]


class Segments(NamedTuple):
    """Segments into which a pass cuts T."""

    count: int
    recompute: int = 0
    """0 if ``segment_sum_kernel`` runs before the pass. Otherwise each CTA of the pass recomputes the state at the start of its
    segment: the constant RECOMPUTE of ``chunk_state_kernel``, :func:`recomputed_chunk`."""
    share: int = 0
    """With ``recompute``: share of a sequence's chunks in its first segment, in 1/SHARES."""


def recomputed_time(chunks: int, count: int, recompute: int, first: int) -> float:
    """Return the time of the slowest of the CTAs that recompute states, in times of a chunk with outputs.

    It cuts the sequence as ``recomputed_span`` of kernels/hopper_recompute.py does, except that the last segment may be empty.

    Args:
        chunks: Chunks of a sequence.
        count: Segments.
        recompute: Time of a chunk without outputs, in 1/PARTS of one with them.
        first: Chunks of the first segment.
    """
    start, end, slowest = 0, first, 0.0
    for segment in range(count):
        end = chunks if segment == count - 1 else min(end, chunks)
        slowest = max(slowest, start * recompute / PARTS + end - start)
        start, end = end, first + end * (PARTS - recompute) // PARTS
    return slowest


@remembered
def recomputed_segments(chunks: int, count: int, recompute: int) -> tuple[float, Segments]:
    """Return the first segment that makes the slowest CTA fastest, and its time; see :func:`recomputed_time`."""
    rate = recompute / PARTS
    even = int(chunks * rate / (1.0 - (1.0 - rate) ** count))  # without rounding, all CTAs would take this time
    firsts = range(max(even - 1, 1), min(even + 2, chunks) + 1)
    time, first = min((recomputed_time(chunks, count, recompute, first), first) for first in firsts)
    return time, Segments(count, recompute, first * SHARES // chunks)


def _best(ctas: int, chunks: int, multiprocessors: int, chunk: float, recompute: int) -> tuple[float, Segments]:
    """Return the estimated duration of a pass in microseconds and the segments, see :func:`pass_segments`."""
    times: list[tuple[float, Segments]] = []
    for count in (1, 2, 3, 4, 6, 8, 12, 16):
        waves = cdiv(ctas * count, multiprocessors)
        if count <= max(chunks // 4, 1):
            time = waves * cdiv(chunks, count) * chunk
            if count > 1:
                time = time * (1.0 + _SEGMENT_SUM_COST) + _SEGMENTS_TIME + _SUM_TIME * (count - 1)
            times.append((time, Segments(count)))
        if recompute and 1 < count <= chunks:
            slowest, segments = recomputed_segments(chunks, count, recompute)
            times.append((waves * slowest * chunk + _RECOMPUTE_TIME, segments))
    return min(times)


@remembered
def pass_segments(ctas: int, chunks: int, multiprocessors: int, chunk: float, recompute: int = 0) -> Segments:
    """Return the segments of T: one, unless that leaves SMs idle for longer than the states at their starts take.

    With ``segment_sum_kernel`` segments have at least four chunks on average. Where estimates are equal, there are fewer.

    Args:
        ctas: CTAs per segment.
        chunks: Chunks of a sequence; of one of mean length if lengths differ.
        multiprocessors: SMs of the device.
        chunk: Microseconds that a CTA takes for a chunk.
        recompute: Time of a chunk without outputs, in 1/PARTS of one with them; 0 for a pass that cannot recompute states.
    """
    return _best(ctas, chunks, multiprocessors, chunk, recompute)[1]


@remembered
def pass_groups(ctas: int, chunks: int, multiprocessors: int, times: ChunkTimes, recompute: RecomputedChunk) -> int:
    """Return whether a pass has one or two warpgroups that multiply in each CTA, where two can run.

    With one there are twice the CTAs, each with half the values, and a chunk takes them less time, though each makes the scores
    and decays the keys for itself. It pays where the heads fill less than half of the SMs, so that fewer segments, or none, are
    needed.

    Args:
        ctas: CTAs per segment with two groups.
        chunks: Chunks of a sequence; of one of mean length if lengths differ.
        multiprocessors: SMs of the device.
        times: Times of a chunk.
        recompute: Times of a chunk without outputs.
    """
    one = _best(2 * ctas, chunks, multiprocessors, times.one, recompute.one)[0]
    two = _best(ctas, chunks, multiprocessors, times.two, recompute.two)[0]
    return 1 if one < two else 2
