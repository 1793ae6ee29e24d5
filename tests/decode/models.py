"""Small models, and checkpoint folders of them, shared by the decoding tests and ``tests/test_fuzz.py``."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from onelaunch.decode import ModelConfig, Weights
from onelaunch.decode.model.config import LinearScaling, Llama3Scaling, YarnScaling
from onelaunch.decode.model.families import ARCHITECTURES
from onelaunch.decode.model.weights import parts

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

ROPE_TYPES = {LinearScaling: "linear", YarnScaling: "yarn", Llama3Scaling: "llama3"}
"""Value of ``rope_type`` in ``config.json`` for each class of RoPE scaling."""


def architecture_of(config: ModelConfig) -> str:
    """Return an architecture that has the features of a configuration."""
    if config.qk_norm:
        return "Qwen3ForCausalLM"
    if config.unrotated_layers:
        return "SmolLM3ForCausalLM"
    return "Qwen2ForCausalLM" if config.attention_bias and not config.output_bias else "LlamaForCausalLM"


def as_dict(config: ModelConfig) -> dict[str, Any]:
    """Return the content of a Hugging Face ``config.json`` for a configuration."""
    unsaved = ("dtype", "eos_token_ids", "rope_scaling", "qk_norm", "output_bias", "unrotated_layers")
    content = {name: value for name, value in vars(config).items() if name not in unsaved}
    name = architecture_of(config)
    content |= {"architectures": [name], "model_type": ARCHITECTURES[name].model_type}
    content["dtype"] = str(config.dtype).removeprefix("torch.")
    if config.unrotated_layers:
        content["no_rope_layers"] = [int(each not in config.unrotated_layers) for each in range(config.num_hidden_layers)]
        content["pad_token_id"] = 0  # the default is no token of a small vocabulary
    content["eos_token_id"] = list(config.eos_token_ids)
    if (scaling := config.rope_scaling) is not None:
        parameters = {name: value for name, value in vars(scaling).items() if value is not None}
        content["rope_parameters"] = parameters | {"rope_type": ROPE_TYPES[type(scaling)], "rope_theta": config.rope_theta}
    return content


def write(folder: Path, weights: Weights, shards: int = 1) -> Path:
    """Write weights and configuration as a Hugging Face folder, and return the folder.

    With several ``shards``, tensors are dealt to the files in turn, and an index file names the file of each tensor.
    """
    config = weights.config
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(as_dict(config)))
    by_field = weights.tensors()
    tensors = {checkpoint_name: by_field[field] for field, checkpoint_name, _ in parts(config)}
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    file_of = {name: f"model-{number % shards}.safetensors" for number, name in enumerate(tensors)}
    for file in set(file_of.values()):
        save_file({name: tensor for name, tensor in tensors.items() if file_of[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": file_of}))
    return folder
