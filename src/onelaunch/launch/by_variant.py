"""Registry from names, mostly those of an operation's variants, to the functions that launch their kernels.

The variants of an operation share one registered PyTorch operator. An operator takes strings but no functions, so it receives the
name of what it launches. ``autograd.py`` of operations whose variants launch different kernels makes one, ``launches``, and the
modules of variants and ablations register their functions in it. ``gla_layer`` calls functions from those of its parts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from onelaunch.errors import ArgumentError

F = TypeVar("F", bound=Callable[..., object])


class Launches(Generic[F]):
    """Registry of launching functions: ``@launches("fused")`` registers one, and ``launches["fused"](...)`` calls it."""

    def __init__(self) -> None:
        self._by_name: dict[str, F] = {}

    def __call__(self, name: str) -> Callable[[F], F]:
        """Return a decorator that registers a launching function under this name."""

        def register(function: F) -> F:
            if name in self._by_name:
                raise ArgumentError(f"A function that launches the variant {name!r} is registered already; choose another name.")
            self._by_name[name] = function
            return function

        return register

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def __getitem__(self, name: str) -> F:
        return self._by_name[name]
