"""Kernels of the gated scan over time, their launches, and the decoupled look-back that joins tiles inside one launch."""
