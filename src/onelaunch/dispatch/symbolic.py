"""Decisions about calls whose sizes are symbolic, so that code compiled once serves many sizes.

A tracer such as ``torch.compile`` may leave the batch size, the number of steps or that of rows open. A decision that depends on
sizes, such as the choice of a variant, is made for the sizes of the call that is being traced, the *hints*. It holds in a range
of every symbolic size: the traced code compares the size with the ends of the range, which become guards of the compiled code.
Beyond the range ``torch.compile`` traces again.

:func:`note_sizes` and :func:`within` run in traced code, :func:`decided` where the tracer takes a function's result as a
constant::

    note_sizes(sizes)
    name = within(sizes, constant(...))  # constant() returns decided(decide)

``dispatch/choice.py`` chooses the variants of all operations by them, and ``ops/gla_layer/autograd.py`` those whose kernels make
up a layer.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from onelaunch.errors import VariantUnsupported

_LARGEST = 1 << 40
"""Size up to which the end of a range is searched. A range that reaches it has no upper end."""


class _Noted(threading.local):
    """Sizes of the decision that this thread will make next."""

    hints: tuple[int, ...] = ()
    symbolic: tuple[bool, ...] = ()

    def add(self, hint: int, symbolic: bool) -> None:
        self.hints, self.symbolic = (*self.hints, hint), (*self.symbolic, symbolic)

    def clear(self) -> None:
        self.hints, self.symbolic = (), ()


_NOTED = _Noted()


def note_sizes(sizes: Sequence[int]) -> None:
    """Note the hints of sizes, some of which may be symbolic, for the next call of :func:`decided` in this thread.

    While Dynamo traces, a function whose result is a constant cannot take a symbolic size, and Dynamo of PyTorch 2.11 traces no
    function that returns the hint of one. ``comptime`` runs a function in the compiler, which can read the hint there.
    """
    if torch.compiler.is_dynamo_compiling():
        from torch._dynamo.comptime import comptime  # loaded already when code is traced

        comptime(_clear_in_compiler)
        for size in sizes:  # noqa: B007 - the function reads this local variable
            comptime(_note_in_compiler)
        return
    _NOTED.clear()
    for size in sizes:
        _note(size)


def _clear_in_compiler(context: Any) -> None:
    """Forget sizes that a trace noted before it was given up."""
    _NOTED.clear()


def _note_in_compiler(context: Any) -> None:
    """Note the value of the local variable ``size`` of :func:`note_sizes`."""
    size = context.get_local("size")
    _note(size.as_python_constant() if size.is_python_constant() else size.as_fake())


def _note(size: Any) -> None:
    """Note a size; one that is not known, because it depends on data, raises PyTorch's error for that."""
    hint = size if type(size) is int or size.node.maybe_as_int() is not None else size.node.hint
    if hint is None or type(size) is int or hint is size:
        _NOTED.add(int(size), symbolic=False)
    else:
        _NOTED.add(int(hint), symbolic=True)


def decided(decide: Callable[[tuple[int, ...]], str]) -> str:
    """Return the decision for the noted sizes and the ranges in which it holds, as one string for :func:`within`.

    Dynamo takes a string as a constant, but may make an integer symbolic.

    Args:
        decide: Function from sizes to a word without spaces. It may raise :class:`VariantUnsupported`.

    Raises:
        VariantUnsupported: ``decide`` raises it for the noted sizes.
    """
    hints, symbolic = _NOTED.hints, _NOTED.symbolic
    decision = decide(hints)
    if not any(symbolic):
        return decision

    def holds(sizes: tuple[int, ...]) -> bool:
        try:
            return decide(sizes) == decision
        except VariantUnsupported:
            return False

    ends = [_range_of(holds, hints, index) if each else (hints[index],) * 2 for index, each in enumerate(symbolic)]
    lows = _common(holds, hints, tuple([low for low, _ in ends]))
    highs = _common(holds, hints, tuple([high for _, high in ends]))
    ranges = [
        f"{low or ''}:{high if high < _LARGEST else ''}" if each else ":"
        for low, high, each in zip(lows, highs, symbolic, strict=True)
    ]
    return " ".join([decision, *ranges])


def within(sizes: Sequence[int], decision: str) -> str:
    """Return the word of a decision of :func:`decided`, and guard that every size stays in its range."""
    word, *ranges = decision.split(" ")
    for size, ends in zip(sizes, ranges, strict=False):  # there are none where all sizes are known
        low, high = ends.split(":")
        if (low and size < int(low)) or (high and size > int(high)):
            raise AssertionError("the size of a traced call is outside of the range that was found around it")
    return word


def _range_of(holds: Callable[[tuple[int, ...]], bool], sizes: tuple[int, ...], index: int) -> tuple[int, int]:
    """Return a range of one size around its hint in which a decision holds, with the other sizes at their hints.

    It is searched in steps of a factor of 4 and then by bisection. A decision that holds at neither neighbour of the hint may
    depend on divisibility: its range is the hint alone.
    """
    hint = sizes[index]

    def at(size: int) -> bool:
        return holds((*sizes[:index], size, *sizes[index + 1 :]))

    if not at(hint - 1) and not at(hint + 1):
        return hint, hint
    low, beyond = hint, -1
    while low > 0:
        if not at(low // 4):
            beyond = low // 4
            break
        low //= 4
    high, above = hint, _LARGEST
    while high < _LARGEST:
        if not at(min(4 * high, _LARGEST)):
            above = min(4 * high, _LARGEST)
            break
        high = min(4 * high, _LARGEST)
    return _last(at, low, beyond), high if high == _LARGEST else _last(at, high, above)


def _last(at: Callable[[int], bool], good: int, bad: int) -> int:
    """Return the size next to one at which a decision no longer holds, between one at which it holds and one at which not."""
    while abs(good - bad) > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if at(middle) else (good, middle)
    return good


def _common(holds: Callable[[tuple[int, ...]], bool], hints: tuple[int, ...], ends: tuple[int, ...]) -> tuple[int, ...]:
    """Return ends at which a decision holds for all sizes at once: the given ones, moved towards the hints until it does.

    A limit may concern a product of sizes, such as that of batch entries and steps.
    """
    while not holds(ends) and ends != hints:
        ends = tuple([_between(hint, end) for hint, end in zip(hints, ends, strict=True)])
    return ends


def _between(hint: int, end: int) -> int:
    """Return a size between a hint and an end: their geometric mean, or the hint itself at last."""
    mean = math.isqrt(hint * end)
    return hint if mean == end or abs(hint - end) <= 1 else mean
