"""Kernels of the ablations."""
