"""Kernels of ``output_chain``: norm and gate in one pass, and the output projection with both inside."""
