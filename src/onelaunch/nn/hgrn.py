"""The layers of HGRN and HGRN2, which users make through ``onelaunch.nn``."""

from __future__ import annotations

import torch
from torch import nn

from onelaunch.errors import ArgumentError
from onelaunch.nn import inputs
from onelaunch.nn.forget import ForgetGateLayer, Span, hgrn, hgrn2, hgrn2_segments, hgrn_segments

FLA_EPS = 1e-5
"""Number that the norm of fla's HGRN2 layer adds to the mean of squares.

Its forward (release 0.6.0) calls ``rms_norm_linear`` without ``norm_eps``, whose default this is.
"""


class HGRNAttention(ForgetGateLayer):
    """A linear RNN with a forget gate (HGRN), with the arguments and the state dict of ``fla.layers.hgrn.HGRNAttention``.

        i, f, g = x W_i, x W_f, x W_g;  decay = bound + (1 - bound) sigmoid(f)
        s_t = decay_t * s_{t-1} + (1 - decay_t) * silu(i_t);  out = (rmsnorm(s) * silu(g)) W_o        norm over all channels

    One parameter ``in_proj_weight`` holds W_i, W_f and W_g. A state dict holds them as ``i_proj.weight``, ``f_proj.weight`` and
    ``g_proj.weight``, so that state dicts of fla 0.6.0 load here, and ours load there. The bound is an argument of the call,
    which a model computes for all layers; without one it is 0.

    Args:
        mode: ``chunk`` or ``fused_recurrent``, names of fla's kernels; without effect here, since the dispatcher chooses.
        hidden_size: channels of inputs and outputs, D.
        expand_ratio: ratio of the state's channels C to ``hidden_size``.
        use_short_conv: whether i and f go through short causal convolutions, see :class:`onelaunch.nn.ShortConvolution`.
        conv_size: steps that a convolution covers.
        conv_bias: whether the convolutions have a bias.
        elementwise_affine: whether the norm has a weight.
        norm_eps: constant that the norm adds to the mean of squares, at least 0.
        layer_idx: key of the layer's state in a :class:`onelaunch.nn.Cache`. As in fla, layer 0 ignores the bound.

    Raises:
        ArgumentError: an argument is invalid; the message names it, what it was and what it must be.

    Source: Qin et al., Hierarchically Gated Recurrent Neural Network for Sequence Modeling (2023).
    """

    modes = ("chunk", "fused_recurrent")
    convolutions = ("i", "f")

    def __init__(
        self,
        mode: str = "chunk",
        hidden_size: int = 1024,
        expand_ratio: float = 1,
        use_short_conv: bool = False,
        conv_size: int = 4,
        conv_bias: bool = False,
        elementwise_affine: bool | None = True,
        norm_eps: float = 1e-5,
        layer_idx: int | None = None,
    ) -> None:
        super().__init__(mode=mode, hidden_size=hidden_size, layer_idx=layer_idx)
        self.expand_ratio = expand_ratio
        self.input_dim = inputs.expanded(self.hidden_size, "expand_ratio", expand_ratio)
        self.use_short_conv = bool(use_short_conv)
        self.norm_eps = self._used_eps = inputs.number("norm_eps", norm_eps, least=0)
        norm = nn.RMSNorm(self.input_dim, eps=self.norm_eps, elementwise_affine=bool(elementwise_affine))
        segments = hgrn_segments(self.input_dim, convolved=self.use_short_conv)
        self.add_parts(segments, conv_size, conv_bias, norm, ("silu", None))

    def sizes_to_divide(self) -> dict[str, int]:
        return {"hidden_size * expand_ratio": self.input_dim}

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, input_dim={self.input_dim}"

    def recur(
        self, projected: dict[str, torch.Tensor], lower_bound: torch.Tensor | None, span: Span
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the states ``[B, T, C]`` and the final one ``[N, C]``."""
        return hgrn(projected["i"], projected["f"], lower_bound, span)


class HGRN2Attention(ForgetGateLayer):
    """Gated linear attention with tied keys and decays (HGRN2), like ``fla.layers.hgrn2.HGRN2Attention``.

        q, f, i = x W_q, x W_f, x W_i;  decay = bound + (1 - bound) sigmoid(f)
        o = gla(silu(q), 1 - decay, i, log(decay));  out = rmsnorm(o) W_o        norm over the channels of all heads

    One parameter ``in_proj_weight`` holds W_q, W_f and W_i. A state dict holds them as ``q_proj.weight``, ``f_proj.weight`` and
    ``i_proj.weight``, so that state dicts of fla 0.6.0 load here, and ours load there. The bound is an argument of the call,
    which a model computes for all layers; without one it is 0.

    Args:
        mode: ``chunk``, ``fused_recurrent`` or ``fused_chunk``, names of fla's kernels; without effect here, since the
            dispatcher chooses.
        hidden_size: channels of inputs and outputs, D.
        num_heads: number of heads, H; read only where ``expand_ratio`` is ``None``.
        expand_ratio: channels of q and of the decays in a head, from 16 to 512. There are ``hidden_size // expand_ratio`` heads.
            Default of ``None``: ``hidden_size // num_heads``.
        use_short_conv: whether q, f and i go through short causal convolutions, see :class:`onelaunch.nn.ShortConvolution`.
        conv_size: steps that a convolution covers.
        conv_bias: whether the convolutions have a bias.
        elementwise_affine: whether the norm has a weight; it is float32 in a new layer, as in fla.
        norm_eps: accepted as in fla 0.6.0, whose forward adds 1e-5 to the mean of squares whatever it is; so does this layer.
        layer_idx: key of the layer's state in a :class:`onelaunch.nn.Cache`. As in fla, layer 0 ignores the bound.

    Raises:
        ArgumentError: an argument is invalid; the message names it, what it was and what it must be.

    Source: Qin et al., HGRN2: Gated Linear RNNs with State Expansion (2024).
    """

    modes = ("chunk", "fused_recurrent", "fused_chunk")
    convolutions = ("q", "f", "i")

    def __init__(
        self,
        mode: str = "chunk",
        hidden_size: int = 1024,
        num_heads: int | None = None,
        expand_ratio: int | None = 128,
        use_short_conv: bool = False,
        conv_size: int = 4,
        conv_bias: bool = False,
        elementwise_affine: bool | None = True,
        norm_eps: float = 1e-5,
        layer_idx: int | None = None,
    ) -> None:
        super().__init__(mode=mode, hidden_size=hidden_size, layer_idx=layer_idx)
        if expand_ratio is None and num_heads is None:
            raise ArgumentError("expand_ratio and num_heads are both None; give one of them.")
        if expand_ratio is None:
            self.num_heads = inputs.count("num_heads", num_heads)
            self.expand_ratio = self.hidden_size // self.num_heads
        else:
            self.expand_ratio = inputs.count("expand_ratio", expand_ratio)
            self.num_heads = self.hidden_size // self.expand_ratio
        makes = "num_heads makes" if expand_ratio is None else "expand_ratio makes"
        if self.num_heads == 0 or self.hidden_size % self.num_heads:
            raise ArgumentError(f"{makes} {self.num_heads} heads; their number must divide hidden_size = {self.hidden_size}.")
        self.head_f_dim = inputs.head_size(makes, self.expand_ratio)
        self.head_i_dim = inputs.head_size(makes, self.hidden_size // self.num_heads)
        self.forget_dim, self.input_dim = self.num_heads * self.head_f_dim, self.hidden_size
        self.use_short_conv = bool(use_short_conv)
        self.norm_eps, self._used_eps = inputs.number("norm_eps", norm_eps, least=0), FLA_EPS
        norm = nn.RMSNorm(self.hidden_size, eps=FLA_EPS, elementwise_affine=bool(elementwise_affine), dtype=torch.float32)
        segments = hgrn2_segments(self.num_heads, self.head_f_dim, self.head_i_dim, convolved=self.use_short_conv)
        self.add_parts(segments, conv_size, conv_bias, norm, ("silu", None, None))

    def sizes_to_divide(self) -> dict[str, int]:
        return {"num_heads": self.num_heads}

    def take_share(self, ranks: int) -> None:
        super().take_share(ranks)
        self.num_heads, self.forget_dim = self.num_heads // ranks, self.forget_dim // ranks

    def extra_repr(self) -> str:
        heads = f"num_heads={self.num_heads}, head_f_dim={self.head_f_dim}, head_i_dim={self.head_i_dim}"
        return f"{self.hidden_size}, {heads}"

    def recur(
        self, projected: dict[str, torch.Tensor], lower_bound: torch.Tensor | None, span: Span
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the outputs ``[B, T, H, V]`` and the final state ``[N, H, K, V]``."""
        return hgrn2(projected["q"], projected["f"], projected["i"], lower_bound, span)
