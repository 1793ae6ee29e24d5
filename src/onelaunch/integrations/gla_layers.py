"""The gated linear attention layers of fla, by ``onelaunch.ops.gla_layer``."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from onelaunch.integrations.forward import Forward, joined, linear_refusals, parameter_refusals
from onelaunch.ops import gla_layer
from onelaunch.ops.gla.contract import LARGEST_HEAD, SMALLEST_HEAD
from onelaunch.tracing import is_traced

_SWISH = ("swish", "silu", "SwishFunction")
"""Names of SiLU in fla: of an activation, and of the autograd function that ``ACT2FN`` holds."""
_CONVOLUTIONS = ("q_conv1d", "k_conv1d", "v_conv1d")
_OPERATION = "onelaunch.ops.gla_layer"


class GlaLayer(Forward):
    """Forward of ``fla.layers.GatedLinearAttention``, whose decays per channel come from a product of low rank."""

    operation = "gla_layer"
    projections = ("q_proj", "k_proj", "v_proj", "g_proj", "gk_proj.0")
    """Projections of the input, in the order in which the operation takes their weights."""
    decay = "gk_proj.1"
    """Projection that has the bias of the decays."""

    @classmethod
    def refusals(cls, module: nn.Module) -> Iterator[str]:
        """Yield each reason why the forward of a module cannot be replaced."""
        yield from _option_refusals(module)
        yield from _norm_refusals(module)
        if getattr(module, "use_short_conv", False):
            yield from _convolution_refusals(module)
        for name in sorted({*cls.projections, cls.decay, "o_proj"}):
            if name == "g_proj" and not getattr(module, "use_output_gate", True):
                continue  # refused already
            yield from linear_refusals(name, _find(module, name), bias=name == cls.decay)

    def __init__(self, module: nn.Module) -> None:
        self._convolved = bool(getattr(module, "use_short_conv", False))
        self._norm_name = "g_norm_swish_gate" if getattr(module, "fuse_norm_and_gate", False) else "g_norm"
        super().__init__(module)

    def not_called(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the submodules that the original forward calls and this one does not, by name."""
        names = {*self.projections, self.decay, "o_proj", "gk_proj", self._norm_name}
        for name in sorted(names | (set(_CONVOLUTIONS) if self._convolved else set())):
            yield name, _find(self.module, name)

    def groups(self) -> tuple[tuple[nn.Parameter, ...], ...]:
        """Return the weights of the projections of the input and, if there are any, of the convolutions."""
        projected = tuple([_find(self.module, name).weight for name in self.projections])
        filters = tuple([_find(self.module, name).weight for name in _CONVOLUTIONS]) if self._convolved else ()
        return (projected, filters) if filters else (projected,)

    def weights(self) -> tuple[torch.Tensor, ...]:
        """Return all tensors that must have the dtype of the input."""
        decay, module = _find(self.module, self.decay), self.module
        more = () if self.decay in self.projections else (decay.weight,)
        named = (*more, decay.bias, module.o_proj.weight)  # pyrefly: ignore[missing-attribute]
        return (*[weight for group in self.groups() for weight in group], *named)  # pyrefly: ignore[bad-return]

    def separately(self) -> str:
        """Return what a call does with weights that do not lie one behind the other."""
        return "packed in each call"

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
        reason = self.why_not(hidden_states) or self._why_not_call(
            hidden_states, attention_mask, past_key_values, use_cache, kwargs
        )
        if reason is not None:
            return self.original(reason, hidden_states, attention_mask, past_key_values, use_cache, output_attentions, **kwargs)
        module: Any = self.module
        projected, *filters = self.groups()
        decay, norm = _find(module, self.decay), getattr(module, self._norm_name)
        stores = past_key_values is not None
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
            output_final_state=stores,
            conv_weight=joined(filters[0]).squeeze(1) if filters else None,
        )
        if stores and state is not None:  # fla's states are [N, H, V, K]
            past_key_values.update(
                layer_idx=module.layer_idx,
                recurrent_state=state.transpose(-1, -2).contiguous(),
                conv_state=None,
                offset=hidden_states.shape[1],
            )
        return out, None, past_key_values

    def _why_not_call(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        past_key_values: Any,
        use_cache: bool | None,
        kwargs: dict[str, Any],
    ) -> str | None:
        """Return why the arguments of this call need the original forward, or ``None``."""
        if hidden_states.dim() != 3:
            return "hidden_states does not have three dimensions"
        if kwargs.get("cu_seqlens") is not None:
            return "cu_seqlens is given"
        if past_key_values is not None:
            if self._convolved:
                return "past_key_values is given, and the layer has short convolutions"
            index: Any = self.module.layer_idx
            if not use_cache or index is None:
                return "past_key_values is given without use_cache or layer_idx"
            if len(past_key_values) > index and past_key_values[index] is not None:
                return "the call continues from a state in past_key_values"
        norm = getattr(self.module, self._norm_name).weight
        if type(norm) is not nn.Parameter and type(norm) is not torch.Tensor:
            return f"a weight is a {type(norm).__name__}"
        if norm.dtype not in (hidden_states.dtype, torch.float32) and not torch.is_autocast_enabled(hidden_states.device.type):
            return "the input and the weights differ in dtype"
        return None if attention_mask is None else _why_not_mask(attention_mask, hidden_states.shape[1])


class SimpleGlaLayer(GlaLayer):
    """Forward of ``fla.layers.SimpleGatedLinearAttention``, with one decay per head."""

    projections = ("q_proj", "k_proj", "v_proj", "g_proj", "gk_proj")
    decay = "gk_proj"


def _find(module: nn.Module, name: str) -> Any:
    """Return a submodule by its name, which may hold dots, or ``None``."""
    found: Any = module
    for key in name.split("."):
        found = getattr(found, key, None)
    return found


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
        size = getattr(module, attribute, 0)
        if not SMALLEST_HEAD <= size <= LARGEST_HEAD:
            heads = f"{option} and num_heads make heads of {size} channels"
            yield f"{heads}; {_OPERATION} takes {SMALLEST_HEAD} to {LARGEST_HEAD}"


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
    if name not in _SWISH and getattr(module, "use_output_gate", True):
        yield f"gate_fn is {name}; {_OPERATION} has swish alone"
    if not isinstance(getattr(norm, "eps", None), float):
        yield "the norm has no attribute eps"
    if getattr(norm, "bias", None) is not None:
        yield "the norm has a bias"
    if getattr(norm, "weight", None) is None:
        yield f"elementwise_affine is False; {_OPERATION} needs a weight of the norm"
    else:
        yield from parameter_refusals("the norm's weight", norm.weight)


def _convolution_refusals(module: nn.Module) -> Iterator[str]:
    """Yield each reason why the short convolutions are not those of the operation."""
    sizes = set()
    for name in _CONVOLUTIONS:
        convolution = getattr(module, name, None)
        if not isinstance(convolution, nn.Conv1d):
            yield f"{name} is not a torch.nn.Conv1d"
            continue
        sizes.add(convolution.kernel_size)
        if convolution.bias is not None:
            yield f"conv_bias is True; {_OPERATION} has none"
        if getattr(convolution, "activation", None) not in _SWISH:
            yield f"the activation of {name} is not silu"
        yield from parameter_refusals(f"{name}.weight", convolution.weight)
    if len(sizes) > 1:
        yield "the short convolutions differ in conv_size"


class _SeenMask:
    """Mask of the previous call and whether it has padding, so that the layers of a model wait for the device once a step."""

    mask: weakref.ref[torch.Tensor] | None = None
    key: tuple[int, int] = (0, 0)
    """Length of the call and version of the mask's values."""
    padded = False


def _why_not_mask(mask: torch.Tensor, length: int) -> str | None:
    """Return why a mask needs the original forward, or ``None`` if it marks no padding in the last ``length`` steps."""
    if is_traced(mask):
        return "attention_mask is given under torch.compile, which cannot look at its values"
    if mask.dim() != 2 or mask.is_inference():
        return "attention_mask is not [B, T], or was made in inference mode"
    if mask.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return "attention_mask is given while a CUDA graph is captured"
    key = (length, mask._version)  # noqa: SLF001 - PyTorch has no public name
    if _SeenMask.mask is None or _SeenMask.mask() is not mask or _SeenMask.key != key:
        _SeenMask.padded = not bool(mask[:, -length:].all())
        _SeenMask.mask, _SeenMask.key = weakref.ref(mask), key
    return "attention_mask has padding" if _SeenMask.padded else None
