"""Triton kernels of ``swiglu``."""
