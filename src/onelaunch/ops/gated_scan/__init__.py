"""``gated_scan``: s_t = exp(log_decay_t) * s_{t-1} + v_t, y_t = s_t * silu(gate_t), or y_t = s_t without a gate (HGRN)."""

from onelaunch.ops.gated_scan.contract import gated_scan
from onelaunch.ops.gated_scan.functions import chunk_hgrn, fused_recurrent_hgrn

from onelaunch.ops.gated_scan import cost, probes, reference, typical, variants  # isort: skip  (register into gated_scan)

__all__ = ["chunk_hgrn", "cost", "fused_recurrent_hgrn", "gated_scan", "probes", "reference", "typical", "variants"]
