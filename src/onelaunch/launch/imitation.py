"""Fake and recorded launches: calls on fake tensors that launch no kernel.

Code that launches kernels runs in one of three modes. Normally it launches. While launches are *imitated*, each does nothing and
the call returns the empty tensors that the kernels would fill. PyTorch's tracers learn the shapes of results this way from an
operator without a function ``fake`` of its own (``operator.py``); all operators of the package have one. While launches are
*recorded*, they are also appended to a list; the inspector, ``onelaunch prebuild``, the compilation of first calls and the tests
learn from it which kernels a call launches. ``operation/examples.py`` records example calls, ``side_by_side.py`` first calls, and
``gla_layer`` its convolutions. Code that launches, allocates workspaces or compiles asks for the mode.
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
    """Mode of this thread for launches."""

    imitated = False
    """Flag that launches do nothing."""
    launches: list[Any] | None = None
    """List to which launches are appended, or ``None`` if they are not recorded."""


_STATE = _State()


def imitated() -> bool:
    """Return whether launches of this thread do nothing now, because their tensors have no memory."""
    return _STATE.imitated


def recorded() -> bool:
    """Return whether launches of this thread are recorded now without being executed."""
    return _STATE.imitated and _STATE.launches is not None


def is_observed() -> bool:
    """Return whether launches of this thread are recorded, or do nothing."""
    return _STATE.imitated or _STATE.launches is not None


def record_launch(launch: Any) -> bool:
    """Append a launch to the list of the thread if there is one, and return whether the caller must skip the launch."""
    if _STATE.launches is not None:
        _STATE.launches.append(launch)
    return _STATE.imitated


@contextmanager
def imitate() -> Iterator[None]:
    """Make launches of this thread do nothing inside."""
    before = _STATE.imitated
    _STATE.imitated = True
    try:
        yield
    finally:
        _STATE.imitated = before


@contextmanager
def observe() -> Iterator[list[Any]]:
    """Record the launches of this thread inside, and yield the list of them. They are also executed, unless they are imitated."""
    before = _STATE.launches
    _STATE.launches = launches = []
    try:
        yield launches
    finally:
        _STATE.launches = before


@contextmanager
def record(architecture: str) -> Iterator[tuple[torch.device, list[Any]]]:
    """Record the launches of calls on fake tensors, as on a chip of an architecture.

    Yields:
        The pretended device on which to create the tensors inside, and the list of launches in order.
    """
    with observe() as launches, imitate(), warnings.catch_warnings(), trace(architecture, fake_tensor.FakeTensorMode()) as device:
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        yield device, launches


@contextmanager
def trace(architecture: str, mode: fake_tensor.FakeTensorMode) -> Iterator[torch.device]:
    """Make calls on fake tensors possible on a chip of an architecture, as a tracer would make them there.

    Args:
        architecture: Name of the architecture, such as ``sm_90a``.
        mode: Mode of the fake tensors. With a ``ShapeEnv``, their sizes may be symbolic.

    Yields:
        The pretended device on which to create the tensors inside.
    """
    with _no_context(), mode, _Pretended():
        yield pretended(architecture)


class _Pretended(TorchFunctionMode):
    """Mode that replaces what would make a pretended device current, which fails: indexing with brackets, and ``torch.tensor``.

    PyTorch's ``tensor[...]`` is replaced by function calls. ``torch.tensor``, which copies numbers to the device in a build of
    PyTorch for GPUs, is replaced by a tensor of the same shape without numbers: a fake tensor holds none.
    """

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func == torch.Tensor.__setitem__:  # a fake tensor holds no values
            return None
        if func == torch.Tensor.__getitem__:
            tensor, index = args
            items = index if isinstance(index, tuple) else (index,)
            if all(each is None or each is Ellipsis or type(each) in (int, slice) for each in items):
                return _indexed(tensor, items)
        if func is torch.tensor and (device := (kwargs or {}).get("device")) is not None:
            given: dict[str, Any] = {**(kwargs or {}), "device": "cpu"}
            numbers = func(*args, **given)
            return torch.empty(numbers.shape, dtype=numbers.dtype, device=device)
        return func(*args, **(kwargs or {}))


def _indexed(tensor: torch.Tensor, items: tuple[Any, ...]) -> torch.Tensor:
    """Return the view for an index of integers, slices, ``None`` and at most one ``...``."""
    indexed = sum(each is not None and each is not Ellipsis for each in items)  # dimensions that the items from here on index
    dimension = 0  # dimension of `tensor`, as the earlier items have changed it, that the next item applies to
    for item in items:
        if item is Ellipsis:
            dimension = tensor.dim() - indexed
        elif item is None:
            tensor = tensor.unsqueeze(dimension)
            dimension += 1
        elif isinstance(item, slice):
            tensor = torch.ops.aten.slice.Tensor(tensor, dimension, item.start, item.stop, item.step or 1)
            dimension, indexed = dimension + 1, indexed - 1
        else:
            tensor, indexed = tensor.select(dimension, item), indexed - 1  # the next dimension moves to this place
    return tensor


@contextmanager
def _no_context() -> Iterator[None]:
    """Keep PyTorch from creating a CUDA context for the device of a fake tensor, which fails for a pretended device."""
    before = fake_tensor.init_gpu_context
    setattr(fake_tensor, "init_gpu_context", lambda device: None)  # noqa: B010 - pyrefly knows its type
    try:
        yield
    finally:
        fake_tensor.init_gpu_context = before
