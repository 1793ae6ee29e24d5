"""Kernels of the ablations.

``gla.py`` and ``linear_rnn.py`` of the folder above launch them.
"""
