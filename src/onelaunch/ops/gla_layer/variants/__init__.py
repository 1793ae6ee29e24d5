"""The variants of ``gla_layer``, registered in the order of these imports."""

from onelaunch.ops.gla_layer.variants import peers, composed, module  # isort: skip

__all__ = ["composed", "module", "peers"]
