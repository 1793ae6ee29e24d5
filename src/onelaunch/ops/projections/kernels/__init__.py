"""Kernels of ``projections`` in Triton: activations in a pass of their own, and in the epilogue of the wide product."""
