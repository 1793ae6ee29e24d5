"""The layer of a linear RNN, which users make through ``onelaunch.nn``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from onelaunch.nn import inputs
from onelaunch.nn.cache import Cache
from onelaunch.nn.packed import PackedModule, parameter
from onelaunch.ops import Segment, linear_rnn, projections


class LinearRNN(PackedModule):
    """A linear RNN with a decay and an output gate per channel: the layer of experiment 040, with its projections.

        log_decay = logsigmoid(x W_gk + b) / gate_logit_normalizer
        s_t = exp(log_decay_t) * s_{t-1} + x_t W_v;  out = (s * silu(x W_g)) W_o

    One parameter ``in_proj_weight`` holds W_g and W_gk; W_v is a parameter of its own, since
    :func:`onelaunch.ops.linear_rnn` multiplies by it, in some variants in the launch of the scan. A state dict holds
    ``v_proj.weight``, ``g_proj.weight``, ``gk_proj.weight``, ``gk_proj.bias`` and ``o_proj.weight``.

    Args:
        hidden_size: channels of inputs and outputs, D.
        expand_v: ratio of the state's channels V to ``hidden_size``.
        gate_logit_normalizer: divisor of the log-decays, above 0; larger values give a longer memory.
        layer_idx: key of the layer's state in a :class:`onelaunch.nn.Cache`.

    Raises:
        ArgumentError: an argument is invalid; the message names it, what it was and what it must be.

    Source: experiment 040, which ``studies/040-linear-rnn.toml`` asks again of the operation alone; the decay
        is that of gated linear attention.
    """

    in_proj_weight: nn.Parameter
    in_proj_bias: nn.Parameter
    row_wise = "o_proj"

    def __init__(
        self,
        hidden_size: int = 1024,
        expand_v: float = 1.0,
        gate_logit_normalizer: float = 16,
        layer_idx: int | None = None,
    ) -> None:
        super().__init__()
        self.hidden_size = inputs.count("hidden_size", hidden_size)
        self.expand_v = expand_v
        self.value_dim = channels = inputs.expanded(self.hidden_size, "expand_v", expand_v)
        self.gate_logit_normalizer = inputs.number("gate_logit_normalizer", gate_logit_normalizer, above=0)
        self.layer_idx = inputs.index("layer_idx", layer_idx)
        self.segments: tuple[Segment, ...] = (
            Segment("gate", channels, 1),
            Segment("gk", channels, 1, "logsigmoid", self.gate_logit_normalizer, bias=True),
        )
        self.pack("in_proj_weight", {"g_proj.weight": channels, "gk_proj.weight": channels}, self.hidden_size)
        self.pack("in_proj_bias", {"gk_proj.bias": channels})
        self.v_proj = nn.Linear(self.hidden_size, channels, bias=False)
        self.o_proj = nn.Linear(channels, self.hidden_size, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize all projections as in a new layer, like :class:`torch.nn.Linear`."""
        self.reset_packed()
        self.v_proj.reset_parameters()
        self.o_proj.reset_parameters()

    def sizes_to_divide(self) -> dict[str, int]:
        return {"hidden_size * expand_v": self.value_dim}

    def take_share(self, ranks: int) -> None:
        self.value_dim //= ranks
        self.segments = tuple([replace(each, heads=each.heads // ranks) for each in self.segments])

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, value_dim={self.value_dim}"

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = False,
        output_attentions: bool | None = False,
        *,
        cu_seqlens: torch.Tensor | None = None,
        mesh: Any = None,
    ) -> tuple[torch.Tensor, None, Cache | None]:
        """Run the layer; arguments, results and errors are those of :meth:`onelaunch.nn.GatedLinearAttention.forward`."""
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
        weight, bias = parameter(self, "in_proj_weight"), parameter(self, "in_proj_bias")
        gate, log_decay = projections(given.x, weight, self.segments, bias=bias)
        result = linear_rnn(
            given.x,
            self.local(self.v_proj.weight).t(),
            given.without_padding(log_decay),
            gate,
            initial_state=given.initial_state,
            output_final_state=given.use_cache,
            **given.steps,
        )
        y, state = result if given.use_cache else (result, None)
        given.store(state)
        return self.o_proj(y), None, given.cache  # y is 0 at padding, since x and so the gate are 0 there
