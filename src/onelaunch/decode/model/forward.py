"""The model in plain PyTorch, in the dtype of its weights: the oracle in float64, what people run in 16 bits.

In 16 bits, matrix products take and give 16 bits, and SwiGLU's gate works in them; norms, rotations and the residual stream are
float32. Hugging Face rounds between these as well: the stream twice in each layer, which alone would take most of what errors may
be, and norms and rotations at each step. Angles are made in float64.
"""

from __future__ import annotations

import math

import torch
from torch.nn import functional as F

from onelaunch.decode.model.cache import KVCache
from onelaunch.decode.model.rope import rotate, rotation
from onelaunch.decode.model.weights import LayerWeights, Weights

PIECE = 4096
"""Tokens of a prompt that go through the model at once: pieces after the first need a mask of as many rows."""


def prefill(weights: Weights, tokens: torch.Tensor, cache: KVCache) -> tuple[torch.Tensor, KVCache]:
    """Logits after the last of several tokens, and the cache with all of them.

    Args:
        weights: of the model.
        tokens: ``[T]`` int64 on the weights' device, at least one.
        cache: what comes before; memory is added where it has too little.

    Returns:
        logits ``[V]`` float32 (float64 for float64 weights), and the cache, ``T`` positions longer.

    Raises:
        ContextExceeded: the model's context is shorter.
    """
    cache = cache.grown(weights.config, cache.length + len(tokens))
    hidden = tokens.new_empty(0)
    for piece in tokens.split(PIECE):
        hidden = forward(weights, piece, cache)
        cache = cache.with_length(cache.length + len(piece))
    return logits_of(weights, hidden[-1]), cache


def forward(weights: Weights, tokens: torch.Tensor, cache: KVCache) -> torch.Tensor:
    """Residual stream ``[T, H]``, float32 or float64, after all layers of tokens ``[T]`` that follow the cache.

    It gets their keys and values.
    """
    config, start, end = weights.config, cache.length, cache.length + len(tokens)
    embedded = F.embedding(tokens, weights.embed_tokens)
    hidden = widened(embedded)
    turn = rotation(config, torch.arange(start, end, device=tokens.device), hidden.dtype)
    for layer, keys, values in zip(weights.layers, cache.keys, cache.values, strict=True):
        normed = rms_norm(hidden, layer.input_layernorm, config.rms_norm_eps)
        q, k, v = heads(config.head_dim, config.rms_norm_eps, layer, normed, turn)
        keys[:, start:end] = k
        values[:, start:end] = v
        attended = attend(q, keys[:, :end], values[:, :end])
        hidden = hidden + F.linear(attended, layer.o_proj, layer.o_bias)
        hidden = hidden + mlp(config.rms_norm_eps, layer, hidden)
    return hidden


def logits_of(weights: Weights, hidden: torch.Tensor) -> torch.Tensor:
    """Logits ``[..., V]`` of a residual stream ``[..., H]``; float32, or float64 for float64."""
    return widened(F.linear(rms_norm(hidden, weights.norm, weights.config.rms_norm_eps), weights.lm_head))


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``x / rms(x) * weight`` over the last dimension, in the dtype of ``weight``."""
    return normalised(x, weight, eps).to(weight.dtype)


def normalised(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The same in float32 at least."""
    wide = widened(x)
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight


def widened(x: torch.Tensor) -> torch.Tensor:
    """In float32 at least."""
    return x if x.dtype is torch.float64 else x.float()


def heads(
    head_dim: int, eps: float, layer: LayerWeights, normed: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries ``[Q, T, D]``, keys and values ``[K, T, D]``: projected, normalised per head and turned, values only projected."""
    shape = (len(normed), -1, head_dim)
    q = F.linear(normed, layer.q_proj, layer.q_bias).view(shape)
    k = F.linear(normed, layer.k_proj, layer.k_bias).view(shape)
    v = F.linear(normed, layer.v_proj, layer.v_bias).view(shape)
    q = rotate(normalised(q, layer.q_norm, eps), *turn).to(v.dtype)
    k = rotate(normalised(k, layer.k_norm, eps), *turn).to(v.dtype)
    return q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)


def attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Grouped causal attention of the last queries ``[Q, T, D]`` to keys and values ``[K, S, D]``: ``[T, Q * D]``."""
    count, length, shared = q.shape[1], keys.shape[1], len(q) // len(keys)
    mask = None
    if 1 < count < length:
        mask = torch.ones(count, length, dtype=torch.bool, device=q.device).tril(length - count)
        # With a mask, no fast kernel knows that heads are shared.
        keys, values = (each.repeat_interleave(shared, 0) for each in (keys, values))
    found = F.scaled_dot_product_attention(
        q[None], keys[None], values[None], mask, is_causal=1 < count == length, scale=1 / math.sqrt(q.shape[-1]),
        enable_gqa=len(q) != len(keys),
    )  # fmt: skip
    return found[0].transpose(0, 1).flatten(1)


def mlp(eps: float, layer: LayerWeights, hidden: torch.Tensor) -> torch.Tensor:
    """SwiGLU of the normalised residual stream."""
    normed = rms_norm(hidden, layer.post_attention_layernorm, eps)
    return F.linear(F.silu(F.linear(normed, layer.gate_proj)) * F.linear(normed, layer.up_proj), layer.down_proj)
