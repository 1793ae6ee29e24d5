"""The operation ``decode_step``: what it computes, takes and refuses."""

from __future__ import annotations

from typing import NamedTuple

import torch

from onelaunch import checks, dispatch
from onelaunch.decode.model.arguments import class_name
from onelaunch.decode.model.cache import KVCache
from onelaunch.decode.model.config import ModelConfig
from onelaunch.decode.model.weights import Weights
from onelaunch.errors import ArgumentError, ContextExceeded, ShapeError, ValueRangeError
from onelaunch.operation import Query, Shapes, operation

Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Logits, and the new rows of keys and of values."""

DIMENSIONS = ("layers", "hidden", "intermediate", "heads", "kv_heads", "head_dim", "vocabulary", "position")


class DecodeCall(NamedTuple):
    """Checked arguments of :func:`decode_step`."""

    token: torch.Tensor
    """``[1]`` int64, on the device."""
    weights: Weights
    cache: KVCache
    """Of ``position`` positions, with room for one more."""
    key: Query

    def query(self) -> Query:
        return self.key

    @property
    def config(self) -> ModelConfig:
        return self.weights.config

    @property
    def position(self) -> int:
        """Of the token, from 0."""
        return self.cache.length

    def results(self, logits: torch.Tensor) -> Results:
        """What a variant returns once it has written the cache's row at ``position``."""
        return logits, self.cache.keys[:, :, self.position], self.cache.values[:, :, self.position]


def key_of(config: ModelConfig, position: int, device: str) -> Query:
    """The dispatch key of a step; flags: ``tied`` if the head is the embedding's matrix, ``bias`` if projections add one."""
    sizes = (
        config.num_hidden_layers, config.hidden_size, config.intermediate_size, config.num_attention_heads,
        config.num_key_value_heads, config.head_dim, config.vocab_size, position,
    )  # fmt: skip
    flags = ("bias",) * config.attention_bias + ("tied",) * config.tie_word_embeddings
    return Query("decode_step", device, config.dtype, sizes, flags=flags)


def bind(token: torch.Tensor, weights: Weights, cache: KVCache) -> DecodeCall:
    """The checked call; raises as :func:`decode_step` says."""
    for name, value, kind in (("weights", weights, Weights), ("cache", cache, KVCache)):
        if not isinstance(value, kind):
            raise ArgumentError(f"{name} is {type(value).__name__}; it must be {class_name(kind)}.")
    config = weights.config
    checks.tensor("token", token)
    checks.shape("token", token, (1,), "[1]", "decoding one token at a time")
    checks.dtype("token", token, (torch.int64,))
    checks.device("weights", weights.embed_tokens, token.device)
    checks.dtype("weights", weights.embed_tokens, (config.dtype,), ", the dtype of their configuration")
    if cache.length >= config.max_position_embeddings:
        raise ContextExceeded(cache.length + 1, context=config.max_position_embeddings)
    for name in ("keys", "values"):
        held: torch.Tensor = getattr(cache, name)
        want = (config.num_hidden_layers, config.num_key_value_heads, cache.capacity, config.head_dim)
        checks.shape(f"cache.{name}", held, want, "[L, K, C, D]", "the weights' configuration")
        checks.dtype(f"cache.{name}", held, (config.dtype,), ", the dtype of the weights")
        checks.device(f"cache.{name}", held, token.device)
        if not held.is_contiguous():
            raise ArgumentError(f"cache.{name} is not contiguous; make the cache with KVCache.empty.")
    if not 0 <= cache.length < cache.capacity:
        want = f"of a capacity C above its length {cache.length}; use cache.grown(config, {cache.length + 1})"
        raise ShapeError("cache.keys", got=cache.keys.shape, want=want)
    if checks.values_are_checked(token) and not 0 <= int(token) < config.vocab_size:
        raise ValueRangeError(
            "token", got=f"is {int(token)}", want=f"it must be a row of the embedding, 0..{config.vocab_size - 1}"
        )
    return DecodeCall(token, weights, cache, key_of(config, cache.length, str(token.device)))


@operation(
    dimensions=DIMENSIONS,
    outputs=("logits", "keys", "values"),
    bind=bind,
    options={"tied": True, "bias": False, "rope_theta": 1_000_000.0},
    defaults={"cuda": ("streaming", "captured", "eager"), "cpu": ("eager",)},
    # Ten operations a layer, each of which rounds; but the residual stream adds layers up, so that six are as good a bound
    # as all: in bfloat16, plain PyTorch was up to 3.4e-2 off after 28 layers, where the cap is 4.0e-2.
    stages=64,
)
def decode_step(token: torch.Tensor, weights: Weights, cache: KVCache, *, variant: str = "auto") -> Results:
    """One token through a model: logits for the next, and the token's keys and values appended to the cache.

    Every layer adds attention (queries and keys normalised per head, rotary positions, shared key heads), then a SwiGLU MLP, each
    of the normalised residual stream; the head multiplies its norm with every row of a matrix.

    Args:
        token: ``[1]`` int64, the token at position ``cache.length``.
        weights: in ``weights.config.dtype`` (bfloat16, float16 or float32), on the device of ``token``.
        cache: of the positions before. Its row at ``cache.length`` is written; ``cache.with_length(cache.length + 1)`` is the
            cache of the next step. Filled rows are only read, and what further room holds never matters.
        variant: a name from ``decode_step.variants``, or ``"auto"`` for the fastest measured one.

    Returns:
        logits ``[V]`` float32, and the new rows of keys and values ``[L, K, D]``, as views of the cache.

    Raises:
        ContextExceeded: the cache is as long as the model's context.
        ShapeError, DTypeError, DeviceError, ArgumentError: naming the argument, what it was and what it has to be.
        ValueRangeError: the token is no row of the embedding (seen on a CPU only, see :mod:`onelaunch.checks`).
        VariantUnsupported: the named variant cannot run this call; says why and which can.

    Source: the Qwen3 technical report (2025); the ladder of launches and barriers is the write-up's on a decode megakernel.
    """
    with torch.no_grad():
        return dispatch.run(decode_step, bind(token, weights, cache), variant)


@decode_step.shapes
def result_shapes(call: DecodeCall) -> Shapes:
    """Return the logits ``[V]``, and the new rows of keys and values ``[L, K, D]``."""
    config = call.config
    rows = (config.num_hidden_layers, config.num_key_value_heads, config.head_dim)
    return (config.vocab_size,), rows, rows
