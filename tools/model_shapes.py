"""Shapes of published language models, which ``measure_decoding.py`` and ``measure_prompts.py`` fill with random weights."""

from __future__ import annotations

from onelaunch.decode.model.config import Llama3Scaling, ModelConfig

_LLAMA = Llama3Scaling(32.0, 8192, 1.0, 4.0)
"""Scaling of the RoPE frequencies of Llama 3.2."""

SHAPES = {
    "Llama-3.2-1B": ModelConfig(
        128_256, 2048, 8192, 16, 32, 8, 64, rms_norm_eps=1e-5, rope_theta=5e5, rope_scaling=_LLAMA, tie_word_embeddings=True,
        qk_norm=False,
    ),
    "Llama-3.2-3B": ModelConfig(
        128_256, 3072, 8192, 28, 24, 8, 128, rms_norm_eps=1e-5, rope_theta=5e5, rope_scaling=_LLAMA, tie_word_embeddings=True,
        qk_norm=False,
    ),
    "Qwen2.5-0.5B": ModelConfig(
        151_936, 896, 4864, 24, 14, 2, 64, rope_theta=1e6, tie_word_embeddings=True, qk_norm=False, attention_bias=True,
        output_bias=False,
    ),
    "Qwen2.5-1.5B": ModelConfig(
        151_936, 1536, 8960, 28, 12, 2, 128, rope_theta=1e6, tie_word_embeddings=True, qk_norm=False, attention_bias=True,
        output_bias=False,
    ),
    "SmolLM2-135M": ModelConfig(
        49_152, 576, 1536, 30, 9, 3, 64, rms_norm_eps=1e-5, rope_theta=1e5, tie_word_embeddings=True, qk_norm=False
    ),
    "SmolLM2-360M": ModelConfig(
        49_152, 960, 2560, 32, 15, 5, 64, rms_norm_eps=1e-5, rope_theta=1e5, tie_word_embeddings=True, qk_norm=False
    ),
    "Mistral-7B": ModelConfig(32_768, 4096, 14_336, 32, 32, 8, 128, rms_norm_eps=1e-5, rope_theta=1e6, qk_norm=False),
    "SmolLM3-3B": ModelConfig(
        128_256, 2048, 11_008, 36, 16, 4, 128, rope_theta=5e6, tie_word_embeddings=True, qk_norm=False,
        unrotated_layers=tuple(range(3, 36, 4)),
    ),
    "Qwen3-0.6B": ModelConfig(151_936, 1024, 3072, 28, 16, 8, 128, rope_theta=1e6, tie_word_embeddings=True),
    "Qwen3-1.7B": ModelConfig(151_936, 2048, 6144, 28, 16, 8, 128, rope_theta=1e6, tie_word_embeddings=True),
    "Qwen3-4B": ModelConfig(151_936, 2560, 9728, 36, 32, 8, 128, rope_theta=1e6, tie_word_embeddings=True),
    "Qwen3-8B": ModelConfig(151_936, 4096, 12_288, 36, 32, 8, 128, rope_theta=1e6),
    "small": ModelConfig(300, 96, 160, 2, 6, 2, 16, tie_word_embeddings=True, qk_norm=False),
}  # fmt: skip
"""Shapes by name; ``small`` is no published model. It is for machines without a GPU, and measured only if it is named."""
