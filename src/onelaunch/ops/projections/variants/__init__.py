"""The variants of ``projections``, registered in the order of these imports."""

from onelaunch.ops.projections.variants import torch, triton  # isort: skip
from onelaunch.ops.projections.variants import hopper  # isort: skip

__all__ = ["hopper", "torch", "triton"]
