"""Kernels of ``rms_norm``: addition and norm in one pass, and the gradients."""
