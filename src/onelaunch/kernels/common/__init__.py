"""Helpers that the kernels of several operations share (activations), or their launch code (memory layout, packed sequences)."""
