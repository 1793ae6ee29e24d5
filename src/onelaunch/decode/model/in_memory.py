"""Weights and configuration of a model that ``transformers`` holds in memory.

``decode/transformers_model.py`` makes a :class:`~onelaunch.decode.Model` of them. Nothing is copied: the weights are the model's
own parameters, so a change of theirs counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from onelaunch.decode.model.config import DTYPES, ModelConfig
from onelaunch.decode.model.families import ARCHITECTURES
from onelaunch.decode.model.weights import Weights, from_tensors, parts
from onelaunch.errors import ArgumentError, DTypeError, UnsupportedModel
from onelaunch.wording import listing, shown


def weights_of(hf_model: Any) -> Weights:
    """Return the weights of a model of ``transformers``, which share its memory.

    Args:
        hf_model: Model of a supported architecture, such as ``Qwen3ForCausalLM``: plain parameters of one dtype on one device.

    Raises:
        ArgumentError: It is no such model; parameters are missing, left over, on several devices, or without memory.
        UnsupportedModel, ModelConfigError: its architecture or a feature of it is not supported, such as quantized weights.
        DTypeError: its parameters have another dtype, or several.
        ShapeError, DeviceError: a parameter does not match the configuration.
    """
    architecture = type(hf_model).__name__
    settings = getattr(getattr(hf_model, "config", None), "to_dict", None)
    if not isinstance(hf_model, torch.nn.Module) or settings is None:
        raise ArgumentError(f"hf_model is {shown(hf_model)}; it must be a model of transformers, such as Qwen3ForCausalLM.")
    if architecture not in ARCHITECTURES:
        hint = "; merge its adapters first, as by merge_and_unload" if hasattr(hf_model, "peft_config") else ""
        raise UnsupportedModel(f"architecture {shown(architecture)}{hint}", supported=ARCHITECTURES)
    values = settings()
    tensors = {name: tensor.detach() for name, tensor in hf_model.named_parameters(remove_duplicate=False)}
    if getattr(hf_model, "hf_quantizer", None) is not None or values.get("quantization_config"):
        raise UnsupportedModel("quantized weights", supported=tuple(DTYPES))
    dtype = _only_one(tensors)
    config = ModelConfig.from_dict({**values, "architectures": [architecture], "dtype": dtype})
    ends = getattr(getattr(hf_model, "generation_config", None), "eos_token_id", None)
    if ends is not None:
        config = replace(config, eos_token_ids=tuple(ends) if isinstance(ends, (list, tuple)) else (ends,))
    config = replace(config, tie_word_embeddings=_is_tied(tensors))
    return _checked(config, tensors)


def _only_one(tensors: Mapping[str, torch.Tensor]) -> torch.dtype:
    """Return the dtype of all parameters, after a check that they have one dtype and lie on one device."""
    if not tensors:
        raise ArgumentError("hf_model has no parameters; it must be a model that is loaded.")
    first, dtype, device = next((name, tensor.dtype, tensor.device) for name, tensor in tensors.items())
    for name, tensor in tensors.items():
        if tensor.is_meta:
            raise ArgumentError(f"{name} of hf_model has no memory (it is on the meta device); load it onto one device first.")
        if tensor.dtype is not dtype:
            raise DTypeError(f"{name} of hf_model", got=tensor.dtype, want=f"{dtype} as {first}; use hf_model.to({dtype})")
        if tensor.device != device:
            raise ArgumentError(f"{name} of hf_model is on {tensor.device}, and {first} is on {device}; move all to one device.")
    if dtype not in DTYPES.values():
        raise DTypeError("hf_model", got=dtype, want=f"one of {listing(DTYPES)}")
    return dtype


def _is_tied(tensors: Mapping[str, torch.Tensor]) -> bool:
    """Return whether the LM head is the embedding: by its memory, since a configuration may say something else."""
    head, embedding = (tensors.get(name) for name in ("lm_head.weight", "model.embed_tokens.weight"))
    return head is None or (embedding is not None and head.data_ptr() == embedding.data_ptr())


def _checked(config: ModelConfig, tensors: dict[str, torch.Tensor]) -> Weights:
    """Return the weights made of parameters by their names in ``transformers``, each of which must have a place."""
    wanted = {file_name: name for name, file_name, _ in parts(config)}
    if missing := [name for name in wanted if name not in tensors]:
        raise ArgumentError(f"hf_model has no parameter {missing[0]}, which its configuration asks for.")
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    if rest := sorted(tensors.keys() - wanted.keys() - tied):
        hint = "; merge adapters first, as by merge_and_unload" if any("lora" in name for name in rest) else ""
        raise ArgumentError(f"hf_model has the parameter {rest[0]}, for which its configuration has no place{hint}.")
    weights = from_tensors(config, {wanted[name]: tensors[name] for name in wanted})
    weights.check()
    return weights
