"""The gated linear attention layers of fla, by ``onelaunch.ops.gla_layer``."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from onelaunch.integrations.fla_layers import SWISH, FlaLayer, convolution_refusals, head_refusals, norm_refusals
from onelaunch.integrations.forward import find, joined, linear_refusals
from onelaunch.nn.packed import child, parameter
from onelaunch.ops import gla_layer

_OPERATION = "onelaunch.ops.gla_layer"


class GlaLayer(FlaLayer):
    """Forward of ``fla.layers.GatedLinearAttention``, whose decays per channel come from a product of low rank."""

    operation = "gla_layer"
    projections = ("q_proj", "k_proj", "v_proj", "g_proj", "gk_proj.0")
    """Projections of the input, in the order in which the operation takes their weights."""
    convolutions = ("q_conv1d", "k_conv1d", "v_conv1d")
    decay = "gk_proj.1"
    """Projection that has the bias of the decays."""

    @classmethod
    def refusals(cls, module: nn.Module) -> Iterator[str]:
        """Yield each reason why the forward of a module cannot be replaced."""
        yield from _option_refusals(module)
        yield from _norm_refusals(module)
        if getattr(module, "use_short_conv", False):
            yield from _convolution_refusals(module, cls.convolutions)
        for name in sorted({*cls.projections, cls.decay, "o_proj"}):
            if name == "g_proj" and not getattr(module, "use_output_gate", True):
                continue  # refused already
            yield from linear_refusals(name, find(module, name), bias=name == cls.decay)

    def __init__(self, module: nn.Module) -> None:
        self.norm_name = "g_norm_swish_gate" if getattr(module, "fuse_norm_and_gate", False) else "g_norm"
        super().__init__(module)

    def not_called(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the submodules that the original forward calls and this one does not, by name."""
        names = {*self.projections, self.decay, "o_proj", "gk_proj", self.norm_name}
        for name in sorted(names | (set(self.convolutions) if self.convolved else set())):
            yield name, find(self.module, name)

    def groups(self) -> tuple[tuple[nn.Parameter, ...], ...]:
        """Return the weights of the projections of the input and, if there are any, of the convolutions."""
        projected = tuple([parameter(find(self.module, name), "weight") for name in self.projections])
        filters = tuple([parameter(find(self.module, name), "weight") for name in self.convolutions]) if self.convolved else ()
        return (projected, filters) if filters else (projected,)

    def weights(self) -> tuple[torch.Tensor, ...]:
        """Return all tensors that must have the dtype of the input."""
        decay, module = find(self.module, self.decay), self.module
        more = () if self.decay in self.projections else (parameter(decay, "weight"),)
        named = (*more, parameter(decay, "bias"), parameter(child(module, "o_proj"), "weight"))
        return (*[weight for group in self.groups() for weight in group], *named)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = False,
        output_attentions: bool | None = False,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None, Any]:
        """Run the layer; the arguments and results are those of fla's forward."""
        reason = self.why_not(hidden_states) or self.why_not_call(hidden_states, attention_mask, past_key_values, use_cache)
        if reason is None and kwargs.get("cu_seqlens") is not None:
            reason = "cu_seqlens is given"
        if reason is None and self.cached(past_key_values) is not None:
            reason = "the call continues from a state in past_key_values"
        if reason is not None:
            return self.original(reason, hidden_states, attention_mask, past_key_values, use_cache, output_attentions, **kwargs)
        module: Any = self.module
        projected, *filters = self.groups()
        decay, norm = find(module, self.decay), getattr(module, self.norm_name)
        out, state = gla_layer(
            hidden_states,
            joined(projected),
            None if self.decay in self.projections else decay.weight,
            decay.bias,
            norm.weight,
            module.o_proj.weight,
            heads=module.num_heads,
            normalizer=module.gate_logit_normalizer,
            eps=norm.eps,
            output_final_state=past_key_values is not None,
            conv_weight=joined(filters[0]).squeeze(1) if filters else None,
        )
        # fla's states are [N, H, V, K]
        self.store(past_key_values, None if state is None else state.transpose(-1, -2), hidden_states.shape[1])
        return out, None, past_key_values


class SimpleGlaLayer(GlaLayer):
    """Forward of ``fla.layers.SimpleGatedLinearAttention``, with one decay per head."""

    projections = ("q_proj", "k_proj", "v_proj", "g_proj", "gk_proj")
    decay = "gk_proj"


def _option_refusals(module: nn.Module) -> Iterator[str]:
    """Yield each option of a layer that the operation lacks."""
    if not getattr(module, "use_output_gate", True):
        yield f"use_output_gate is False; {_OPERATION} always has a gate"
    if getattr(module, "num_kv_groups", 1) != 1:
        heads = f"num_kv_heads is {getattr(module, 'num_kv_heads', None)} and num_heads {getattr(module, 'num_heads', None)}"
        yield f"{heads}; {_OPERATION} needs as many heads of keys and values as of queries"
    if getattr(module, "feature_map_fn", None) is not None:
        yield f"feature_map is set; {_OPERATION} has none"
    if (least := getattr(module, "clamp_min", None)) is not None:
        yield f"clamp_min is {least}; {_OPERATION} has none"
    for option, attribute in (("expand_k", "head_k_dim"), ("expand_v", "head_v_dim")):
        yield from head_refusals(f"{option} and num_heads make", getattr(module, attribute, 0), _OPERATION)


def _norm_refusals(module: nn.Module) -> Iterator[str]:
    """Yield each reason why the norm and the gate are not those of the operation, an RMS norm with a weight and then SiLU."""
    fused = getattr(module, "fuse_norm_and_gate", False)
    norm = getattr(module, "g_norm_swish_gate" if fused else "g_norm", None)
    if norm is None:
        yield "the norm is missing"
        return
    gate = getattr(norm, "activation", None) if fused else getattr(module, "gate_fn", None)
    called = gate.__self__ if inspect.ismethod(gate) else gate  # ACT2FN holds the method apply of an autograd function
    name = called if isinstance(called, str) else getattr(called, "__name__", type(called).__name__)
    if name not in SWISH and getattr(module, "use_output_gate", True):
        yield f"gate_fn is {name}; {_OPERATION} has swish alone"
    yield from norm_refusals(norm)
    if getattr(norm, "weight", None) is None:
        yield f"elementwise_affine is False; {_OPERATION} needs a weight of the norm"


def _convolution_refusals(module: nn.Module, names: tuple[str, ...]) -> Iterator[str]:
    """Yield each reason why the short convolutions are not those of the operation."""
    sizes = set()
    for name in names:
        convolution = getattr(module, name, None)
        if isinstance(convolution, nn.Conv1d):
            sizes.add(convolution.kernel_size)
            if convolution.bias is not None:
                yield f"conv_bias is True; {_OPERATION} has none"
        yield from convolution_refusals(module, name, SWISH)
    if len(sizes) > 1:
        yield "the short convolutions differ in conv_size"
