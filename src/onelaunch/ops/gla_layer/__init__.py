"""``gla_layer``: a whole layer of gated linear attention, from its input to its output."""

from onelaunch.ops.gla_layer.contract import gla_layer

from onelaunch.ops.gla_layer import cost, probes, reference, typical, variants  # isort: skip  (register into it)

__all__ = ["cost", "gla_layer", "probes", "reference", "typical", "variants"]
