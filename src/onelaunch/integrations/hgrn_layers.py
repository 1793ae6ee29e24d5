"""The HGRN and HGRN2 layers of fla, by ``gated_scan`` and ``gla`` between ``projections`` and ``output_chain``."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional as F

from onelaunch.integrations.fla_layers import SWISH, FlaLayer, convolution_refusals, head_refusals, norm_refusals
from onelaunch.integrations.forward import find, joined, linear_refusals
from onelaunch.nn.convolution import short_convolution
from onelaunch.nn.forget import Span, hgrn, hgrn2, hgrn2_segments, hgrn_segments, one_head
from onelaunch.nn.hgrn import FLA_EPS
from onelaunch.nn.packed import parameter
from onelaunch.operation.states import float32_state
from onelaunch.ops import Segment, output_chain, projections


class ForgetGateForward(FlaLayer):
    """Forward of a layer whose forget gate may have a lower bound, which the model passes in each call."""

    silu: ClassVar[tuple[str, ...]]
    """Projections that SiLU follows, beside the gate of the norm."""
    norm_name = "g_norm"

    @classmethod
    def refusals(cls, module: nn.Module) -> Iterator[str]:
        """Yield each reason why the forward of a module cannot be replaced."""
        yield from cls.option_refusals(module)
        norm = getattr(module, "g_norm", None)
        yield from ("the norm is missing",) if norm is None else norm_refusals(norm)
        if getattr(module, "use_short_conv", False):
            for name in cls.convolutions:
                yield from convolution_refusals(module, name, (None,))
        for name in (*cls.projections, "o_proj"):
            yield from linear_refusals(name, getattr(module, name, None))

    @classmethod
    @abstractmethod
    def option_refusals(cls, module: nn.Module) -> Iterator[str]:
        """Yield each option of a layer that the operations lack."""

    @abstractmethod
    def segments(self) -> tuple[Segment, ...]:
        """Return the segments of the projections, named as they are without ``_proj``.

        They are made from the module's sizes, which compiled code takes as constants; those of other objects may become symbols.
        """

    @abstractmethod
    def eps(self) -> float:
        """Return the number that the norm adds to the mean of squares."""

    @abstractmethod
    def recur(
        self, projected: dict[str, torch.Tensor], lower_bound: torch.Tensor | None, span: Span
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the outputs of the recurrence and the final state; ``projected["f"]`` is the logarithm of the forget gate."""

    def not_called(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the submodules that the original forward calls and this one does not, by name."""
        for name in (*self.projections, *(self.convolutions if self.convolved else ()), "g_norm", "o_proj"):
            yield name, find(self.module, name)

    def groups(self) -> tuple[tuple[nn.Parameter, ...], ...]:
        """Return the weights of the projections of the input."""
        return (tuple([parameter(find(self.module, name), "weight") for name in self.projections]),)

    def weights(self) -> tuple[torch.Tensor, ...]:
        """Return all tensors that must have the dtype of the input."""
        convolutions = [find(self.module, name) for name in self.convolutions] if self.convolved else []
        filters = [value for each in convolutions for value in (each.weight, each.bias) if value is not None]
        return (*self.groups()[0], *filters, parameter(find(self.module, "o_proj"), "weight"))

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = False,
        output_attentions: bool | None = False,
        lower_bound: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None, Any]:
        """Run the layer; the arguments and results are those of fla's forward."""
        reason = (
            self.why_not(hidden_states)
            or self.why_not_call(hidden_states, attention_mask, past_key_values, use_cache)
            or self._why_not_bound(hidden_states, lower_bound)
        )
        if reason is not None:
            return self.original(
                reason, hidden_states, attention_mask, past_key_values, use_cache, output_attentions, lower_bound, **kwargs
            )
        segments = self.segments()
        results = projections(hidden_states, joined(self.groups()[0]), segments)
        projected = {segment.name: each for segment, each in zip(segments, results, strict=True)}
        offsets = kwargs.get("cu_seqlens")
        if self.convolved:
            for name in self.convolutions:
                self._convolve(projected, name.removesuffix("_conv1d"), find(self.module, name), offsets)
        last = self.cached(past_key_values)
        initial = None if last is None else float32_state(last["recurrent_state"], hidden_states)
        bound = None if self.module.layer_idx == 0 else lower_bound
        o, state = self.recur(projected, bound, Span(initial, past_key_values is not None, offsets))
        self.store(past_key_values, state, hidden_states.shape[1])
        norm_weight, w_out = parameter(find(self.module, "g_norm"), "weight"), parameter(find(self.module, "o_proj"), "weight")
        return output_chain(one_head(o), projected.get("g"), norm_weight, w_out, eps=self.eps()), None, past_key_values

    def _convolve(
        self, projected: dict[str, torch.Tensor], name: str, convolution: nn.Conv1d, offsets: torch.Tensor | None
    ) -> None:
        """Apply a short convolution and the activation behind it to a projection."""
        value, silu = projected[name], name in self.silu
        y, _ = short_convolution(
            value.flatten(2), convolution.weight, convolution.bias, None, offsets, silu=silu, output_final_state=False
        )
        y = y.unflatten(-1, value.shape[2:])
        projected[name] = F.logsigmoid(y) if name == "f" else y

    def _why_not_bound(self, hidden_states: torch.Tensor, lower_bound: torch.Tensor | None) -> str | None:
        """Return why the lower bound needs the original forward, or ``None``."""
        if lower_bound is None:
            return None
        if type(lower_bound) is not torch.Tensor and type(lower_bound) is not nn.Parameter:
            return f"lower_bound is a {type(lower_bound).__name__}"
        channels = find(self.module, "f_proj").out_features
        if lower_bound.shape != (channels,) or not lower_bound.is_floating_point() or self.module.layer_idx is None:
            return "lower_bound is not [C] of a floating-point dtype, or the layer has no layer_idx"
        return "lower_bound is on another device" if lower_bound.device != hidden_states.device else None


class HgrnLayer(ForgetGateForward):
    """Forward of ``fla.layers.hgrn.HGRNAttention``."""

    operation = "gated_scan"
    projections = ("i_proj", "f_proj", "g_proj")
    convolutions = ("i_conv1d", "f_conv1d")
    silu = ("i",)

    @classmethod
    def option_refusals(cls, module: nn.Module) -> Iterator[str]:
        """Yield the reason why the activation of the norm's gate is not SiLU, if it is not."""
        name = getattr(getattr(module, "g_norm", None), "activation", None)
        if name not in SWISH:
            yield f"the activation of g_norm is {name}; onelaunch.ops.output_chain has swish alone"

    def segments(self) -> tuple[Segment, ...]:
        """Return the segments of the inputs, of the forget gate and of the norm's gate."""
        return hgrn_segments(find(self.module, "i_proj").out_features, convolved=self.convolved)

    def eps(self) -> float:
        """Return the number that the norm adds to the mean of squares."""
        return find(self.module, "g_norm").eps

    def recur(
        self, projected: dict[str, torch.Tensor], lower_bound: torch.Tensor | None, span: Span
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the states ``[B, T, C]`` and the final one ``[N, C]``."""
        return hgrn(projected["i"], projected["f"], lower_bound, span)


class Hgrn2Layer(ForgetGateForward):
    """Forward of ``fla.layers.hgrn2.HGRN2Attention``, whose norm adds 1e-5 whatever its ``eps`` is."""

    operation = "gla"
    projections = ("q_proj", "f_proj", "i_proj")
    convolutions = ("q_conv1d", "f_conv1d", "i_conv1d")
    silu = ("q",)

    @classmethod
    def option_refusals(cls, module: nn.Module) -> Iterator[str]:
        """Yield the reason why the operation does not take heads of these sizes, if it does not."""
        for attribute in ("head_f_dim", "head_i_dim"):
            yield from head_refusals("expand_ratio and num_heads make", getattr(module, attribute, 0), "onelaunch.ops.gla")

    def segments(self) -> tuple[Segment, ...]:
        """Return the segments of the queries, of the forget gate and of the values."""
        module: Any = self.module
        return hgrn2_segments(module.num_heads, module.head_f_dim, module.head_i_dim, convolved=self.convolved)

    def eps(self) -> float:
        """Return the number that the norm adds to the mean of squares."""
        return FLA_EPS

    def recur(
        self, projected: dict[str, torch.Tensor], lower_bound: torch.Tensor | None, span: Span
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the outputs ``[B, T, H, V]`` and the final state in fla's layout, ``[N, H, V, K]``."""
        return hgrn2(projected["q"], projected["f"], projected["i"], lower_bound, span, state_v_first=True)
