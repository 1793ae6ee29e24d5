"""Launches that are not made: calls on fake tensors, recorded or only imitated.

Code that launches kernels runs in one of three ways. Usually it launches. While it is *imitated*, every launch does nothing, and
what comes back are the empty tensors that the launch would fill: so PyTorch's tracers learn the shapes of results. While it is
*recorded*, launches are noted as well: so the inspector and the tests learn which kernels a call launches, without a GPU.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch.overrides import TorchFunctionMode

from onelaunch.device.architectures import pretended


class _State(threading.local):
    """Mode in which this thread makes launches."""

    imitated = False
    """Flag that launches do nothing."""
    notes: list[Any] | None = None
    """List that takes the launches, where they are noted."""


_STATE = _State()


def imitated() -> bool:
    """Return whether launches do nothing now, because their tensors are fake."""
    return _STATE.imitated


def recorded() -> bool:
    """Return whether launches on a pretended device are noted now."""
    return _STATE.imitated and _STATE.notes is not None


def note(launch: Any) -> bool:
    """Take a launch into the notes, if there are any, and return whether it is to be left undone."""
    if _STATE.notes is not None:
        _STATE.notes.append(launch)
    return _STATE.imitated


@contextmanager
def imitate() -> Iterator[None]:
    """Let launches of this thread do nothing inside."""
    before = _STATE.imitated
    _STATE.imitated = True
    try:
        yield
    finally:
        _STATE.imitated = before


@contextmanager
def observe() -> Iterator[list[Any]]:
    """Note the launches that this thread makes inside, and make them."""
    before = _STATE.notes
    _STATE.notes = notes = []
    try:
        yield notes
    finally:
        _STATE.notes = before


@contextmanager
def record(architecture: str) -> Iterator[tuple[torch.device, list[Any]]]:
    """Note the launches of calls on fake tensors, as a chip of an architecture would make them.

    Yields:
        The device on which to make the tensors, inside, and the list of launches in their order.
    """
    with observe() as notes, imitate(), _no_context(), warnings.catch_warnings(), fake_tensor.FakeTensorMode(), _Brackets():
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        yield pretended(architecture), notes


class _Brackets(TorchFunctionMode):
    """Indexing by functions: Python's brackets make the tensor's device the current one, which a pretended device cannot be."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func == torch.Tensor.__setitem__:  # a fake tensor holds no values
            return None
        if func == torch.Tensor.__getitem__:
            tensor, index = args
            items = index if isinstance(index, tuple) else (index,)
            if all(each is None or each is Ellipsis or type(each) in (int, slice) for each in items):
                return _indexed(tensor, items)
        return func(*args, **(kwargs or {}))


def _indexed(tensor: torch.Tensor, items: tuple[Any, ...]) -> torch.Tensor:
    """Return the view that numbers, slices, ``None`` and one ``...`` in brackets give."""
    named = sum(each is not None and each is not Ellipsis for each in items)
    dimension = 0
    for item in items:
        if item is Ellipsis:
            dimension = tensor.dim() - named
        elif item is None:
            tensor = tensor.unsqueeze(dimension)
            dimension += 1
        elif isinstance(item, slice):
            tensor = torch.ops.aten.slice.Tensor(tensor, dimension, item.start, item.stop, item.step or 1)
            dimension, named = dimension + 1, named - 1
        else:
            tensor, named = tensor.select(dimension, item), named - 1
    return tensor


@contextmanager
def _no_context() -> Iterator[None]:
    """Keep PyTorch from making a context on the device of a fake tensor, which for a pretended device it cannot."""
    before = fake_tensor.init_gpu_context
    setattr(fake_tensor, "init_gpu_context", lambda device: None)  # noqa: B010 - pyrefly knows its type
    try:
        yield
    finally:
        fake_tensor.init_gpu_context = before
