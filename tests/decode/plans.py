"""Models, plans and KV caches shared by tests of plans and of their kernels on the host, small enough for one core.

Each optimization level of the decode megakernel (``level``) is a variant of ``decode_step``.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from onelaunch.decode import KVCache, ModelConfig, random_weights
from onelaunch.decode.model.config import Llama3Scaling
from onelaunch.decode.plan.levels import LEVELS, plan_for
from onelaunch.decode.plan.packing import pack
from tools.model_shapes import SHAPES

# Vocabulary, hidden size, intermediate size, layers, query heads, key heads, channels of a head.
TINY = ModelConfig(300, 128, 96, 2, 4, 2, 16, max_position_embeddings=512, tie_word_embeddings=True)
MODELS = {
    "tied": TINY,
    "untied, a key head": replace(TINY, tie_word_embeddings=False, num_key_value_heads=1, head_dim=32, num_hidden_layers=1),
    "odd sizes": replace(TINY, vocab_size=101, hidden_size=264, intermediate_size=520, head_dim=64),
    "whole chunks": ModelConfig(100, 1024, 1024, 2, 8, 2, 128, max_position_embeddings=512, tie_word_embeddings=True),
    "half chunks": ModelConfig(100, 512, 512, 1, 8, 4, 64, max_position_embeddings=512, qk_norm=False, attention_bias=True),
    "two queries a key": ModelConfig(100, 1024, 1024, 1, 8, 4, 128, max_position_embeddings=512, tie_word_embeddings=True),
    "five queries a key": replace(TINY, num_attention_heads=5, num_key_value_heads=1),
    "llama": replace(TINY, qk_norm=False, hidden_size=192, num_attention_heads=6, rope_scaling=Llama3Scaling(8.0, 128, 1.0, 4.0)),
    "qwen2": replace(
        TINY,
        qk_norm=False,
        attention_bias=True,
        output_bias=False,
        hidden_size=112,
        num_attention_heads=14,
        head_dim=8,
        rms_norm_eps=1e-5,
    ),
    "biases everywhere": replace(TINY, attention_bias=True, tie_word_embeddings=False),
    "smollm3": replace(TINY, qk_norm=False, num_hidden_layers=3, num_attention_heads=8, unrotated_layers=(1,)),
    "two blocks": ModelConfig(100, 1056, 1184, 1, 6, 2, 16, max_position_embeddings=512, tie_word_embeddings=True, qk_norm=False),
    "three blocks": replace(TINY, hidden_size=160, intermediate_size=2080, num_hidden_layers=1),
    "three layers": replace(TINY, num_key_value_heads=4, rope_theta=1e6, head_dim=8, num_hidden_layers=3),
}
"""Models by name. In "whole chunks", rows have 1024 columns, as a bulk copy has, so that keys too pass through the ring.

In "half chunks" a chunk has rows of two tiles. The weights of most others are counted in parts of a warp, as rows end anywhere;
in "two blocks" and "three blocks" the columns of some rows are several blocks, of which the last is shorter.
"""


BRIEFLY, BY_HAND = ("tied", "odd sizes"), ("llama", "biases everywhere", "two blocks", "half chunks")
"""Models whose plans are interpreted in every run of the tests, or only by hand; those of others are in ``make check``."""


def marks_of(model: str) -> list[pytest.MarkDecorator]:
    """Return the marks of the tests that interpret the plans of one of :data:`MODELS`."""
    return [] if model in BRIEFLY else [pytest.mark.every if model in BY_HAND else pytest.mark.thorough]


FAMILIES = {name: config for name, config in SHAPES.items() if not config.qk_norm and name != "small"}
"""Public models of other families than Qwen3, at their sizes."""

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
