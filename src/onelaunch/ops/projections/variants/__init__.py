"""Variants of ``projections``, registered in the order of these imports.

If neither measured times nor the operation's preferences decide, ``auto`` takes the first of them that can run.
"""

from onelaunch.ops.projections.variants import torch, triton  # isort: skip
from onelaunch.ops.projections.variants import hopper  # isort: skip

__all__ = ["hopper", "torch", "triton"]
