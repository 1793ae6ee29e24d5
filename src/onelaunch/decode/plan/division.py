"""Division of the matrices of a layer among CTAs, in tiles of eight rows.

``builder.py`` divides the work of a plan with it, and ``packing.py`` asks :func:`tiles`.
"""

from __future__ import annotations

from onelaunch.decode.model.config import ModelConfig
from onelaunch.decode.plan.phases import TILE, Op


def tiles(config: ModelConfig, op: Op) -> int:
    """Return the number of tiles of a phase's matrix."""
    rows = {
        "qkv": config.query_size + 2 * config.key_value_size,
        "o": config.hidden_size,
        "gate_up": 2 * config.intermediate_size,
        "down": config.hidden_size,
        "lm_head": config.vocab_size,
    }[op]
    return -(-rows // TILE)


def layer_ctas(config: ModelConfig, ctas: int) -> int:
    """Return the number of CTAs that work in the layers.

    It is the smallest number with which the busiest CTA of each phase has no more tiles than if all CTAs worked.
    """
    counts = [tiles(config, op) for op in ("qkv", "o", "gate_up", "down")]
    most = [-(-count // ctas) for count in counts]
    return max(-(-count // each) for count, each in zip(counts, most, strict=True))
