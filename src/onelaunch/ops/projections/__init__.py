"""``projections``: all projections of a layer's input by one packed weight, each through its activation."""

from onelaunch.ops.projections.contract import projections
from onelaunch.ops.projections.layout import Segment

from onelaunch.ops.projections import cost, reference, torch_variants, triton_variants, hopper  # isort: skip  (register into it)

__all__ = ["Segment", "cost", "hopper", "projections", "reference", "torch_variants", "triton_variants"]
