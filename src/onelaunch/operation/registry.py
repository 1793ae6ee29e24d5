"""Registry of all operations, including those of plug-ins.

``contract.py`` of each operation registers it by :func:`operation`. Those who know an operation by its name call
:func:`find_operation`: the dispatcher, the workbench, the commands, ``examples.py`` and ``gla_layer``, among others. ``onelaunch
prebuild``, tests, and scripts of ``docs`` and ``tools`` go through :func:`operations`. ``onelaunch doctor`` and the provenance of
results ask for :func:`plugins`.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

from onelaunch.errors import (
    ArgumentError,
    UnknownOperation,
)
from onelaunch.launch.planned import forget_plans
from onelaunch.operation.definition import Operation, check_name
from onelaunch.operation.entry_points import Plugin, load_once
from onelaunch.operation.query import P, R
from onelaunch.operation.variant import Variant

_REGISTRY: dict[str, Operation[..., Any]] = {}
"""Registered operations by name."""


def operation(**facts: Any) -> Callable[[Callable[P, R]], Operation[P, R]]:
    """Make the decorated public function an operation and register it. The arguments are those of :class:`Operation`."""

    def register(function: Callable[P, R]) -> Operation[P, R]:
        made = Operation(function, **facts)
        check_name("operation", made.name)
        _check_parts(made.name, made.dimensions, made.outputs, made.bind)
        if made.name in _REGISTRY:
            raise ArgumentError(f"An operation {made.name!r} is registered already; choose another name.")
        _REGISTRY[made.name] = made
        return made

    return register


def find_operation(name: str) -> Operation[..., Any]:
    """Return the operation of a name. If the name is not known yet, all of onelaunch's own operations are imported first.

    Raises:
        UnknownOperation: No operation has this name.
    """
    plugins()
    if name not in _REGISTRY:
        _load_our_own()
    try:
        return _REGISTRY[name]
    except KeyError:
        raise UnknownOperation(name, _REGISTRY) from None


def operations() -> Iterator[Operation[..., Any]]:
    """Yield all operations in the order of their names, including those of plug-ins."""
    _load_our_own()
    plugins()
    yield from (_REGISTRY[name] for name in sorted(_REGISTRY))


def plugins() -> tuple[Plugin, ...]:
    """Return the plug-ins of installed packages. The first call loads them; one that failed holds the reason.

    A plug-in that asks for operations while it is loaded sees those that are registered by then.
    """
    return load_once(_load_our_own, _Snapshot)


class _Snapshot:
    """State of the registry, of every operation and of every variant, before a plug-in is loaded."""

    FUNCTIONS = ("_function", "bind", "_oracle", "_inputs", "_cost", "_query", "_probes", "_typical", "shapes_of", "run")
    """Attributes of operations and variants that no plug-in may replace once they are set."""

    ORDER = ("_preference", "defaults")
    """Attributes of operations that no plug-in may set at all: the order of variants, which ``auto`` trusts."""

    def __init__(self) -> None:
        self._known = dict(_REGISTRY)
        self._parts = self._named()
        self._states = {name: {key: _copied(value) for key, value in vars(part).items()} for name, part in self._parts.items()}

    def restore(self) -> None:
        """Take back all later registrations and replacements."""
        _REGISTRY.clear()
        _REGISTRY.update(self._known)
        for name, part in self._parts.items():
            vars(part).clear()
            vars(part).update(self._states[name])
        forget_plans()

    def added(self) -> tuple[str, ...]:
        """Return the names of operations and variants registered since: ``operation`` or ``operation.variant``."""
        return tuple(name for name in self._named() if name not in self._parts)

    def problem(self) -> str | None:
        """Return a sentence if an operation, a variant or one of its functions has been replaced since, else ``None``."""
        present = self._named()
        for name, part in self._parts.items():
            before, now = self._states[name], vars(part)
            kept = present.get(name) is part and all(
                before.get(key) is None or now.get(key) is before[key] for key in self.FUNCTIONS
            )
            kept = kept and all(now.get(key) == before.get(key) for key in self.ORDER)
            if not kept:
                return f"it replaces {name} or a function of it; a plug-in may only add operations and variants of new names"
        return None

    @staticmethod
    def _named() -> dict[str, Operation[..., Any] | Variant]:
        """Return all operations and variants by name."""
        found: dict[str, Operation[..., Any] | Variant] = {}
        for name, each in _REGISTRY.items():
            found |= {name: each, **{f"{name}.{variant}": part for variant, part in each.variants.items()}}
        return found


def _copied(value: Any) -> Any:
    """Return a copy of a container, which registration may add to, and any other value itself."""
    return value.copy() if isinstance(value, (dict, list, set)) else value


def operation_by_name(module: str, name: str) -> Operation[..., Any]:
    """Return an operation for a pickle, which stores only the module that registers it and its name; import the module first.

    Operations name this function in their pickles, and variants the next one.
    """
    importlib.import_module(module)
    return find_operation(name)


def variant_by_name(module: str, operation_name: str, name: str) -> Variant:
    """Return a variant for a pickle, which stores only the operation's module, the operation's name and the variant's name."""
    return operation_by_name(module, operation_name).get(name)


def _check_parts(name: str, dimensions: object, outputs: object, bind: object) -> None:
    """Raise :class:`ArgumentError` unless the arguments of a new :class:`Operation` have the right types."""

    def names(value: object) -> bool:
        return isinstance(value, tuple) and all(isinstance(each, str) for each in value) and len(set(value)) == len(value)

    if not names(dimensions):
        raise ArgumentError(f"dimensions of {name} is {dimensions!r}; it must be a tuple of different names.")
    if not callable(outputs) and not names(outputs):
        raise ArgumentError(f"outputs of {name} is {outputs!r}; it must be a tuple of different names, or a function.")
    if not callable(bind):
        raise ArgumentError(f"bind of {name} is {bind!r}; it must be the function that checks a call's arguments.")


def load_ablations() -> None:
    """Register the ablations (variants kept for the studies that measured them) with the operations, which must exist before.

    ``onelaunch.ops`` calls it last, so that users of that package alone see the same variants as :func:`operations` does. The
    ablations are a higher layer, so they are imported by name.
    """
    importlib.import_module("onelaunch.ablations")


@functools.cache
def _load_our_own() -> None:
    """Import all packages of onelaunch that register operations or variants."""
    for package in ("onelaunch.ops", "onelaunch.ablations", "onelaunch.decode"):
        importlib.import_module(package)
