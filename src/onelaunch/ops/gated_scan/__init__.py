"""``gated_scan``: s_t = exp(log_decay_t) * s_{t-1} + v_t, y_t = s_t * silu(gate_t)."""

from onelaunch.ops.gated_scan.contract import gated_scan

from onelaunch.ops.gated_scan import cost, probes, reference, variants  # isort: skip  (register into gated_scan)

__all__ = ["cost", "gated_scan", "probes", "reference", "variants"]
