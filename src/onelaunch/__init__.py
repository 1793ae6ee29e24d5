"""Fused, persistent GPU kernels for linear-RNN layers, and the workbench that proves when fusing pays."""

from onelaunch import ops

__version__ = "0.1.0"
__all__ = ["__version__", "ops"]
