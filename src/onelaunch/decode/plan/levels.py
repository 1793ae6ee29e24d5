"""Optimization levels of the decode megakernel, from eight grid barriers per layer to none, and the plan of each.

Each level adds to the previous one, so that their times are an ablation; only ``graph``, the baseline with a launch per phase,
stands apart. Each is a variant of ``decode_step``. The megakernel's variants ask :func:`unsupported` and, as
``decode/runtime/proofs.py`` does, :func:`plan_for`; engines ask whether a level has a launch per phase. :class:`Level` explains
the options. ``heads`` and ``others`` name the synchronization before phases, which is ``grid`` (a grid barrier), ``flags``
(semaphores per key head), ``data`` (flag-in-data words) or ``none``.
"""

from __future__ import annotations

import functools

from onelaunch.decode.model.config import ModelConfig
from onelaunch.decode.plan.builder import Builder, Level
from onelaunch.decode.plan.phases import SPLITS, TILE, Plan
from onelaunch.moved import renamed

__getattr__ = renamed(__name__, {"RUNGS": "LEVELS", "Rung": "Level"})

LEVELS = {
    "eight_barriers": Level("one launch, eight grid barriers per layer", norms=True, rope=True),
    "redundant_norm": Level("one launch, six grid barriers per layer: every CTA computes the norms itself", rope=True),
    "head_local": Level(
        "one launch, four grid barriers per layer: the CTAs of a head synchronize by semaphores", rope=True, heads="flags"
    ),
    "fused_phases": Level(
        "one launch, four grid barriers per layer and one semaphore per head: RoPE is in the epilogue of the QKV product",
        heads="flags",
    ),
    "tagged_words": Level(
        "one launch, no grid barriers but those of sampling: flag-in-data words, and weights are prefetched across all phases",
        heads="data",
        others="data",
        streams=True,
        splits=SPLITS,
    ),
    "streaming": Level(
        "as tagged_words, with one exchange of all CTAs less: the output projection is split over heads and added atomically",
        heads="data",
        others="data",
        streams=True,
        splits=SPLITS,
        summed=True,
    ),
    "graph": Level(
        "one launch per phase, overlapping, in a CUDA graph", heads="none", others="none", splits=SPLITS, separate=True
    ),
}
"""Optimization levels by name, in the order of the ablation, and ``graph``."""


def unsupported(config: ModelConfig) -> str | None:
    """Return why the kernels cannot run a model, in words that complete "it ...", or ``None`` if they can."""
    if str(config.dtype) != "torch.bfloat16":
        return f"takes weights in bfloat16, not {str(config.dtype).removeprefix('torch.')}"
    if config.head_dim not in (8, 16, 32, 64, 128, 256):
        return f"takes heads of 8 to 256 channels in powers of two, not {config.head_dim}"
    if config.hidden_size % TILE or config.intermediate_size % TILE:
        return f"takes sizes in multiples of {TILE}, not {config.hidden_size} and {config.intermediate_size}"
    if config.vocab_size >= 1 << 24:
        return f"numbers tokens in 24 bits, not {config.vocab_size}"
    if config.queries_per_key > 8:
        return f"takes at most 8 query heads for a key head, not {config.queries_per_key}"
    return None


@functools.lru_cache(maxsize=64)
def plan_for(config: ModelConfig, level: str, ctas: int, used: int | None = None, rounds: int | None = None) -> Plan:
    """Return the plan of an optimization level.

    Args:
        config: Model.
        level: Optimization level, a name of :data:`LEVELS`.
        ctas: Number of CTAs of the launch, all resident at once.
        used: Number of KV splits of a key head that have positions; by default the most, as the kernel is generated. The kernel
            computes the number from the position itself, so it is passed only to check a plan at other lengths. In levels that
            are ``summed`` it is 1 (each unit takes all positions), the number of ``splits``, or the most.
        rounds: Number of radix-select passes of a sampled token: 0 with a temperature alone, at most
            :data:`~onelaunch.decode.plan.phases.ROUNDS`. By default the token with the largest logit is taken. One kernel
            does both; the number only matters for the check.
    """
    return Builder(config, level, LEVELS[level], ctas, used, rounds).plan()
