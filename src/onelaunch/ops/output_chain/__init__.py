"""``output_chain``: RMSNorm of every head, times the gate, and the output projection of a linear-attention layer."""

from onelaunch.ops.output_chain.contract import output_chain

from onelaunch.ops.output_chain import cost, probes, reference, typical, variants  # isort: skip  (register into output_chain)

__all__ = ["cost", "output_chain", "probes", "reference", "typical", "variants"]
