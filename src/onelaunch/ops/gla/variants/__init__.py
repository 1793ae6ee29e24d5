"""Variants of ``gla``, registered in this order; ``slower`` registers what is known of calls that fla runs faster."""

from onelaunch.ops.gla.variants import peers, torch, triton, recurrence, hopper, hopper_tf32, slower  # isort: skip

__all__ = ["hopper", "hopper_tf32", "peers", "recurrence", "slower", "torch", "triton"]
