"""Argument checks that operations, layers of ``nn``, formats, and the weights and steps of ``decode`` share.

Each check raises an error that names the argument. A replayed call has the same facts as a call that passed the checks, so the
replay skips them. ``launch/planned.py`` asks :func:`asks_for_values` whether it may, because values may differ. Autocast and
state checks of ``onelaunch.operation`` take :data:`FLOATS`.

Shapes, dtypes and devices are always checked, at no cost on the device. These checks take a tensor or its :class:`Facts`, which
are hashable, so that a contract can cache the outcome. Checking values (a positive log-decay, offsets out of order) means reading
the tensor, which on a GPU would synchronize with the device at every call. Values are checked for CPU tensors, and for GPU
tensors only while the environment variable ``ONELAUNCH_CHECK_VALUES=1`` is set.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

import torch

from onelaunch.errors import ArgumentError, DeviceError, DTypeError, PackingError, ShapeError, ValueRangeError
from onelaunch.tracing import is_traced, is_transformed

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
"""Dtypes that operations take for floating-point arguments."""


class Facts(NamedTuple):
    """Facts about a tensor from which a contract checks a call and makes its dispatch key.

    They are known without reading the tensor, and are hashable. The ``reference.py`` of an operation makes the facts of a case.
    """

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool


def facts(argument: str, value: object) -> Facts:
    """Return the facts of an argument.

    Raises:
        ArgumentError: The value is no tensor, or is nested or sparse.
    """
    if not isinstance(value, torch.Tensor):
        raise _no_tensor(argument, value)
    if value.layout is not torch.strided or value.is_nested:
        kind = "a nested tensor" if value.is_nested else f"a tensor of layout {value.layout}"
        raise ArgumentError(
            f"{argument} is {kind}; it must be a plain strided tensor. Pass {argument}.to_dense(), or pack sequences."
        )
    return Facts(value.shape, value.dtype, value.device, value.requires_grad)


def optional_facts(argument: str, value: object) -> Facts | None:
    """Return the facts of an optional argument, ``None`` if it is ``None``; raise as :func:`facts` does."""
    return None if value is None else facts(argument, value)


def grad_wanted(*given: Facts | None) -> bool:
    """Return whether any of the given tensors requires a gradient; the caller checks whether gradients are enabled."""
    return any(each is not None and each.requires_grad for each in given)


def tensor(argument: str, value: object) -> torch.Tensor:
    """Return the value, or raise :class:`ArgumentError` unless it is a tensor."""
    if not isinstance(value, torch.Tensor):
        raise _no_tensor(argument, value)
    return value


def _no_tensor(argument: str, value: object) -> ArgumentError:
    """Return the error for an argument that is no tensor."""
    quantized = (
        " In a quantized torch.nn.Linear, weight is a method; layers of onelaunch need floating-point weights."
        if callable(value)
        else ""
    )
    return ArgumentError(f"{argument} is {type(value).__name__}; it must be a torch.Tensor.{quantized}")


def rank(argument: str, value: torch.Tensor | Facts, dimensions: str) -> None:
    """Raise :class:`ShapeError` unless a tensor has as many dimensions as ``dimensions`` names, such as ``[B, T, D]``."""
    if len(value.shape) != dimensions.count(",") + 1:
        raise ShapeError(argument, got=value.shape, want=f"{dimensions}, a tensor of {dimensions.count(',') + 1} dimensions")


def shape(argument: str, value: torch.Tensor | Facts, want: Sequence[int], dimensions: str, because: str) -> None:
    """Raise :class:`ShapeError` unless the shape is ``want``; ``because`` names the arguments that it must match."""
    if tuple(value.shape) != tuple(want):
        raise ShapeError(argument, got=value.shape, want=f"{dimensions} = {list(want)} to match {because}")


def dtype(argument: str, value: torch.Tensor | Facts, allowed: Sequence[torch.dtype], because: str = "") -> None:
    """Raise :class:`DTypeError` unless the dtype is one of ``allowed``; ``because`` is added to the message."""
    if value.dtype not in allowed:
        names = " or ".join(str(each).removeprefix("torch.") for each in allowed)
        raise DTypeError(argument, got=value.dtype, want=names + because)


def device(argument: str, value: torch.Tensor | Facts, want: torch.device) -> None:
    """Raise :class:`DeviceError` unless the tensor is on the device ``want``."""
    if value.device != want:
        raise DeviceError(argument, got=value.device, want=want)


def packing(cu_seqlens: torch.Tensor | Facts, batch: int) -> None:
    """Raise :class:`PackingError` unless ``cu_seqlens`` has the dtype and number of offsets, and the batch size is 1.

    Raise :class:`ShapeError` if it does not have one dimension.
    """
    rank("cu_seqlens", cu_seqlens, "[N + 1]")
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise PackingError(f"is {cu_seqlens.dtype}", want="hold int32 or int64 offsets")
    if batch != 1:
        raise PackingError(f"came with a batch of {batch}", want="come with B = 1: pack all sequences into one")
    if cu_seqlens.shape[0] < 2:
        raise PackingError(f"holds {cu_seqlens.shape[0]} offsets", want="hold N + 1 offsets for N >= 1 sequences")


def offsets(cu_seqlens: torch.Tensor, length: int) -> None:
    """Raise :class:`PackingError` unless the offsets run from 0 to ``length`` and never decrease, if values are checked."""
    if not values_are_checked(cu_seqlens):
        return
    steps = cu_seqlens.diff()
    if bool((steps < 0).any()):
        at = int((steps < 0).nonzero()[0])
        raise PackingError(f"falls from {int(cu_seqlens[at])} to {int(cu_seqlens[at + 1])} at {at + 1}", want="never decrease")
    if int(cu_seqlens[0]) != 0 or int(cu_seqlens[-1]) != length:
        raise PackingError(f"runs from {int(cu_seqlens[0])} to {int(cu_seqlens[-1])}", want=f"run from 0 to T = {length}")


def log_decay(value: torch.Tensor, name: str = "log_decay") -> None:
    """Raise :class:`ValueRangeError` if a log-decay, named ``name``, is positive or NaN, if values are checked."""
    if values_are_checked(value) and value.numel() and not bool((value <= 0).all()):
        largest = value.max().item()
        raise ValueRangeError(
            name,
            got=f"holds {'NaN' if largest != largest else f'{largest:g}'}",
            want=f"a log-decay is at most 0 (decay = exp({name}) lies in [0, 1]); pass torch.log of your decay",
        )


def values_are_checked(value: torch.Tensor) -> bool:
    """Return whether the values of this tensor are checked now.

    A tensor has no values while a program is traced, inside a transform of ``torch.func``, and on the meta device.
    """
    if value.is_meta or is_traced(value) or is_transformed():
        return False
    return value.device.type == "cpu" or asks_for_values()


_VARIABLES = getattr(os.environ, "_data", None)
"""Content of ``os.environ``, whose own look-up takes a microsecond for a variable that is not set."""


def asks_for_values() -> bool:
    """Return whether the user asks that values of GPU tensors are checked."""
    # Only on POSIX are the keys bytes; elsewhere this test would always say that the variable is not set.
    if isinstance(_VARIABLES, dict) and b"ONELAUNCH_CHECK_VALUES" not in _VARIABLES and os.name == "posix":
        return False
    return os.environ.get("ONELAUNCH_CHECK_VALUES") == "1"


def flag(argument: str, value: object) -> None:
    """Raise :class:`ArgumentError` unless the value is True or False."""
    if not isinstance(value, bool):
        raise ArgumentError(f"{argument} is {value!r}; it must be True or False.")
