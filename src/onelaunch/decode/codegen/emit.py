"""Source of the decode megakernel: CUDA C++ files, and two headers that are generated from a plan.

``plan.cuh`` has sizes, flags and offsets as constants, which ``step.cu`` describes; ``order.cuh`` calls the phases in order,
with the synchronization between them. So the compiler specializes the kernel for one model, optimization level and number of
SMs. ``decode/runtime/kernels.py`` compiles what :func:`source` returns.

Of a plan, ``separate`` says that each phase is a launch, ``streams`` that weights are prefetched across phases, and ``blocks`` is
given if the output projection is split over heads (split-K). Words of a ``tagged`` buffer are flag-in-data words. The ``edge``
before a phase is ``grid`` (a grid barrier), ``flags`` (semaphores per key head), ``data`` (flag-in-data words) or ``none``.
"""

from __future__ import annotations

from onelaunch import cuda
from onelaunch.decode.codegen.layout import BINS, Tuning, launch_of, layout_of, parameter_offsets, sum_rows, word_offsets
from onelaunch.decode.model.config import ModelConfig
from onelaunch.decode.plan.phases import (
    DEPTH,
    PRODUCTS,
    ROUNDS,
    Edge,
    Op,
    Phase,
    Plan,
    blocks_of,
    depth,
    groups,
    groups_of,
    in_parts,
    piece_columns,
)

KINDS: tuple[cuda.Kind, ...] = (*["pointer"] * 19, *["i32"] * 4)  # pyrefly: ignore[bad-assignment]
"""Kinds of the kernel's arguments, in the order of ``decode`` in ``step.cu``."""

_FILES = (
    "waiting.cuh",
    "consumer.cuh",
    "words.cuh",
    "vectors.cuh",
    "products.cuh",
    "heads.cuh",
    "attention.cuh",
    "parts.cuh",
    "residual.cuh",
    "sampling.cuh",
    "phases.cuh",
)
"""Headers that ``step.cu`` includes, one of them through ``phases.cuh``, in the order in which they depend on each other."""

NAMES = {
    "hidden": "RESIDUAL", "final": "FINAL", "mid": "MID", "act": "ACT", "qkv": "QKV_OUT", "partial": "PARTIAL",
    "normed": "NORMED", "q": "QUERIES", "squares": "HEAD_SQUARES", "kept": "RESIDUAL_ROWS",
}  # fmt: skip
"""Name of the constant in the kernel that holds the offset of each buffer of :func:`word_offsets`, 0 if a plan lacks it."""


def header(plan: Plan, tuning: Tuning) -> str:
    """Return the text of ``plan.cuh``: the sizes, flags and offsets that specialize the kernel."""
    config, layout, words = plan.config, layout_of(plan, tuning), word_offsets(plan)
    ops = {phase.op for phase in plan.phases()}
    numbers = {
        "CTAS": plan.ctas, "LAYERS": config.num_hidden_layers, "HIDDEN": config.hidden_size, "INNER": config.intermediate_size,
        "QUERY": config.query_size, "VOCAB": config.vocab_size, "KV_HEADS": config.num_key_value_heads,
        "GROUP": config.queries_per_key, "HEAD_DIM": config.head_dim, "KV_SPLITS": plan.splits, "QUERY_SPLITS": plan.query_splits,
        "QUERY_MERGE": plan.query_merge, "POSITIONS_PER_SPLIT": plan.positions, "MERGE_FROM": plan.merge_from,
        "SUM_ROWS": sum_rows(plan),
        "DEPTH": DEPTH if in_parts(config) else depth(config, config.hidden_size), "PIECE_COLUMNS": piece_columns(config),
        "STAGES": layout.stages, "FLIGHT": min(tuning.flight, layout.stages),
        "HOLD": tuning.hold,
        "FLIGHT_LOCAL": min(tuning.flight_local if plan.blocks else tuning.flight, layout.stages),
        "RADIX_PASSES": ROUNDS, "BINS": BINS, "PACE": (700 if plan.blocks else 800) if tuning.pace is None else tuning.pace,
        "L2_CHUNKS": tuning.l2_chunks if plan.streams else 0, "PACE_L2": tuning.pace_l2,
    }  # fmt: skip
    # Plans without blocks do not run the code that uses these constants, but it must compile.
    blocks = plan.blocks or blocks_of(config, plan.query_splits)
    numbers |= {"BLOCK_WIDTH": blocks.width, "O_TILE_COLUMNS": blocks.tile_columns}
    numbers |= {"BLOCKS_PER_SPLIT": blocks.count, "ADDERS": plan.adders}
    numbers |= {name: words.get(buffer, 0) for buffer, name in NAMES.items()} | dict(layout.offsets)
    numbers |= parameter_offsets(config)
    # Most and fewest tiles of a group that is multiplied at once, and most groups of a CTA.
    for op in PRODUCTS:
        tiles_of_groups = [end - begin for cta in range(plan.ctas) for begin, end in groups_of(plan, op, cta)]
        numbers |= {f"MAX_{op.upper()}": max(tiles_of_groups), f"MIN_{op.upper()}": min(tiles_of_groups)}
        numbers[f"GROUPS_{op.upper()}"] = max(len(groups(assignment.units)) for assignment in plan.phase(op).assignments)
    numbers["UNITS"] = max(
        assignment.units
        for phase in plan.phases()
        for assignment in phase.assignments
        if "attention" in phase.op  # also rope_attention
    )
    flags = {
        "CROSS_PHASE_PREFETCH": plan.streams, "LAUNCH_PER_PHASE": plan.separate,
        "FLAG_IN_DATA": any(buffer.tagged for buffer in plan.buffers),
        "ROPE_PHASE": "rope" in ops, "NORM_PHASE": "norm" in ops, "PROFILED": tuning.stamps,
        "KV_THROUGH_RING": plan.kv_through_ring, "SPLIT_K_O": plan.blocks is not None,
        "QK_NORM": config.qk_norm, "QKV_BIAS": config.attention_bias, "O_BIAS": config.attention_bias and config.output_bias,
        "SOME_UNROTATED": bool(config.unrotated_layers),
    }  # fmt: skip
    lines = ["#pragma once", *(f"constexpr int {name} = {value};" for name, value in numbers.items())]
    lines += [f"constexpr bool {name} = {str(value).lower()};" for name, value in flags.items()]
    lines += _rotates(config)
    return "\n".join([*lines, f"constexpr float EPS = {config.rms_norm_eps:.9e}f;", ""])


def _rotates(config: ModelConfig) -> list[str]:
    """Return the lines of the kernel's function that tells whether a layer rotates queries and keys, by a bit for each layer."""
    unrotated = frozenset(config.unrotated_layers)
    lines = []
    for first in range(0, config.num_hidden_layers if unrotated else 0, 32):
        bits = sum(1 << layer - first for layer in range(first, first + 32) if layer not in unrotated)
        lines.append(f"  if (layer < {first + 32}) return 0x{bits:08X}u >> layer % 32 & 1;")
    return ["DEVICE bool rotates(int layer) {", *lines, "  return true;", "}"]


_CALLS: dict[Op, str] = {
    "qkv": "multiply_qkv(c);", "rope": "norm_rope(c);", "attention": "attend(c);", "rope_attention": "attend(c);",
    "o": "multiply_o(c);", "gate_up": "multiply_gate_up(c);", "down": "multiply_down(c);", "lm_head": "multiply_head(c);",
    "next": "next_token(c);",
}  # fmt: skip
"""Call of each phase's function in the kernel.

A ``norm`` is called by the name of its phase. ``next_token`` samples too: plans with the sampler's phases, ``tally`` and
``draw``, are made for checks and tests, and no kernel is generated from them.
"""

_SPLIT_K_CALLS: dict[Op, str] = {"o": "multiply_o_split_k(c);", "down": "multiply_down_counted(c);"}
"""Calls of the phases that add atomically to the residual stream, if the output projection is split over heads."""

_ATTENTION_HEADS = (
    "c.begin(ATTENTION) / (KV_SPLITS * QUERY_SPLITS), "
    "(c.end(ATTENTION) + KV_SPLITS * QUERY_SPLITS - 1) / (KV_SPLITS * QUERY_SPLITS)"
)
"""First key head of a CTA's units of attention, and one past the last, as arguments in the kernel."""

_HEADS_OF: dict[Op, str] = {
    "qkv": "c.begin(QKV) * TILE / HEAD_WORDS, c.begin(QKV) < c.end(QKV) ? (c.end(QKV) * TILE + HEAD_WORDS - 1) / HEAD_WORDS : 0",
    "rope": "c.begin(ROPE), c.end(ROPE)",
    "attention": _ATTENTION_HEADS,
    "rope_attention": _ATTENTION_HEADS,
}
"""First key head that a CTA works for in a phase, and one past the last, as arguments in the kernel."""

_BEFORE: dict[Edge, str] = {"none": "", "data": "", "grid": "grid_barrier(c);"}
"""Synchronization before a phase; flag-in-data words are waited for within it."""


def order(plan: Plan) -> str:
    """Return the text of ``order.cuh``: the phases of a layer and of the tail, with the synchronization between them."""
    calls = _CALLS | (_SPLIT_K_CALLS if plan.blocks else {})

    def body(phases: tuple[Phase, ...]) -> list[str]:
        lines = []
        for phase in phases:
            waits = [wait.counter for assignment in phase.assignments for wait in assignment.awaits]
            base = min(waits) if waits else 0  # the semaphore of key head 0; those of a phase follow each other by head
            lines.append(f"wait_heads(c, {base}, {_HEADS_OF[phase.op]});" if phase.edge == "flags" else _BEFORE[phase.edge])
            lines.append(f"{phase.name}(c);" if phase.op == "norm" else calls[phase.op])
            if arrives := [counter for assignment in phase.assignments for counter in assignment.arrives]:
                lines.append(f"signal_heads(c, {min(arrives)}, {_HEADS_OF[phase.op]});")
        return [f"  {line}" for line in lines if line]

    parts = ["#pragma once", "DEVICE void layer_phases(Consumer& c) {", *body(plan.layer), "}"]
    return "\n".join([*parts, "DEVICE void tail_phases(Consumer& c) {", *body(plan.tail), "}", ""])


def source(plan: Plan, tuning: Tuning | None = None, phase: Phase | None = None) -> cuda.Source:
    """Return the source of a plan's kernel, or of one phase's kernel if the plan has a launch per phase."""
    here = "onelaunch.decode.codegen.kernels"
    files = [cuda.include("hopper.cuh"), cuda.include("machine.cuh"), *((name, cuda.read(here, name)) for name in _FILES)]
    files += [("plan.cuh", header(plan, tuning or Tuning())), ("order.cuh", order(plan))]
    defines = () if phase is None else (("ONLY_PHASE", launch_of(plan, phase)[0]),)
    return cuda.Source("step.cu", cuda.read(here, "step.cu"), "decode", tuple(files), defines)
