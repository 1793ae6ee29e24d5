"""Prompts: conversion of text, sequences or tensors to tokens, each checked to be a token of the model.

``decode/generate.py`` calls :func:`tokens_of` for every request.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from collections.abc import Set as AbstractSet
from itertools import islice
from typing import Any, TypeAlias

import torch

from onelaunch.decode.model.config import ModelConfig
from onelaunch.decode.model.tokenizer import TextCodec
from onelaunch.errors import ArgumentError, CheckpointError, ValueRangeError
from onelaunch.wording import in_a_line, shown

Prompt: TypeAlias = str | Sequence[int] | torch.Tensor
"""Prompt as callers give it: text, or token ids in a sequence or in a tensor ``[T]`` or ``[1, T]``."""

_EXPECTED = "it must be text, or token ids in a sequence or a tensor"
"""Requirement on a prompt, for the messages that refuse one of another type."""


def tokens_of(prompt: Prompt, config: ModelConfig, codec_for: Callable[[str], TextCodec]) -> tuple[int, ...]:
    """Return the tokens of a prompt, at least one.

    Args:
        prompt: Text or token ids.
        config: Configuration of the model.
        codec_for: Function that returns the tokenizer, or raises an error that names the purpose it is given.

    Raises:
        ArgumentError: the prompt is of another type, or has no tokens.
        ValueRangeError: an element is no token of the model.
        CheckpointError: the tokenizer makes a token that the model does not have.
    """
    if isinstance(prompt, str):
        tokens = codec_for("a prompt of text").encode(prompt)
        wrong = next((token for token in tokens if not 0 <= token < config.vocab_size), None)
        if wrong is not None:
            raise CheckpointError(
                f"the tokenizer makes the token {wrong} of this prompt, and the model has only {config.vocab_size} tokens "
                "(vocab_size of config.json): tokenizer.json belongs to another model"
            )
    else:
        tokens = tuple(_token(value, config) for value in _values(prompt, config))
    if not tokens and config.bos_token_id is not None:
        tokens = (config.bos_token_id,)
    if not tokens:
        raise ArgumentError("prompt has no tokens; it must have at least one.")
    return tokens


def _values(prompt: Any, config: ModelConfig) -> Iterable[object]:
    """Return the elements of a prompt that is a sequence or a tensor."""
    if isinstance(prompt, torch.Tensor):
        if prompt.is_nested or prompt.is_meta or prompt.is_quantized or prompt.layout is not torch.strided:
            kind = "nested" if prompt.is_nested else "meta" if prompt.is_meta else "sparse or quantized"
            raise ArgumentError(f"prompt is a {kind} tensor; it must be a plain one, [T] or [1, T] of integers.")
        integers = not (prompt.is_floating_point() or prompt.is_complex() or prompt.dtype is torch.bool)
        if not integers or not (prompt.dim() == 1 or (prompt.dim() == 2 and prompt.shape[0] == 1)):
            got = f"{tuple(prompt.shape)} of {prompt.dtype}"
            raise ArgumentError(f"prompt is a tensor {got}; it must be [T] or [1, T] of integers: one sequence at a time.")
        return prompt.flatten().tolist()
    if isinstance(prompt, Mapping):
        hint = "pass its input_ids" if "input_ids" in prompt else "for a message, pass what Model.chat makes of it"
        raise ArgumentError(f"prompt is a mapping, {shown(prompt)}; {_EXPECTED}: {hint}.")
    if not isinstance(prompt, Iterable) or isinstance(prompt, (bytes, bytearray, memoryview, AbstractSet)):
        raise ArgumentError(f"prompt is {type(prompt).__name__}; {_EXPECTED}.")
    try:
        values = iter(prompt)
    except TypeError as problem:  # raised by NumPy arrays without dimensions, among others
        raise ArgumentError(f"prompt is {shown(prompt)}, {in_a_line(problem)}; {_EXPECTED}.") from None
    # An iterator may be endless, so it is cut one token beyond the context, where the prompt is refused.
    return values if isinstance(prompt, Sized) else islice(values, config.max_position_embeddings + 1)


def _token(value: object, config: ModelConfig) -> int:
    """Return a token as an ``int``; integers of other classes, such as NumPy's, are accepted."""
    try:
        token = -1 if isinstance(value, bool) else operator.index(value)  # pyrefly: ignore[bad-argument-type]
    except TypeError:
        token = -1
    if not 0 <= token < config.vocab_size:
        hint = ""
        if isinstance(value, Mapping):
            hint = "; for messages, pass what Model.chat makes of them"
        elif isinstance(value, Iterable) and not isinstance(value, str):
            hint = "; give one sequence at a time"
        want = f"a token is an integer within 0..{config.vocab_size - 1}{hint}"
        raise ValueRangeError("prompt", got=f"holds {shown(value)}", want=want)
    return token
