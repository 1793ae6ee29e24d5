"""Old names of modules that moved, and of objects that were renamed.

Other packages, mainly plug-ins, import from these modules. After :func:`install`, importing a module's old name gives a module
that forwards to the new one, and warns once with a :class:`DeprecationWarning`. :func:`renamed` does the same for names in a
module. ``onelaunch/__init__.py`` calls :func:`install`, and modules with renamed objects call :func:`renamed`.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

MOVED = {
    "onelaunch.builds": "onelaunch.launch.build",
    "onelaunch.decode.cache": "onelaunch.decode.model.cache",
    "onelaunch.decode.check": "onelaunch.decode.plan.check",
    "onelaunch.decode.config": "onelaunch.decode.model.config",
    "onelaunch.decode.engine": "onelaunch.decode.model.request",
    "onelaunch.decode.plan.rungs": "onelaunch.decode.plan.levels",
    "onelaunch.decode.rungs": "onelaunch.decode.plan.levels",
    "onelaunch.decode.sampling": "onelaunch.decode.model.sampling",
    "onelaunch.decode.text": "onelaunch.decode.model.tokenizer",
    "onelaunch.decode.weights": "onelaunch.decode.model.weights",
    "onelaunch.hardware": "onelaunch.device.hardware",
    "onelaunch.measured": "onelaunch.dispatch.measured",
    "onelaunch.nvrtc": "onelaunch.cuda",
    "onelaunch.ops.formats": "onelaunch.formats",
    "onelaunch.peaks": "onelaunch.device.peaks",
    "onelaunch.plugins": "onelaunch.operation.entry_points",
    "onelaunch.sass": "onelaunch.cuda.sass",
    "onelaunch.torch_compile": "onelaunch.dispatch.capture",
    "onelaunch.workbench.compare": "onelaunch.workbench.decide.compare",
    "onelaunch.workbench.count": "onelaunch.workbench.measure.count",
    "onelaunch.workbench.criteria": "onelaunch.workbench.decide.criteria",
    "onelaunch.workbench.decision": "onelaunch.workbench.decide.decision",
    "onelaunch.workbench.plan": "onelaunch.workbench.study.plan",
    "onelaunch.workbench.provenance": "onelaunch.workbench.result.provenance",
    "onelaunch.workbench.study_file": "onelaunch.workbench.study.read",
    "onelaunch.workbench.timing": "onelaunch.workbench.measure.timing",
    "onelaunch.workbench.verify.truth": "onelaunch.workbench.verify.reference",
}
"""Name of the new module, by the name of the old one."""

PARTS = {
    "onelaunch.decode.engine": ("onelaunch.decode.runtime.engines",),
    "onelaunch.hardware": ("onelaunch.device.architectures",),
    "onelaunch.nvrtc": ("onelaunch.cuda.compiler",),
    "onelaunch.ops.formats": ("onelaunch.formats.nvfp4", "onelaunch.formats.scales"),
    "onelaunch.peaks": ("onelaunch.device.read_rate",),
    "onelaunch.workbench.criteria": ("onelaunch.workbench.decide.judging",),
}
"""Further new modules of an old module that was split: they define names that the module in :data:`MOVED` does not have."""


class _Finder:
    """Finder and loader for the old names, which Python's import system calls."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return a module specification for an old name, and ``None`` for all other names."""
        return importlib.util.spec_from_loader(name, self) if name in MOVED else None  # pyrefly: ignore[bad-argument-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return a module that looks up every attribute in the new module."""
        new = MOVED[spec.name]
        warnings.warn(f"{spec.name} is now {new}; the old name will be removed.", DeprecationWarning, stacklevel=2)
        here = importlib.import_module(new)
        parts = PARTS.get(spec.name, ())

        def look_up(name: str) -> Any:
            """Return an attribute of the new module, or of the further modules in :data:`PARTS`."""
            for part in () if name.startswith("__") or hasattr(here, name) else map(importlib.import_module, parts):
                if hasattr(part, name):
                    return getattr(part, name)
            return getattr(here, name)

        module = ModuleType(spec.name, f"Old name of :mod:`{new}`.")
        module.__dict__["__getattr__"] = look_up
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing, since all attributes are looked up in the new module."""


def install() -> None:
    """Register the finder of the old names, once per process."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())  # pyrefly: ignore[bad-argument-type]


def renamed(module: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a ``__getattr__`` for a module whose names have changed, so that the old ones still work.

    Each use of an old name gives the object of the new name, with a :class:`DeprecationWarning` that names it.

    Args:
        module: Name of the module, its ``__name__``.
        names: New name by old name.
    """

    def look_up(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warnings.warn(f"{module}.{name} is now {names[name]}; the old name will go away.", DeprecationWarning, stacklevel=2)
        return getattr(sys.modules[module], names[name])

    return look_up
