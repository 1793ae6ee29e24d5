"""Plans of the ladder: from eight barriers a layer to none."""

from __future__ import annotations

import functools

from onelaunch.decode.model.config import ModelConfig
from onelaunch.decode.plan.builder import SPLITS, Builder, Rung
from onelaunch.decode.plan.phases import TILE, Plan

RUNGS = {
    "eight_barriers": Rung("one launch, eight barriers over the grid in each layer", norms=True, rope=True),
    "redundant_norm": Rung("one launch, six barriers: every CTA computes norms itself", rope=True),
    "head_local": Rung("one launch, four barriers: a head's CTAs wait only for each other", rope=True, heads="flags"),
    "fused_phases": Rung(
        "one launch, four barriers and one hand-off by heads: heads are turned where they are made", heads="flags"
    ),
    "tagged_words": Rung(
        "one launch, no barriers: weights stream through all edges, words tell when they are there",
        heads="data",
        others="data",
        streams=True,
        splits=SPLITS,
    ),
    "streaming": Rung(
        "the same with four hand-offs a layer: what a head found is multiplied where it is, words count what is added to them",
        heads="data",
        others="data",
        streams=True,
        splits=SPLITS,
        summed=True,
    ),
    "graph": Rung(
        "a launch for each phase, overlapping, in a CUDA graph", heads="none", others="none", splits=SPLITS, separate=True
    ),
}


def unsupported(config: ModelConfig) -> str | None:
    """Why there are no kernels for a model, in words that complete "it ...", or ``None``."""
    if config.attention_bias:
        return "has no biases in attention"
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
def plan_for(config: ModelConfig, rung: str, ctas: int, used: int | None = None, rounds: int | None = None) -> Plan:
    """The plan of a rung.

    Args:
        config: the model.
        rung: a name of :data:`RUNGS`.
        ctas: of the launch, all resident at once.
        used: CTAs that share the positions of a key head; by default as many as may. Where sums are counted all do, or, with 1,
            each takes all positions.
        rounds: in which the limits of a token are found that is drawn: 0 with a temperature alone, at most
            :data:`~onelaunch.decode.plan.phases.ROUNDS`; by default, the likeliest is taken. One kernel does both.
    """
    return Builder(config, rung, RUNGS[rung], ctas, used, rounds).plan()
