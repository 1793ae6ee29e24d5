"""Kernels of the variants that are kept as lessons."""
