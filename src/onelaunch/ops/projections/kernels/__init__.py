"""Kernels of ``projections`` in Triton."""
