"""Source of the decode megakernel: two headers generated from a plan, and the CUDA C++ files that include them."""

from __future__ import annotations

from onelaunch import cuda
from onelaunch.decode.codegen.layout import BINS, Tuning, launch_of, layout_of, sum_rows, word_offsets
from onelaunch.decode.plan.phases import PRODUCTS, ROUNDS, Edge, Op, Phase, Plan, blocks_of, depth, groups, groups_of

KINDS: tuple[cuda.Kind, ...] = (*["pointer"] * 19, *["i32"] * 4)  # pyrefly: ignore[bad-assignment]
"""Kinds of the kernel's arguments, in order."""

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
"""Headers that ``step.cu`` includes."""


NAMES = {
    "hidden": "RESIDUAL", "final": "FINAL", "mid": "MID", "act": "ACT", "qkv": "RAW", "partial": "PARTIAL", "normed": "NORMED",
    "q": "QUERIES", "squares": "HEAD_SQUARES", "kept": "KEPT",
}  # fmt: skip
"""Names of buffers in the kernel."""


def header(plan: Plan, tuning: Tuning) -> str:
    """Return the text of ``plan.cuh``: the sizes and flags that specialize the kernel."""
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
    numbers |= {
        "BLOCK_WIDTH": blocks.width,
        "BLOCK_ROOM": blocks.tile_columns,
        "UNIT_BLOCKS": blocks.count,
        "ADDERS": plan.adders,
    }
    numbers |= {name: words.get(buffer, 0) for buffer, name in NAMES.items()} | dict(layout.offsets)
    for op in PRODUCTS:
        together = [end - begin for cta in range(plan.ctas) for begin, end in groups_of(plan, op, cta)]
        numbers |= {f"MOST_{op.upper()}": max(together), f"LEAST_{op.upper()}": min(together)}
        numbers[f"GROUPS_{op.upper()}"] = max(len(groups(share.units)) for share in plan.phase(op).shares)
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
"""Calls of the phases in which CTAs add to the residual stream."""

HEADS_OF: dict[Op, str] = {
    "qkv": "w.begin(QKV) * TILE / HEAD_WORDS, w.begin(QKV) < w.end(QKV) ? (w.end(QKV) * TILE + HEAD_WORDS - 1) / HEAD_WORDS : 0",
    "rope": "w.begin(ROPE), w.end(ROPE)",
    "attention": "w.begin(ATTENTION) / (SPLITS * SHARERS), (w.end(ATTENTION) + SPLITS * SHARERS - 1) / (SPLITS * SHARERS)",
    "rope_attention": "w.begin(ATTENTION) / (SPLITS * SHARERS), (w.end(ATTENTION) + SPLITS * SHARERS - 1) / (SPLITS * SHARERS)",
}
"""First and last key head that a CTA works for, as arguments in the kernel."""

BEFORE: dict[Edge, str] = {"none": "", "data": "", "grid": "meet_grid(w);"}


def order(plan: Plan) -> str:
    """Return the text of ``order.cuh``: the phases of a layer and of the tail, with the synchronization between them."""
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


def source(plan: Plan, tuning: Tuning | None = None, phase: Phase | None = None) -> cuda.Source:
    """Return the kernel of a plan, or that of one phase of a plan whose phases are launches."""
    here = "onelaunch.decode.codegen.kernels"
    files = [cuda.include("hopper.cuh"), *((name, cuda.read(here, name)) for name in FILES)]
    files += [("plan.cuh", header(plan, tuning or Tuning())), ("order.cuh", order(plan))]
    defines = () if phase is None else (("ALONE", launch_of(plan, phase)[0]),)
    return cuda.Source("step.cu", cuda.read(here, "step.cu"), "decode", tuple(files), defines)
