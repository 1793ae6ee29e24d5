"""Kernels and launch code that several operations share."""
