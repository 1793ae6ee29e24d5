"""Plans: what a function launches and allocates for inputs of one kind, repeated without the function's own Python code.

A plan is made of a recording (:mod:`onelaunch.launch.recording`). A replay allocates memory, writes addresses into a packet
(:mod:`onelaunch.launch.packet`), and lets the driver launch the kernels on the current stream. PyTorch's operators among the
steps are called in their order, by one function that ``written.py`` writes for the plan. A plan keeps no tensor.
:mod:`onelaunch.launch.planned` makes and replays plans, and says when one may be replayed; ``sites.py`` replays one at its place
in a tape.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from onelaunch.cuda.driver import current_context
from onelaunch.errors import DriverError
from onelaunch.launch.packet import Address, Image, Packet, Parameters, launch_function, place
from onelaunch.launch.parameters import NotPlannable
from onelaunch.launch.recording import Allocate, Geometry, Operate, Provide, Recording, Start
from onelaunch.launch.written import ALLOCATE, FREE, OPERATE, PROVIDE, START, Step, View, write

_ARENA = 1 << 20
"""Largest allocation in bytes that shares one allocation with the other intermediate tensors of a plan.

A larger one is allocated where the function allocates it, and freed after its last use.
"""

_ARENA_ALIGNMENT = 256
"""Alignment in bytes of the parts of a shared allocation; PyTorch aligns allocations to at least as much on a GPU."""

_NO_CONTEXT = 201
"""Driver error CUDA_ERROR_INVALID_CONTEXT: no context is current in this thread."""

REPLAY = "ONELAUNCH_REPLAY"
"""Environment variable that turns replays of calls on NVIDIA GPUs off when it is 0 at the time the package is imported."""


class Device:
    """Functions of PyTorch and the driver that a replay needs. Tests replace them, to replay plans on a CPU."""

    types: tuple[str, ...] = ("cuda",) if os.environ.get(REPLAY) != "0" and not torch.version.hip else ()
    """Types of devices whose calls are planned."""
    taped: tuple[str, ...] = ("cpu",)
    """Types of further devices, whose calls are replayed from tapes alone."""

    @staticmethod
    @functools.cache
    def launch_function() -> Any:
        return launch_function()

    current = staticmethod(getattr(torch._C, "_cuda_getDevice", lambda: 0))  # noqa: SLF001 - as torch.cuda.current_device, quicker
    stream = staticmethod(getattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0))  # noqa: SLF001
    at = staticmethod(torch.cuda.device)
    """Context in which the GPU of an index is current."""

    @staticmethod
    def is_capturing() -> bool:
        """Return whether a CUDA graph is being captured."""
        return torch.cuda.is_current_stream_capturing()

    @staticmethod
    def index_of(values: Iterable[Any]) -> int | None:
        """Return the index of the GPU of the first tensor on a GPU among values, or ``None`` if there is none."""
        for each in values:
            tensor = each if isinstance(each, torch.Tensor) else getattr(each, "base", None)  # descriptors have a base
            if isinstance(tensor, torch.Tensor) and tensor.is_cuda:
                return tensor.get_device()
        return None

    @classmethod
    def elsewhere(cls, values: Iterable[Any]) -> int | None:
        """Return the index of the GPU of the first tensor on a GPU among values if another GPU is current, else ``None``.

        PyTorch's functions run on the GPU of their tensors. Triton launches on the current one, where addresses are not valid.
        """
        index = cls.index_of(values)
        return None if index is None or index == cls.current() else index


class Plan:
    """Steps that repeat a recorded function for inputs of the same kind.

    Args:
        recording: What the function did.
        results: Its results: a tensor, ``None``, or a tuple or list of these.
        find: Function that returns the geometry of a tensor among the results.

    Raises:
        NotPlannable: A step or a result cannot be repeated.
    """

    __slots__ = ("_distances", "_image", "_owners", "_pool", "_replay", "index", "repeated", "steps")

    def __init__(self, recording: Recording, results: Any, find: Callable[[torch.Tensor], Geometry]) -> None:
        self._pool: list[Packet] = []
        self.repeated: Any = None
        """Comparison with later inputs that ``planned.py`` keeps here; ``None`` before it was made, false if it cannot be."""
        made = _Maker(recording, results, find)
        self.steps: list[Step] = made.steps
        """Steps that a replay repeats."""
        self._replay = write(made.steps, made.inputs, made.results, made.make, _allocator(made.device))
        self.index: int = made.index
        """Index of the device."""
        self._image = made.image, made.placed
        self._owners = made.owners  # keep kernels loaded
        self._distances = tuple((i, j, apart) for (i, j), apart in made.differences.items())

    def distances(self) -> tuple[tuple[int, int, int], ...]:
        """Return pairs of inputs with the distance in bytes that they must have."""
        return self._distances

    def replay(self, tensors: Sequence[torch.Tensor], addresses: Sequence[int]) -> Any:
        """Repeat the steps for the tensors of a call, given with their addresses, and return the results."""
        try:
            packet = self._pool.pop()  # another thread gets another one
        except IndexError:
            packet = Packet(*self._image)
        stream = Device.stream(self.index)
        if stream != packet.stream:
            packet.set_stream(stream)
        results = self._replay(tensors, addresses, packet.words, packet.launches, Device.launch_function(), self._retry)
        self._pool.append(packet)
        return results

    def _retry(self, error: int, arguments: tuple[Any, Any, Any]) -> None:
        """Launch again with the device's context current, if none was in this thread; raise :class:`DriverError` otherwise."""
        if error == _NO_CONTEXT:
            with current_context(self.index):
                error = Device.launch_function()(*arguments, None)
        if error:
            raise DriverError("cuLaunchKernelEx", got=f"error {error}", about="a planned launch")


class _Maker:
    """Translation of a recording into the steps of a plan; its arguments are those of :class:`Plan`."""

    def __init__(self, recording: Recording, results: Any, find: Callable[[torch.Tensor], Geometry]) -> None:
        self._recording = recording
        self.differences = recording.differences
        inputs = [each for each in recording.inputs if each is not None]
        devices = {step.device for step in recording.steps if isinstance(step, Allocate)}
        if len(devices) > 1:
            raise NotPlannable("memory is allocated on several devices")
        single, listed = _listed(results)
        wanted = [find(each) if isinstance(each, torch.Tensor) else each for each in listed]
        if any(each is not None and not isinstance(each, Geometry) for each in wanted):
            raise NotPlannable("a result is neither a tensor nor None")
        self.make: Callable[[list[Any]], Any] | None = single
        self.inputs = len(inputs)
        self._live = self._needed([each for each in wanted if each is not None])
        self._shared: set[int] = set()
        self._shape_allocations(wanted)
        self._new: dict[int, tuple[int, int]] = {each.source: (at, 0) for at, each in enumerate(inputs)}
        self._count = len(inputs)
        self.steps: list[tuple[Any, ...]] = []
        self.image, self.placed, self.owners = Image(), [], []
        self.device = next(iter(devices), recording.device)
        self._share({each.source for each in wanted if each is not None})
        for step in recording.steps:
            self._add(step)
        self.image.content += bytes(-len(self.image.content) % 8)
        self.results = [None if each is None else self._view(each) for each in wanted]
        self.steps = self._with_frees()
        self.index = 0 if self.device is None else self.device.index or 0

    def _needed(self, wanted: list[Geometry]) -> set[int]:
        """Return the sources that results, launches and operators with effects depend on."""
        live = {each.source for each in wanted}
        for step in reversed(self._recording.steps):
            if isinstance(step, Start):
                live |= {each.source for each in step.parameters.values if isinstance(each, Address)}
            elif isinstance(step, Operate) and (None in step.results or live & set(step.results)):
                live |= {each.source for each in _geometries((step.arguments, step.keywords))}
        return live

    def _of_operators(self) -> dict[int, set[torch.dtype]]:
        """Return the sources that operators take as arguments, with the dtypes that these are read as."""
        used: dict[int, set[torch.dtype]] = {}
        for step in self._recording.steps:
            if isinstance(step, Operate):
                for each in _geometries((step.arguments, step.keywords)):
                    used.setdefault(each.source, set()).add(each.dtype)
        return used

    def _shape_allocations(self, wanted: list[Any]) -> None:
        """Let an allocation have the shape of the result that it is, so that the result needs no view."""
        self._shapes: dict[int, Geometry] = {}
        known = {step.source: step for step in self._recording.steps if isinstance(step, Allocate)}
        for result in wanted:
            step = None if result is None else known.get(result.source)
            if step is None or result.source in self._shapes or result.offset or result.dtype is not step.dtype:
                continue
            if _extent(result.size, result.stride) == _extent(step.size, step.stride):
                self._shapes[result.source] = result

    def _share(self, results: set[int]) -> None:
        """Add one allocation for all small intermediate tensors.

        Operators take views of it, which have its dtype: that of the first tensor that an operator takes. Tensors of other dtypes
        are allocated apart if an operator takes them.
        """
        used = self._of_operators()
        small = [step for step in self._recording.steps if isinstance(step, Allocate) and 0 < step.nbytes <= _ARENA]
        small = [step for step in small if step.source in self._live and step.source not in results]
        typed = [step.dtype for step in small if used.get(step.source, set()) == {step.dtype}]
        dtype = typed[0] if typed else torch.uint8
        size, shared = 0, {}
        for step in small:
            if used.get(step.source, set()) <= {dtype}:
                shared[step.source] = size
                size += step.nbytes + -step.nbytes % _ARENA_ALIGNMENT
        if len(shared) > 1:
            self.steps.append((ALLOCATE, (size // dtype.itemsize,), (1,), dtype))
            self._new |= {source: (self._count, offset) for source, offset in shared.items()}
            self._count += 1
            self._shared = set(shared)

    def _add(self, step: Any) -> None:
        """Add the steps of a plan for a recorded one; none for one without effect."""
        if isinstance(step, Start):
            placed = place(self.image, self._renumbered(step.parameters))
            self.steps.append((START, len(self.placed), placed.words, placed.sources))
            self.placed.append(placed)
        elif isinstance(step, Allocate):
            if step.source in self._live and step.source not in self._new:
                shape = self._shapes.get(step.source, step)
                self._next(step.source)
                self.steps.append((ALLOCATE, shape.size, shape.stride, step.dtype))
        elif isinstance(step, Provide):
            if step.source in self._live:
                self._next(step.source)
                self.steps.append((PROVIDE, step.function, step.arguments))
        elif None in step.results or self._live & set(step.results):
            arguments = [self._template(each) for each in step.arguments]
            keywords = tuple((name, self._template(each)) for name, each in step.keywords.items())
            for source in step.results:
                if source is not None:
                    self._next(source)
            new = tuple(source is not None for source in step.results)
            self.steps.append((OPERATE, step.function, arguments, keywords, step.single, new))

    def _next(self, source: int) -> None:
        """Give a source the number of the next tensor of a replay."""
        self._new[source] = (self._count, 0)
        self._count += 1

    def _renumbered(self, parameters: Parameters) -> Parameters:
        """Return the parameters of a launch with the plan's numbers of sources."""
        values = tuple(
            Address(self._new[each.source][0], self._new[each.source][1] + each.offset, each.tensor_map)
            if isinstance(each, Address)
            else each
            for each in parameters.values
        )
        self.owners.append(parameters.owner)
        return replace(parameters, values=values)

    def _view(self, geometry: Geometry) -> View:
        """Return how a tensor is made of its source."""
        source = self._shapes.get(geometry.source) or self._recording.sources[geometry.source]
        at, start = self._new[geometry.source]
        assert source is not None  # noqa: S101 - a source of a tensor is a tensor
        if geometry.dtype is not source.dtype:
            raise NotPlannable("a tensor is read as another dtype")
        is_shared = geometry.source in self._shared
        if not is_shared and (geometry.offset, geometry.size, geometry.stride) == (0, source.size, source.stride):
            return View(at)
        elements, rest = divmod(start + geometry.offset, geometry.dtype.itemsize)
        if rest:
            raise NotPlannable("a view begins inside an element")
        return View(at, geometry.size, geometry.stride, elements)

    def _template(self, value: Any) -> Any:
        """Return an argument of an operator with views in place of geometries."""
        if isinstance(value, Geometry):
            return self._view(value)
        if isinstance(value, (list, tuple)):
            return [self._template(each) for each in value]
        return value

    def _with_frees(self) -> list[tuple[Any, ...]]:
        """Return the steps with those that free a large allocation after its last use."""
        results = {each.source for each in self.results if each is not None}
        allocations = [each for each in self._recording.steps if isinstance(each, Allocate) and each.nbytes > _ARENA]
        large = {self._new[each.source][0] for each in allocations if each.source in self._new} - results
        last: dict[int, int] = {}
        for at, step in enumerate(self.steps):
            for source in _sources(step) & large:
                last[source] = at
        steps: list[tuple[Any, ...]] = []
        for at, step in enumerate(self.steps):
            steps.append(step)
            steps += [(FREE, source) for source, end in last.items() if end == at]
        return steps


def _sources(step: tuple[Any, ...]) -> set[int]:
    """Return the numbers of the tensors that a step of a plan reads or writes."""
    if step[0] == START:
        return set(step[3])
    if step[0] == OPERATE:
        return {each.source for each in _views(step[2:4])}
    return set()


def _views(value: Any) -> list[View]:
    """Return the views in nested lists."""
    if isinstance(value, View):
        return [value]
    return [view for each in value for view in _views(each)] if isinstance(value, (list, tuple)) else []


def _geometries(value: Any) -> list[Geometry]:
    """Return the geometries in nested lists and dictionaries."""
    if isinstance(value, Geometry):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [found for each in value for found in _geometries(each)] if isinstance(value, (list, tuple)) else []


def _extent(size: Sequence[int], stride: Sequence[int]) -> int:
    """Return the number of elements from the first to the last one of a tensor; 0 for one without elements."""
    return 0 if 0 in size else 1 + sum((count - 1) * step for count, step in zip(size, stride, strict=True))


def _listed(results: Any) -> tuple[Callable[[list[Any]], Any] | None, list[Any]]:
    """Return results as a list, and the function that makes results of such a list; ``None`` for a single result."""
    if isinstance(results, (tuple, list)):
        kind: Any = type(results)
        return (getattr(kind, "_make", None) or (list if kind is list else tuple)), list(results)
    return None, [results]


def _allocator(device: torch.device | None) -> Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor]:
    """Return a function that allocates memory of a size, strides and dtype on a device, which is current where it is a GPU.

    The code that ``torch.compile`` generates allocates by the same functions of PyTorch. They take half the time of
    ``torch.empty_strided``.
    """
    quick = None if device is None else getattr(torch._C._dynamo.guards, f"_empty_strided_{device.type}", None)  # noqa: SLF001
    if quick is not None:
        return quick

    def allocate(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(size, stride, dtype=dtype, device=device)

    return allocate
