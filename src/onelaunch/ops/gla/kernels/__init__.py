"""Kernels of ``gla`` in Triton, and in Gluon for Hopper GPUs."""
