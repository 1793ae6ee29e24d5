"""What the kernel is specialised with: a header made of a plan, the table of shares, and the source that includes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from onelaunch import cuda
from onelaunch.decode.plan import (
    CHUNK,
    MOST_TILES,
    ROUNDS,
    TILE,
    Edge,
    Op,
    Phase,
    Plan,
    blocks_of,
    depth,
    padded,
    passes,
    passes_of,
)
from onelaunch.device.architectures import HOPPER_SHARED_BYTES

WARPS: Final = 8
THREADS: Final = 32 * (WARPS + 1)

PRODUCTS: tuple[Op, ...] = ("qkv", "o", "gate_up", "down", "lm_head")
"""Phases that use weights, in the order of the stream."""

SHARES = (*PRODUCTS, "attention", "rope", "norm")
"""Rows of the table of shares, as the kernel names them."""

KINDS: tuple[cuda.Kind, ...] = (*["pointer"] * 19, *["i32"] * 4)  # pyrefly: ignore[bad-assignment]
"""Of the kernel's arguments."""

BINS = 1024
"""Sums of a round in which a drawn token's limits are found: one for each of ten bits."""

FILES = (
    "machine.cuh",
    "waiting.cuh",
    "vectors.cuh",
    "products.cuh",
    "heads.cuh",
    "attention.cuh",
    "parts.cuh",
    "residual.cuh",
    "sampling.cuh",
    "phases.cuh",
)
"""Beside ``step.cu``."""


@dataclass(frozen=True, slots=True)
class Tuning:
    """What a plan leaves open about the ring."""

    stages: int | None = None
    """Chunks of 16 KB; by default as many as there is room for, half of it where launches overlap."""
    flight: int = 2
    """Of them, those on their way at once where there are hand-offs: these queue behind them."""
    flight_apart: int = 3
    """The same in texts so short that attention hands nothing on."""
    pace: int | None = None
    """Ticks of the processor's clock from one chunk to the next, where there are hand-offs: copies that come evenly, and not as
    fast as they can, make no queues. By default 800, or 700 where sums are counted: there is a hand-off less.
    """
    hold: int = 600
    """Ticks that pass before a CTA asks for what others of its head have found: asked for earlier, it comes later."""
    stamps: bool = False
    """Whether the kernel notes when each CTA came where: :mod:`onelaunch.decode.stamps`."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where things lie in shared memory, in bytes."""

    stages: int
    offsets: tuple[tuple[str, int], ...]
    bytes: int


def layout_of(plan: Plan, tuning: Tuning) -> Layout:
    """The ring first, as large as there is room for, then everything else."""
    config = plan.config
    widest = max(map(padded, (config.hidden_size, config.query_size, config.intermediate_size)))
    if plan.blocks:  # what units have found lies behind the residual stream
        units = max(share.units for share in plan.phase("rope_attention").shares)
        widest = max(widest, padded(config.hidden_size) + units * plan.blocks.room)
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
    """Sums of a warp that are kept at once: of a group of tiles, or blocks of them."""
    most = max((end - begin for cta in range(plan.ctas) for begin, end in passes_of(plan, "o", cta)), default=0)
    return max(MOST_TILES * TILE, most * plan.blocks.rows if plan.blocks else 0)


def word_offsets(plan: Plan) -> dict[str, int]:
    """Where buffers begin among the words; each at a multiple of 32 of them, and of two each if they count. The last entry is
    the number of all.
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
"""Buffers that are not among the words."""

NAMES = {
    "hidden": "RESIDUAL", "final": "FINAL", "mid": "MID", "act": "ACT", "qkv": "RAW", "partial": "PARTIAL", "normed": "NORMED",
    "q": "QUERIES", "squares": "HEAD_SQUARES", "kept": "KEPT",
}  # fmt: skip
"""Of buffers, in the kernel."""


def header(plan: Plan, tuning: Tuning) -> str:
    """``plan.cuh``."""
    config, layout, words = plan.config, layout_of(plan, tuning), word_offsets(plan)
    ops = {phase.op for phase in plan.phases()}
    numbers = {
        "CTAS": plan.ctas, "LAYERS": config.num_hidden_layers, "HIDDEN": config.hidden_size, "INNER": config.intermediate_size,
        "QUERY": config.query_size, "VOCAB": config.vocab_size, "HEADS": config.num_key_value_heads,
        "GROUP": config.queries_per_key, "HEAD": config.head_dim, "SPLITS": plan.splits, "SHARERS": plan.sharers,
        "JOINED": plan.joined, "POSITIONS": plan.positions, "JOINED_FROM": plan.joined_from, "SUM_ROWS": sum_rows(plan),
        "DEPTH": depth(config), "STAGES": layout.stages, "FLIGHT": min(tuning.flight, layout.stages),
        "HOLD": tuning.hold,
        "FLIGHT_APART": min(tuning.flight_apart if plan.blocks else tuning.flight, layout.stages),
        "ROUNDS": ROUNDS, "BINS": BINS, "PACE": (700 if plan.blocks else 800) if tuning.pace is None else tuning.pace,
    }  # fmt: skip
    blocks = plan.blocks or blocks_of(config, plan.sharers)
    numbers |= {"BLOCK_WIDTH": blocks.width, "BLOCK_ROOM": blocks.room, "UNIT_BLOCKS": blocks.count, "ADDERS": plan.adders}
    numbers |= {name: words.get(buffer, 0) for buffer, name in NAMES.items()} | dict(layout.offsets)
    for op in PRODUCTS:
        together = [end - begin for cta in range(plan.ctas) for begin, end in passes_of(plan, op, cta)]
        numbers |= {f"MOST_{op.upper()}": max(together), f"LEAST_{op.upper()}": min(together)}
        numbers[f"GROUPS_{op.upper()}"] = max(len(passes(share.units)) for share in plan.phase(op).shares)
    numbers["UNITS"] = max(share.units for phase in plan.phases() for share in phase.shares if "attention" in phase.op)
    flags = {
        "STREAMS": plan.streams, "SEPARATE": plan.separate, "TAGGED": any(buffer.tagged for buffer in plan.buffers),
        "ROPE_APART": "rope" in ops, "NORM_APART": "norm" in ops, "STAMPED": tuning.stamps, "KEYS_STREAM": plan.keys_stream,
        "SUMMED": plan.blocks is not None,
    }  # fmt: skip
    lines = ["#pragma once", *(f"constexpr int {name} = {value};" for name, value in numbers.items())]
    lines += [f"constexpr bool {name} = {str(value).lower()};" for name, value in flags.items()]
    return "\n".join([*lines, f"constexpr float EPS = {config.rms_norm_eps:.9e}f;", ""])


CALLS: dict[Op, str] = {
    "qkv": "multiply_qkv(w);", "rope": "turn(w);", "attention": "attend(w);", "rope_attention": "attend(w);",
    "o": "multiply_o(w);", "gate_up": "multiply_gate_up(w);", "down": "multiply_down(w);", "lm_head": "multiply_head(w);",
    "next": "next_token(w);",
}  # fmt: skip

SUMMED_CALLS: dict[Op, str] = {"o": "multiply_summed(w);", "down": "multiply_down_summed(w);"}
"""Where CTAs add to the residual stream."""

HEADS_OF: dict[Op, str] = {
    "qkv": "w.begin(QKV) * TILE / HEAD_WORDS, w.begin(QKV) < w.end(QKV) ? (w.end(QKV) * TILE + HEAD_WORDS - 1) / HEAD_WORDS : 0",
    "rope": "w.begin(ROPE), w.end(ROPE)",
    "attention": "w.begin(ATTENTION) / (SPLITS * SHARERS), (w.end(ATTENTION) + SPLITS * SHARERS - 1) / (SPLITS * SHARERS)",
    "rope_attention": "w.begin(ATTENTION) / (SPLITS * SHARERS), (w.end(ATTENTION) + SPLITS * SHARERS - 1) / (SPLITS * SHARERS)",
}
"""The key heads that a CTA works for."""

BEFORE: dict[Edge, str] = {"none": "", "data": "", "grid": "meet_grid(w);"}


def order(plan: Plan) -> str:
    """``order.cuh``: the phases of a layer and of the tail, with their edges."""
    calls = CALLS | (SUMMED_CALLS if plan.blocks else {})

    def body(phases: tuple[Phase, ...]) -> list[str]:
        lines = []
        for phase in phases:
            waits = [wait.counter for share in phase.shares for wait in share.awaits]
            base = min(waits) if waits else 0
            lines.append(f"await_heads(w, {base}, {HEADS_OF[phase.op]});" if phase.edge == "flags" else BEFORE[phase.edge])
            lines.append(f"{phase.name}(w);" if phase.op == "norm" else calls[phase.op])
            if arrives := [counter for share in phase.shares for counter in share.arrives]:
                lines.append(f"arrive_heads(w, {min(arrives)}, {HEADS_OF[phase.op]});")
        return [f"  {line}" for line in lines if line]

    parts = ["#pragma once", "DEVICE void layer_phases(Worker& w) {", *body(plan.layer), "}"]
    return "\n".join([*parts, "DEVICE void tail_phases(Worker& w) {", *body(plan.tail), "}", ""])


def shares_table(plan: Plan) -> list[list[tuple[int, int]]]:
    """``[CTAS][SHARES][2]``: the units of each CTA in each phase that has any."""
    by_op: dict[str, Phase] = {}
    for phase in plan.phases():
        by_op.setdefault("attention" if phase.op == "rope_attention" else phase.op, phase)
    nothing = (0, 0)
    return [
        [(by_op[op].shares[cta].begin, by_op[op].shares[cta].end) if op in by_op else nothing for op in SHARES]
        for cta in range(plan.ctas)
    ]


def launch_of(plan: Plan, phase: Phase) -> tuple[int, int]:
    """How a phase is launched alone: what the kernel calls it, and its CTAs; the next token is chosen by one."""
    if phase.op == "next":
        return len(SHARES), 1
    return SHARES.index("attention" if phase.op == "rope_attention" else phase.op), plan.ctas


def arrivals_table(plan: Plan) -> list[int]:
    """How often each counter is bumped in one use."""
    found: dict[int, int] = {}
    for phase in plan.layer:
        for share in phase.shares:
            for counter in share.arrives:
                found[counter] = found.get(counter, 0) + 1
    return [found.get(counter, 0) for counter in range(max(found, default=-1) + 1)]


def source(plan: Plan, tuning: Tuning | None = None, phase: Phase | None = None) -> cuda.Source:
    """The kernel of a plan; of a plan whose phases are launches, that of a phase."""
    here = "onelaunch.decode.kernels"
    files = [cuda.include("hopper.cuh"), *((name, cuda.read(here, name)) for name in FILES)]
    files += [("plan.cuh", header(plan, tuning or Tuning())), ("order.cuh", order(plan))]
    defines = () if phase is None else (("ALONE", launch_of(plan, phase)[0]),)
    return cuda.Source("step.cu", cuda.read(here, "step.cu"), "decode", tuple(files), defines)
