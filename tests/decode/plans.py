"""Models, plans and KV caches shared by tests of plans and of their kernels on the host, small enough for one core.

Each optimization level of the decode megakernel (``level``) is a variant of ``decode_step``.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from onelaunch.decode import KVCache, ModelConfig, random_weights
from onelaunch.decode.plan.levels import LEVELS, plan_for
from onelaunch.decode.plan.packing import pack

# Vocabulary, hidden size, intermediate size, layers, query heads, key heads, channels of a head.
TINY = ModelConfig(300, 128, 96, 2, 4, 2, 16, max_position_embeddings=512, tie_word_embeddings=True)
MODELS = {
    "tied": TINY,
    "untied, a key head": replace(TINY, tie_word_embeddings=False, num_key_value_heads=1, head_dim=32, num_hidden_layers=1),
    "odd sizes": replace(TINY, vocab_size=101, hidden_size=264, intermediate_size=520, head_dim=64),
    "whole chunks": ModelConfig(100, 1024, 1024, 2, 8, 2, 128, max_position_embeddings=512, tie_word_embeddings=True),
    "two queries a key": ModelConfig(100, 1024, 1024, 1, 8, 4, 128, max_position_embeddings=512, tie_word_embeddings=True),
    "five queries a key": replace(TINY, num_attention_heads=5, num_key_value_heads=1),
    "three layers": replace(TINY, num_key_value_heads=4, rope_theta=1e6, head_dim=8, num_hidden_layers=3),
}
"""Models by name. In "whole chunks", rows have 1024 columns, as a bulk copy has, so that keys too pass through the ring."""


WIDE = ModelConfig(100, 1024, 1024, 2, 16, 2, 128, max_position_embeddings=512, tie_word_embeddings=True)
"""Model whose attention is wider than its hidden size, in whole chunks of a product."""

DEEP = replace(TINY, num_attention_heads=8, num_key_value_heads=8, head_dim=8, num_hidden_layers=30, hidden_size=64)
"""Model with more additions to a word of the residual stream than its counter holds: the counter carries into the sum."""

SHARED = {"two queries a key": (16, 2), "whole chunks": (9, 2), "five queries a key": (12, 2), "untied, a key head": (24, 8)}
"""Number of CTAs and of KV splits with which several CTAs divide the queries of one key head."""


def plan_with(config: ModelConfig, level: str, ctas: int, splits: int, used: int | None = None, **options):
    """Return the plan of a level for ``ctas`` CTAs with at most ``splits`` KV splits per key head.

    ``used`` of them have positions, by default all. ``options`` replace further fields of the level.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(LEVELS, level, replace(LEVELS[level], splits=splits, **options))
        return plan_for(config, level, ctas, used)


def weights_and_caches(config: ModelConfig, length: int, seed: int = 0):
    """Return random weights and a random KV cache with ``length`` positions in bfloat16, then both with equal values in float64.

    The cache has room for 40 more positions.
    """
    weights = random_weights(config, seed)
    generator = torch.Generator().manual_seed(seed)
    cache = KVCache.empty(config, length + 40)
    for each in (cache.keys, cache.values):
        each.copy_(torch.randn(each.shape, generator=generator))
    cache = cache.with_length(length)
    return weights, cache, weights.map(torch.Tensor.double), cache.map(torch.Tensor.double)


def packed(weights, plan, *, double: bool = False):
    """Pack the weights for a plan, optionally in float64."""
    stream = pack(weights, plan)
    return replace(stream, data=stream.data.double()) if double else stream
