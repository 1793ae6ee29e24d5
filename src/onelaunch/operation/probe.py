"""Probes of an operation: edge cases on which tests judge its variants, and studies do before the variants' times count.

An operation's file ``probes.py`` lists them. Most are plain cases. A probe with a function ``prepare`` has arguments that no
case describes, such as transposed memory or rows of very different magnitude. Those files also call the functions below, which
make such probes. ``verify/probes.py`` of the workbench judges a variant on them. Studies judge no
variant with one of the capabilities ``requires`` and ``recompiles`` on them, nor ``auto``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from onelaunch.operation.case import Case

Prepare: TypeAlias = Callable[[dict[str, Any]], dict[str, Any]]
"""Function from the arguments of a case to those of a probe. It makes new tensors and leaves the given ones unchanged."""


@dataclass(frozen=True)
class Probe:
    """Edge case of an operation, and how its arguments differ from those that the input maker draws for the case."""

    case: Case
    prepare: Prepare | None = None
    """Function applied to the drawn arguments, before the reference is computed from them; ``None`` for the case as it is."""
    refused: bool = False
    """Flag that the contract refuses the arguments, such as a tensor on another device. A call that returns has failed."""

    def __str__(self) -> str:
        return str(self.case)


Probes: TypeAlias = Callable[[], Iterable[Case | Probe]]
"""Function that yields the edge cases of an operation."""


def transposed(*names: str) -> Prepare:
    """Return a function that stores the last two dimensions of the named arguments in swapped order; values stay the same.

    A kernel that takes the last dimension's stride for 1 then reads wrong elements.
    """

    def prepare(arguments: dict[str, Any]) -> dict[str, Any]:
        return arguments | {name: arguments[name].mT.contiguous().mT for name in names}

    return prepare


def mixed_magnitudes(name: str, smallest: float, largest: float) -> Prepare:
    """Return a function that scales the rows of an argument by factors from ``smallest`` to ``largest``, evenly on a log scale.

    A row is an index of the last dimension but one. Sums in low precision over rows of such an argument lose the small ones.
    """

    def prepare(arguments: dict[str, Any]) -> dict[str, Any]:
        value: torch.Tensor = arguments[name]
        factors = torch.logspace(0, 1, value.shape[-2], base=largest / smallest, device=value.device) * smallest
        return arguments | {name: (value * factors[:, None]).to(value.dtype)}

    return prepare


def elsewhere(name: str) -> Prepare:
    """Return a function that moves an argument to the meta device, on which nothing is stored; contracts refuse such a call."""

    def prepare(arguments: dict[str, Any]) -> dict[str, Any]:
        return arguments | {name: arguments[name].to("meta")}

    return prepare


def named(case: Callable[..., Case], cases: Mapping[str, Mapping[str, Any]]) -> Iterable[Case]:
    """Yield a case for each name and arguments of ``operation.case``, which is passed as ``case``."""
    for name, given in cases.items():
        yield case(name=name, **given)
