"""Kernels of ``gla_layer`` that none of its parts has."""
