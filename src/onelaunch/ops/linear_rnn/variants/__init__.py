"""The variants of ``linear_rnn``, registered in the order of these imports."""

from onelaunch.ops.linear_rnn.variants import peers, torch, triton, hopper  # isort: skip

__all__ = ["hopper", "peers", "torch", "triton"]
