"""Fused, persistent GPU kernels for linear-RNN layers, and the workbench that proves when fusing pays."""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from onelaunch import moved

if TYPE_CHECKING:
    from onelaunch import ops
    from onelaunch.integrations import accelerate

moved.install()  # plug-ins may import modules by names that they had before

__version__ = "0.1.0"
__all__ = ["__version__", "accelerate", "ops"]


def __getattr__(name: str) -> Any:
    """Import ``accelerate`` or a module at its first use, so that ``import onelaunch`` loads no operation that is not used."""
    if name == "accelerate":
        return importlib.import_module(f"{__name__}.integrations").accelerate
    if not name.startswith("_") and importlib.util.find_spec(f"{__name__}.{name}") is not None:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
