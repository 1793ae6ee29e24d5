"""Small models, and checkpoint folders of them, shared by the decoding tests and ``tests/test_fuzz.py``."""

from __future__ import annotations

from dataclasses import replace

import torch

from onelaunch.decode import ModelConfig
from onelaunch.decode.model.config import LinearScaling, Llama3Scaling, YarnScaling
from tools.model_folders import as_dict, write

__all__ = ["CONFIGS", "SMALL", "as_dict", "write"]

SMALL = ModelConfig(
    vocab_size=300,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=512,
    tie_word_embeddings=True,
    dtype=torch.float32,
    eos_token_ids=(0,),
)
"""Qwen3 model with GQA (two query heads to a KV head), small enough for the CPU. The other configurations differ from it."""

CONFIGS = {
    "tied": SMALL,
    "untied_with_biases": replace(SMALL, tie_word_embeddings=False, attention_bias=True, rms_norm_eps=1e-5),
    # One KV head for all query heads (MQA).
    "one_key_head": replace(SMALL, num_key_value_heads=1, head_dim=16, rope_theta=1e6),
    # A KV head for each query head (MHA).
    "a_key_head_each": replace(SMALL, num_key_value_heads=4, num_hidden_layers=3),
    "linear": replace(SMALL, rope_scaling=LinearScaling(3.0)),
    "yarn": replace(SMALL, rope_scaling=YarnScaling(4.0, 128)),
    # All options of YaRN that have defaults: beta_fast, beta_slow, attention_factor and truncate.
    "yarn_with_choices": replace(SMALL, rope_scaling=YarnScaling(2.0, 64, 24.0, 2.0, 1.25, truncate=False)),
    # Other families: no norms of heads, 3 and 7 query heads to a key head, biases with and without that of the output, and
    # layers without rotation.
    "llama": replace(
        SMALL,
        qk_norm=False,
        hidden_size=96,
        num_attention_heads=6,
        head_dim=16,
        rms_norm_eps=1e-5,
        rope_scaling=Llama3Scaling(8.0, 128, 1.0, 4.0),
    ),
    "llama_with_biases": replace(SMALL, qk_norm=False, attention_bias=True, tie_word_embeddings=False),
    "qwen2": replace(
        SMALL, qk_norm=False, attention_bias=True, output_bias=False, hidden_size=112, num_attention_heads=14, head_dim=8
    ),
    "smollm3": replace(SMALL, qk_norm=False, num_hidden_layers=4, unrotated_layers=(1, 3)),
    "llama3": replace(SMALL, rope_theta=5e4, rope_scaling=Llama3Scaling(8.0, 128, 1.0, 4.0)),
}
"""Configurations of models by name: head layouts, biases, tied and untied LM head, and each RoPE scaling."""
