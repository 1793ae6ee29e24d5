"""Facts about the inputs of a function that decide what it launches, as keys of plans.

``planned.py`` takes the facts of every call that may be replayed, keeps plans by their keys, and hands them to ``plan.py``, which
replays for the tensors in them; ``sites.py`` hands over tensors alone. ``ops/projections/layout.py`` declares its class by
:func:`plain`, and ``meta_tensors.py`` reads :data:`PLAIN`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch.nn import Parameter

from onelaunch.launch.tf32 import float32_precision

ALIGNMENT = 16
"""Bytes of which an address may be a multiple: Triton compiles kernels for such addresses, and TMA requires them."""

PLAIN: set[type] = {type(None), bool, int, str, torch.dtype, torch.device}
"""Types of inputs that are part of a key as they are; :func:`plain` adds one."""

K = TypeVar("K", bound=type)


def plain(kind: K) -> K:
    """Declare that objects of the decorated class are immutable, hashable and hold no tensors, so that keys may hold them."""
    PLAIN.add(kind)
    return kind


class Facts(NamedTuple):
    """Facts about the inputs of one call."""

    key: tuple[Any, ...]
    """Hashable value of everything about the inputs that may decide what is launched, without the contents of tensors.

    For a tensor these are its shape, strides, dtype, device, alignment, and whether it takes a gradient now. Two settings of
    PyTorch are part of it too: whether gradients are enabled, and on a GPU the precision of float32 products.
    """
    tensors: list[torch.Tensor]
    """Tensors among the inputs, in order."""
    addresses: list[int]
    """Addresses of their first elements."""


def facts_of(inputs: Iterable[Any]) -> Facts | None:
    """Return the facts about inputs, or ``None`` if one of them has a type whose facts are not known, as a tensor's subclass."""
    grad = torch.is_grad_enabled()
    key: list[Any] = [grad]
    tensors: list[torch.Tensor] = []
    addresses: list[int] = []
    try:
        known = _collect(inputs, grad, key, tensors, addresses)
    except RuntimeError:  # a sparse tensor has no strides, and some tensors have no address
        return None
    if tensors and tensors[0].is_cuda:  # on a CPU nothing depends on it, and a short call would notice that it was read
        key.append(float32_precision())
    return Facts(tuple(key), tensors, addresses) if known else None


def _collect(inputs: Iterable[Any], grad: bool, key: list[Any], tensors: list[torch.Tensor], addresses: list[int]) -> bool:
    """Append the facts of inputs to the lists, and return whether they are all known."""
    for value in inputs:
        kind = type(value)
        if kind is torch.Tensor or kind is Parameter:
            address = value.data_ptr()
            key += (
                value.shape, value.stride(), value.dtype, value.device, address % ALIGNMENT, grad and value.requires_grad
            )  # fmt: skip
            tensors.append(value)
            addresses.append(address)
        elif kind in PLAIN:
            key += (kind, value)  # the type too, since 1 and True are equal
        elif kind is float:
            key += (kind, value or str(value))  # 0.0 and -0.0 are equal
        elif isinstance(value, (tuple, list)):
            key += (kind, len(value))
            if not _collect(value, grad, key, tensors, addresses):
                return False
        else:
            return False
    return True


def with_tensors(inputs: Sequence[Any], tensors: Iterable[torch.Tensor]) -> list[Any]:
    """Return inputs with their tensors replaced by others, in order."""
    rest = iter(tensors)

    def replaced(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return next(rest)
        if isinstance(value, (tuple, list)):
            made = [replaced(each) for each in value]
            return value._make(made) if hasattr(value, "_make") else type(value)(made)
        return value

    return [replaced(each) for each in inputs]
