"""Layout of a plan's launch: bytes of shared memory, offsets of the word buffers, and the tables that the kernel reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from onelaunch.decode.plan.phases import CHUNK, MAX_TILES, PRODUCTS, TILE, WARPS, Phase, Plan, groups_of, padded
from onelaunch.device.architectures import HOPPER_SHARED_BYTES

THREADS: Final = 32 * (WARPS + 1)
"""Threads of a CTA: the warps that multiply, and a producer warp that copies weights with TMA."""

SHARES = (*PRODUCTS, "attention", "rope", "norm")
"""Rows of the table of work assignments, by the names that the kernel gives them."""

BINS = 1024
"""Bins of the histogram of a radix-select pass, ten bits of a key, when a token is sampled."""

MARKER_HEADER = 4
"""Words of a CTA before its profile markers: clock and nanoseconds at the start of the token, then at its end."""

MARKER_ROWS = (*SHARES, "next")
"""Phases in the order of their profile markers, two words each. A norm computed by one CTA has none."""


@dataclass(frozen=True, slots=True)
class Tuning:
    """Settings of the ring of weight chunks that a plan leaves open."""

    stages: int | None = None
    """Chunks of 16 KB in the ring; by default all of shared memory that is left, or half of it where launches overlap."""
    flight: int = 2
    """Chunks in flight at once in phases that pass data between CTAs, since that data queues behind them."""
    flight_apart: int = 3
    """Chunks in flight at once while the context is so short that attention passes nothing between CTAs."""
    pace: int | None = None
    """Clock cycles between the copies of two chunks, in phases that pass data between CTAs: evenly paced copies do not queue.

    ``None`` is 800, or 700 where additions to the residual stream are counted, which saves one exchange between CTAs.
    """
    hold: int = 600
    """Clock cycles to wait before polling for the other CTAs' partial attention results. Polling earlier delays them."""
    stamps: bool = False
    """Flag of a kernel that writes profile markers: each CTA's clock at the start and the end of its work in every phase."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Layout of a CTA's shared memory."""

    stages: int
    """Chunks in the ring, which lies at offset 0."""
    offsets: tuple[tuple[str, int], ...]
    """Name and offset in bytes of everything behind the ring."""
    bytes: int
    """Size of all of it, in bytes."""


def layout_of(plan: Plan, tuning: Tuning) -> Layout:
    """Lay out shared memory: the ring first, as large as there is room for, then everything else."""
    config = plan.config
    widest = max(map(padded, (config.hidden_size, config.query_size, config.intermediate_size)))
    if plan.blocks:  # what units have found lies behind the residual stream
        units = max(share.units for share in plan.phase("rope_attention").shares)
        widest = max(widest, padded(config.hidden_size) + units * plan.blocks.tile_columns)
    own = max((share.units for share in plan.phase("o").shares), default=0) * TILE
    sizes = {
        "UPPER": widest * 2 + 64,  # 64 bytes apart in banks: a warp reads both parts at once
        "LOWER": max(widest * 2 + 64, 8 * BINS - widest * 2),  # over both lie the sums of a drawn token
        "SUMS": 2 * WARPS * sum_rows(plan) * 4,
        "OWN": 0 if plan.blocks else own * 4,
        "SQUARES": WARPS * 4,
        "FOUND": WARPS * (config.queries_per_key // plan.sharers * plan.joined) * (config.head_dim + 4) * 4,
        "WINNERS": WARPS * 8,
    }
    rest = sum(-(-size // 64) * 64 for size in sizes.values()) + 256
    # two launches side by side on a processor, each with what CUDA keeps for itself
    limit = HOPPER_SHARED_BYTES // 2 - 1024 if plan.separate else HOPPER_SHARED_BYTES
    stages = tuning.stages or max((limit - rest) // (CHUNK + 16), 1)
    at, offsets = stages * CHUNK, []
    for name, size in sizes.items():
        offsets.append((f"{name}_AT", at))
        at += -(-size // 64) * 64
    offsets.append(("FULL_AT", at))
    return Layout(stages, tuple(offsets), at + 16 * stages + 20 + 8 * len(SHARES))


def sum_rows(plan: Plan) -> int:
    """Return the number of row sums that a warp keeps at once, for a group of tiles or of blocks of tiles."""
    most = max((end - begin for cta in range(plan.ctas) for begin, end in groups_of(plan, "o", cta)), default=0)
    return max(MAX_TILES * TILE, most * plan.blocks.rows if plan.blocks else 0)


def word_offsets(plan: Plan) -> dict[str, int]:
    """Return the offset of each buffer among the float32 words, with the number of all words under ``"end"``.

    Offsets are multiples of 32 words. A word that counts its additions takes two.
    """
    found, at = {}, 0
    for buffer in plan.buffers:
        if buffer.name in APART:
            continue
        found[buffer.name] = at
        at += -(-buffer.words * (1 + buffer.counts) // 32) * 32
    found["kept"] = at
    return found | {"end": at + -(-plan.config.hidden_size // 32) * 32}


APART = ("best", "drawn", "tallies", "cache")
"""Names of the buffers that are not among the float32 words."""


def assignments_table(plan: Plan) -> list[list[tuple[int, int]]]:
    """Return the first and last unit of each CTA in each phase, ``[CTAS][SHARES][2]``."""
    by_op: dict[str, Phase] = {}
    for phase in plan.phases():
        by_op.setdefault("attention" if phase.op == "rope_attention" else phase.op, phase)
    nothing = (0, 0)
    return [
        [(by_op[op].shares[cta].begin, by_op[op].shares[cta].end) if op in by_op else nothing for op in SHARES]
        for cta in range(plan.ctas)
    ]


def launch_of(plan: Plan, phase: Phase) -> tuple[int, int]:
    """Return the kernel's number of a phase that is launched alone, and its CTAs; one CTA chooses the next token."""
    if phase.op == "next":
        return len(SHARES), 1
    return SHARES.index("attention" if phase.op == "rope_attention" else phase.op), plan.ctas


def arrivals_table(plan: Plan) -> list[int]:
    """Return how many CTAs increment each counter per use."""
    found: dict[int, int] = {}
    for phase in plan.layer:
        for share in phase.shares:
            for counter in share.arrives:
                found[counter] = found.get(counter, 0) + 1
    return [found.get(counter, 0) for counter in range(max(found, default=-1) + 1)]


def marker_words(plan: Plan) -> int:
    """Return the number of words that one CTA writes as profile markers."""
    return MARKER_HEADER + (plan.config.num_hidden_layers + 1) * len(MARKER_ROWS) * 2
