"""Poisoned memory: what a variant allocates and does not write must not look like an answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import _C as DISPATCHER
from torch.utils._python_dispatch import TorchDispatchMode

ALLOCATIONS = frozenset({"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "empty_permuted"})


class Poison(TorchDispatchMode):
    """While active, fresh uninitialised tensors hold NaN, or an odd large number where NaN cannot be held.

    Memory that is made initialised (``zeros``, ``full``) stays as it is. It also sees the allocations inside custom operators,
    which run below the level at which a dispatch mode is switched off again.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if func.namespace == "aten":
            result = func(*args, **given)
            return poison(result) if func.overloadpacket.__name__ in ALLOCATIONS else result
        if (keys := _backend_keys(func, (*args, *given.values()))) is not None:
            with self:  # straight to the operator's kernel, so that what it calls comes through here again
                return func.redispatch(keys, *args, **given)
        return func(*args, **given)


@contextmanager
def poisoned() -> Iterator[None]:
    """A region in which allocations are poisoned.

    What is compiled runs uncompiled here: Dynamo would otherwise meet a dispatch mode, and never compile that function again.
    """
    with torch.compiler.set_stance("force_eager"), Poison():
        yield


@torch.no_grad()
def poison(tensor: torch.Tensor) -> torch.Tensor:
    """Fill a tensor with what no answer holds, and return it."""
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.fill_(float("nan"))
    if tensor.dtype == torch.bool:
        return tensor.logical_or_(torch.ones_like(tensor))
    return tensor.fill_(torch.iinfo(tensor.dtype).max // 3 * 2 * (-1 if tensor.dtype.is_signed else 1))


def _backend_keys(func: Any, values: tuple[Any, ...]) -> Any:
    """The key set of the operator's own kernel for the device of its first tensor, if it has one."""
    for value in values:
        for tensor in value if isinstance(value, (list, tuple)) else (value,):
            if type(tensor) in (torch.Tensor, torch.nn.Parameter):
                name = tensor.device.type.upper()
                found = DISPATCHER._dispatch_has_computed_kernel_for_dispatch_key(func.name(), name)  # noqa: SLF001 - no other way
                return DISPATCHER.DispatchKeySet(DISPATCHER.DispatchKey.__members__[name]) if found else None
    return None
