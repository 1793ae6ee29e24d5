"""Gated linear attention: S_t = diag(exp(g_t)) S_{t-1} + k_t^T v_t, o_t = scale * q_t S_t, by chunks of time or step by step."""

from onelaunch.ops.gla.contract import gla
from onelaunch.ops.gla.functions import chunk_gla, chunk_simple_gla, fused_recurrent_gla, fused_recurrent_simple_gla

from onelaunch.ops.gla import cost, probes, reference, typical, variants  # isort: skip  (register into gla)

__all__ = [
    "chunk_gla",
    "chunk_simple_gla",
    "cost",
    "fused_recurrent_gla",
    "fused_recurrent_simple_gla",
    "gla",
    "probes",
    "reference",
    "typical",
    "variants",
]
