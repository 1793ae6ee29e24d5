"""Launches of an operation's own kernels by the names of its variants, as the operator that all of them share finds them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from onelaunch.errors import ArgumentError

F = TypeVar("F", bound=Callable[..., object])


class Launches(Generic[F]):
    """Registered by ``@launches("fused")``, called as ``launches["fused"](...)``: an operator takes no functions, but names."""

    def __init__(self) -> None:
        self._by_name: dict[str, F] = {}

    def __call__(self, name: str) -> Callable[[F], F]:
        """Decorator: register the launches of the variant of this name."""

        def register(function: F) -> F:
            if name in self._by_name:
                raise ArgumentError(f"Launches of a variant {name!r} are registered already.")
            self._by_name[name] = function
            return function

        return register

    def __getitem__(self, name: str) -> F:
        return self._by_name[name]
