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
    ("channel", 64): ChunkTimes(1.8, 2.2), ("channel", 128): ChunkTimes(3.0, 3.7), ("channel", 256): ChunkTimes(7.1, 7.1),
    ("wide", 64): ChunkTimes(2.4, 3.0), ("wide", 128): ChunkTimes(5.6, 6.0),
}  # fmt: skip
"""Times by what the log-decays are, one per head, 16-bit ones per channel or float32 ones per channel, and by padded K.

With K of 256 there is only one warpgroup. Those of K = 64 with two of them or with float32 log-decays are estimates."""

_WIDE_WITH_STATES = ChunkTimes(4.6, 6.0)
"""Times with float32 log-decays and K = 128 in a pass that stores states, from the time of a backward pass."""

_SEGMENT_SUM_COST = 0.5
"""Time of ``segment_sum_kernel`` relative to a pass that makes outputs over the same steps."""

_SEGMENTS_TIME = 10.0
"""Microseconds that more than one segment takes besides: the second launch, and loads of sums before a CTA's first chunk."""

_SUM_TIME = 2.5
"""Microseconds to load and add the sum of each segment before the last."""


@remembered
def chunk_times(keys: int, *, scalar: bool, wide: bool, store_states: bool) -> ChunkTimes:
    """Return the times of a chunk with K padded to ``keys``, see :func:`pass_tiles` for the other arguments."""
    if wide and store_states and keys == 2 * PANEL:
        return _WIDE_WITH_STATES
    return _CHUNK_TIMES["head" if scalar else "wide" if wide else "channel", keys]


def _duration(ctas: int, chunks: int, multiprocessors: int, chunk: float, segments: int) -> float:
    """Return the estimated duration of a pass in microseconds: waves of CTAs times the chunks of a segment."""
    time = cdiv(ctas * segments, multiprocessors) * cdiv(chunks, segments) * chunk
    if segments == 1:
        return time
    return time * (1.0 + _SEGMENT_SUM_COST) + _SEGMENTS_TIME + _SUM_TIME * (segments - 1)


@remembered
def segment_count(ctas: int, chunks: int, multiprocessors: int, chunk: float) -> int:
    """Return the number of segments of T: one, unless that leaves SMs idle for longer than ``segment_sum_kernel`` takes.

    Segments have at least four chunks on average.

    Args:
        ctas: CTAs per segment.
        chunks: Chunks of a sequence; of one of mean length if lengths differ.
        multiprocessors: SMs of the device.
        chunk: Microseconds that a CTA takes for a chunk.
    """
    possible = (segments for segments in (1, 2, 3, 4, 6, 8, 12, 16) if segments <= max(chunks // 4, 1))
    return min(possible, key=lambda segments: _duration(ctas, chunks, multiprocessors, chunk, segments))


@remembered
def pass_groups(ctas: int, chunks: int, multiprocessors: int, times: ChunkTimes) -> int:
    """Return whether a pass has one or two warpgroups that multiply in each CTA, where two can run.

    With one there are twice the CTAs, each with half the values, and a chunk takes them less time, though each makes the scores
    and decays the keys for itself. It pays where the heads fill less than half of the SMs, so that fewer segments, or none, are
    needed.

    Args:
        ctas: CTAs per segment with two groups.
        chunks: Chunks of a sequence; of one of mean length if lengths differ.
        multiprocessors: SMs of the device.
        times: Times of a chunk.
    """
    two, one = (
        _duration(each, chunks, multiprocessors, chunk, segment_count(each, chunks, multiprocessors, chunk))
        for each, chunk in ((ctas, times.two), (2 * ctas, times.one))
    )
    return 1 if one < two else 2
