"""Fused, persistent GPU kernels for linear-RNN layers, and the workbench that proves when fusing pays."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onelaunch import ops

__version__ = "0.1.0"
__all__ = ["__version__", "ops"]


def __getattr__(name: str) -> Any:
    """Operations when they are asked for: a text need not wait for them."""
    if name == "ops":
        return importlib.import_module("onelaunch.ops")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
