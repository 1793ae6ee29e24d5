"""Tensors without memory in the place of real ones, on which a call can be run to see what it would launch.

PyTorch's own fake tensors serve the same purpose, but import ``torch._dynamo`` at their first use, which takes two seconds. A
:class:`MetaTensor` consists of a tensor on the meta device, which PyTorch's operators take, and of the device that it stands for.
While a :class:`MetaTensorMode` is entered, operators return such tensors too. ``side_by_side.py`` runs a first call once on such
tensors.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

from onelaunch.launch.facts import PLAIN

_META = torch.device("meta")


class MetaTensor(torch.Tensor):
    """Tensor without memory that tells another device than meta as its own."""

    plain: torch.Tensor
    """Tensor on the meta device, of the same size, strides and place in its storage."""

    @staticmethod
    def __new__(  # noqa: PYI034 - it has no subclasses
        cls: type[MetaTensor], plain: torch.Tensor, device: torch.device
    ) -> MetaTensor:
        made = torch.Tensor._make_wrapper_subclass(  # noqa: SLF001 - the way that PyTorch documents for such classes
            cls, plain.size(), strides=plain.stride(), storage_offset=plain.storage_offset(), dtype=plain.dtype, device=device
        )
        made.plain = plain
        return made

    # PyTorch's documentation advises this for such classes.
    __torch_function__ = torch._C._disabled_torch_function_impl  # noqa: SLF001 # pyrefly: ignore[bad-override]

    def __repr__(self) -> str:  # pyrefly: ignore[bad-override]
        return f"<meta tensor of {self.dtype} {list(self.shape)} on {self.device}>"

    def data_ptr(self) -> int:
        """Return the bytes from the start of the storage, which are as aligned as an address on a GPU."""
        return int(self.storage_offset()) * self.element_size()

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return the storage on the meta device, which knows its size."""
        return self.plain.untyped_storage()

    @classmethod
    def __torch_dispatch__(  # pyrefly: ignore[bad-override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _operate(func, args, dict(kwargs or {}))


class MetaTensorMode(TorchDispatchMode):
    """Mode in which PyTorch's operators compute nothing and return meta tensors."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keep PyTorch from wrapping the method below in one that imports ``torch._dynamo``."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _operate(func, args, dict(kwargs or {}))


def _operate(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator on the meta device, and return meta tensors for its results."""
    wrappers: dict[int, MetaTensor] = {}

    def plain(value: Any) -> Any:
        if isinstance(value, MetaTensor):
            wrappers[id(value.plain)] = value
            return value.plain
        if isinstance(value, torch.Tensor) and not value.is_meta:
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=_META)
        return value

    given = _mapped(plain, args), _mapped(plain, kwargs)
    device = kwargs.get("device") or next((each.device for each in wrappers.values()), torch.device("cpu"))
    if "device" in kwargs:
        given[1].update(device=_META)
    given[1].pop("pin_memory", None)
    result = _like(*given) if func in _COPIES else None
    if result is None:
        result = func(*given[0], **given[1])

    def wrapped(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        known = wrappers.get(id(value))
        if known is not None:  # an operator that writes to its argument
            return known
        return MetaTensor(value, torch.device(device))

    return _mapped(wrapped, result)


_COPIES = tuple(getattr(torch.ops.aten, name).default for name in ("empty_like", "zeros_like", "clone"))
"""Operators whose meta kernels are written in Python, and import sympy at their first use."""


def _like(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """Return what the operators of :data:`_COPIES` return on the meta device, or ``None`` for a case that is left to them."""
    (given,), kind = args, kwargs.get("memory_format")
    dtype = kwargs.get("dtype") or given.dtype
    if kind is torch.contiguous_format:
        return torch.empty(given.shape, dtype=dtype, device=_META)
    if kind in (None, torch.preserve_format) and _is_dense(given):
        return torch.empty_strided(given.shape, given.stride(), dtype=dtype, device=_META)
    return None


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements of a tensor fill a range of memory, each at a place of its own."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Return a value with a function applied to everything in its tuples, lists and dictionaries."""
    if isinstance(value, (tuple, list)):
        made = [_mapped(function, each) for each in value]
        return value._make(made) if hasattr(value, "_make") else type(value)(made)
    if isinstance(value, dict):
        return {name: _mapped(function, each) for name, each in value.items()}
    return function(value)


class MetaTensors:
    """Meta tensors for the tensors of one call. Those of one storage and one dtype share a storage as well."""

    def __init__(self) -> None:
        self._storages: dict[tuple[int, torch.dtype], torch.Tensor] = {}

    def of(self, value: Any) -> Any:
        """Return a value with the tensors replaced in its tuples, lists, dictionaries and data classes.

        Raises:
            TypeError: A tensor is of another class than PyTorch's own, so that operators may treat it in another way, or an
                object is of a class that may hold tensors or a state.
        """
        return _mapped(self._replaced, value)

    def _replaced(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._meta(value)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            made = copy.copy(value)
            for each in dataclasses.fields(value):
                object.__setattr__(made, each.name, self.of(getattr(value, each.name)))
            return made
        if type(value) not in PLAIN and type(value) is not float:
            raise TypeError(f"a call holds {type(value).__name__}")
        return value

    def _meta(self, tensor: torch.Tensor) -> MetaTensor:
        if type(tensor) is not torch.Tensor and type(tensor) is not Parameter:
            raise TypeError(f"a tensor is a {type(tensor).__name__}")
        storage = tensor.untyped_storage()
        key = (storage._cdata, tensor.dtype)  # noqa: SLF001 - PyTorch has no public name for a storage's identity
        if key not in self._storages:
            elements = storage.nbytes() // tensor.dtype.itemsize
            self._storages[key] = torch.empty(elements, dtype=tensor.dtype, device=_META)
        with torch.no_grad():
            plain = self._storages[key].as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
            made = MetaTensor(plain, tensor.device)
        if tensor.requires_grad:
            made.requires_grad_()
        return made
