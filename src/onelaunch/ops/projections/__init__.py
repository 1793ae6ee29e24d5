"""``projections``: all projections of a layer's input by one packed weight, each with its activation."""

from onelaunch.ops.projections.contract import projections
from onelaunch.ops.projections.layout import Segment

from onelaunch.ops.projections import cost, probes, reference, typical, variants  # isort: skip  (register into projections)

__all__ = ["Segment", "cost", "probes", "projections", "reference", "typical", "variants"]
