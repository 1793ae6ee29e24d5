"""Base class of the gated linear attention layers: heads, packed projections, norm and output projection.

``gla.py`` and ``simple_gla.py`` derive their layers from it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from onelaunch.errors import ArgumentError
from onelaunch.nn import activations, inputs
from onelaunch.nn.cache import Cache
from onelaunch.nn.inputs import Inputs
from onelaunch.nn.packed import child, parameter
from onelaunch.nn.recurrent import RecurrentLayer
from onelaunch.ops import Segment, gla, gla_layer, output_chain


class Projected(NamedTuple):
    """Projections of a layer's input. A head of keys, values and decays may be shared by a group of query heads."""

    q: torch.Tensor
    """Queries, ``[B, T, H, K]``."""
    k: torch.Tensor
    """Keys, ``[B, T, H_kv, K]``."""
    v: torch.Tensor
    """Values, ``[B, T, H_kv, V]``."""
    gate: torch.Tensor | None
    """Gate, ``[B, T, H, V]``, or ``None``."""
    decay: torch.Tensor
    """Log-decays ``[B, T, H]``, at most 0, or what :meth:`GatedLayer.log_decay` computes them from."""


class GatedLayer(RecurrentLayer, ABC):
    """Layer with packed projections, gated linear attention, per-head norm, gate and output projection.

    The subclasses describe the arguments. Each calls :meth:`pack_projections` and, at last, :meth:`reset_parameters` in
    its constructor, and defines :meth:`project`.
    """

    replicated = ("g_norm.weight", "g_norm_swish_gate.weight")  # a norm per head, whose weight all heads share

    def __init__(
        self,
        *,
        mode: str,
        hidden_size: int,
        expand_k: float,
        expand_v: float,
        num_heads: int,
        num_kv_heads: int | None,
        feature_map: str | None,
        use_short_conv: bool,
        conv_size: int,
        conv_bias: bool,
        use_output_gate: bool,
        gate_fn: str,
        elementwise_affine: bool | None,
        norm_eps: float,
        gate_logit_normalizer: float,
        fuse_norm: bool,
        layer_idx: int | None,
    ) -> None:
        super().__init__(mode=mode, hidden_size=hidden_size, layer_idx=layer_idx)
        self.num_heads = inputs.count("num_heads", num_heads)
        self.num_kv_heads = inputs.count("num_kv_heads", num_heads if num_kv_heads is None else num_kv_heads)
        if self.num_heads % self.num_kv_heads:
            raise ArgumentError(f"num_kv_heads is {self.num_kv_heads}; it must divide num_heads = {self.num_heads}.")
        self.num_kv_groups = self.num_heads // self.num_kv_heads
        self.expand_k, self.expand_v = expand_k, expand_v
        self.key_dim = inputs.expanded(self.hidden_size, "expand_k", expand_k)
        self.value_dim = inputs.expanded(self.hidden_size, "expand_v", expand_v)
        self.head_k_dim = self._head_size("expand_k", self.key_dim)
        self.head_v_dim = self._head_size("expand_v", self.value_dim)
        self.gate_logit_normalizer = inputs.number("gate_logit_normalizer", gate_logit_normalizer, above=0)
        self.use_short_conv, self.use_output_gate = bool(use_short_conv), bool(use_output_gate)
        self.feature_map = None if feature_map is None else activations.checked("feature_map", feature_map)
        self.gate_fn = activations.checked("gate_fn", gate_fn)
        self._add_norm(norm_eps, fuse_norm, bool(elementwise_affine))
        self.o_proj = nn.Linear(self.value_dim, self.hidden_size, bias=False)
        if self.use_short_conv:
            widths = {"q": self.key_dim, "k": self.num_kv_heads * self.head_k_dim, "v": self.num_kv_heads * self.head_v_dim}
            for name, width in widths.items():
                self.add_convolution(name, width, conv_size, conv_bias)

    def _head_size(self, argument: str, width: int) -> int:
        """Return the channels of a head; raise :class:`ArgumentError` if ``onelaunch.ops.gla`` does not take such heads."""
        if width % self.num_heads:
            raise ArgumentError(f"{argument} makes {width} channels; they must be a multiple of num_heads = {self.num_heads}.")
        return inputs.head_size(f"{argument} and num_heads make", width // self.num_heads)

    def _add_norm(self, norm_eps: float, fuse_norm: bool, affine: bool) -> None:
        """Add the norm's weight, under the name that fla's layer with these arguments uses."""
        self.norm_eps = inputs.number("norm_eps", norm_eps, least=0)
        self.fuse_norm = bool(fuse_norm)
        norm = nn.RMSNorm(self.head_v_dim, eps=self.norm_eps, elementwise_affine=affine)
        gated = self.gate_fn == "swish" and self.fuse_norm and self.use_output_gate
        self.norm_name = "g_norm_swish_gate" if gated else "g_norm"
        self.add_module(self.norm_name, norm)

    def pack_projections(self, decay: Segment, decay_parts: dict[str, int]) -> None:
        """Add one packed weight for all projections, and decide which kernel applies each activation.

        The feature map is applied by the packed projection if it can and no convolution comes before it, else by
        :meth:`forward`. The gate's SiLU is left to ``output_chain``; :meth:`with_decay` applies what no kernel can.

        Args:
            decay: segment of the decay, or of the low-rank factor that it is computed from.
            decay_parts: row counts of ``decay`` by state-dict key.
        """
        early = self.feature_map is not None and not self.use_short_conv
        mapped = activations.IN_PROJECTION.get(self.feature_map or "", "none") if early else "none"
        self._map_later = self.feature_map is not None and mapped == "none"
        gate_fn = activations.IN_PROJECTION.get(self.gate_fn, "none")
        # output_chain applies SiLU: applied here, its input would be saved for the gradient as well.
        self._silu_on_the_way_out = gate_fn == "silu"
        biased = self.use_short_conv and child(self, "q_conv1d").bias is not None
        options = self.use_output_gate and self.feature_map is None and self.num_kv_groups == 1 and not biased
        self.plain = self._silu_on_the_way_out and options
        """Flag: :func:`onelaunch.ops.gla_layer` has the formula of this layer's options."""
        gate = Segment("gate", self.num_heads, self.head_v_dim, "none" if gate_fn == "silu" else gate_fn)
        self.segments: tuple[Segment, ...] = (
            Segment("q", self.num_heads, self.head_k_dim, mapped),
            Segment("k", self.num_kv_heads, self.head_k_dim, mapped),
            Segment("v", self.num_kv_heads, self.head_v_dim),
            *((gate,) if self.use_output_gate else ()),
            decay,
        )
        rows = {"q_proj.weight": "q", "k_proj.weight": "k", "v_proj.weight": "v", "g_proj.weight": "gate"}
        widths = {segment.name: segment.width for segment in self.segments}
        parts = {key: widths[name] for key, name in rows.items() if name in widths}
        self.pack("in_proj_weight", {**parts, **decay_parts}, self.hidden_size)

    @abstractmethod
    def project(self, x: torch.Tensor) -> Projected:
        """Return all projections of ``x [B, T, D]``; the gate is activated unless its activation is SiLU."""

    def log_decay(self, decay: torch.Tensor) -> torch.Tensor:
        """Return log-decays, ``[B, T, H_kv, K]`` per channel or ``[B, T, H]`` per head, from those of :meth:`project`."""
        return decay

    def whole(self, given: Inputs) -> torch.Tensor | None:
        """Return the result by ``gla_layer``, or ``None`` if it cannot compute this call.

        It can compute calls of plain layers whose norm has a weight, without a cache, padding, packed sequences or steps on
        other ranks.
        """
        if not self.plain or given.cache is not None or given.padding is not None:
            return None
        if given.cu_seqlens is not None or given.context is not None:
            return None
        norm_weight = parameter(child(self, self.norm_name), "weight")
        if norm_weight is None:
            return None
        filters = [parameter(child(self, f"{name}_conv1d"), "weight") for name in "qkv"] if self.use_short_conv else None
        w_out = parameter(child(self, "o_proj"), "weight")
        if self.shards is not None:
            norm_weight, w_out = self.local(norm_weight), self.local(w_out)
            filters = None if filters is None else [self.local(each) for each in filters]
        names = self.packed or self.separate
        out, _ = gla_layer(
            given.x,
            parameter(self, "in_proj_weight"),
            parameter(self, "gk_proj_weight") if "gk_proj_weight" in names else None,
            parameter(self, "gk_proj_bias" if "gk_proj_bias" in names else "in_proj_bias"),
            norm_weight,
            w_out,
            heads=self.num_heads,
            normalizer=self.gate_logit_normalizer,
            eps=self.norm_eps,
            conv_weight=None if filters is None else torch.cat([each[:, 0] for each in filters]),
        )
        return out

    def with_decay(
        self, decay: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *gates: torch.Tensor
    ) -> Projected:
        """Return the results of the packed projection with the decay; activate the gate (0 or 1 ``gates``) if no kernel does."""
        gate = gates[0] if gates else None
        if gate is not None and self.gate_fn not in activations.IN_PROJECTION:
            gate = activations.FUNCTIONS[self.gate_fn](gate)
        return Projected(q, k, v, gate, decay)

    def sizes_to_divide(self) -> dict[str, int]:
        return {"num_heads": self.num_heads, "num_kv_heads": self.num_kv_heads}

    def take_share(self, ranks: int) -> None:
        self.num_heads, self.num_kv_heads = self.num_heads // ranks, self.num_kv_heads // ranks
        self.key_dim, self.value_dim = self.key_dim // ranks, self.value_dim // ranks
        # Every rank has the whole low-rank factor of the decay.
        shared = [each.heads if each.name == "low_rank" else each.heads // ranks for each in self.segments]
        self.segments = tuple([replace(each, heads=heads) for each, heads in zip(self.segments, shared, strict=True)])

    def extra_repr(self) -> str:
        heads = f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}"
        return f"{self.hidden_size}, {heads}, head_k_dim={self.head_k_dim}, head_v_dim={self.head_v_dim}"

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
        """Run the layer.

        Args:
            hidden_states: ``[B, T, hidden_size]`` float16, bfloat16 or float32, dtype of the parameters.
            attention_mask: ``[B, at least T]``, 0 for padding; the last T columns are read. Padding does not change the state,
                and its outputs are 0. With short convolutions padding must lie at the ends of a sequence, and with
                ``use_cache`` before its tokens. Not together with ``cu_seqlens``.
            past_key_values: states of the previous calls, from which this call continues.
            use_cache: whether to store the state after the last step, in ``past_key_values`` or in a new
                :class:`onelaunch.nn.Cache`.
            output_attentions: must be false: linear attention has no attention weights.
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
        if (whole := self.whole(given)) is not None:
            return whole, None, None
        q, k, v, gate, decay = self.project(given.x)
        conv_state = None
        started = self.before_convolutions(given, "qkv", (q, k, v)) if self.use_short_conv else None
        decay = self.log_decay(decay)  # while ranks exchange the inputs of the convolutions
        if started is not None:
            (q, k, v), conv_state = self.convolve(given, started)
            if child(self, "v_conv1d").bias is not None:
                v = given.without_padding(v)  # a bias makes the values of padding nonzero
        if self._map_later:
            apply = activations.FUNCTIONS[self.feature_map or ""]
            q, k = apply(q), apply(k)
        o, state = gla(
            q,
            k,
            v,
            given.without_padding(decay),
            initial_state=given.initial_state,
            output_final_state=given.use_cache,
            **given.steps,
        )
        given.store(state, conv_state)
        norm_weight = self.local(self.get_submodule(self.norm_name).weight)
        w_out = self.local(self.o_proj.weight)
        activated = gate is not None and not self._silu_on_the_way_out
        out = output_chain(o, gate, norm_weight, w_out, activated=activated, eps=self.norm_eps)
        return given.without_padding(out), None, given.cache
