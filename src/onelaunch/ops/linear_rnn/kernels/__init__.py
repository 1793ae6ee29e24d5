"""The kernels of ``linear_rnn``."""
