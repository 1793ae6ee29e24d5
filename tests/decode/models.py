"""Models and checkpoint files shared by the decoding tests."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from onelaunch.decode import ModelConfig, Weights
from onelaunch.decode.model.config import LinearScaling, Llama3Scaling, YarnScaling
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

CONFIGS = {
    "tied": SMALL,
    "untied_with_biases": replace(SMALL, tie_word_embeddings=False, attention_bias=True, rms_norm_eps=1e-5),
    "one_key_head": replace(SMALL, num_key_value_heads=1, head_dim=16, rope_theta=1e6),
    "a_key_head_each": replace(SMALL, num_key_value_heads=4, num_hidden_layers=3),
    "linear": replace(SMALL, rope_scaling=LinearScaling(3.0)),
    "yarn": replace(SMALL, rope_scaling=YarnScaling(4.0, 128)),
    "yarn_with_choices": replace(SMALL, rope_scaling=YarnScaling(2.0, 64, 24.0, 2.0, 1.25, truncate=False)),
    "llama3": replace(SMALL, rope_theta=5e4, rope_scaling=Llama3Scaling(8.0, 128, 1.0, 4.0)),
}

KINDS = {LinearScaling: "linear", YarnScaling: "yarn", Llama3Scaling: "llama3"}


def as_dict(config: ModelConfig) -> dict[str, Any]:
    """Return the content of ``config.json`` for a configuration."""
    named = {name: value for name, value in vars(config).items() if name not in ("dtype", "eos_token_ids", "rope_scaling")}
    named |= {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "dtype": str(config.dtype).removeprefix("torch.")}
    named["eos_token_id"] = list(config.eos_token_ids)
    if (scaling := config.rope_scaling) is not None:
        given = {name: value for name, value in vars(scaling).items() if value is not None}
        named["rope_parameters"] = given | {"rope_type": KINDS[type(scaling)], "rope_theta": config.rope_theta}
    return named


def write(folder: Path, weights: Weights, shards: int = 1) -> Path:
    """Write weights and configuration as a Hugging Face folder."""
    config = weights.config
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(as_dict(config)))
    held = weights.tensors()
    tensors = {file_name: held[name] for name, file_name, _ in parts(config)}
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    homes = {name: f"model-{number % shards}.safetensors" for number, name in enumerate(tensors)}
    for file in set(homes.values()):
        save_file({name: tensor for name, tensor in tensors.items() if homes[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": homes}))
    return folder
