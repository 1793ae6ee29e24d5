"""Kernels and their launch code that several operations share."""
