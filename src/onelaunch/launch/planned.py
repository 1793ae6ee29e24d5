"""Functions whose calls are recorded and replayed: when a call is run, recorded or replayed, and when it must not be.

Operators (``operator.py``) and operations (``operation/definition.py``) make :class:`Planned` functions, and the functions with
names of flash-linear-attention are decorated by :func:`replayed`. A :class:`Planned` function runs as it is the first time that
it meets inputs with certain facts (shapes, strides, dtypes, device, alignment, see :mod:`onelaunch.launch.facts`), is recorded
the second time, and is replayed from then on: from a :class:`~onelaunch.launch.plan.Plan`, or from a
:class:`~onelaunch.launch.tape.Taped` if autograd follows the call.

Under anything that must see PyTorch's operators or our launches (a dispatch mode, a tracer, a function transform, Triton's
launch hooks), the function itself runs, as it does while ``torch.compile`` traces. It is not recorded during the capture of a
CUDA graph, but a plan that exists can be captured: its allocations and launches are then the graph's. A call with tensors of a
GPU that is not current makes that GPU current.

The registry, the dispatcher, and variants whose function is replaced call :func:`forget_plans`, since plans repeat what ran
before. The dispatcher keeps calls from being recorded by :func:`unrecorded`, as do variants that ``torch.compile`` compiles. It
and ``side_by_side.py`` ask :func:`is_recording`; ``sites.py`` calls an operator's forward pass and keeps its plan.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar

import torch
from torch.compiler import is_compiling

from onelaunch.checks import asks_for_values
from onelaunch.launch.facts import Facts, facts_of, with_tensors
from onelaunch.launch.imitation import is_observed
from onelaunch.launch.parameters import NotPlannable
from onelaunch.launch.plan import Device, Plan
from onelaunch.launch.recording import Recorder, recorder
from onelaunch.launch.repeated import Repeated
from onelaunch.launch.tape import Tape, Taped, active_tape
from onelaunch.tracing import sees_operators

P = ParamSpec("P")
R = TypeVar("R")

MOST = 4096
"""Largest number of kinds of inputs that a function remembers. Beyond it all are forgotten."""

_MOST_DISTANCES = 256
"""Largest number of plans kept for equal facts that differ in the byte distances between the addresses of their inputs."""

_SEEN = object()
"""Entry for facts with which one call was made; the next one is recorded."""

_ALL: list[Planned[Any]] = []
"""All planned functions of the process."""


class Refused(NamedTuple):
    """Entry for facts whose calls cannot be replayed; recording is not tried again."""

    reason: str


class Planned(Generic[R]):
    """Function whose calls are replayed from plans, and from tapes if they take gradients.

    Args:
        function: Function of tensors, numbers, flags and strings, or lists of these. It depends on nothing but facts about them
            that :func:`~onelaunch.launch.facts.facts_of` finds, and on what stays the same in a process. Its results are new
            tensors.
        taped: Flag that calls may take gradients. Otherwise the function is only called where autograd does not record, and
            where autocast is off.
        autocast: Flag that all calls are made under autocast, for one dtype of it. They are replayed from tapes, with gradients
            or without, since a plan holds no casts.
    """

    def __init__(self, function: Callable[..., R], *, taped: bool = False, autocast: bool = False) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        self._taped = taped
        self._autocast = autocast
        self._lowered: dict[torch.dtype, Planned[R]] = {}
        """Objects for the calls under autocast, by the dtype that autocast casts to."""
        self._plans: dict[tuple[Any, ...], Any] = {}
        self._latest: tuple[tuple[Any, ...], Any, dict[tuple[Any, ...], Any], Repeated | None] | None = None
        _ALL.append(self)

    def __call__(self, *inputs: Any, **named: Any) -> R:
        """Return the function's results."""
        if is_compiling() or sees_operators() or is_observed():
            return self._function(*inputs, **named)
        other = self._in_its_place(inputs, named) if self._taped else self._function if _hooked() else None
        if other is not None:
            return other(*inputs, **named)
        latest, plans = self._latest, self._plans
        if latest is not None and latest[2] is plans:
            repeated, found = latest[3], latest[1]
            tensors = None if repeated is None else repeated.tensors_of(inputs, named)
            if tensors is not None and (found.index is None or found.index == Device.current()):
                return found.replay(tensors[0]) if type(found) is Taped else found.replay(*tensors)
        facts = facts_of((*inputs, *named, *named.values()) if named else inputs)
        if facts is None:
            return self._function(*inputs, **named)
        # Comparing takes half the time of the look-up, which hashes too.
        if latest is not None and latest[0] == facts.key and latest[2] is plans:
            found = latest[1]
        else:
            found = plans.get(facts.key)
            if type(found) is Plan or type(found) is Taped:
                self._latest = (facts.key, found, plans, _repeated(found, inputs, named, facts))
        if type(found) is Plan and found.index == Device.current():
            return found.replay(facts.tensors, facts.addresses)
        if type(found) is Taped and (found.index is None or found.index == Device.current()):
            return found.replay(facts.tensors)
        return self._run(inputs, named, facts, found, plans)

    def _in_its_place(self, inputs: tuple[Any, ...], named: dict[str, Any]) -> Callable[..., R] | None:
        """Return the function or object that makes a call in the place of this one; ``None`` if this object makes the call.

        It is the function itself if the first input is no tensor, while a tape is recorded, and on devices that :class:`Device`
        does not list. On GPUs it is also the function if Triton has launch hooks, or if ``ONELAUNCH_CHECK_VALUES`` is set, since
        a replay checks no values of their tensors. Under autocast it is the object for autocast's dtype.
        """
        first = inputs[0] if inputs else next(iter(named.values()), None)
        if not isinstance(first, torch.Tensor) or active_tape() is not None:
            return self._function
        kind = first.device.type
        if (asks_for_values() or _hooked()) if kind in Device.types else kind not in Device.taped:
            return self._function
        if torch.is_autocast_enabled(kind) is self._autocast:
            return None
        low = torch.get_autocast_dtype(kind)
        if low not in self._lowered:
            self._lowered.setdefault(low, Planned(self._function, taped=True, autocast=True))
        return self._lowered[low]

    def plan_for(self, inputs: tuple[Any, ...]) -> Plan | None:
        """Return the plan for inputs, or ``None`` if there is none or if it depends on the distances between their addresses."""
        facts = facts_of(inputs)
        found = None if facts is None else self._plans.get(facts.key)
        return found if type(found) is Plan else None

    def _run(self, inputs: tuple[Any, ...], named: dict[str, Any], facts: Facts, found: Any, plans: dict[Any, Any]) -> R:
        """Run the function, or record it if it has met such inputs before.

        ``plans`` is the dictionary of plans in which the call was looked up. What the call makes is remembered there, so that it
        is lost if plans are forgotten meanwhile: the function may have changed while it ran. A call with tensors of a GPU that is
        not current is made again with that GPU current, as PyTorch's own functions do, so that it is replayed too.
        """
        elsewhere = Device.elsewhere(facts.tensors)
        if elsewhere is not None:
            with Device.at(elsewhere):
                return self(*inputs, **named)
        if type(found) is dict:
            plan = found.get(_distances_of(found, facts))
            if plan is not None and plan.index == Device.current():
                return plan.replay(facts.tensors, facts.addresses)
        elif found is not _SEEN:
            types = Device.types + Device.taped if self._taped else Device.types
            if found is None and all(each.device.type in types for each in facts.tensors):
                results = self._function(*inputs, **named)
                # The entry is made after the call. Until then calls of other threads are not recorded, and wait for the kernels
                # that this call compiles. A recorded call would compile them itself.
                if facts.key not in plans:
                    self._remember(facts, _SEEN, plans)
                return results
            return self._function(*inputs, **named)
        if self._autocast or (self._taped and (_takes_gradients(facts) or facts.tensors[0].device.type not in Device.types)):
            return self._tape(inputs, named, facts, plans)
        if any(each.device.index != Device.current() for each in facts.tensors if each.is_cuda) or Device.is_capturing():
            return self._function(*inputs, **named)
        return self._record(inputs, named, facts, found, plans)

    def _tape(self, inputs: tuple[Any, ...], named: dict[str, Any], facts: Facts, plans: dict[Any, Any]) -> R:
        """Run the function on its inputs, and remember the tape made of it."""
        tape = Tape(facts.tensors, facts.tensors[0].device.type if self._autocast else None)
        with tape:
            results = self._function(*inputs, **named)
        try:
            made = tape.finish(results)
            made.index = Device.index_of(facts.tensors)
            self._remember(facts, made, plans)
        except NotPlannable as problem:
            self._remember(facts, Refused(str(problem)), plans)
        return results

    def _record(self, inputs: tuple[Any, ...], named: dict[str, Any], facts: Facts, found: Any, plans: dict[Any, Any]) -> R:
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
        except NotPlannable as problem:
            self._remember(facts, Refused(str(problem)), plans)
            return results
        if plan.distances():
            kept = found if type(found) is dict and len(found) < _MOST_DISTANCES else {}
            kept[None] = plan.distances()
            kept[tuple(apart for *_, apart in plan.distances())] = plan
            self._remember(facts, kept, plans)
        else:
            self._remember(facts, plan, plans)
        return results

    def _remember(self, facts: Facts, state: Any, plans: dict[Any, Any]) -> None:
        if len(plans) >= MOST and plans is self._plans:
            self.forget()
            plans = self._plans
        plans[facts.key] = state

    def forget(self) -> None:
        """Forget all plans, also those of calls that other threads look up or record meanwhile.

        Such calls keep their plans in the old dictionary, in which no later call looks.
        """
        self._plans = {}
        self._latest = None

    def refused(self) -> list[str]:
        """Return the reason of each kind of call that cannot be replayed and runs as if there were no plans."""
        lowered = [reason for each in self._lowered.values() for reason in each.refused()]
        return [each.reason for each in self._plans.values() if type(each) is Refused] + lowered

    def plans(self) -> list[Plan | Taped]:
        """Return all plans and tapes, those for calls under autocast included."""
        found = [*self._plans.values()]
        nested = [plan for each in found if type(each) is dict for plan in each.values() if type(plan) is Plan]
        lowered = [plan for each in self._lowered.values() for plan in each.plans()]
        return [each for each in found if type(each) in (Plan, Taped)] + nested + lowered


def _repeated(found: Plan | Taped, inputs: tuple[Any, ...], named: dict[str, Any], facts: Facts) -> Repeated | None:
    """Return an object that compares later inputs with those of a recorded call, or ``None`` if they cannot be compared.

    The plan or the tape of the call keeps this object.
    """
    if found.repeated is None:
        try:
            found.repeated = Repeated(inputs, named, facts)
        except (TypeError, RuntimeError):
            found.repeated = False
    return found.repeated or None


def replayed(function: Callable[P, R]) -> Callable[P, R]:
    """Replay calls of the decorated public function, whose results are the same for equal facts and values of its arguments."""
    planned = Planned(function, taped=True)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return planned(*args, **kwargs)

    return call


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
    """Return the byte distances between addresses of a call's tensors by which its plans differ."""
    return tuple(facts.addresses[j] - facts.addresses[i] for i, j, _ in plans[None])


def refuse_plan(problem: str) -> None:
    """Keep the call that is recorded in this thread, if one is, from being replayed later.

    Only tests call it; the package stops the recording too, by :func:`unrecorded`.
    """
    for active in (recorder(), active_tape()):
        if active is not None:
            active.fail(problem)


@contextmanager
def unrecorded(problem: str) -> Iterator[None]:
    """Pause the recording in this thread, if there is one, and keep the call that is recorded from being replayed later."""
    stopped = [active for active in (recorder(), active_tape()) if active is not None]
    for active in stopped:
        active.fail(problem)
        active.__exit__(None, None, None)
    try:
        yield
    finally:
        for active in reversed(stopped):
            active.__enter__()


def is_recording() -> bool:
    """Return whether a call is recorded in this thread."""
    return active_tape() is not None or recorder() is not None


def refused_calls() -> dict[str, list[str]]:
    """Return the reasons why calls of this process are not replayed, by the name of the function. Tests ask for them."""
    found: dict[str, list[str]] = {}
    for each in _ALL:
        if not each._autocast and (reasons := each.refused()):  # noqa: SLF001 - objects of a class here
            found.setdefault(getattr(each, "__name__", repr(each)), []).extend(reasons)
    return found


def forget_plans() -> None:
    """Forget the plans of all functions."""
    for each in _ALL:
        each.forget()


def _takes_gradients(facts: Facts) -> bool:
    """Return whether autograd follows a call."""
    return torch.is_grad_enabled() and any(each.requires_grad for each in facts.tensors)


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
