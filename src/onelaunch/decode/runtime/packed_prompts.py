"""Layers of a prompt's pass that multiplies by matrices in the weight stream, without a plain copy of them.

The channels of the residual stream, of values and of the MLP are in the order of operands there
(:func:`~onelaunch.decode.plan.packing.as_operands`), in which one product stores them and the next one reads them. The cache has
the model's order. ``prompts.py`` runs short passes by this module, and long ones by ``decode/model/forward.py`` on copied
matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from onelaunch.decode.model.cache import KVCache
from onelaunch.decode.model.forward import AddAndNorm, Rotation, attention, logits_of, normed_and_rotated, rms_norm, upcast
from onelaunch.decode.model.weights import ModelWeights
from onelaunch.decode.plan.packing import as_operands
from onelaunch.decode.plan.phases import PRODUCTS, Op
from onelaunch.decode.runtime.products import StreamProducts


class _Vectors(NamedTuple):
    """Norm factors and biases of a layer in the order of the channels that they are for."""

    input_norm: torch.Tensor
    post_attention_norm: torch.Tensor
    qkv_bias: torch.Tensor | None
    o_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None


def run_layers_by_stream(
    weights: ModelWeights,
    products: StreamProducts,
    hidden: torch.Tensor,
    rotations: Sequence[Rotation],
    cache: KVCache,
    layers: range,
    add_and_norm: AddAndNorm,
    pace: Callable[[], None] | None = None,
) -> torch.Tensor:
    """Run successive layers as :func:`~onelaunch.decode.model.forward.run_layers` does, on the first tokens of a sequence.

    Args:
        weights: Weights of the model, whose norm factors and biases are read.
        products: Products with the matrices.
        hidden: Residual stream ``[T, H]`` before the first of the layers, float32, its channels in the order of operands.
        rotations: Rotations of every layer of the model.
        cache: Empty cache with room for the tokens' keys and values, which are written to it.
        layers: Numbers of the layers.
        add_and_norm: Function that adds and normalizes.
        pace: Function to call before each half of a layer.

    Returns:
        Residual stream after the layers, as ``hidden``.
    """
    config, count = weights.config, len(hidden)
    eps, heads = config.rms_norm_eps, (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
    update: torch.Tensor | None = None
    with weights.exclusive():  # Triton launches on the current device
        ordered = _vectors(weights, layers)
        biased: dict[Op, bool] = {"qkv": ordered[0].qkv_bias is not None, "o": ordered[0].o_bias is not None}
        products.compile([(op, count, biased.get(op, False)) for op in PRODUCTS[:-1]])
        for number, vectors in zip(layers, ordered, strict=True):
            if pace is not None:
                pace()
            normed, hidden = add_and_norm(hidden, update, vectors.input_norm, eps)
            qkv = products.multiply("qkv", number, normed, vectors.qkv_bias).view(count, -1, config.head_dim)
            q, k, v = qkv.split(heads, 1)
            q, k = (
                normed_and_rotated(each, weight, eps, rotations[number])
                for each, weight in ((q, vectors.q_norm), (k, vectors.k_norm))
            )
            v = v.transpose(0, 1)
            keys = cache.keys[number][:, :count]
            keys.copy_(k)
            pairs = (-1, 2, 2, 2)  # as_operands() in place, by one copy
            cache.values[number][:, :count].unflatten(-1, pairs).copy_(v.unflatten(-1, pairs).transpose(-3, -2))
            update = products.multiply("o", number, attention(q, keys, v).contiguous(), vectors.o_bias)
            if pace is not None:
                pace()
            normed, hidden = add_and_norm(hidden, update, vectors.post_attention_norm, eps)
            update = products.multiply("down", number, products.multiply("gate_up", number, normed))
    return hidden if update is None else hidden + update


def logits_by_stream(weights: ModelWeights, products: StreamProducts, hidden: torch.Tensor) -> torch.Tensor:
    """Return the logits ``[T, V]`` float32 of a residual stream ``[T, H]`` whose channels are in the order of operands."""
    hidden = as_operands(hidden)
    if weights.config.tie_word_embeddings:
        return logits_of(weights, hidden)
    normed = rms_norm(hidden, weights.norm, weights.config.rms_norm_eps)
    with weights.exclusive():
        return upcast(products.multiply("lm_head", 0, as_operands(normed)))


def _vectors(weights: ModelWeights, layers: range) -> list[_Vectors]:
    """Return the vectors of some layers. Those of all layers are put in order by the same few launches."""
    found = [weights.vectors(number) for number in layers]

    def stacked(name: str) -> torch.Tensor | None:
        return torch.stack([each[name] for each in found]) if name in found[0] else None

    def in_order(name: str) -> Sequence[torch.Tensor | None]:
        return [None] * len(found) if (vectors := stacked(name)) is None else as_operands(vectors).unbind()

    qkv: Sequence[torch.Tensor | None] = [None] * len(found)
    biases = [stacked(f"{name}_bias") for name in "qkv"]
    if (q := biases[0]) is not None and (k := biases[1]) is not None and (v := biases[2]) is not None:
        qkv = torch.cat([q, k, as_operands(v)], 1).unbind()
    norms = zip(in_order("input_layernorm"), in_order("post_attention_layernorm"), strict=True)
    rows = zip(norms, qkv, in_order("o_bias"), found, strict=True)
    return [
        _Vectors(first, second, qkv_bias, o_bias, each.get("q_norm"), each.get("k_norm"))
        for (first, second), qkv_bias, o_bias, each in rows
        if first is not None and second is not None
    ]
