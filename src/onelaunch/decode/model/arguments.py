"""Argument checks that the public functions of decoding share.

An :class:`~onelaunch.errors.ArgumentError` of theirs names the argument, a :class:`~onelaunch.errors.NoDeviceError` the device.

``decode/generate.py``, ``cache.py``, ``weights.py`` and the contract of ``decode_step`` call them.
"""

from __future__ import annotations

import math
import numbers
import operator
from typing import TypeVar

import torch

from onelaunch.device.hardware import present
from onelaunch.errors import ArgumentError, NoDeviceError
from onelaunch.wording import shown

Kind = TypeVar("Kind")


def instance(argument: str, value: object, kind: type[Kind]) -> Kind:
    """Return ``value`` if it is an instance of ``kind``.

    Raises:
        ArgumentError: ``value`` is not one.
    """
    if not isinstance(value, kind):
        raise ArgumentError(f"{argument} is {shown(value)}; it must be a {class_name(kind)}.")
    return value


def class_name(kind: type) -> str:
    """Return the name by which callers import a class; classes of this package are exported by ``onelaunch.decode``."""
    module = "onelaunch.decode" if kind.__module__.startswith("onelaunch.decode.") else kind.__module__
    return f"{module}.{kind.__qualname__}"


def integer(argument: str, value: object, least: int, most: int | None = None) -> int:
    """Return ``value`` as an ``int``; integers of other classes, such as NumPy's, are accepted.

    Raises:
        ArgumentError: ``value`` is no integer, or not between ``least`` and ``most``.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)  # pyrefly: ignore[bad-argument-type]
    except TypeError:
        number = None
    if number is None or number < least or (most is not None and number > most):
        end = "" if most is None else f", at most {most}"
        raise ArgumentError(f"{argument} is {shown(value)}; it must be an integer of at least {least}{end}.")
    return number


def positive(argument: str, value: object) -> float:
    """Return ``value`` as a ``float`` if it is a finite number above 0.

    Raises:
        ArgumentError: ``value`` is not one.
    """
    number = float(value) if isinstance(value, numbers.Real) and not isinstance(value, bool) else math.nan
    if not 0 < number < math.inf:
        raise ArgumentError(f"{argument} is {shown(value)}; it must be a number above 0.")
    return number


def flag(argument: str, value: object) -> bool:
    """Return ``value`` if it is a ``bool``.

    Raises:
        ArgumentError: ``value`` is not one. A string such as ``"no"`` would count as true.
    """
    if not isinstance(value, bool):
        raise ArgumentError(f"{argument} is {shown(value)}; it must be True or False.")
    return value


def string(argument: str, value: object, example: str) -> str:
    """Return ``value`` if it is a nonempty string; the error gives ``example``.

    Raises:
        ArgumentError: ``value`` is not one.
    """
    if not isinstance(value, str) or not value:
        raise ArgumentError(f"{argument} is {shown(value)}; it must be a string, such as {example}.")
    return value


def device_of(argument: str, value: object) -> torch.device:
    """Return ``value`` as a PyTorch device.

    Raises:
        ArgumentError: PyTorch does not know such a device.
        NoDeviceError: this machine lacks the device.
    """
    if isinstance(value, torch.device):
        found = value
    else:
        try:
            found = torch.device(string(argument, value, "'cpu' or 'cuda:0'"))
        except RuntimeError:
            want = "it must name a device of PyTorch, such as 'cpu' or 'cuda:0'"
            raise ArgumentError(f"{argument} is {shown(value)}; {want}.") from None
    here = present()
    if found.type != "cpu" and f"{found.type}:{found.index or 0}" not in here:
        raise NoDeviceError(str(found), present=here)
    return found
