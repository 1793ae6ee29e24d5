"""Ablations: variants of optimizations that were measured and lost.

They are registered for the studies that measured them and run by name alone: ``auto`` never chooses them
(``by_name_only=True``). Their kernels are left as they were measured, and some spill registers by design. They are registered
when :mod:`onelaunch.ops` is imported.
"""

from onelaunch.ablations import gla, linear_rnn

__all__ = ["gla", "linear_rnn"]
