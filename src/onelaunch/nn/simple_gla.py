"""The layer of gated linear attention with a decay per head.

Users make it through ``onelaunch.nn``, and so does the variant ``module`` of the operation ``gla_layer``.
"""

from __future__ import annotations

import torch
from torch import nn

from onelaunch.nn.gated import GatedLayer, Projected
from onelaunch.nn.packed import parameter
from onelaunch.ops import Segment, projections


class SimpleGatedLinearAttention(GatedLayer):
    """Gated linear attention with one decay per head, like ``fla.layers.simple_gla.SimpleGatedLinearAttention``.

        q, k, v, g = x W_q, x W_k, x W_v, x W_g;  gk = logsigmoid(x W_gk + b) / gate_logit_normalizer
        o = gla(q, k, v, gk);  out = (rmsnorm(o) * swish(g)) W_o        norm per head

    One parameter ``in_proj_weight`` holds W_q, W_k, W_v, W_g and W_gk: one product for all of them. A state dict holds them as in
    fla 0.6.0: ``q_proj.weight``, ``k_proj.weight``, ``v_proj.weight``, ``g_proj.weight``, ``gk_proj.weight``; b is
    ``gk_proj.bias``.

    Args:
        mode: ``chunk`` or ``fused_recurrent``, names of fla's kernels; without effect here, since the dispatcher chooses.
        hidden_size: channels of inputs and outputs, D.
        expand_k: ratio of the channels of all query heads to ``hidden_size``. Heads have 16 to 512 channels.
        expand_v: ratio of the channels of all value heads to ``hidden_size``. Heads have 16 to 512 channels.
        num_heads: number of query heads, H.
        num_kv_heads: heads of keys and values, each shared by a group of queries; every query head has a decay of its own.
            No copies are made for :func:`onelaunch.ops.gla`. Default: ``num_heads``.
        feature_map: activation of queries and keys: ``relu``, ``sigmoid``, ``logsigmoid``, ``silu`` or ``swish``, ``sqrelu``,
            ``gelu``. Default: none.
        use_short_conv: whether queries, keys and values go through short causal convolutions with SiLU, see
            :class:`onelaunch.nn.ShortConvolution`.
        conv_size: steps that a convolution covers.
        conv_bias: whether the convolutions have a bias.
        gate_fn: activation of the output gate, a name as for ``feature_map``.
        elementwise_affine: whether the norm has a weight.
        norm_eps: constant that the norm adds to the mean of squares, at least 0.
        gate_logit_normalizer: divisor of the log-decays, above 0.
        fuse_norm: as in fla, decides whether the norm's weight is ``g_norm_swish_gate.weight`` or ``g_norm.weight``.
        layer_idx: key of the layer's state in a :class:`onelaunch.nn.Cache`.

    Raises:
        ArgumentError: an argument is invalid; the message names it, what it was and what it must be.

    Source: the layer of that name in flash-linear-attention; decays per head as in RetNet and Mamba-2.
    """

    modes = ("chunk", "fused_recurrent")
    in_proj_bias: nn.Parameter

    def __init__(
        self,
        mode: str = "chunk",
        hidden_size: int = 1024,
        expand_k: float = 1.0,
        expand_v: float = 1.0,
        num_heads: int = 4,
        num_kv_heads: int | None = None,
        feature_map: str | None = None,
        use_short_conv: bool = True,
        conv_size: int = 4,
        conv_bias: bool = False,
        gate_fn: str = "swish",
        elementwise_affine: bool | None = True,
        norm_eps: float = 1e-5,
        gate_logit_normalizer: float = 16,
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
            use_output_gate=True,
            gate_fn=gate_fn,
            elementwise_affine=elementwise_affine,
            norm_eps=norm_eps,
            gate_logit_normalizer=gate_logit_normalizer,
            fuse_norm=fuse_norm,
            layer_idx=layer_idx,
        )
        decay = Segment("gk", self.num_heads, 1, "logsigmoid", self.gate_logit_normalizer, bias=True)
        self.pack_projections(decay, {"gk_proj.weight": self.num_heads})
        self.pack("in_proj_bias", {"gk_proj.bias": self.num_heads})
        self.reset_parameters()

    def project(self, x: torch.Tensor) -> Projected:
        """Return all projections of ``x``."""
        weight, bias = parameter(self, "in_proj_weight"), parameter(self, "in_proj_bias")
        *projected, decay = projections(x, weight, self.segments, bias=bias)
        return self.with_decay(decay, *projected)
