"""The kernels of ``output_chain``."""
