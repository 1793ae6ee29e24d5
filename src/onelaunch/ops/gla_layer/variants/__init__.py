"""The variants of ``gla_layer``, registered in the order of these imports."""

from onelaunch.ops.gla_layer.variants import peers, composed  # isort: skip

__all__ = ["composed", "peers"]
