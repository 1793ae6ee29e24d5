"""Variants of ``gla_layer``, registered in this order."""

from onelaunch.ops.gla_layer.variants import peers, composed  # isort: skip

__all__ = ["composed", "peers"]
