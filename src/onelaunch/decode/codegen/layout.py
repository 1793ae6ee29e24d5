"""Memory layout of a plan's launch: shared memory, offsets of the buffers, and the tables that the kernel reads.

``emit.py`` makes constants of the generated headers from it. The decode runtime sizes launches, fills buffers and checks plans by
it. The megakernel's variants ask with the default :class:`Tuning` whether a plan can run on a device.

Of a plan, ``separate`` says that each phase is a launch, and ``blocks`` is given if the output projection is split over heads
(split-K).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from onelaunch.decode.model.config import ModelConfig
from onelaunch.decode.plan.phases import CHUNK, MAX_TILES, PRODUCTS, TILE, WARPS, Phase, Plan, groups_of, in_parts, padded
from onelaunch.device.architectures import HOPPER_SHARED_BYTES

THREADS: Final = 32 * (WARPS + 1)
"""Threads of a CTA: eight consumer warps, and a producer warp that issues bulk copies."""

ASSIGNED_PHASES = (*PRODUCTS, "attention", "rope", "norm")
"""Rows of the table of work assignments, in the order of the enumeration in ``step.cu``."""

BINS = 1024
"""Bins of a radix-select pass of the sampler, for ten bits of a key."""

MARKER_HEADER = 4
"""Words of a CTA before its profile markers: clock and nanoseconds at the start of the token, then both at its end."""

MARKER_ROWS = (*ASSIGNED_PHASES, "next")
"""Phases in the order of their profile markers, two words each: operand staged, results stored.

A ``norm`` in one CTA has none, and both of ``next`` are its end.
"""


@dataclass(frozen=True, slots=True)
class Tuning:
    """Settings of the weight ring, of polling and of profile markers, which do not change results."""

    stages: int | None = None
    """Chunks of 16 KB in the ring; by default as many as fit in shared memory, or in half of it if launches overlap."""
    flight: int = 2
    """Bulk copies in flight at once in phases that pass data between CTAs, since that data queues behind them."""
    flight_local: int = 3
    """Bulk copies in flight at once while the context is so short that attention exchanges no partial results."""
    pace: int | None = None
    """Clock cycles between two bulk copies, in phases that pass data between CTAs: evenly paced copies do not queue.

    ``None`` is 800, or 700 if the output projection is split over heads, which saves one exchange of all CTAs per layer.
    """
    hold: int = 600
    """Clock cycles to wait before polling for the other CTAs' partial attention results. Polling earlier delays them."""
    l2_chunks: int = 0
    """Most chunks of weights that the producer prefetches into L2 while the ring is full, if it runs ahead across phases."""
    pace_l2: int = 350
    """Clock cycles between two bulk copies if the second is of a chunk that was prefetched into L2."""
    stamps: bool = False
    """Flag of a kernel that writes profile markers: each CTA's clock when a phase's operand is staged and its results stored."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Layout of a CTA's shared memory."""

    stages: int
    """Number of chunks in the ring, which lies at offset 0."""
    offsets: tuple[tuple[str, int], ...]
    """Name and offset, in bytes, of each array behind the ring."""
    bytes: int
    """Total size in bytes."""


def layout_of(plan: Plan, tuning: Tuning) -> Layout:
    """Lay out shared memory: the ring first, as large as fits, then all other arrays."""
    config = plan.config
    widest = max(padded(config, columns) for columns in (config.hidden_size, config.query_size, config.intermediate_size))
    if plan.blocks:  # attention outputs lie behind the operand of the next phase (residual.cuh)
        units = max(assignment.units for assignment in plan.phase("rope_attention").assignments)
        widest = max(widest, padded(config, config.hidden_size) + units * plan.blocks.tile_columns)
    own = max((assignment.units for assignment in plan.phase("o").assignments), default=0) * TILE
    # Bytes of each array behind the ring. Struct Shared in waiting.cuh says what they hold, and NAME_AT is the offset of NAME.
    sizes = {
        "VECTOR_HI": widest * 2 + 64,  # so that the two are 64 bytes apart modulo the 128 of all banks: a warp reads both at once
        "VECTOR_LO": max(widest * 2 + 64, 8 * BINS - widest * 2),  # the sampler's histogram aliases both
        "SUMS": 2 * WARPS * sum_rows(plan) * 4,
        "OWN_ROWS": 0 if plan.blocks else own * 4,
        "SQUARES": WARPS * 4,
        "WARP_PARTIAL": WARPS * (config.queries_per_key // plan.query_splits * plan.query_merge) * (config.head_dim + 4) * 4,
        "CANDIDATES": WARPS * 8,
    }
    rest = sum(-(-size // 64) * 64 for size in sizes.values()) + 256  # 256 hold the control words and assignments
    # Two overlapping launches share an SM, and CUDA reserves 1 KB for each.
    limit = HOPPER_SHARED_BYTES // 2 - 1024 if plan.separate else HOPPER_SHARED_BYTES
    stages = tuning.stages or max((limit - rest) // (CHUNK + 16), 1 + in_parts(config))
    at, offsets = stages * CHUNK, []
    for name, size in sizes.items():
        offsets.append((f"{name}_AT", at))
        at += -(-size // 64) * 64
    offsets.append(("FULL_AT", at))
    # Behind the arrays: two mbarriers per stage, five control words, and two assignments per phase (waiting.cuh, Shared).
    return Layout(stages, tuple(offsets), at + 16 * stages + 20 + 8 * len(ASSIGNED_PHASES))


def sum_rows(plan: Plan) -> int:
    """Return the number of row sums that a warp stores at most: for a group of tiles, or of blocks of tiles."""
    most = max((end - begin for cta in range(plan.ctas) for begin, end in groups_of(plan, "o", cta)), default=0)
    return max(MAX_TILES * TILE, most * plan.blocks.rows if plan.blocks else 0)


def word_offsets(plan: Plan) -> dict[str, int]:
    """Return the offset of each buffer in the array of float32 words, and the size of the array as ``"end"``.

    Offsets are multiples of 32 words. A word that counts its additions takes two. ``"kept"`` holds the residual stream between
    launches, if each phase is a launch.
    """
    offsets, at = {}, 0
    for buffer in plan.buffers:
        if buffer.name in _OTHER_BUFFERS:
            continue
        offsets[buffer.name] = at
        at += -(-buffer.words * (1 + buffer.counts) // 32) * 32
    offsets["kept"] = at
    return offsets | {"end": at + -(-plan.config.hidden_size // 32) * 32}


_OTHER_BUFFERS = ("best", "drawn", "histograms", "cache")
"""Names of the buffers of a plan that are not in the array of float32 words; ``Builder.sizes`` describes all buffers."""


def parameter_offsets(config: ModelConfig) -> dict[str, int]:
    """Return the offsets of a layer's parts in the kernel's table of norm factors and biases, and the size of a layer.

    The factors of the norms before attention and before the MLP come first, ``[H]`` each. Then come those of queries and keys,
    ``[D]`` each, the biases of queries, keys and values in the order of the product's tiles, and those of the output, ``[H]``, as
    far as the model has them. ``decode/runtime/memory.py`` fills the table.
    """
    sizes = {
        "QK_NORMS_AT": 2 * config.head_dim * config.qk_norm,
        "QKV_BIAS_AT": (config.query_size + 2 * config.key_value_size) * config.attention_bias,
        "O_BIAS_AT": config.hidden_size * (config.attention_bias and config.output_bias),
    }
    offsets, at = {}, 2 * config.hidden_size
    for name, size in sizes.items():
        offsets[name] = at
        at += size
    return offsets | {"LAYER_PARAMETERS": at}


def assignments_table(plan: Plan) -> list[list[tuple[int, int]]]:
    """Return the work assignments: first unit and one past the last, ``[CTAs][phases][2]``."""
    by_op: dict[str, Phase] = {}
    for phase in plan.phases():
        by_op.setdefault("attention" if phase.op == "rope_attention" else phase.op, phase)
    nothing = (0, 0)
    return [
        [(by_op[op].assignments[cta].begin, by_op[op].assignments[cta].end) if op in by_op else nothing for op in ASSIGNED_PHASES]
        for cta in range(plan.ctas)
    ]


def launch_of(plan: Plan, phase: Phase) -> tuple[int, int]:
    """Return a phase's number in the kernel and its CTAs, if each phase is a launch; one CTA chooses the next token."""
    if phase.op == "next":
        return len(ASSIGNED_PHASES), 1
    return ASSIGNED_PHASES.index("attention" if phase.op == "rope_attention" else phase.op), plan.ctas


def arrivals_table(plan: Plan) -> list[int]:
    """Return the number of CTAs that increment each semaphore per use, that is, once per layer."""
    arrivals: dict[int, int] = {}
    for phase in plan.layer:
        for assignment in phase.assignments:
            for counter in assignment.arrives:
                arrivals[counter] = arrivals.get(counter, 0) + 1
    return [arrivals.get(counter, 0) for counter in range(max(arrivals, default=-1) + 1)]


def marker_words(plan: Plan) -> int:
    """Return the number of words that one CTA writes as profile markers."""
    return MARKER_HEADER + (plan.config.num_hidden_layers + 1) * len(MARKER_ROWS) * 2
