"""Folders of models with given weights, as Hugging Face lays them out. Tests and ``measure_serving.py`` write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from onelaunch.decode import ModelConfig, Weights
from onelaunch.decode.model.config import LinearScaling, Llama3Scaling, YarnScaling
from onelaunch.decode.model.families import ARCHITECTURES
from onelaunch.decode.model.weights import parts

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
