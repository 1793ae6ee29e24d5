"""Helpers of kernels of all kinds: memory layout, packed sequences, activations."""
