"""Forward pass of the model in plain PyTorch: with float64 weights the oracle, with 16-bit weights the PyTorch baseline.

With 16-bit weights, matrix products read and return 16-bit values, and SwiGLU's gate is computed in 16 bits. Norms, rotations
and the residual stream are float32. Hugging Face's implementation rounds these too: the residual stream twice in each layer,
norms and rotations at each of their operations. With a residual stream of 16 bits, the logits of 28 layers were further off
than ``decode_step``'s error cap permits (docs/notebook/decode.md). Angles are computed in float64.

``decode/step/reference.py`` and the variants in ``decode/step/variants/pytorch.py`` call it. Engines read prompts with
:func:`prefill`, also those that decode with the megakernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn import functional as F

from onelaunch.decode.model.cache import KVCache
from onelaunch.decode.model.config import ModelConfig
from onelaunch.decode.model.rope import layer_rotations, rotate
from onelaunch.decode.model.weights import LayerWeights, ModelWeights

PREFILL_CHUNK = 4096
"""Most tokens of a prompt that are prefilled at once. A chunk after the first needs an attention mask with as many rows."""

Rotation: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines of a layer's rotation."""

AddAndNorm: TypeAlias = Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]]
"""Function such as :func:`plain_add_and_norm`."""

_ATTENTION_FLOPS = 2**39
"""Most FLOPs of a chunk's attention in one layer, a few milliseconds of a data-center GPU.

It shortens the chunks of long prompts, so that a prompt can be cancelled soon. Sizes alone decide, so that a prompt always gives
the same logits.
"""


def prefill(
    weights: ModelWeights, tokens: torch.Tensor, cache: KVCache, pace: Callable[[], None] | None = None
) -> tuple[torch.Tensor, KVCache]:
    """Return the logits after the last of several tokens, and the cache extended by all of them.

    Args:
        weights: Weights of the model.
        tokens: Tokens, ``[T]`` int64 on the weights' device, at least one.
        cache: Cache of the positions before; a larger one is made if it has too little room.
        pace: Function to call before each half of a layer, which may wait, or raise to end the work here.

    Returns:
        Logits ``[V]`` float32 (float64 for float64 weights), and the cache, ``T`` positions longer.

    Raises:
        ContextExceeded: The model's context is shorter.
    """
    cache = cache.grown(weights.config, cache.length + len(tokens))
    hidden = tokens.new_empty(0)
    while len(tokens):
        chunk = tokens[: chunk_tokens(weights.config, cache.length)]
        hidden = forward(weights, chunk, cache, pace)
        cache, tokens = cache.with_length(cache.length + len(chunk)), tokens[len(chunk) :]
    return logits_of(weights, hidden[-1]), cache


def chunk_tokens(config: ModelConfig, position: int) -> int:
    """Return how many tokens of a prompt to prefill at once from a position on: a power of two, at least 256."""
    tokens = PREFILL_CHUNK
    while tokens > 256 and 4 * tokens * (position + tokens) * config.query_size > _ATTENTION_FLOPS:
        tokens //= 2
    return tokens


def forward(weights: ModelWeights, tokens: torch.Tensor, cache: KVCache, pace: Callable[[], None] | None = None) -> torch.Tensor:
    """Run all layers on tokens ``[T]`` that follow the cache, and return the residual stream ``[T, H]``, float32 or float64.

    The tokens' keys and values are written to the cache, which must have room for them. ``pace`` is that of :func:`prefill`.
    """
    hidden, rotations = embed(weights, tokens, cache.length)
    return run_layers(weights, hidden, rotations, cache, range(weights.config.num_hidden_layers), pace=pace)


def embed(weights: ModelWeights, tokens: torch.Tensor, start: int) -> tuple[torch.Tensor, list[Rotation]]:
    """Return the residual stream ``[T, H]`` before the first layer, and each layer's rotations at positions from ``start`` on.

    Both are float32, or float64 for float64 weights.
    """
    hidden = upcast(F.embedding(tokens, weights.embed_tokens))
    positions = torch.arange(start, start + len(tokens), device=tokens.device)
    return hidden, list(layer_rotations(weights.config, positions, hidden.dtype))


def run_layers(
    weights: ModelWeights,
    hidden: torch.Tensor,
    rotations: Sequence[Rotation],
    cache: KVCache,
    layers: range,
    *,
    add_and_norm: AddAndNorm | None = None,
    pace: Callable[[], None] | None = None,
) -> torch.Tensor:
    """Run successive layers on the residual stream ``[T, H]`` of tokens that follow the cache, and return it after them.

    Args:
        weights: Weights of the model.
        hidden: Residual stream before the first of the layers, float32 or float64.
        rotations: Rotations of every layer of the model, as :func:`embed` returns them.
        cache: Cache of the positions before, with room for the tokens' keys and values, which are written to it.
        layers: Numbers of the layers.
        add_and_norm: Function that adds and normalizes, by default :func:`plain_add_and_norm`.
        pace: Function of :func:`prefill`.
    """
    config, start, end = weights.config, cache.length, cache.length + len(hidden)
    eps, add = config.rms_norm_eps, plain_add_and_norm if add_and_norm is None else add_and_norm
    update: torch.Tensor | None = None
    with weights.exclusive():
        for number in layers:
            if pace is not None:
                pace()
            layer = weights.layer(number, number + 1 if number + 1 in layers else None)
            keys, values = cache.keys[number], cache.values[number]
            normed, hidden = add(hidden, update, layer.input_layernorm, eps)
            q, k, v = project_qkv(config.head_dim, eps, layer, normed, rotations[number])
            keys[:, start:end] = k
            values[:, start:end] = v
            update = F.linear(attention(q, keys[:, :end], values[:, :end]), layer.o_proj, layer.o_bias)
            if pace is not None:
                pace()
            normed, hidden = add(hidden, update, layer.post_attention_layernorm, eps)
            update = swiglu_mlp(layer, normed)
    return hidden if update is None else hidden + update


def plain_add_and_norm(
    hidden: torch.Tensor, update: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norm of ``hidden + update`` in the dtype of ``weight``, and that sum in the dtype of ``hidden``.

    ``hidden`` and ``update`` are ``[T, H]``; an update of ``None`` adds nothing.
    """
    hidden = hidden if update is None else hidden + update
    return rms_norm(hidden, weight, eps), hidden


def logits_of(weights: ModelWeights, hidden: torch.Tensor) -> torch.Tensor:
    """Return the logits ``[..., V]`` of a residual stream ``[..., H]``: float32, or float64 for float64 weights."""
    normed = rms_norm(hidden, weights.norm, weights.config.rms_norm_eps)
    with weights.exclusive():
        found = [F.linear(normed, rows) for _, rows in weights.head_rows()]
    return upcast(found[0] if len(found) == 1 else torch.cat(found, -1))


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return ``x / rms(x) * weight`` over the last dimension, in the dtype of ``weight``."""
    return _unrounded_rms_norm(x, weight, eps).to(weight.dtype)


def _unrounded_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return ``x / rms(x) * weight`` over the last dimension, in float32, or float64 for float64 ``x``."""
    wide = upcast(x)
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight


def upcast(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor in float32; float64 stays as it is."""
    return x if x.dtype is torch.float64 else x.float()


def project_qkv(
    head_dim: int, eps: float, layer: LayerWeights, normed: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the queries, ``[Q, T, D]`` for ``Q`` query heads, and keys and values, ``[K, T, D]`` for ``K`` key heads.

    ``normed`` is the normalised residual stream, ``[T, H]``, and ``eps`` the epsilon of the norms.

    Queries and keys are normalised per head, where the layer has norms, and rotated by ``rotary``, a cosine and a sine; values
    are only projected.
    """
    shape = (len(normed), -1, head_dim)
    q = F.linear(normed, layer.q_proj, layer.q_bias).view(shape)
    k = F.linear(normed, layer.k_proj, layer.k_bias).view(shape)
    v = F.linear(normed, layer.v_proj, layer.v_bias).view(shape)
    return normed_and_rotated(q, layer.q_norm, eps, rotary), normed_and_rotated(k, layer.k_norm, eps, rotary), v.transpose(0, 1)


def normed_and_rotated(heads: torch.Tensor, weight: torch.Tensor | None, eps: float, rotary: Rotation) -> torch.Tensor:
    """Return projected queries or keys ``[T, N, D]``, normalized if there is a ``weight``, and rotated, as ``[N, T, D]``."""
    normed = upcast(heads) if weight is None else _unrounded_rms_norm(heads, weight, eps)
    return rotate(normed, *rotary).to(heads.dtype).transpose(0, 1)


def attention(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return grouped-query causal attention ``[T, Q * D]`` of queries ``[Q, T, D]`` to keys and values ``[K, S, D]``.

    The queries are those of the last ``T`` of the ``S`` positions; a single one attends to all, so it needs no mask. ``Q`` and
    ``K`` are numbers of heads.
    """
    count, length, group = q.shape[1], keys.shape[1], len(q) // len(keys)
    scale, grouped, mask = 1 / math.sqrt(q.shape[-1]), group > 1, None
    if count > 1 and q.is_cuda and _takes_flash_attention(q, keys, values):
        # PyTorch itself would choose cuDNN, whose first call of a shape in a thread takes 40 to 60 ms, measured on an H100.
        # With "is_causal" the mask is aligned with the last query and the last position.
        flash = torch.ops.aten._scaled_dot_product_flash_attention  # noqa: SLF001 - torch.nn.attention.bias calls it too
        attended = flash(q[None], keys[None], values[None], is_causal=True, scale=scale)[0]
        return attended[0].transpose(0, 1).flatten(1)
    if 1 < count < length:
        mask = torch.ones(count, length, dtype=torch.bool, device=q.device).tril(length - count)
        # PyTorch has no fast kernel for grouped queries with a mask, so the key heads are repeated.
        keys, values, grouped = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0), False
    attended = F.scaled_dot_product_attention(
        q[None], keys[None], values[None], mask, is_causal=1 < count == length, scale=scale, enable_gqa=grouped
    )
    return attended[0].transpose(0, 1).flatten(1)


def _takes_flash_attention(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> bool:
    """Return whether PyTorch's FlashAttention kernel takes these tensors, which are those of :func:`attention`."""
    dropout, causal, grouped = 0.0, False, len(q) > len(keys)  # it would refuse "causal" for fewer queries than positions
    return can_use_flash_attention(SDPAParams(q[None], keys[None], values[None], None, dropout, causal, grouped))


def mlp(eps: float, layer: LayerWeights, hidden: torch.Tensor) -> torch.Tensor:
    """Return the SwiGLU MLP's output ``[T, H]`` for the residual stream ``[T, H]``, which is normalised first."""
    return swiglu_mlp(layer, rms_norm(hidden, layer.post_attention_layernorm, eps))


def swiglu_mlp(layer: LayerWeights, normed: torch.Tensor) -> torch.Tensor:
    """Return the SwiGLU MLP's output ``[T, H]`` for normalised inputs ``[T, H]``."""
    return F.linear(F.silu(F.linear(normed, layer.gate_proj)) * F.linear(normed, layer.up_proj), layer.down_proj)
