"""Helpers that kernels of several operations share: memory layout, packed sequences, activations."""
