"""``rms_norm``: RMSNorm of rows, with the addition of a residual before it."""

from onelaunch.ops.rms_norm.contract import rms_norm

from onelaunch.ops.rms_norm import cost, probes, reference, typical, variants  # isort: skip  (register into rms_norm)

__all__ = ["cost", "probes", "reference", "rms_norm", "typical", "variants"]
