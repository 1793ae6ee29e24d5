"""Kernels of ``projections`` in Triton: activations in a pass or in the wide product's epilogue, and gradients of few inputs."""
