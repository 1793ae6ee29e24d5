"""Kernels of ``swiglu`` in Triton."""
