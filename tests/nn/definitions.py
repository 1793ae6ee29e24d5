"""Definitions of the layers, step by step and head by head, with separate weights.

Tests of this folder call them with float64 tensors, those of most layers through :func:`tests.nn.layers.make`.

A definition is given the module, whose sizes and options it reads, the weights by state-dict name (:func:`weights_of`), and x.
"""

from __future__ import annotations

import math
from typing import Any

import torch

ACTIVATIONS = {
    "relu": lambda x: x.clamp_min(0),
    "sigmoid": lambda x: 1 / (1 + torch.exp(-x)),
    "logsigmoid": lambda x: -torch.log1p(torch.exp(-x)),
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "swish": lambda x: x / (1 + torch.exp(-x)),
    "sqrelu": lambda x: x.clamp_min(0) ** 2,
    "gelu": lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    None: lambda x: x,
}


def weights_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return a module's state dict in float64, as leaves that take gradients."""
    return {name: value.detach().double().requires_grad_() for name, value in module.state_dict().items()}


def convolve(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None = "silu") -> torch.Tensor:
    """Convolve ``x [T, D]`` causally with ``weight [D, 1, W]``, and apply SiLU if asked; inputs before the first step are 0."""
    taps, steps = weight.shape[2], []
    for t in range(len(x)):
        y = torch.zeros_like(x[0]) if bias is None else bias
        for lag in range(min(taps, t + 1)):
            y = y + x[t - lag] * weight[:, 0, taps - 1 - lag]
        steps.append(y)
    return ACTIVATIONS[activation](torch.stack(steps))


def attention(layer: Any, weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Compute GatedLinearAttention or SimpleGatedLinearAttention for one sequence ``x [T, D]``."""
    H, H_kv, K, V = layer.num_heads, layer.num_kv_heads, layer.head_k_dim, layer.head_v_dim
    q, k, v = (x @ weights[f"{name}_proj.weight"].T for name in "qkv")
    if layer.use_short_conv:
        q, k, v = (
            convolve(value, weights[f"{name}_conv1d.weight"], weights.get(f"{name}_conv1d.bias"))
            for name, value in (("q", q), ("k", k), ("v", v))
        )
    mapped = ACTIVATIONS[layer.feature_map]
    q, k = mapped(q), mapped(k)
    low_rank = "gk_proj.0.weight" in weights
    if low_rank:
        logits = x @ weights["gk_proj.0.weight"].T @ weights["gk_proj.1.weight"].T + weights["gk_proj.1.bias"]
    else:
        logits = x @ weights["gk_proj.weight"].T + weights["gk_proj.bias"]
    decay = ACTIVATIONS["logsigmoid"](logits) / layer.gate_logit_normalizer
    if getattr(layer, "clamp_min", None) is not None:
        decay = decay.clamp_min(layer.clamp_min)
    heads = []
    for head in range(H):
        shared = head // (H // H_kv)
        state, outputs = torch.zeros(K, V, dtype=x.dtype), []
        for t in range(len(x)):
            g = decay[t, shared * K : (shared + 1) * K, None] if low_rank else decay[t, head]
            key, value = k[t, shared * K : (shared + 1) * K], v[t, shared * V : (shared + 1) * V]
            state = torch.exp(g) * state + torch.outer(key, value)
            outputs.append(q[t, head * K : (head + 1) * K] @ state / math.sqrt(K))
        o = torch.stack(outputs)
        o = o / torch.sqrt((o**2).mean(-1, keepdim=True) + layer.norm_eps)
        norm = weights.get("g_norm_swish_gate.weight", weights.get("g_norm.weight"))
        o = o if norm is None else o * norm
        if layer.use_output_gate:
            o = o * ACTIVATIONS[layer.gate_fn](x @ weights["g_proj.weight"][head * V : (head + 1) * V].T)
        heads.append(o)
    return torch.cat(heads, -1) @ weights["o_proj.weight"].T


def linear_rnn(layer: Any, weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Compute LinearRNN for one sequence ``x [T, D]``."""
    logits = x @ weights["gk_proj.weight"].T + weights["gk_proj.bias"]
    decay = torch.exp(ACTIVATIONS["logsigmoid"](logits) / layer.gate_logit_normalizer)
    v, state, states = x @ weights["v_proj.weight"].T, torch.zeros(layer.value_dim, dtype=x.dtype), []
    for t in range(len(x)):
        state = decay[t] * state + v[t]
        states.append(state)
    gated = torch.stack(states) * ACTIVATIONS["silu"](x @ weights["g_proj.weight"].T)
    return gated @ weights["o_proj.weight"].T


def decays_of(weights: dict[str, torch.Tensor], x: torch.Tensor, bound: torch.Tensor | float) -> torch.Tensor:
    """Return the decays of HGRN's and HGRN2's forget gate, ``[T, C]``."""
    f = x @ weights["f_proj.weight"].T
    if "f_conv1d.weight" in weights:
        f = convolve(f, weights["f_conv1d.weight"], weights.get("f_conv1d.bias"), None)
    return bound + (1 - bound) * ACTIVATIONS["sigmoid"](f)


def normed(o: torch.Tensor, eps: float, weight: torch.Tensor | None) -> torch.Tensor:
    """Normalize all channels of ``o [T, C]`` together."""
    o = o / torch.sqrt((o**2).mean(-1, keepdim=True) + eps)
    return o if weight is None else o * weight


def hgrn(layer: Any, weights: dict[str, torch.Tensor], x: torch.Tensor, bound: torch.Tensor | float = 0.0) -> torch.Tensor:
    """Compute HGRNAttention for one sequence ``x [T, D]``."""
    i, decay = x @ weights["i_proj.weight"].T, decays_of(weights, x, bound)
    if layer.use_short_conv:
        i = convolve(i, weights["i_conv1d.weight"], weights.get("i_conv1d.bias"), None)
    i = ACTIVATIONS["silu"](i)
    state, states = torch.zeros_like(i[0]), []
    for t in range(len(x)):
        state = decay[t] * state + (1 - decay[t]) * i[t]
        states.append(state)
    o = normed(torch.stack(states), layer.norm_eps, weights.get("g_norm.weight"))
    return (o * ACTIVATIONS["silu"](x @ weights["g_proj.weight"].T)) @ weights["o_proj.weight"].T


def hgrn2(layer: Any, weights: dict[str, torch.Tensor], x: torch.Tensor, bound: torch.Tensor | float = 0.0) -> torch.Tensor:
    """Compute HGRN2Attention for one sequence ``x [T, D]``; the norm adds 1e-5, as fla's does whatever ``norm_eps`` is."""
    H, K, V = layer.num_heads, layer.head_f_dim, layer.head_i_dim
    q, i = (x @ weights[f"{name}_proj.weight"].T for name in "qi")
    if layer.use_short_conv:
        q, i = (
            convolve(value, weights[f"{name}_conv1d.weight"], weights.get(f"{name}_conv1d.bias"), None)
            for name, value in (("q", q), ("i", i))
        )
    q, decay, heads = ACTIVATIONS["silu"](q), decays_of(weights, x, bound), []
    for head in range(H):
        state, outputs, keys = torch.zeros(K, V, dtype=x.dtype), [], slice(head * K, (head + 1) * K)
        for t in range(len(x)):
            f = decay[t, keys]
            state = f[:, None] * state + torch.outer(1 - f, i[t, head * V : (head + 1) * V])
            outputs.append(q[t, keys] @ state / math.sqrt(K))
        heads.append(torch.stack(outputs))
    return normed(torch.cat(heads, -1), 1e-5, weights.get("g_norm.weight")) @ weights["o_proj.weight"].T


def each_sequence(
    definition: Any, layer: Any, weights: dict[str, torch.Tensor], x: torch.Tensor, *more: torch.Tensor
) -> torch.Tensor:
    """Apply a definition to ``x [B, T, D]`` and ``more`` arguments, one batch entry after the other."""
    return torch.stack([definition(layer, weights, sequence, *more) for sequence in x])


def error(found: torch.Tensor, true: torch.Tensor) -> float:
    """Return the norm of ``found - true`` relative to the norm of ``true``. NaN counts as infinite."""
    distance = (found.double() - true).norm() / true.norm().clamp_min(1e-30)
    return float("inf") if distance.isnan() else distance.item()
