"""The variants of ``gated_scan``, registered in the order of these imports."""

from onelaunch.ops.gated_scan.variants import peers, torch, triton  # isort: skip

__all__ = ["peers", "torch", "triton"]
