"""Variants of ``gla``, registered in this order."""

from onelaunch.ops.gla.variants import peers, torch, triton, recurrence, hopper  # isort: skip

__all__ = ["hopper", "peers", "recurrence", "torch", "triton"]
