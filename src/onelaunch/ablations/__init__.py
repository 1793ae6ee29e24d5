"""Ablations: variants that are kept only to measure the effect of one change: a baseline, a control, and attempts that lost.

Studies run them by name; ``auto`` never chooses them (``by_name_only=True``). Their kernels are left as they were measured,
some with spilled registers. They are registered when :mod:`onelaunch.ops` is imported.
"""

from onelaunch.ablations import gla, gla_in_turns, linear_rnn

__all__ = ["gla", "gla_in_turns", "linear_rnn"]
