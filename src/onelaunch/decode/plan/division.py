"""Division of the matrices of a layer among CTAs, in tiles of eight rows.

``builder.py`` divides the work of a plan with it, and ``packing.py`` asks :func:`tiles`.
"""

from __future__ import annotations

from collections.abc import Sequence

from onelaunch.decode.model.config import ModelConfig
from onelaunch.decode.plan.phases import CHUNK, TILE, Op

UNEVEN = 1.1
"""Ratio of the busiest CTA's weights in a layer to the mean, above which tiles are divided by :func:`balanced`.

Below it, equal numbers of tiles keep every phase as short as it can be.
"""

AHEAD_BYTES = 12 * CHUNK
"""Bytes of weights that a CTA copies ahead, about the size of its ring.

If a CTA's weights of a layer are fewer, no phase waits for copies, and equal numbers of tiles are best.
"""


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


def balanced(count: int, weight: int, others: Sequence[int]) -> list[tuple[int, int]]:
    """Divide ``count`` tiles among CTAs so that their weights are as equal as possible over all phases of a layer.

    The tiles of a matrix with few rows are so large that some CTAs have twice the weights of others in its phase. A CTA that has
    fewer there takes more tiles of another matrix. It copies them into its ring while the others still multiply.

    Args:
        count: Number of tiles.
        weight: Weights of a tile, in any unit.
        others: Weights of each CTA in the other phases, in the same unit.

    Returns:
        First tile of each CTA and one past the last.
    """
    low, high = 0, sum(others) + count * weight  # the most that a CTA has of all phases
    while low < high:
        most = (low + high) // 2
        if sum(max(most - other, 0) // weight for other in others) >= count:
            high = most
        else:
            low = most + 1
    shares = [max(low - other, 0) // weight for other in others]
    for cta in sorted(range(len(others)), key=lambda cta: others[cta] + shares[cta] * weight, reverse=True):
        if (spare := sum(shares) - count) <= 0:
            break
        shares[cta] -= min(spare, 1, shares[cta])
    ends = [sum(shares[: cta + 1]) for cta in range(len(shares))]
    return list(zip([0, *ends], ends, strict=False))
