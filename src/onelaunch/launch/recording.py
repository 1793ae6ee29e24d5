"""Record one execution of a function, from which a plan is made that repeats it without the function's own Python code.

While a function is recorded it runs as usual, on the same memory. Recorded are PyTorch's operators, by a dispatch mode, and the
launches of our kernels, which :mod:`onelaunch.launch.launch` reports. Views leave no trace: an argument of a kernel is known by
the allocation that it lies in and its distance from the start of it. A recorded function must depend on nothing but facts about
its inputs that are known without reading them, see :func:`onelaunch.launch.facts.facts_of`. One that reads a value cannot be
repeated. ``planned.py`` records by a :class:`Recorder`, to which ``launch.py``, ``workspace.py`` and ``kernels/tma.py`` report,
and ``plan.py`` repeats the steps.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.utils import dlpack
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from onelaunch.launch.packet import Address, Parameters
from onelaunch.launch.parameters import NotPlannable, of_cuda, of_triton, with_map

if TYPE_CHECKING:
    from typing_extensions import Self  # in typing from Python 3.11 on

_ALLOCATIONS = frozenset({"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "empty_permuted"})
"""PyTorch's operators that return uninitialized memory."""

ALIGNMENT = 16
"""Bytes that addresses of allocations are multiples of. Kernels are compiled for this alignment, and TMA requires it."""


@dataclass(frozen=True)
class Geometry:
    """Size, strides and dtype of a tensor, and where in a source it begins."""

    source: int
    """Index of the tensor whose memory it lies in."""
    offset: int
    """Bytes from the first element of the source."""
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Allocate:
    """Step: allocate uninitialized memory."""

    source: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    nbytes: int


@dataclass(frozen=True)
class Operate:
    """Step: call an operator of PyTorch. Tensors among the arguments are given by their :class:`Geometry`."""

    function: Any
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]
    results: tuple[int | None, ...]
    """Source that each result becomes; ``None`` for a result that is an argument."""
    single: bool
    """Flag that the operator returns one tensor rather than several."""


@dataclass(frozen=True)
class Provide:
    """Step: ask a function for memory that no step allocates, such as a workspace of the current stream."""

    function: Callable[..., torch.Tensor]
    arguments: tuple[Any, ...]
    source: int


@dataclass(frozen=True)
class Start:
    """Step: launch a kernel."""

    parameters: Parameters


Step: TypeAlias = Allocate | Operate | Provide | Start


@dataclass
class Recording:
    """Steps of a recorded function, in order.

    Attributes:
        inputs: Geometry of each input, ``None`` for one that is no tensor.
        steps: What was executed.
        sources: Geometry of every source: the inputs first.
        differences: Pairs of inputs whose distance in memory the function depends on, with that distance in bytes.
        device: Device of the first input that is a tensor.
    """

    inputs: list[Geometry | None] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    sources: list[Geometry | None] = field(default_factory=list)
    differences: dict[tuple[int, int], int] = field(default_factory=dict)
    device: torch.device | None = None


class _Active(threading.local):
    """Recorder of this thread, ``None`` while nothing is recorded."""

    recorder: Recorder | None = None


_ACTIVE = _Active()


def recorder() -> Recorder | None:
    """Return the recorder of this thread, or ``None`` while nothing is recorded."""
    return _ACTIVE.recorder


def _isolated(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the same memory, in a storage of its own.

    Inputs may lie in one storage, such as the columns of a packed projection. Each needs a storage of its own, so that a view can
    be assigned to the input that it is made of.
    """
    plain, bytes_alone = tensor.detach(), tensor.dtype.itemsize == 1
    if plain.numel() == 0:
        return torch.empty_strided(plain.shape, plain.stride(), dtype=plain.dtype, device=plain.device)
    exchanged = plain.view(torch.uint8) if bytes_alone else plain  # DLPack does not know all types of one byte
    alias = dlpack.from_dlpack(dlpack.to_dlpack(exchanged))
    alias = alias.as_strided(plain.shape, plain.stride())  # DLPack replaces strides of dimensions of one element
    return alias.view(plain.dtype) if bytes_alone else alias


def _storage(tensor: torch.Tensor) -> int:
    """Return the identity of a tensor's storage."""
    return tensor.untyped_storage()._cdata  # noqa: SLF001 - PyTorch has no public name for it


class Recorder(TorchDispatchMode):
    """Dispatch mode that records what a function does. Launches are reported to it as well.

    Args:
        inputs: Inputs of the function, of which ``planned.py`` gives the tensors alone; :attr:`inputs` are to be passed to it in
            their place.
    """

    def __init__(self, inputs: Sequence[Any]) -> None:
        super().__init__()
        self.recording = Recording()
        self.problem: str | None = None
        self.launches = 0
        """Number of kernels of Triton that were reported."""
        self._at: dict[int, tuple[int, int]] = {}  # by storage: its source, and the address of the source's first element
        self._maps: dict[bytes, Callable[[int], bytes]] = {}
        self.inputs = tuple(_isolated(each) if isinstance(each, torch.Tensor) else each for each in inputs)
        for each in self.inputs:
            if isinstance(each, torch.Tensor):
                self.recording.inputs.append(self._add(each))
                self.recording.device = self.recording.device or each.device
            else:
                self.recording.sources.append(None)
                self.recording.inputs.append(None)

    def __enter__(self) -> Self:
        _ACTIVE.recorder = self
        return super().__enter__()

    def __exit__(self, exc_type: object, exc_val: object, exc_tb: object) -> None:
        _ACTIVE.recorder = None
        super().__exit__(exc_type, exc_val, exc_tb)

    # What the recorded code reports

    def launched(self, launch: Any, compiled: Any) -> None:
        """Record a launch of a kernel that Triton compiled."""
        self.launches += 1
        if 0 not in launch.grid:
            self._attempt(lambda: self.recording.steps.append(Start(of_triton(launch, compiled, self.address_of))))

    def launched_cuda(self, launch: Any, function: Any) -> None:
        """Record a launch of a CUDA C++ kernel."""
        self._attempt(
            lambda: self.recording.steps.append(
                Start(of_cuda(function, launch.grid, launch.arguments, self.address_of, self._map_of))
            )
        )

    def provided(self, function: Callable[..., torch.Tensor], arguments: tuple[Any, ...], tensor: torch.Tensor) -> None:
        """Record memory that a function has provided and that it must be asked for again at every call."""
        geometry = self._add(tensor)
        self.recording.steps.append(Provide(function, arguments, geometry.source))

    def encoded(self, tensor_map: bytes, encode: Callable[[int], bytes]) -> None:
        """Note a tensor map, and the function that encodes it for another address."""
        self._maps[tensor_map] = encode

    def depends_on_distance(self, first: torch.Tensor, second: torch.Tensor) -> None:
        """Note that what follows depends on the distance of two tensors in memory."""

        def note() -> None:
            one, other = self.address_of(first), self.address_of(second)
            if one.source == other.source:
                return
            if max(one.source, other.source) >= len(self.inputs):
                raise NotPlannable("the distance of two allocations decides what is launched")
            here, there = self.inputs[one.source], self.inputs[other.source]
            self.recording.differences[one.source, other.source] = there.data_ptr() - here.data_ptr()

        self._attempt(note)

    def fail(self, problem: str) -> None:
        """Give up: what was recorded cannot be repeated."""
        self.problem = self.problem or problem

    # PyTorch's operators

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keep PyTorch from wrapping the method below in one that imports ``torch._dynamo``, which takes two seconds."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        keywords = dict(kwargs or {})
        result = func(*args, **keywords)
        if self.problem is None:
            self._attempt(lambda: self._operated(func, args, keywords, result))
        return result

    def _attempt(self, note: Callable[[], None]) -> None:
        """Note something, unless that is impossible: then nothing more is."""
        try:
            note()
        except NotPlannable as reason:
            self.fail(str(reason))

    def _operated(self, func: Any, args: tuple[Any, ...], keywords: dict[str, Any], result: Any) -> None:
        """Record an operator that has run."""
        several = isinstance(result, (tuple, list))
        results = list(result) if several else [result]
        if not all(isinstance(each, torch.Tensor) for each in results):
            raise NotPlannable(f"{func} returns a value")
        # An argument lives, so a result in its storage is a view of it. Storages of tensors that were freed may have come back.
        storages = {_storage(each) for each in tree_leaves((args, keywords)) if isinstance(each, torch.Tensor)}
        mutable = func._schema.is_mutable  # noqa: SLF001 - PyTorch has no public name for it
        if not mutable and all(_storage(each) in storages for each in results):
            return
        if func.overloadpacket.__name__ in _ALLOCATIONS and not mutable:
            (made,) = results
            geometry, storage = self._add(made), made.untyped_storage()
            if storage.data_ptr() % ALIGNMENT:
                raise NotPlannable(f"an allocation is not aligned to {ALIGNMENT} bytes")
            self.recording.steps.append(
                Allocate(geometry.source, geometry.size, geometry.stride, made.dtype, made.device, storage.nbytes())
            )
            return
        given = (self._template(args), self._template(keywords))  # before the results become known
        new = tuple(None if _storage(each) in storages else self._add(each).source for each in results)
        self.recording.steps.append(Operate(func, given[0], given[1], new, not several))

    def _template(self, value: Any) -> Any:
        """Return a value with its tensors replaced by their geometry."""
        if isinstance(value, torch.Tensor):
            return self.geometry_of(value)
        if isinstance(value, (list, tuple)):
            return type(value)(self._template(each) for each in value)
        if isinstance(value, dict):
            return {name: self._template(each) for name, each in value.items()}
        return value

    # Where tensors lie

    def _add(self, tensor: torch.Tensor) -> Geometry:
        """Add a tensor as a new source, and return its geometry."""
        source = len(self.recording.sources)
        geometry = Geometry(source, 0, tuple(tensor.shape), tensor.stride(), tensor.dtype)
        self.recording.sources.append(geometry)
        self._at[_storage(tensor)] = (source, tensor.data_ptr())
        return geometry

    def address_of(self, tensor: torch.Tensor) -> Address:
        """Return where a tensor begins.

        Raises:
            NotPlannable: Its memory is neither that of an input nor was it allocated while the function was recorded.
        """
        found = self._at.get(_storage(tensor))
        if found is None or tensor.is_neg():
            raise NotPlannable("a tensor is neither an input nor was it made by the function")
        source, first = found
        return Address(source, tensor.data_ptr() - first if tensor.numel() else 0)

    def geometry_of(self, tensor: torch.Tensor) -> Geometry:
        """Return the geometry of a tensor; raise :class:`NotPlannable` as :meth:`address_of` does."""
        found = self.address_of(tensor)
        return Geometry(found.source, found.offset, tuple(tensor.shape), tensor.stride(), tensor.dtype)

    def _map_of(self, tensor_map: bytes) -> Address:
        """Return the address of a tensor map that was noted, with the map."""
        encode = self._maps.get(tensor_map)
        if encode is None:
            raise NotPlannable("a tensor map was not made while the function was recorded")
        address = int.from_bytes(tensor_map[:8], "little")
        starts = [(source, address - first) for source, first in self._at.values() if self._holds(source, address - first)]
        if len(starts) != 1:
            raise NotPlannable("the tensor of a tensor map is ambiguous")
        return with_map(Address(*starts[0]), encode, address)

    def _holds(self, source: int, offset: int) -> bool:
        """Return whether an offset in bytes lies inside the extent of a source."""
        geometry = self.recording.sources[source]
        if geometry is None or 0 in geometry.size:
            return False
        last = sum((size - 1) * stride for size, stride in zip(geometry.size, geometry.stride, strict=True))
        return 0 <= offset <= last * geometry.dtype.itemsize
