"""Stand-ins for fla's layers, which cannot run without a GPU: the same attributes, parameters and results in plain PyTorch.

``accelerate`` recognizes classes by their qualified names, and these have fla's. The tests on a GPU machine with fla installed
compare the real layers.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


def named(qualified):
    """Give a class and its forward the module and the name that fla's class has."""

    def rename(cls):
        cls.__module__, cls.__qualname__ = qualified.rsplit(".", 1)
        cls.__name__ = cls.__qualname__
        cls.forward.__module__ = cls.__module__
        return cls

    return rename


class Norm(nn.Module):
    """Norm of fla, fused with the gate or not."""

    def __init__(self, size, eps, activation=None, affine=True):
        super().__init__()
        self.eps, self.activation = eps, activation
        self.weight = nn.Parameter(torch.rand(size) + 0.5) if affine else None
        self.bias = None

    def forward(self, x, gate=None):
        y = F.rms_norm(x.float(), x.shape[-1:], self.weight, self.eps).to(x.dtype)
        return y if gate is None else y * F.silu(gate)


class Convolution(nn.Conv1d):
    """Short convolution of fla."""

    def __init__(self, channels, size, bias, activation="silu"):
        super().__init__(channels, channels, size, padding=size - 1, groups=channels, bias=bias)
        self.activation = activation

    def forward(self, x):
        y = super().forward(x.mT)[..., : x.shape[1]].mT
        return y if self.activation is None else F.silu(y)


class Cache:
    """Cache of fla: a state per layer."""

    def __init__(self):
        self.states = {}

    def __len__(self):
        return max(self.states, default=-1) + 1

    def __getitem__(self, index):
        return self.states.get(index)

    def update(self, *, layer_idx, recurrent_state, conv_state=None, offset):
        self.states[layer_idx] = {"recurrent_state": recurrent_state, "conv_state": conv_state, "offset": offset}


class Layer(nn.Module):
    """Parts that both layers have."""

    def __init__(self, hidden_size=64, num_heads=2, num_kv_heads=None, feature_map=None, use_short_conv=False, conv_bias=False,
                 use_output_gate=True, gate_fn="swish", affine=True, norm_eps=1e-5, clamp_min=None, fuse_norm=True,
                 head_k_dim=16, head_v_dim=24):  # fmt: skip
        super().__init__()
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads or num_heads
        self.num_kv_groups = num_heads // self.num_kv_heads
        self.feature_map_fn = None if feature_map is None else getattr(F, feature_map)
        self.use_short_conv, self.use_output_gate = use_short_conv, use_output_gate
        self.clamp_min, self.layer_idx, self.gate_logit_normalizer = clamp_min, 0, 16
        self.head_k_dim, self.head_v_dim = head_k_dim, head_v_dim
        keys, values = num_heads * head_k_dim, num_heads * head_v_dim
        self.q_proj = nn.Linear(hidden_size, keys, bias=False)
        self.k_proj = nn.Linear(hidden_size, keys // self.num_kv_groups, bias=False)
        self.v_proj = nn.Linear(hidden_size, values // self.num_kv_groups, bias=False)
        if use_output_gate:
            self.g_proj = nn.Linear(hidden_size, values, bias=False)
        if use_short_conv:
            for name, size in (("q", keys), ("k", keys), ("v", values)):
                self.add_module(f"{name}_conv1d", Convolution(size, 4, conv_bias))
        self.o_proj = nn.Linear(values, hidden_size, bias=False)
        self.fuse_norm_and_gate = gate_fn == "swish" and fuse_norm and use_output_gate
        norm = Norm(head_v_dim, norm_eps, gate_fn if self.fuse_norm_and_gate else None, affine)
        self.add_module("g_norm_swish_gate" if self.fuse_norm_and_gate else "g_norm", norm)
        if not self.fuse_norm_and_gate:
            self.gate_fn = {"swish": F.silu, "sigmoid": torch.sigmoid}[gate_fn]

    def run(self, x, mask, cache, use_cache, decays):
        """Compute the layer; ``decays`` are the logits of the log-decays."""
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if self.use_short_conv:
            q, k, v = self.q_conv1d(q), self.k_conv1d(k), self.v_conv1d(v)
        g = F.logsigmoid(decays) / self.gate_logit_normalizer
        if mask is not None:
            v, g = v * mask[:, :, None], g * mask[:, :, None]
        q, k, v, g, gate = (each.unflatten(-1, (self.num_heads, -1)) for each in (q, k, v, g, self.g_proj(x)))
        last = cache[self.layer_idx] if cache is not None and len(cache) > self.layer_idx else None
        state = q.new_zeros(1) if last is None else last["recurrent_state"].mT
        outputs = []
        for t in range(x.shape[1]):
            state = state * g[:, t, :, :, None].exp() + k[:, t, :, :, None] * v[:, t, :, None]
            outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t] * self.head_k_dim**-0.5, state))
        if cache is not None:
            cache.update(layer_idx=self.layer_idx, recurrent_state=state.mT if use_cache else None, offset=x.shape[1])
        o = torch.stack(outputs, 1)
        o = self.g_norm_swish_gate(o, gate) if self.fuse_norm_and_gate else self.g_norm(o) * self.gate_fn(gate)
        return self.o_proj(o.flatten(2)), None, cache


@named("fla.layers.gla.GatedLinearAttention")
class GatedLinearAttention(Layer):
    """Stand-in for the layer with a decay per channel."""

    def __init__(self, hidden_size=64, **options):
        super().__init__(hidden_size, **options)
        keys = self.num_kv_heads * self.head_k_dim
        self.gk_proj = nn.Sequential(nn.Linear(hidden_size, 16, bias=False), nn.Linear(16, keys))

    def forward(
        self, hidden_states, attention_mask=None, past_key_values=None, use_cache=False, output_attentions=False, **kwargs
    ):
        return self.run(hidden_states, attention_mask, past_key_values, use_cache, self.gk_proj(hidden_states))


@named("fla.layers.simple_gla.SimpleGatedLinearAttention")
class SimpleGatedLinearAttention(Layer):
    """Stand-in for the layer with a decay per head."""

    def __init__(self, hidden_size=64, use_short_conv=True, **options):
        super().__init__(hidden_size, use_short_conv=use_short_conv, **options)
        self.gk_proj = nn.Linear(hidden_size, self.num_heads)

    def forward(
        self, hidden_states, attention_mask=None, past_key_values=None, use_cache=False, output_attentions=False, **kwargs
    ):
        return self.run(hidden_states, attention_mask, past_key_values, use_cache, self.gk_proj(hidden_states))


class SwigluLinear(nn.Module):
    """Stand-in for the fused activation and product of fla's MLP."""

    def forward(self, gate, up, weight, bias):
        return F.linear(F.silu(gate) * up, weight, bias)


@named("fla.modules.mlp.GatedMLP")
class GatedMLP(nn.Module):
    """Stand-in for fla's MLP."""

    def __init__(self, hidden_size=32, intermediate_size=48, hidden_act="swish"):
        super().__init__()
        self.hidden_act = hidden_act
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)
        self.swiglu_linear = SwigluLinear()

    def forward(self, x, **kwargs):
        return self.swiglu_linear(self.gate_proj(x), self.up_proj(x), self.down_proj.weight, self.down_proj.bias)


class Bounded(nn.Module):
    """Parts that the layers of HGRN and HGRN2 have: the projections, the forget gate and the cache."""

    def __init__(self, names, hidden_size, widths, norm, convolved, conv_bias, layer_idx):
        super().__init__()
        self.layer_idx, self.use_short_conv, self.names = layer_idx, convolved, names
        for name, width in zip(names, widths, strict=True):
            self.add_module(f"{name}_proj", nn.Linear(hidden_size, width, bias=False))
            if convolved and name != "g":
                self.add_module(f"{name}_conv1d", Convolution(width, 4, conv_bias, None))
        self.g_norm, self.o_proj = norm, nn.Linear(widths[-1], hidden_size, bias=False)

    def projected(self, x, lower_bound):
        """Return the projections of x by name; "f" are the log-decays."""
        found = {name: getattr(self, f"{name}_proj")(x) for name in self.names}
        if self.use_short_conv:
            found |= {name: getattr(self, f"{name}_conv1d")(found[name]) for name in self.names if name != "g"}
        found["f"] = F.logsigmoid(found["f"])
        if lower_bound is not None and self.layer_idx > 0:
            found["f"] = torch.logaddexp(lower_bound.log(), torch.log1p(-lower_bound) + found["f"])
        return found

    def loop(self, x, cache, use_cache, decay, inputs, read):
        """Return ``read(t, state)`` for each step of ``state = decay * state + inputs``, after the state of a cache."""
        last = cache[self.layer_idx] if cache is not None and len(cache) > self.layer_idx else None
        state, outputs = torch.zeros_like(inputs[:, 0]) if last is None else last["recurrent_state"].to(inputs.dtype), []
        for t in range(x.shape[1]):
            state = state * decay[:, t] + inputs[:, t]
            outputs.append(read(t, state))
        if cache is not None:
            cache.update(layer_idx=self.layer_idx, recurrent_state=state if use_cache else None, offset=x.shape[1])
        return torch.stack(outputs, 1)


@named("fla.modules.norm.layernorm.RMSNorm")
class RMSNorm(nn.Module):
    """Stand-in for fla's norm, which counts the calls of its forward."""

    def __init__(self, hidden_size=32, elementwise_affine=True, bias=False, eps=1e-5):
        super().__init__()
        self.hidden_size, self.elementwise_affine, self.eps, self.calls = hidden_size, elementwise_affine, eps, 0
        self.weight = nn.Parameter(torch.rand(hidden_size) + 0.5) if elementwise_affine else None
        self.bias = nn.Parameter(torch.zeros(hidden_size)) if bias else None

    def forward(self, x, residual=None, prenorm=False, residual_in_fp32=False):
        self.calls += 1
        total = x if residual is None else x + residual
        y = F.rms_norm(total.float(), x.shape[-1:], None, self.eps)
        y = (y if self.weight is None else y * self.weight).to(x.dtype)
        total = total.float() if residual is None and residual_in_fp32 else total
        return (y, total) if prenorm else y


@named("fla.layers.hgrn.HGRNAttention")
class HGRNAttention(Bounded):
    """Stand-in for the layer with a forget gate per channel."""

    def __init__(self, hidden_size=64, use_short_conv=False, conv_bias=False, affine=True, activation="swish", layer_idx=1):
        norm = Norm(48, 1e-3, activation, affine)
        super().__init__("ifg", hidden_size, (48, 48, 48), norm, use_short_conv, conv_bias, layer_idx)

    def forward(
        self, hidden_states, attention_mask=None, past_key_values=None, use_cache=False, output_attentions=False,
        lower_bound=None, **kwargs,
    ):  # fmt: skip
        found = self.projected(hidden_states, lower_bound)
        inputs = F.silu(found["i"]) * (1 - found["f"].exp())
        if attention_mask is not None:
            inputs = inputs * attention_mask[:, -inputs.shape[1] :, None]
        o = self.loop(hidden_states, past_key_values, use_cache, found["f"].exp(), inputs, lambda t, state: state)
        return self.o_proj(self.g_norm(o, found["g"])), None, past_key_values


@named("fla.layers.hgrn2.HGRN2Attention")
class HGRN2Attention(Bounded):
    """Stand-in for the layer with keys and decays of one projection. Its norm ignores ``eps``, as fla's does."""

    def __init__(
        self, hidden_size=64, num_heads=2, head_f_dim=16, use_short_conv=False, conv_bias=False, affine=True, layer_idx=1
    ):
        keys = num_heads * head_f_dim
        norm = Norm(hidden_size, 0.1, affine=affine)
        super().__init__("qfi", hidden_size, (keys, keys, hidden_size), norm, use_short_conv, conv_bias, layer_idx)
        self.num_heads, self.head_f_dim, self.head_i_dim = num_heads, head_f_dim, hidden_size // num_heads

    def forward(
        self, hidden_states, attention_mask=None, past_key_values=None, use_cache=False, output_attentions=False,
        lower_bound=None, **kwargs,
    ):  # fmt: skip
        q, f, i = (each.unflatten(-1, (self.num_heads, -1)) for each in self.projected(hidden_states, lower_bound).values())
        if attention_mask is not None:
            i = i * attention_mask[:, -i.shape[1] :, None, None]
        q, keys = F.silu(q) * self.head_f_dim**-0.5, 1 - f.exp()
        read = lambda t, state: torch.einsum("bhk,bhvk->bhv", q[:, t], state)  # noqa: E731
        o = self.loop(hidden_states, past_key_values, use_cache, f.exp()[..., None, :], i[..., None] * keys[..., None, :], read)
        o = F.rms_norm(o.flatten(2), (o.shape[2:].numel(),), self.g_norm.weight, 1e-5)
        return F.linear(o, self.o_proj.weight), None, past_key_values


@named("fla.layers.rwkv6.RWKV6Attention")
class RWKV6Attention(nn.Module):
    """Stand-in for a layer of fla without a replacement."""

    def forward(self, x):
        return x
