"""Variants of ``swiglu``, registered in the order of these imports.

If neither measured times nor the operation's preferences decide, ``auto`` takes the first of them that can run.
"""

from onelaunch.ops.swiglu.variants import torch, triton  # isort: skip
from onelaunch.ops.swiglu.variants import blackwell, fused  # isort: skip
from onelaunch.ops.swiglu.variants import hopper  # isort: skip
from onelaunch.ops.swiglu.variants import peers  # isort: skip

__all__ = ["blackwell", "fused", "hopper", "peers", "torch", "triton"]
