"""The variants of ``output_chain``, registered in the order of these imports."""

from onelaunch.ops.output_chain.variants import torch, triton  # isort: skip

__all__ = ["torch", "triton"]
