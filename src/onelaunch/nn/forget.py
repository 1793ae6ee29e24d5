"""The recurrences of HGRN and HGRN2 with their forget gates, and the base class of their layers.

``hgrn.py`` derives the layers from :class:`ForgetGateLayer`. The replaced forward passes of fla's layers
(``onelaunch.integrations``) call the functions with the weights of fla's modules.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from onelaunch import checks
from onelaunch.errors import ShapeError
from onelaunch.nn import inputs
from onelaunch.nn.cache import Cache
from onelaunch.nn.inputs import Inputs
from onelaunch.nn.packed import Shards, child, parameter
from onelaunch.nn.recurrent import RecurrentLayer
from onelaunch.operation import remembered
from onelaunch.ops import Segment, gated_scan, gla, output_chain, projections
from onelaunch.parallel import Context

LARGEST_SHARE = 1 - 2**-24
"""Largest share of a step's input in float32: beyond it, the log-decay would be infinite."""


class Span(NamedTuple):
    """Steps of a call: where their states come from and go to, and which of them are packed sequences."""

    initial_state: torch.Tensor | None = None
    """State before the first step, float32, or ``None`` for zeros."""
    output_final_state: bool = False
    """Flag to return the state after the last step."""
    cu_seqlens: torch.Tensor | None = None
    """Offsets of packed sequences, ``[N + 1]``, or ``None``."""
    mesh: Context | None = None
    """Slices of the ranks over which the steps are spread, which know the offsets, or ``None``."""

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of the operation that computes the recurrence."""
        named = self._asdict()
        if self.mesh is None:
            del named["mesh"]
        return named


def forget(log_forget: torch.Tensor, lower_bound: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-decays of a forget gate, and the share ``1 - decay`` of each step's input, float32.

        decay = bound + (1 - bound) exp(log_forget);  share = 1 - decay = (1 - bound) (1 - exp(log_forget))

    fla subtracts a decay from 1. Here the share is a product of terms that keep their digits where decays are near 1, and the
    log-decays with a bound are ``log1p(-share)``, which is at most 0 however it is rounded.

    Args:
        log_forget: Logarithm of the forget gate's sigmoid, ``[B, T, ...]``, at most 0.
        lower_bound: Least decay of each channel, from 0 to 1, of the trailing shape of ``log_forget``. Default: none.

    Returns:
        Log-decays, ``log_forget`` itself without a bound and float32 with one, and the shares.
    """
    share = -torch.expm1(log_forget.float())
    if lower_bound is None:
        return log_forget, share
    share = (1 - lower_bound.float()) * share
    return torch.log1p(-share.clamp_max(LARGEST_SHARE)), share


def hgrn(
    i: torch.Tensor, log_forget: torch.Tensor, lower_bound: torch.Tensor | None, span: Span
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run HGRN's recurrence ``s_t = decay_t * s_{t-1} + (1 - decay_t) * i_t`` per channel.

    Args:
        i: Inputs after SiLU, ``[B, T, C]``.
        log_forget: As for :func:`forget`, ``[B, T, C]``.
        lower_bound: As for :func:`forget`, ``[C]``.
        span: States are ``[N, C]``.

    Returns:
        States ``[B, T, C]`` in the dtype of ``i``, and the final one, or ``None``.
    """
    log_decay, share = forget(log_forget, lower_bound)
    result = gated_scan((i * share).to(i.dtype), log_decay, **span.arguments)
    return result if isinstance(result, tuple) else (result, None)


def hgrn2(
    q: torch.Tensor,
    log_forget: torch.Tensor,
    i: torch.Tensor,
    lower_bound: torch.Tensor | None,
    span: Span,
    *,
    state_v_first: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run HGRN2's recurrence: gated linear attention whose keys are the shares ``1 - decay``.

    Args:
        q: Queries after SiLU, ``[B, T, H, K]``.
        log_forget: As for :func:`forget`, ``[B, T, H, K]``.
        i: Values, ``[B, T, H, V]``.
        lower_bound: As for :func:`forget`, ``[H * K]``.
        span: States are ``[N, H, K, V]``.
        state_v_first: Flag that they are ``[N, H, V, K]``.

    Returns:
        Outputs ``[B, T, H, V]`` in the dtype of ``i``, and the final state, or ``None``.
    """
    bound = None if lower_bound is None else lower_bound.view(log_forget.shape[2:])
    log_decay, share = forget(log_forget, bound)
    return gla(q, share.to(i.dtype), i, log_decay, state_v_first=state_v_first, **span.arguments)


@remembered
def hgrn_segments(channels: int, *, convolved: bool) -> tuple[Segment, ...]:
    """Return the segments of HGRN's packed projection in fla's order, activated unless short convolutions come first."""
    silu, logsigmoid = ("none", "none") if convolved else ("silu", "logsigmoid")
    return Segment("i", channels, 1, silu), Segment("f", channels, 1, logsigmoid), Segment("g", 1, channels)


@remembered
def hgrn2_segments(heads: int, keys: int, values: int, *, convolved: bool) -> tuple[Segment, ...]:
    """Return the segments of HGRN2's packed projection in fla's order, activated unless short convolutions come first."""
    silu, logsigmoid = ("none", "none") if convolved else ("silu", "logsigmoid")
    return Segment("q", heads, keys, silu), Segment("f", heads, keys, logsigmoid), Segment("i", heads, values)


class ForgetGateLayer(RecurrentLayer, ABC):
    """Layer of HGRN or HGRN2: a recurrence with a forget gate that may have a lower bound, and one norm over all channels.

    A subclass calls :meth:`add_parts` in its constructor and defines :meth:`recur`.
    """

    convolutions: tuple[str, ...]
    """Projections with short convolutions, in the order in which fla keeps their states."""
    norm_eps: float
    use_short_conv: bool
    input_dim: int
    """Number of channels of the recurrence's output."""
    _used_eps: float
    """Number that the norm adds to the mean of squares."""

    def add_parts(
        self, segments: tuple[Segment, ...], conv_size: int, conv_bias: bool, norm: nn.RMSNorm, activations: Sequence[str | None]
    ) -> None:
        """Add the packed weight, the short convolutions with their activations, the norm and the output projection."""
        self.segments = segments
        self.pack("in_proj_weight", {f"{each.name}_proj.weight": each.width for each in segments}, self.hidden_size)
        widths = {each.name: each.width for each in segments}
        if self.use_short_conv:
            for name, activation in zip(self.convolutions, activations, strict=True):
                self.add_convolution(name, widths[name], conv_size, conv_bias, activation)
        self.g_norm = norm
        self.o_proj = nn.Linear(norm.normalized_shape[0], self.hidden_size, bias=False)
        self.reset_parameters()

    @abstractmethod
    def recur(
        self, projected: dict[str, torch.Tensor], lower_bound: torch.Tensor | None, span: Span
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the outputs of the recurrence and the final state; ``projected["f"]`` is the logarithm of the forget gate."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = False,
        output_attentions: bool | None = False,
        lower_bound: torch.Tensor | None = None,
        *,
        cu_seqlens: torch.Tensor | None = None,
        mesh: Any = None,
    ) -> tuple[torch.Tensor, None, Cache | None]:
        """Run the layer.

        Args:
            hidden_states: ``[B, T, hidden_size]`` float16, bfloat16 or float32, dtype of the parameters.
            attention_mask: ``[B, at least T]``, 0 for padding, as for :meth:`onelaunch.nn.GatedLinearAttention.forward`.
            past_key_values: states of the previous calls, from which this call continues.
            use_cache: whether to store the state after the last step, in ``past_key_values`` or in a new
                :class:`onelaunch.nn.Cache`.
            output_attentions: must be false: there are no attention weights.
            lower_bound: least decay of each channel of the forget gate, from 0 to 1, of a floating-point dtype; a model
                has one for each layer. As in fla, a layer with ``layer_idx`` 0 ignores it. Default: none.
            cu_seqlens: ``[N + 1]`` int32 or int64 offsets of packed sequences; needs ``B = 1``.
            mesh: DeviceMesh of one dimension, process group or :class:`onelaunch.parallel.Context` over whose ranks the steps
                are spread, see :func:`onelaunch.ops.gla`. Short convolutions read the inputs before the slice from the ranks
                that have them. Not together with ``past_key_values`` or ``use_cache``.

        Returns:
            ``(o [B, T, hidden_size], None, past_key_values)``

        Raises:
            ShapeError, DTypeError, DeviceError, PackingError, ArgumentError: an argument is invalid; the message names it and
                what it must be.
        """
        given = inputs.read_inputs(
            hidden_states,
            self.hidden_size,
            self.layer_idx,
            attention_mask,
            past_key_values,
            use_cache,
            output_attentions,
            cu_seqlens,
            mesh,
        )
        bound = self._bound(given, lower_bound)
        results = projections(given.x, parameter(self, "in_proj_weight"), self.segments)
        projected = {segment.name: each for segment, each in zip(self.segments, results, strict=True)}
        conv_state = None
        if self.use_short_conv:
            started = self.before_convolutions(given, self.convolutions, [projected[name] for name in self.convolutions])
            convolved, conv_state = self.convolve(given, started)
            projected.update(zip(self.convolutions, convolved, strict=True))
            projected["f"] = F.logsigmoid(projected["f"])
        projected["f"] = given.without_padding(projected["f"])
        o, state = self.recur(projected, bound, Span(given.initial_state, given.use_cache, **given.steps))
        given.store(state, conv_state)
        norm_weight, w_out = [self.local(parameter(child(self, name), "weight")) for name in ("g_norm", "o_proj")]
        out = output_chain(one_head(o), projected.get("g"), norm_weight, w_out, eps=self._used_eps)
        if self.shards is not None:
            out = self._normed_over_all_ranks(out, o, self.shards)
        return given.without_padding(out), None, given.cache

    def _normed_over_all_ranks(self, out: torch.Tensor, o: torch.Tensor, shards: Shards) -> torch.Tensor:
        """Return the output of a rank, which has normed its own channels, as if the norm had covered those of all ranks.

        A norm over all channels divides by another root of a mean of squares, one number for each step, and the output projection
        is linear. So the kernel that norms and projects stays as it is, and the ranks exchange one float32 for each step.
        """
        own = o.float().square().flatten(2).mean(-1, keepdim=True)  # [B, T, 1]
        factor = ((own + self._used_eps) / (shards.mean(own) + self._used_eps)).sqrt()
        return (out.float() * factor).to(out.dtype)

    def take_share(self, ranks: int) -> None:
        shares = []
        for each in self.segments:  # HGRN's gate is one head of all channels, as its norm is
            one = each.heads == 1
            shares.append(replace(each, head_size=each.head_size // ranks) if one else replace(each, heads=each.heads // ranks))
        self.segments = tuple(shares)
        self.input_dim //= ranks

    def _bound(self, given: Inputs, lower_bound: torch.Tensor | None) -> torch.Tensor | None:
        """Return the lower bound if this layer has one; raise unless it has a number for each channel of the forget gate."""
        if lower_bound is None:
            return None
        channels = next(each.width for each in self.segments if each.name == "f")
        if checks.tensor("lower_bound", lower_bound).shape != (channels,):
            raise ShapeError("lower_bound", got=lower_bound.shape, want=f"[C] with C = {channels} channels of the forget gate")
        checks.dtype("lower_bound", lower_bound, (*checks.FLOATS, torch.float64))
        checks.device("lower_bound", lower_bound, given.x.device)
        return None if self.layer_idx == 0 else lower_bound


def one_head(o: torch.Tensor) -> torch.Tensor:
    """Return ``[B, T, ...]`` as one head ``[B, T, 1, C]`` of all channels, for a norm over all of them."""
    return o.flatten(2)[:, :, None]
