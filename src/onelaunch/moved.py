"""Modules that were moved, and go on working under their old names.

Packages of others, plug-ins above all, import names from them. :func:`install` makes such an import give the module of the new
name, with one :class:`DeprecationWarning` that says it.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {
    "onelaunch.builds": "onelaunch.launch.build",
    "onelaunch.hardware": "onelaunch.device.hardware",
    "onelaunch.measured": "onelaunch.dispatch.measured",
    "onelaunch.nvrtc": "onelaunch.cuda",
    "onelaunch.ops.formats": "onelaunch.formats",
    "onelaunch.peaks": "onelaunch.device.peaks",
    "onelaunch.plugins": "onelaunch.operation.entry_points",
    "onelaunch.sass": "onelaunch.cuda.sass",
    "onelaunch.torch_compile": "onelaunch.dispatch.capture",
}
"""New name by old name."""


class _Finder:
    """Finder of the old names, and loader of the modules of the new ones."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return a spec for an old name, ``None`` for all others."""
        return importlib.util.spec_from_loader(name, self) if name in MOVED else None  # pyrefly: ignore[bad-argument-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return a module that hands every attribute on to the one of the new name."""
        new = MOVED[spec.name]
        warnings.warn(f"{spec.name} is now {new}; the old name will go away.", DeprecationWarning, stacklevel=2)
        here = importlib.import_module(new)
        module = ModuleType(spec.name, f"Old name of :mod:`{new}`.")
        module.__dict__["__getattr__"] = lambda attribute: getattr(here, attribute)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: the attributes are those of the other module."""


def install() -> None:
    """Let imports find the old names."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())  # pyrefly: ignore[bad-argument-type]
