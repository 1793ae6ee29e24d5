"""The layer of gated linear attention with a decay per key channel.

Users make it through ``onelaunch.nn``, and so does the variant ``module`` of the operation ``gla_layer``.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from onelaunch.errors import ArgumentError
from onelaunch.nn import inputs
from onelaunch.nn.gated import GatedLayer, Projected
from onelaunch.nn.packed import parameter
from onelaunch.ops import Segment, projections


class GatedLinearAttention(GatedLayer):
    """Gated linear attention (GLA), with the arguments and the state dict of ``fla.layers.GatedLinearAttention``.

        q, k, v, g = x W_q, x W_k, x W_v, x W_g;  gk = logsigmoid(x W_1 W_2 + b) / gate_logit_normalizer
        o = gla(q, k, v, gk);  out = (rmsnorm(o) * swish(g)) W_o        norm per head

    One parameter ``in_proj_weight`` holds W_q, W_k, W_v, W_g and W_1. A state dict holds them as ``q_proj.weight``,
    ``k_proj.weight``, ``v_proj.weight``, ``g_proj.weight`` and ``gk_proj.0.weight``, so that state dicts of
    fla 0.6.0 load here, and ours load there.

    Args:
        mode: ``chunk``, ``fused_recurrent`` or ``fused_chunk``, names of fla's kernels; without effect here, since the
            dispatcher chooses.
        hidden_size: channels of inputs and outputs, D.
        expand_k: ratio of the channels of all query heads to ``hidden_size``. Heads have 16 to 512 channels.
        expand_v: ratio of the channels of all value heads to ``hidden_size``. Heads have 16 to 512 channels.
        num_heads: number of query heads, H.
        num_kv_heads: heads of keys, values and decays, each shared by a group of queries; no copies are made for
            :func:`onelaunch.ops.gla`. Default: ``num_heads``. States have ``num_heads`` heads, as fla's.
        feature_map: activation of queries and keys: ``relu``, ``sigmoid``, ``logsigmoid``, ``silu`` or ``swish``, ``sqrelu``,
            ``gelu``. Default: none.
        use_short_conv: whether queries, keys and values go through short causal convolutions with SiLU, see
            :class:`onelaunch.nn.ShortConvolution`.
        conv_size: steps that a convolution covers.
        conv_bias: whether the convolutions have a bias.
        use_output_gate: whether the result is gated.
        gate_fn: activation of the gate, a name as for ``feature_map``.
        elementwise_affine: whether the norm has a weight.
        norm_eps: constant that the norm adds to the mean of squares, at least 0.
        gate_logit_normalizer: divisor of the log-decays, above 0.
        gate_low_rank_dim: columns of W_1.
        clamp_min: the least log-decay of a step; at most 0. Default: none.
        fuse_norm: as in fla, decides whether the norm's weight is ``g_norm_swish_gate.weight`` or ``g_norm.weight``.
        layer_idx: key of the layer's state in a :class:`onelaunch.nn.Cache`.

    Raises:
        ArgumentError: an argument is invalid; the message names it, what it was and what it must be.

    Source: Yang et al., Gated Linear Attention Transformers with Hardware-Efficient Training (2024).
    """

    modes = ("chunk", "fused_recurrent", "fused_chunk")
    gk_proj_weight: nn.Parameter
    gk_proj_bias: nn.Parameter
    replicated = ("gk_proj.0.weight", *GatedLayer.replicated)

    def __init__(
        self,
        mode: str = "chunk",
        hidden_size: int = 1024,
        expand_k: float = 0.5,
        expand_v: float = 1.0,
        num_heads: int = 4,
        num_kv_heads: int | None = None,
        feature_map: str | None = None,
        use_short_conv: bool = False,
        conv_size: int = 4,
        conv_bias: bool = False,
        use_output_gate: bool = True,
        gate_fn: str = "swish",
        elementwise_affine: bool | None = True,
        norm_eps: float = 1e-5,
        gate_logit_normalizer: float = 16,
        gate_low_rank_dim: int = 16,
        clamp_min: float | None = None,
        fuse_norm: bool = True,
        layer_idx: int | None = None,
    ) -> None:
        super().__init__(
            mode=mode,
            hidden_size=hidden_size,
            expand_k=expand_k,
            expand_v=expand_v,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            feature_map=feature_map,
            use_short_conv=use_short_conv,
            conv_size=conv_size,
            conv_bias=conv_bias,
            use_output_gate=use_output_gate,
            gate_fn=gate_fn,
            elementwise_affine=elementwise_affine,
            norm_eps=norm_eps,
            gate_logit_normalizer=gate_logit_normalizer,
            fuse_norm=fuse_norm,
            layer_idx=layer_idx,
        )
        if clamp_min is not None and not -inputs.number("clamp_min", clamp_min, above=float("-inf")) >= 0:
            raise ArgumentError(f"clamp_min is {clamp_min!r}; it must be at most 0, as log-decays are, or None.")
        self.clamp_min = clamp_min
        self.gate_low_rank_dim = rank = inputs.count("gate_low_rank_dim", gate_low_rank_dim)
        # The narrow product reads all of x. As part of the packed weight it needs no launch and no pass over x of its own.
        self.pack_projections(Segment("low_rank", rank, 1), {"gk_proj.0.weight": rank})
        self.plain = self.plain and clamp_min is None  # gla_layer has no clamp_min
        heads, size, normalizer = self.num_kv_heads, self.head_k_dim, self.gate_logit_normalizer
        self.decay_segments: tuple[Segment, ...] = (Segment("gk", heads, size, "logsigmoid", normalizer, bias=True),)
        self.pack("gk_proj_weight", {"gk_proj.1.weight": heads * size}, rank)
        self.pack("gk_proj_bias", {"gk_proj.1.bias": heads * size})
        self.reset_parameters()

    def take_share(self, ranks: int) -> None:
        super().take_share(ranks)
        self.decay_segments = tuple([replace(each, heads=each.heads // ranks) for each in self.decay_segments])

    def project(self, x: torch.Tensor) -> Projected:
        """Return all projections of ``x``, and the first of the two factors of low rank that the decay comes from."""
        *projected, low_rank = projections(x, parameter(self, "in_proj_weight"), self.segments)
        return self.with_decay(low_rank, *projected)

    def log_decay(self, decay: torch.Tensor) -> torch.Tensor:
        second, bias = parameter(self, "gk_proj_weight"), parameter(self, "gk_proj_bias")
        (decay,) = projections(decay, second, self.decay_segments, bias=bias)
        return decay if self.clamp_min is None else decay.clamp_min(self.clamp_min)
