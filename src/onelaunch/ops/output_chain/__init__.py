"""``output_chain``: a layer's way out. RMSNorm of every head, times the gate, and the output projection."""

from onelaunch.ops.output_chain.contract import output_chain

from onelaunch.ops.output_chain import cost, prologue, reference, torch_variants, triton_variants  # isort: skip  (register into it)

__all__ = ["cost", "output_chain", "prologue", "reference", "torch_variants", "triton_variants"]
