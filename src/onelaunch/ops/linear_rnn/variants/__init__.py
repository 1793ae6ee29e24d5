"""The variants of ``linear_rnn``, registered in the order of these imports."""

from onelaunch.ops.linear_rnn.variants import peers, torch, triton, hopper, few_rows  # isort: skip

__all__ = ["few_rows", "hopper", "peers", "torch", "triton"]
