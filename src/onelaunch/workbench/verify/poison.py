"""Poisoned memory: an output element that a variant allocates but never writes must not look like a result.

``examine.py`` calls a candidate in :func:`poisoned`, and so do tests. ``measure/contents.py`` fills tensors by :func:`poison`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import _C as DISPATCHER
from torch.utils._python_dispatch import TorchDispatchMode

ALLOCATIONS = frozenset({"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "empty_permuted"})
"""Operators of PyTorch that return uninitialised memory."""

_RESIZES = frozenset({"resize_", "resize_as_"})
"""Operators of PyTorch that may give an existing tensor more, uninitialised memory."""


class Poison(TorchDispatchMode):
    """Dispatch mode that fills newly allocated, uninitialised tensors with NaN, or with a large number if the dtype has no NaN.

    Allocations that initialise their memory (``zeros``, ``full``) keep their contents. PyTorch switches a dispatch mode off in
    the kernel of a custom operator. This mode therefore calls such a kernel itself, with the mode on, and so sees the allocations
    inside it.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if func.namespace == "aten":
            name = func.overloadpacket.__name__
            if name in _RESIZES:
                return _poison_growth(func, args, given)
            result = func(*args, **given)
            return poison(result) if name in ALLOCATIONS else result
        if (keys := _backend_keys(func, (*args, *given.values()))) is not None:
            # Dispatch straight to the operator's kernel with the mode on, so that the operators that it calls pass through here.
            with self:
                return func.redispatch(keys, *args, **given)
        return func(*args, **given)


@contextmanager
def poisoned() -> Iterator[None]:
    """Poison all allocations inside the ``with`` block.

    Functions of torch.compile run eagerly inside the block. If Dynamo compiled one while a dispatch mode is active, it would give
    up on that function and never compile it again.
    """
    with torch.compiler.set_stance("force_eager"), Poison():
        yield


@torch.no_grad()
def poison(tensor: torch.Tensor) -> torch.Tensor:
    """Fill a tensor with values that no correct output contains, and return it."""
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.fill_(float("nan"))
    if tensor.dtype == torch.bool:
        return tensor.logical_or_(torch.ones_like(tensor))
    # Two thirds of the largest integer, negative if the dtype is signed.
    return tensor.fill_(torch.iinfo(tensor.dtype).max // 3 * 2 * (-1 if tensor.dtype.is_signed else 1))


def _poison_growth(func: Any, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
    """Resize a tensor, and poison the part of its storage that was not there before."""
    tensor: torch.Tensor = args[0]
    before = tensor.untyped_storage().nbytes() // tensor.element_size()
    result = func(*args, **given)
    after = tensor.untyped_storage().nbytes() // tensor.element_size()
    if after > before:
        poison(tensor.as_strided((after - before,), (1,), before))
    return result


def _backend_keys(func: Any, values: tuple[Any, ...]) -> Any:
    """Return the dispatch key set of the kernel that a custom operator has for the device of its first plain tensor argument.

    The result is ``None`` if the operator has no kernel for that device, or if no argument is a plain tensor. Subclasses, such as
    fake tensors, are not plain.
    """
    for value in values:
        for tensor in value if isinstance(value, (list, tuple)) else (value,):
            if type(tensor) in (torch.Tensor, torch.nn.Parameter):
                key = tensor.device.type.upper()
                # PyTorch has no public function that tells this.
                known = DISPATCHER._dispatch_has_computed_kernel_for_dispatch_key(func.name(), key)  # noqa: SLF001
                return DISPATCHER.DispatchKeySet(DISPATCHER.DispatchKey.__members__[key]) if known else None
    return None
