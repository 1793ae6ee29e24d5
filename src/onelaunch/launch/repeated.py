"""Comparison of a call's inputs with those of the call before, in a third of the time that their facts take.

Most calls of a function repeat the facts of its latest call. PyTorch's ``TensorGuards``, by which compiled code checks its
inputs, compares class, dispatch keys, dtype, device, sizes, strides and ``requires_grad`` of many tensors in one microsecond;
:func:`~onelaunch.launch.facts.facts_of` takes one for each of them, and its key as much again to compare. An input that is no
tensor must be the same object. A call that does not match is looked up by its facts, so that a comparison that is too strict
costs time alone. ``planned.py`` makes a :class:`Repeated` where a plan is found by its key, and
``onelaunch.integrations`` for each decision about a call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from operator import is_, itemgetter, or_
from typing import Any

import torch

from onelaunch.launch.facts import ALIGNMENT, PLAIN, Facts
from onelaunch.launch.tf32 import float32_precision

_guards = getattr(torch._C._dynamo.guards, "TensorGuards", None)  # noqa: SLF001
"""Class of PyTorch that compares tensors; ``None`` if PyTorch has none."""


class Repeated:
    """Inputs of a call that is expected to be repeated with other tensors of the same facts.

    Args:
        inputs: Positional inputs, none of which holds tensors.
        named: Inputs by name.
        facts: Their facts.

    Raises:
        TypeError: Such inputs cannot be compared: there is no tensor, an address is not aligned, or an input may change.
    """

    __slots__ = ("_check", "_constants", "_count", "_grad", "_names", "_others", "_precision", "_tensors")

    def __init__(self, inputs: tuple[Any, ...], named: dict[str, Any], facts: Facts) -> None:
        everything = (*inputs, *named.values())
        tensors = [at for at, each in enumerate(everything) if isinstance(each, torch.Tensor)]
        others = [at for at, each in enumerate(everything) if not isinstance(each, torch.Tensor)]
        if _guards is None or not facts.tensors or len(tensors) != len(facts.tensors) or reduce(or_, facts.addresses) % ALIGNMENT:
            raise TypeError("tensors inside of lists, or at other addresses")
        if not all(_is_constant(everything[at]) for at in others):
            raise TypeError("an input may change")
        self._names, self._count = tuple(named), len(everything)
        self._tensors, self._others = _picker(tensors), _picker(others)
        self._constants = self._others(everything)
        self._grad = torch.is_grad_enabled()
        self._precision = float32_precision() if facts.tensors[0].is_cuda else None
        self._check = _guards(*facts.tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check

    def tensors_of(self, inputs: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[torch.Tensor, ...], list[int]] | None:
        """Return the tensors among inputs and their addresses if all facts are as expected, ``None`` if they may be others."""
        if named or self._names:
            if tuple(named) != self._names:
                return None
            inputs = (*inputs, *named.values())
        if len(inputs) != self._count or torch.is_grad_enabled() is not self._grad:
            return None
        if not all(map(is_, self._others(inputs), self._constants)):
            return None
        tensors = self._tensors(inputs)
        try:
            if not self._check(*tensors):
                return None
        except TypeError:  # one of them is no tensor
            return None
        addresses = [each.data_ptr() for each in tensors]
        if reduce(or_, addresses) % ALIGNMENT or (self._precision is not None and float32_precision() != self._precision):
            return None
        return tensors, addresses


def _is_constant(value: Any) -> bool:
    """Return whether an object of this type stays as it is, so that its identity stands for its value."""
    return type(value) in PLAIN or type(value) is float or (type(value) is tuple and all(map(_is_constant, value)))


def _picker(positions: Sequence[int]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """Return a function from a tuple to the tuple of its values at positions."""
    if len(positions) > 1:
        return itemgetter(*positions)
    return lambda values: tuple([values[at] for at in positions])
