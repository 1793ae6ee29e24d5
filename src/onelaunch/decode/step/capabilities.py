"""Capabilities of a variant of ``decode_step`` beyond a single step.

A variant registers them as keyword arguments of ``decode_step.variant``; they are optional. The functions here return each
with its type, or the default of a variant without it; ``decode/runtime/engines.py`` and ``decode/loops.py`` call them.

==================  ==========================================================================================================
``engine``          ``engine(weights)``: engine that makes a request's tokens; without it, ``TorchEngine`` does.
``engine_bytes``    ``engine_bytes(config)``: most bytes that the engine takes on the device in addition to plain weights.
``load``            ``load(folder, config, device)``: weights of a checkpoint in the form that the engine reads; without it, plain
                    weights.
``load_bytes``      ``load_bytes(config)``: most bytes that such weights and the engine take on the device, also while they are
                    loaded.
``prompt_steps``    ``prompt_steps(config, captured=..., unpacked=...)``: longest prompt that single steps read sooner than
                    PyTorch, which launches op by op, or replays a captured pass; it may copy matrices out of a stream first.
``in_a_row``        ``in_a_row(call, count)``: ``count`` greedy tokens ``[N]``, and the logits ``[V]`` of the last.
``barriers``        ``barriers(call)``: grid barriers of one token, by the kernel's own counter.
==================  ==========================================================================================================
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import torch

from onelaunch.decode.model.config import ModelConfig
from onelaunch.decode.model.request import Engine
from onelaunch.decode.model.weights import ModelWeights, elements, load_weights
from onelaunch.decode.step.contract import DecodeCall
from onelaunch.operation import Variant

InARow: TypeAlias = Callable[[DecodeCall, int], tuple[torch.Tensor, torch.Tensor]]
"""Function from a call and a number of greedy tokens ``N`` to the tokens ``[N]`` and the last logits ``[V]``."""


def engine(variant: Variant) -> Callable[[ModelWeights], Engine] | None:
    """Return the function that makes the variant's engine, or ``None`` if it registers none: :class:`TorchEngine` then."""
    return variant.capabilities.engine


def engine_bytes(variant: Variant, config: ModelConfig) -> int:
    """Return the most bytes that the variant's engine takes on the device in addition to the weights."""
    size: Callable[[ModelConfig], int] | None = variant.capabilities.engine_bytes
    return 0 if size is None else size(config)


def load(variant: Variant, folder: Path, config: ModelConfig, device: torch.device) -> ModelWeights:
    """Return the weights of a checkpoint in the form that the variant's engine reads."""
    own: Callable[[Path, ModelConfig, torch.device], ModelWeights] | None = variant.capabilities.load
    return load_weights(folder, config, device) if own is None else own(folder, config, device)


def load_bytes(variant: Variant, config: ModelConfig) -> int:
    """Return the most bytes that a loaded model and the variant's engine take on the device."""
    size: Callable[[ModelConfig], int] | None = variant.capabilities.load_bytes
    return elements(config) * config.dtype.itemsize + engine_bytes(variant, config) if size is None else size(config)


def prompt_steps(variant: Variant, config: ModelConfig, *, captured: bool = False, unpacked: bool = False) -> int:
    """Return the longest prompt, in tokens, that single steps read sooner than PyTorch's prefill, or its captured pass.

    ``unpacked`` says that the pass copies the matrices out of a stream first.
    """
    longest: Callable[..., int] | None = variant.capabilities.prompt_steps
    return 0 if longest is None else longest(config, captured=captured, unpacked=unpacked)


def in_a_row(variant: Variant) -> InARow | None:
    """Return the function that makes many tokens at once, or ``None`` if the variant makes single steps only."""
    return variant.capabilities.in_a_row


def barriers(variant: Variant) -> Callable[[DecodeCall], int] | None:
    """Return the function that counts the grid barriers of a token, or ``None`` if the variant's kernels count none.

    Tests call it; the workbench reads ``variant.capabilities.barriers`` itself, since it counts barriers for every operation.
    """
    return variant.capabilities.barriers
