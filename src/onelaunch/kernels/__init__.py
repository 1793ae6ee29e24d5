"""Kernels that several operations share, and the host code that launches them."""
