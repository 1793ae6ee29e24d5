"""Variants of ``swiglu``, registered in the order of these imports."""

from onelaunch.ops.swiglu.variants import torch, triton  # isort: skip
from onelaunch.ops.swiglu.variants import blackwell, fused  # isort: skip
from onelaunch.ops.swiglu.variants import hopper  # isort: skip
from onelaunch.ops.swiglu.variants import peers  # isort: skip

__all__ = ["blackwell", "fused", "hopper", "peers", "torch", "triton"]
