"""Kernels of ``linear_rnn``: the whole layer in one launch (three kernels), and a plain matrix product."""
