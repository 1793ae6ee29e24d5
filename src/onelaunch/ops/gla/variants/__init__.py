"""Variants of ``gla``, registered in this order."""

from onelaunch.ops.gla.variants import peers, torch, triton, hopper  # isort: skip

__all__ = ["hopper", "peers", "torch", "triton"]
