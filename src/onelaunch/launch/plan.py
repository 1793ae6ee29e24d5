"""Plans: what a function launches and allocates for inputs of one kind, repeated without the function's own Python code.

A :class:`Planned` function runs as it is the first time that it meets inputs with certain facts (shapes, strides, dtypes, device,
alignment, see :mod:`onelaunch.launch.facts`), is recorded the second time (:mod:`onelaunch.launch.recording`), and from then on
its :class:`Plan` is replayed: memory is allocated, addresses are written into a packet (:mod:`onelaunch.launch.packet`), and
kernels are launched on the current stream by the driver. PyTorch's operators among the steps are called in their order.

A plan keeps no tensor. Under anything that wants to see PyTorch's operators or our launches (a dispatch mode, a tracer, a
function transform, Triton's launch hooks) and where another device is current, the function itself runs. So it does while
``torch.compile`` traces, and it is recorded neither during the capture of a CUDA graph. A plan that exists can be captured:
allocations and launches are then the graph's.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar, cast

import torch
from torch.compiler import is_compiling

from onelaunch.checks import asks_for_values
from onelaunch.cuda.driver import current_context
from onelaunch.errors import DriverError
from onelaunch.launch.facts import Facts, facts_of, with_tensors
from onelaunch.launch.imitation import is_observed
from onelaunch.launch.packet import Address, Image, Packet, Parameters, launch_function, place
from onelaunch.launch.parameters import NotPlannable
from onelaunch.launch.recording import Allocate, Geometry, Operate, Provide, Recorder, Recording, Start, recorder
from onelaunch.launch.tape import Tape, Taped, active_tape
from onelaunch.tracing import is_transformed, sees_operators

R = TypeVar("R")

ARENA = 1 << 20
"""Largest allocation in bytes that shares one allocation with the other intermediate tensors of a plan.

A larger one is allocated where the function allocates it, and freed after its last use.
"""

ARENA_ALIGNMENT = 256
"""Alignment in bytes of the parts of a shared allocation; PyTorch aligns allocations to at least as much on a GPU."""

MOST = 4096
"""Largest number of kinds of inputs that a function remembers. Beyond it all are forgotten."""

MOST_DISTANCES = 256
"""Largest number of distances of inputs for which plans of otherwise equal inputs are kept."""

NO_CONTEXT = 201
"""Driver error CUDA_ERROR_INVALID_CONTEXT: no context is current in this thread."""


class Device:
    """Functions of PyTorch and the driver that a replay needs. Tests replace them, to replay plans on a CPU."""

    types: tuple[str, ...] = () if torch.version.hip else ("cuda",)
    """Types of devices whose calls are planned."""

    @staticmethod
    @functools.cache
    def launch_function() -> Any:
        return launch_function()

    current = staticmethod(getattr(torch._C, "_cuda_getDevice", lambda: 0))  # noqa: SLF001 - as torch.cuda.current_device, quicker
    stream = staticmethod(getattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0))  # noqa: SLF001

    @staticmethod
    def is_capturing() -> bool:
        """Return whether a CUDA graph is being captured."""
        return torch.cuda.is_current_stream_capturing()


@dataclass(frozen=True)
class View:
    """Tensor to make from a source: the source itself, or a view of it."""

    source: int
    size: tuple[int, ...] | None = None
    """Size of the view; ``None`` for the source itself."""
    stride: tuple[int, ...] = ()
    offset: int = 0
    """Elements from the first element of the source."""

    def of(self, tensors: list[Any]) -> torch.Tensor:
        """Return the tensor, from the tensors of a replay."""
        tensor: torch.Tensor = tensors[self.source]
        if self.size is None:
            return tensor
        return tensor.as_strided(self.size, self.stride, tensor.storage_offset() + self.offset)


def filled(template: Any, tensors: list[Any]) -> Any:
    """Return a template with its views made."""
    if type(template) is View:
        return template.of(tensors)
    if type(template) is list:
        return [filled(each, tensors) for each in template]
    return template


ALLOCATE, START, OPERATE, PROVIDE, FREE = range(5)
"""Codes of steps."""


class Plan:
    """Steps that repeat a recorded function for inputs of the same kind.

    Args:
        recording: What the function did.
        results: Its results: a tensor, ``None``, or a tuple or list of these.
        find: Function that returns the geometry of a tensor among the results.

    Raises:
        NotPlannable: A step or a result cannot be repeated.
    """

    __slots__ = ("_distances", "_image", "_index", "_make", "_owners", "_pool", "_results", "_steps")

    def __init__(self, recording: Recording, results: Any, find: Callable[[torch.Tensor], Geometry]) -> None:
        self._pool: list[Packet] = []
        made = _Maker(recording, results, find)
        self._steps, self._results, self._make = made.steps, made.results, made.make
        self._image, self._index = (made.image, made.placed), made.index
        self._owners = made.owners  # keep kernels loaded
        self._distances = tuple((i, j, apart) for (i, j), apart in made.differences.items())

    @property
    def index(self) -> int:
        """Index of the device."""
        return self._index

    def distances(self) -> tuple[tuple[int, int, int], ...]:
        """Return pairs of inputs with the distance in bytes that they must have."""
        return self._distances

    def replay(self, facts: Facts) -> Any:
        """Repeat the steps for the tensors of a call, which are replaced in its lists, and return the results."""
        addresses, tensors = facts.addresses, cast("list[Any]", facts.tensors)
        try:
            packet = self._pool.pop()  # another thread gets another one
        except IndexError:
            packet = Packet(*self._image)
        words, launches = packet.words, packet.launches
        stream, launch, empty = Device.stream(self._index), Device.launch_function(), torch.empty_strided
        for code, one, two, three, four in self._steps:
            if code == START:
                for word, source, offset in two:
                    words[word] = addresses[source] + offset
                words[three] = stream
                configuration, function, pointers = launches[one]
                error = launch(configuration, function, pointers, None)
                if error:
                    self._retry(error, launches[one])
            elif code == ALLOCATE:
                tensor = empty(one, two, dtype=three, device=four)
                tensors.append(tensor)
                addresses.append(tensor.data_ptr())
            elif code == OPERATE:
                result = one(*[filled(each, tensors) for each in two], **{name: filled(each, tensors) for name, each in three})
                for tensor in itertools.compress((result,) if four[0] else result, four[1]):
                    tensors.append(tensor)
                    addresses.append(tensor.data_ptr())
            elif code == PROVIDE:
                tensor = one(*two)
                tensors.append(tensor)
                addresses.append(tensor.data_ptr())
            else:
                tensors[one] = None
        self._pool.append(packet)
        results = [each.of(tensors) if type(each) is View else each for each in self._results]
        return self._make(results)

    def _retry(self, error: int, arguments: tuple[Any, Any, Any]) -> None:
        """Launch again with the device's context current, if none was in this thread; raise :class:`DriverError` otherwise."""
        if error == NO_CONTEXT:
            with current_context(self._index):
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
        self.make: Callable[[list[Any]], Any] = single
        self._live = self._needed([each for each in wanted if each is not None])
        self._kept = self._used_as_tensors([each for each in wanted if each is not None])
        self._shape_allocations(wanted)
        self._new: dict[int, tuple[int, int]] = {each.source: (at, 0) for at, each in enumerate(inputs)}
        self._count = len(inputs)
        self.steps: list[tuple[Any, ...]] = []
        self.image, self.placed, self.owners = Image(), [], []
        self._share(next(iter(devices), None))
        for step in recording.steps:
            self._add(step)
        self.image.content += bytes(-len(self.image.content) % 8)
        self.results = [None if each is None else self._view(each) for each in wanted]
        self.steps = self._with_frees()
        self.index = next(iter(devices)).index or 0 if devices else 0

    def _needed(self, wanted: list[Geometry]) -> set[int]:
        """Return the sources that results, launches and operators with effects depend on."""
        live = {each.source for each in wanted}
        for step in reversed(self._recording.steps):
            if isinstance(step, Start):
                live |= {each.source for each in step.parameters.values if isinstance(each, Address)}
            elif isinstance(step, Operate) and (None in step.results or live & set(step.results)):
                live |= {each.source for each in _geometries((step.arguments, step.keywords))}
        return live

    def _used_as_tensors(self, wanted: list[Geometry]) -> set[int]:
        """Return the sources that must be tensors of their own: results and arguments of operators."""
        used = {each.source for each in wanted}
        for step in self._recording.steps:
            if isinstance(step, Operate):
                used |= {each.source for each in _geometries((step.arguments, step.keywords))}
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

    def _share(self, device: torch.device | None) -> None:
        """Add one allocation for all small intermediate tensors."""
        size, shared = 0, {}
        for step in self._recording.steps:
            if isinstance(step, Allocate) and step.source in self._live - self._kept and 0 < step.nbytes <= ARENA:
                shared[step.source] = size
                size += step.nbytes + -step.nbytes % ARENA_ALIGNMENT
        if len(shared) > 1:
            self.steps.append((ALLOCATE, (size,), (1,), torch.uint8, device))
            self._new |= {source: (self._count, offset) for source, offset in shared.items()}
            self._count += 1

    def _add(self, step: Any) -> None:
        """Add the steps of a plan for a recorded one; none for one without effect."""
        if isinstance(step, Start):
            placed = place(self.image, self._renumbered(step.parameters))
            self.steps.append((START, len(self.placed), placed.words, placed.stream, None))
            self.placed.append(placed)
        elif isinstance(step, Allocate):
            if step.source in self._live and step.source not in self._new:
                shape = self._shapes.get(step.source, step)
                self._next(step.source)
                self.steps.append((ALLOCATE, shape.size, shape.stride, step.dtype, step.device))
        elif isinstance(step, Provide):
            if step.source in self._live:
                self._next(step.source)
                self.steps.append((PROVIDE, step.function, step.arguments, None, None))
        elif None in step.results or self._live & set(step.results):
            arguments = [self._template(each) for each in step.arguments]
            keywords = tuple((name, self._template(each)) for name, each in step.keywords.items())
            for source in step.results:
                if source is not None:
                    self._next(source)
            new = tuple(source is not None for source in step.results)
            self.steps.append((OPERATE, step.function, arguments, keywords, (step.single, new)))

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
        at, _ = self._new[geometry.source]
        assert source is not None  # noqa: S101 - a source of a tensor is a tensor
        if geometry.dtype is not source.dtype:
            raise NotPlannable("a tensor is read as another dtype")
        if (geometry.offset, geometry.size, geometry.stride) == (0, source.size, source.stride):
            return View(at)
        elements, rest = divmod(geometry.offset, geometry.dtype.itemsize)
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
        allocations = [each for each in self._recording.steps if isinstance(each, Allocate) and each.nbytes > ARENA]
        large = {self._new[each.source][0] for each in allocations if each.source in self._new} - results
        last: dict[int, int] = {}
        for at, step in enumerate(self.steps):
            for source in _sources(step) & large:
                last[source] = at
        steps: list[tuple[Any, ...]] = []
        for at, step in enumerate(self.steps):
            steps.append(step)
            steps += [(FREE, source, None, None, None) for source, end in last.items() if end == at]
        return steps


def _sources(step: tuple[Any, ...]) -> set[int]:
    """Return the numbers of the tensors that a step of a plan reads or writes."""
    if step[0] == START:
        return {source for _, source, _ in step[2]}
    if step[0] == OPERATE:
        return {each.source for each in _views((step[2], [each for _, each in step[3]]))}
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


def _listed(results: Any) -> tuple[Callable[[list[Any]], Any], list[Any]]:
    """Return results as a list, and the function that makes results of such a list."""
    if isinstance(results, (tuple, list)):
        kind: Any = type(results)
        return (getattr(kind, "_make", None) or (list if kind is list else tuple)), list(results)
    return _only, [results]


def _only(results: list[Any]) -> Any:
    """Return the only result."""
    return results[0]


_SEEN, _REFUSED = object(), object()
"""States of inputs without a plan: met once, and not plannable."""

_ALL: list[Planned[Any]] = []


class Planned(Generic[R]):
    """Function whose calls are replayed from plans, and from tapes if they take gradients.

    Args:
        function: Function of tensors, numbers, flags and strings, or lists of these. It depends on nothing but facts about them
            that :func:`~onelaunch.launch.facts.facts_of` finds, and on what stays the same in a process. Its results are new
            tensors.
        taped: Flag that calls may take gradients. Otherwise the function is called where autograd is off or done with.
    """

    def __init__(self, function: Callable[..., R], *, taped: bool = False) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        self._taped = taped
        self._plans: dict[tuple[Any, ...], Any] = {}
        _ALL.append(self)

    def __call__(self, *inputs: Any, **named: Any) -> R:
        """Return the function's results."""
        if is_compiling() or not may_replay() or (self._taped and not _is_plain_call(inputs, named)):
            return self._function(*inputs, **named)
        facts = facts_of((*inputs, *named, *named.values()) if named else inputs)
        if facts is None:
            return self._function(*inputs, **named)
        found = self._plans.get(facts.key)
        if type(found) is Plan and found.index == Device.current():
            return found.replay(facts)
        if type(found) is Taped:
            return found.replay(facts.tensors)
        return self._run(inputs, named, facts, found)

    def _run(self, inputs: tuple[Any, ...], named: dict[str, Any], facts: Facts, found: Any) -> R:
        """Run the function, or record it if it has met such inputs before."""
        if type(found) is dict:
            plan = found.get(_distances_of(found, facts))
            if plan is not None and plan.index == Device.current():
                return plan.replay(facts)
        elif found is not _SEEN:
            if found is None and all(each.device.type in Device.types for each in facts.tensors):
                self._remember(facts, _SEEN)
            return self._function(*inputs, **named)
        if any(each.device.index != Device.current() for each in facts.tensors if each.is_cuda) or Device.is_capturing():
            return self._function(*inputs, **named)
        if self._taped and torch.is_grad_enabled() and any(each.requires_grad for each in facts.tensors):
            return self._tape(inputs, named, facts)
        return self._record(inputs, named, facts, found)

    def _tape(self, inputs: tuple[Any, ...], named: dict[str, Any], facts: Facts) -> R:
        """Run the function on its inputs, and remember the tape made of it."""
        tape = Tape(facts.tensors)
        with tape:
            results = self._function(*inputs, **named)
        try:
            self._remember(facts, tape.finish(results))
        except NotPlannable:
            self._remember(facts, _REFUSED)
        return results

    def _record(self, inputs: tuple[Any, ...], named: dict[str, Any], facts: Facts, found: Any) -> R:
        """Run the function on its inputs, and remember the plan made of it."""
        with torch.no_grad(), _launches_of_triton() as launched:
            active = Recorder(facts.tensors)
            with active:
                given = with_tensors((*inputs, *named.values()), active.inputs)
                results = self._function(*given[: len(inputs)], **dict(zip(named, given[len(inputs) :], strict=True)))
        try:
            if active.problem is not None:
                raise NotPlannable(active.problem)
            if len(launched) != active.launches:
                raise NotPlannable("kernels were launched that were not reported")
            plan = Plan(active.recording, results, active.geometry_of)
        except NotPlannable:
            self._remember(facts, _REFUSED)
            return results
        if plan.distances():
            kept = found if type(found) is dict and len(found) < MOST_DISTANCES else {}
            kept[None] = plan.distances()
            kept[tuple(apart for *_, apart in plan.distances())] = plan
            self._remember(facts, kept)
        else:
            self._remember(facts, plan)
        return results

    def _remember(self, facts: Facts, state: Any) -> None:
        if len(self._plans) >= MOST:
            self._plans.clear()
        self._plans[facts.key] = state

    def forget(self) -> None:
        """Forget all plans."""
        self._plans.clear()

    def plans(self) -> list[Plan | Taped]:
        """Return all plans and tapes."""
        found = [*self._plans.values()]
        nested = [plan for each in found if type(each) is dict for plan in each.values() if type(plan) is Plan]
        return [each for each in found if type(each) in (Plan, Taped)] + nested


@contextmanager
def _launches_of_triton() -> Iterator[list[None]]:
    """Yield a list that grows by one with each kernel that Triton launches in this thread, by whatever code."""
    launched: list[None] = []
    thread = threading.get_ident()

    def count(_: Any) -> None:
        if threading.get_ident() == thread:
            launched.append(None)

    hooks = [runtime.launch_enter_hook for runtime in _hooks() if hasattr(runtime.launch_enter_hook, "add")]
    for hook in hooks:
        hook.add(count)
    try:
        yield launched
    finally:
        for hook in hooks:
            hook.remove(count)


def _distances_of(plans: dict[Any, Any], facts: Facts) -> tuple[int, ...]:
    """Return the distances of a call's tensors that tell plans apart."""
    return tuple(facts.addresses[j] - facts.addresses[i] for i, j, _ in plans[None])


def refuse_plan(problem: str) -> None:
    """Keep the call that is recorded in this thread, if one is, from being replayed later."""
    for active in (recorder(), active_tape()):
        if active is not None:
            active.fail(problem)


def forget_plans() -> None:
    """Forget the plans of all functions."""
    for each in _ALL:
        each.forget()


def may_replay() -> bool:
    """Return whether a plan may be replayed now: nothing wants to see PyTorch's operators or our launches."""
    return not (sees_operators() or is_transformed() or is_observed() or _hooked())


def _is_plain_call(inputs: tuple[Any, ...], named: dict[str, Any]) -> bool:
    """Return whether a call with gradients or without may be replayed: on a device of :class:`Device`, and not inside a tape.

    Values of tensors are not checked in a replay, so there is none while ``ONELAUNCH_CHECK_VALUES`` is set. Autocast decides what
    a call casts, and is not part of a key.
    """
    first = inputs[0] if inputs else next(iter(named.values()), None)
    if not isinstance(first, torch.Tensor) or (kind := first.device.type) not in Device.types:
        return False
    return active_tape() is None and not torch.is_autocast_enabled(kind) and not asks_for_values()


@functools.cache
def _hooks() -> tuple[Any, ...]:
    """Return Triton's settings if it is installed."""
    try:
        from triton import knobs
    except ImportError:
        return ()
    return (knobs.runtime,)


def _hooked() -> bool:
    """Return whether functions are to be called around launches of Triton's kernels, as profilers want."""
    for runtime in _hooks():
        for hook in (runtime.launch_enter_hook, runtime.launch_exit_hook):
            if hook is not None and getattr(hook, "calls", True):
                return True
    return False
