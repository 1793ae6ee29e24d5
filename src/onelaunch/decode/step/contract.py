"""Contract of the operation ``decode_step``: the arguments that it takes, the calls that it refuses, and the results.

Users call :func:`decode_step`, which ``onelaunch.decode`` exports; ``TorchEngine`` and the timing loops call it too. The other
files of ``decode/step`` register oracle, cost, probes and variants with it. Engines and the oracle's cases make the key of a call
by :func:`key_of`; the timing loops check arguments by :func:`bind`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from onelaunch import checks, dispatch
from onelaunch.decode.model.arguments import class_name
from onelaunch.decode.model.cache import KVCache
from onelaunch.decode.model.config import ModelConfig
from onelaunch.decode.model.weights import ModelWeights, Weights
from onelaunch.errors import ArgumentError, ContextExceeded, ShapeError, ValueRangeError
from onelaunch.operation import Query, Shapes, operation

Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Logits ``[V]``, then the new rows of keys and of values, ``[L, K, D]`` each.

``V`` is the number of tokens in the vocabulary, ``L`` of layers, ``K`` of key heads, and ``D`` of channels of a head.
"""

DIMENSIONS = ("layers", "hidden", "intermediate", "heads", "kv_heads", "head_dim", "vocabulary", "position")
"""Names of the sizes in a case and, in this order, in a dispatch key."""


class DecodeCall(NamedTuple):
    """Checked arguments of :func:`decode_step`."""

    token: torch.Tensor
    """Token to process, ``[1]`` int64, on the device."""
    weights: ModelWeights
    cache: KVCache
    """Cache of ``position`` filled positions, with room for at least one more."""
    key: Query
    """Dispatch key of the call."""

    def query(self) -> Query:
        """Return the dispatch key of the call."""
        return self.key

    @property
    def config(self) -> ModelConfig:
        return self.weights.config

    @property
    def position(self) -> int:
        """Position of the token, from 0."""
        return self.cache.length

    def results(self, logits: torch.Tensor) -> Results:
        """Return a variant's results, given its logits ``[V]``, once it has written the cache's row at ``position``."""
        return logits, self.cache.keys[:, :, self.position], self.cache.values[:, :, self.position]


def key_of(config: ModelConfig, position: int, device: str) -> Query:
    """Return the dispatch key of a step.

    Its flags are ``tied``, if the LM head is the embedding's matrix; ``bias``, if the projections of attention add a bias, and
    ``no_output_bias``, if that of the output then adds none; ``no_qk_norm``, if heads are not normalised; and ``unrotated``, if
    a layer does not rotate queries and keys.
    """
    sizes = (
        config.num_hidden_layers, config.hidden_size, config.intermediate_size, config.num_attention_heads,
        config.num_key_value_heads, config.head_dim, config.vocab_size, position,
    )  # fmt: skip
    given = {
        "bias": config.attention_bias,
        "no_output_bias": config.attention_bias and not config.output_bias,
        "no_qk_norm": not config.qk_norm,
        "tied": config.tie_word_embeddings,
        "unrotated": bool(config.unrotated_layers),
    }
    flags = tuple(name for name, is_set in given.items() if is_set)
    return Query("decode_step", device, config.dtype, sizes, flags=flags)


def bind(token: torch.Tensor, weights: ModelWeights, cache: KVCache) -> DecodeCall:
    """Return the checked call; the errors are those that :func:`decode_step` lists."""
    for name, value, kind, shown in (("weights", weights, ModelWeights, Weights), ("cache", cache, KVCache, KVCache)):
        if not isinstance(value, kind):
            raise ArgumentError(f"{name} is {type(value).__name__}; it must be {class_name(shown)}.")
    config = weights.config
    checks.tensor("token", token)
    checks.shape("token", token, (1,), "[1]", "decoding one token at a time")
    checks.dtype("token", token, (torch.int64,))
    # One tensor stands for all here; variants that need more check the weights once per model (``Weights.check``).
    checks.device("weights", weights.embed_tokens, token.device)
    checks.dtype("weights", weights.embed_tokens, (config.dtype,), ", the dtype of their configuration")
    if cache.length >= config.max_position_embeddings:
        raise ContextExceeded(cache.length + 1, context=config.max_position_embeddings)
    for name in ("keys", "values"):
        tensor: torch.Tensor = getattr(cache, name)
        want = (config.num_hidden_layers, config.num_key_value_heads, cache.capacity, config.head_dim)
        checks.shape(f"cache.{name}", tensor, want, "[L, K, C, D]", "the weights' configuration")
        checks.dtype(f"cache.{name}", tensor, (config.dtype,), ", the dtype of the weights")
        checks.device(f"cache.{name}", tensor, token.device)
        if not tensor.is_contiguous():
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
    options={
        "tied": True,
        "bias": False,
        "rope_theta": 1_000_000.0,
        "no_output_bias": False,
        "no_qk_norm": False,
        "unrotated": 0,
    },
    defaults={"cuda": ("streaming", "captured", "eager"), "cpu": ("eager",)},
    # A layer has ten operations, and each of them rounds. The residual stream adds the layers up, so the error grows more
    # slowly than their number: the cap that follows from 64 stages is 4.0e-2, and plain PyTorch in bfloat16 was up to 3.4e-2
    # off after 28 layers.
    stages=64,
)
def decode_step(token: torch.Tensor, weights: ModelWeights, cache: KVCache, *, variant: str = "auto") -> Results:
    """Run one token through a model: return the logits for the next token, and append the token's keys and values to the cache.

    Every layer adds attention to the residual stream, then a SwiGLU MLP; each of them reads the RMS-normalised stream.
    Attention normalises queries and keys per head (``config.qk_norm``), rotates them by their positions (RoPE, in all layers but
    ``config.unrotated_layers``), and shares key heads among query heads (GQA). The LM head multiplies the normalised stream by
    its matrix.

    Args:
        token: Token at position ``cache.length``, ``[1]`` int64.
        weights: :class:`Weights` in ``weights.config.dtype`` (bfloat16, float16 or float32), on the device of ``token``; or those
            of the engine of a loaded model, which may be packed for a kernel.
        cache: Cache of the positions before. Its row at ``cache.length`` is written; ``cache.with_length(cache.length + 1)`` is
            the cache of the next step. Filled rows are only read, and the contents of later rows never matter.
        variant: Name from ``decode_step.variants``, or ``"auto"`` for the fastest measured variant.

    Returns:
        Logits ``[V]`` float32, and the new rows of keys and values, ``[L, K, D]`` each for ``L`` layers, ``K`` key heads and
        ``D`` channels of a head, as views of the cache.

    Raises:
        ContextExceeded: the cache is as long as the model's context.
        ShapeError, DTypeError, DeviceError, ArgumentError: an argument is wrong; the message names it, its value and what it
            must be.
        ValueRangeError: the token is no row of the embedding (checked on a CPU only, see :mod:`onelaunch.checks`).
        VariantUnsupported: the named variant cannot run this call; the message says why, and which variants can.

    Source: the Qwen3 technical report (2025). The ablation over launches and grid barriers follows a write-up on a decode
    megakernel, whose figures ``studies/decode-megakernel.toml`` quotes.
    """
    with torch.no_grad():
        return dispatch.run(decode_step, bind(token, weights, cache), variant)


@decode_step.shapes
def result_shapes(call: DecodeCall) -> Shapes:
    """Return the shapes of the results: logits ``[V]``, and the new rows of keys and values ``[L, K, D]``."""
    config = call.config
    rows = (config.num_hidden_layers, config.num_key_value_heads, config.head_dim)
    return (config.vocab_size,), rows, rows
