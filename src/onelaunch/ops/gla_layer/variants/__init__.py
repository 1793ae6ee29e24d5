"""The variants of ``gla_layer``, registered in the order of these imports."""

from onelaunch.ops.gla_layer.variants import peers, composed, module, one_launch  # isort: skip

__all__ = ["composed", "module", "one_launch", "peers"]
