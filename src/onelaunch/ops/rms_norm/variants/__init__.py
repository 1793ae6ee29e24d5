"""The variants of ``rms_norm``, registered in the order of these imports."""

from onelaunch.ops.rms_norm.variants import torch, triton, peers  # isort: skip

__all__ = ["peers", "torch", "triton"]
