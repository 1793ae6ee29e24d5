"""Small layers shared by tests of this folder: one of each kind, and one for every argument that changes the computation.

``tests/ops/test_gla_heads.py`` takes the tolerance :data:`ROUNDING`.
"""

from __future__ import annotations

from onelaunch.nn import GatedLinearAttention, HGRN2Attention, HGRNAttention, LinearRNN, SimpleGatedLinearAttention
from tests.nn import definitions

D = 64

ROUNDING = {"rtol": 1e-4, "atol": 2e-6}
"""Tolerance between float32 calls that split time differently.

Chunks and steps sum in other orders, and elements near 0 are sums of numbers of about 0.1. In addition, layers are compared with
their float64 definitions by norm.
"""

# Keyword arguments of a layer, in addition to those of :func:`make`, by the layer's name in tests

GLA = {
    "gla": {},
    "gla-shared-heads": {"num_kv_heads": 1, "expand_k": 1.0},
    "gla-conv": {"use_short_conv": True},
    "gla-conv-bias": {"use_short_conv": True, "conv_size": 3, "conv_bias": True, "num_kv_heads": 1, "feature_map": "silu"},
    "gla-no-gate": {"use_output_gate": False},
    "gla-sigmoid": {"gate_fn": "sigmoid", "feature_map": "sigmoid"},
    "gla-gelu": {"gate_fn": "gelu", "feature_map": "sqrelu", "fuse_norm": False},
    "gla-clamped": {"clamp_min": -0.04, "gate_logit_normalizer": 4, "gate_low_rank_dim": 5},
    "gla-plain-norm": {"elementwise_affine": False, "norm_eps": 1e-3, "expand_v": 0.5},
}
SIMPLE = {
    "simple": {"use_short_conv": False},
    "simple-conv": {},
    "simple-shared-heads": {"num_kv_heads": 1, "use_short_conv": False, "feature_map": "relu", "gate_fn": "relu"},
}
HGRN = {"hgrn": {}, "hgrn-conv": {"use_short_conv": True, "conv_bias": True, "expand_ratio": 0.5, "norm_eps": 1e-3}}
HGRN2 = {
    "hgrn2": {"norm_eps": 1e-2},
    "hgrn2-conv": {"use_short_conv": True, "conv_size": 3, "conv_bias": True, "expand_ratio": 16, "elementwise_affine": False},
}
NAMES = [*GLA, *SIMPLE, "linear_rnn", *HGRN, *HGRN2]


def make(name: str):
    """Return the layer of a name in :data:`NAMES`, and its definition. Weights are initial ones, but those of norms random.

    Norms begin with ones, with which a layer that ignored the weight would compute the same.
    """
    if name == "linear_rnn":
        return LinearRNN(D, expand_v=0.75, layer_idx=0), definitions.linear_rnn
    if name in HGRN:
        layer = HGRNAttention(hidden_size=D, layer_idx=0, **HGRN[name])
        layer.g_norm.weight.data.uniform_(0.5, 1.5)
        return layer, definitions.hgrn
    if name in HGRN2:
        layer = HGRN2Attention(**{"hidden_size": D, "expand_ratio": 32, "layer_idx": 0, **HGRN2[name]})
        if layer.g_norm.weight is not None:
            layer.g_norm.weight.data.uniform_(0.5, 1.5)
        return layer, definitions.hgrn2
    if name in GLA:
        layer = GatedLinearAttention(**{"hidden_size": D, "num_heads": 2, "layer_idx": 0, **GLA[name]})
    else:
        layer = SimpleGatedLinearAttention(**{"hidden_size": D, "num_heads": 2, "layer_idx": 0, **SIMPLE[name]})
    norm = layer.get_submodule(layer.norm_name).weight
    if norm is not None:
        norm.data.uniform_(0.5, 1.5)
    return layer, definitions.attention
