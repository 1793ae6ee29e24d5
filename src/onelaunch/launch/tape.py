"""Tapes: recordings of the PyTorch functions and of onelaunch's operators in a differentiable call, which a replay calls again.

A call that takes gradients cannot be replayed below autograd, as :class:`~onelaunch.launch.plan.Plan` does. But its argument
checks and the choice of a variant can be left out: what remains is a list of calls, mostly of a single operator. A tape is
recorded by a ``TorchFunctionMode``, which sees PyTorch's functions, and :class:`~onelaunch.launch.operator.Operator` reports its
own calls. A call under ``torch.autocast`` casts its inputs and turns autocast off for the rest. The tape repeats each step with
autocast on or off as it was.

``planned.py`` records tapes and replays them; the contracts of ``gated_scan`` and ``gla`` read values by :func:`check_always`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from onelaunch.launch.parameters import NotPlannable

_CONSTANTS = (type(None), bool, int, float, str, slice, torch.dtype, torch.device, torch.memory_format, type(Ellipsis))
"""Types of arguments that a tape repeats as they are."""

_FACTS = frozenset(
    {
        "__get__", "__len__", "data_ptr", "device", "dim", "element_size", "get_device", "is_complex", "is_contiguous",
        "is_floating_point", "is_neg", "ndimension", "numel", "size", "storage_offset", "stride", "untyped_storage",
    }
)  # fmt: skip
"""Functions that only read metadata of a tensor. They are not recorded, since calls that share a tape have equal metadata."""


_ASSIGNMENTS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")

_IN_PLACE = frozenset({f"__i{name}__" for name in _ASSIGNMENTS})
"""Names of operators that write to their first argument, as do all whose names end with one underscore."""

LONGEST = 256
"""Largest number of steps of a tape. With more of them, what a replay leaves out no longer matters."""


class TapedCall(NamedTuple):
    """Call that a tape holds, with slots in the place of tensors."""

    function: Callable[..., Any]
    arguments: Any
    keywords: Any
    made: tuple[int, ...]
    """Slots of its results."""
    several: bool
    """Flag that it returns a tuple or a list of tensors."""
    lowered: bool
    """Flag that autocast was on in the call."""


@dataclass(frozen=True)
class Slot:
    """Index that stands for a tensor of a taped call: the inputs come first, then the results of the steps in order."""

    index: int


class _Active(threading.local):
    """Tape that is recorded in this thread, ``None`` while none is."""

    tape: Tape | None = None


_ACTIVE = _Active()


def active_tape() -> Tape | None:
    """Return the tape that is recorded in this thread, or ``None`` while none is."""
    return _ACTIVE.tape


class Tape(TorchFunctionMode):
    """Mode that records the PyTorch functions and operators of a call.

    Args:
        inputs: Tensors of the call.
        autocast: Device type for which autocast is on where the call is made; ``None`` if it is off.
    """

    def __init__(self, inputs: Sequence[torch.Tensor], autocast: str | None = None) -> None:
        super().__init__()
        self.problem: str | None = None
        self._autocast = autocast
        self._inside = False
        self._slots: list[torch.Tensor] = []  # keeps the tensors alive, so that no other tensor gets their ids
        self._at: dict[int, int] = {}
        self._calls: list[TapedCall] = []
        for each in inputs:
            self._add(each)
        self._inputs = len(self._slots)

    def __enter__(self) -> Any:
        _ACTIVE.tape = self
        return super().__enter__()

    def __exit__(self, exc_type: object, exc_val: object, exc_tb: object) -> None:
        _ACTIVE.tape = None
        super().__exit__(exc_type, exc_val, exc_tb)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        keywords = dict(kwargs or {})
        result = func(*args, **keywords)
        if not self._inside:
            self._note(func, args, keywords, result)
        return result

    def operated(self, repeat: Callable[..., Any], run: Callable[[], Any], inputs: tuple[Any, ...]) -> Any:
        """Run a call of an operator, record that ``repeat`` is to be called with the same inputs, and return the results.

        PyTorch functions that the operator calls itself are not recorded.
        """
        before, self._inside = self._inside, True
        try:
            result = run()
        finally:
            self._inside = before
        if not before:
            self._note(repeat, inputs, {}, result, operator=True)
        return result

    def holds(self, inputs: tuple[Any, ...]) -> bool:
        """Return whether all tensors among ``inputs`` are inputs of the recorded call, and none is inside a list or a tuple."""
        tensors = [each for each in inputs if isinstance(each, torch.Tensor)]
        known = all(self._at.get(id(each), self._inputs) < self._inputs for each in tensors)
        return known and not any(isinstance(each, (list, tuple)) for each in inputs)

    def checked(self, check: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        """Run a check of values, which every replay repeats."""
        before, self._inside = self._inside, True
        try:
            check(*arguments)
        finally:
            self._inside = before
        if not before:
            self._note(partial(_checking, check), arguments, {}, (), operator=True)

    def fail(self, problem: str) -> None:
        """Give up: what was recorded cannot be repeated."""
        self.problem = self.problem or problem

    def _note(self, func: Any, args: Any, keywords: dict[str, Any], result: Any, *, operator: bool = False) -> None:
        """Record one call."""
        name = "" if operator else getattr(func, "__name__", "")
        several = isinstance(result, (tuple, list))
        results = list(result) if several else [result]
        tensors = [each for each in results if isinstance(each, torch.Tensor)]
        if not tensors and not operator:
            if name not in _FACTS:
                self.fail(f"{name} returns no tensor")
            return
        writes = name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))
        if len(tensors) != len(results) or writes or "out" in keywords:
            self.fail(f"{name} cannot be repeated")
            return
        try:
            given = self._template(args), self._template(keywords)
        except NotPlannable as reason:
            self.fail(str(reason))
            return
        if not several and not operator and any(result is each for each in args):
            return  # a conversion that changes nothing
        lowered = self._autocast is not None and torch.is_autocast_enabled(self._autocast)
        self._calls.append(TapedCall(func, *given, tuple(self._add(each) for each in results), several, lowered))

    def _add(self, tensor: torch.Tensor) -> int:
        """Give a tensor a slot, and return its index."""
        self._slots.append(tensor)
        self._at[id(tensor)] = len(self._slots) - 1
        return len(self._slots) - 1

    def _template(self, value: Any) -> Any:
        """Return an argument with its tensors replaced by their slots.

        Raises:
            NotPlannable: A tensor is unknown, or the argument has a type that tapes do not hold.
        """
        if isinstance(value, torch.Tensor):
            if id(value) not in self._at:
                raise NotPlannable("a tensor is neither an argument nor was it made by the call")
            return Slot(self._at[id(value)])
        if isinstance(value, (list, tuple)):
            made = [self._template(each) for each in value]
            return value._make(made) if hasattr(value, "_make") else made if type(value) is list else tuple(made)
        if isinstance(value, dict):
            return {name: self._template(each) for name, each in value.items()}
        if not isinstance(value, _CONSTANTS):
            raise NotPlannable(f"an argument is {type(value).__name__}")
        return value

    def finish(self, results: Any) -> Taped:
        """Return the tape of the call with these results.

        Raises:
            NotPlannable: The call cannot be repeated.
        """
        if self.problem is not None:
            raise NotPlannable(self.problem)
        wanted = self._template(results)
        needed = _slots(wanted)
        calls = []
        for each in reversed(self._calls):
            # A call without results is a check, and is kept. A call with gradients is kept even if its results are not used: it
            # saves tensors for backward, and activation checkpointing expects a repeated call to save as many.
            if not each.made or needed & set(each.made) or any(self._slots[index].requires_grad for index in each.made):
                needed |= _slots((each.arguments, each.keywords))
                calls.append(each)
        if len(calls) > LONGEST:
            raise NotPlannable("the call consists of too many steps")
        calls.reverse()
        return Taped(self._inputs, calls, wanted, self._autocast)


def check_always(check: Callable[..., None], *arguments: Any) -> None:
    """Run a check that reads values of tensors. A call that is replayed from a tape repeats it."""
    tape = active_tape()
    if tape is None:
        check(*arguments)
    else:
        tape.checked(check, arguments)


def _checking(check: Callable[..., None], *arguments: Any) -> tuple[()]:
    """Run a check, and return no tensors."""
    check(*arguments)
    return ()


def _slots(template: Any) -> set[int]:
    """Return the indices of the slots in a template."""
    if isinstance(template, Slot):
        return {template.index}
    if isinstance(template, dict):
        template = tuple(template.values())
    return {index for each in template for index in _slots(each)} if isinstance(template, (list, tuple)) else set()


def _filled(template: Any, values: list[Any]) -> Any:
    """Return a template with its slots filled."""
    if isinstance(template, Slot):
        return values[template.index]
    if isinstance(template, (list, tuple)):
        made = [_filled(each, values) for each in template]
        return template._make(made) if hasattr(template, "_make") else made if type(template) is list else tuple(made)
    return template


class Taped:
    """Sequence of calls that repeats a recorded call, with autograd.

    A replay keeps one list of values: the inputs, the constant arguments of all steps, then the results of the steps.

    Args:
        inputs: Number of the tensors of the call.
        calls: Calls in their order.
        results: Template of the results of the recorded call.
        autocast: Device type for which autocast is on around the recorded call; ``None`` if it is off.
    """

    __slots__ = ("_autocast", "_constants", "_parts", "_results", "index", "repeated")

    def __init__(self, inputs: int, calls: Sequence[TapedCall], results: Any, autocast: str | None = None) -> None:
        self.repeated: Any = None
        """Comparison with later inputs that ``planned.py`` keeps here; ``None`` before it was made, false if it cannot be."""
        self.index: int | None = None
        """Index of the GPU that is current in replays, set by ``planned.py``; ``None`` for tensors on a CPU."""
        constants = [None, *(each for call in calls for each in call.arguments if not _slots(each))]
        places = {index: index for index in range(inputs)}
        for call in calls:
            for index in call.made:
                places[index] = inputs + len(constants) + len(places) - inputs
        self._autocast, self._constants = autocast, tuple(constants)
        next_constant = inputs + 1  # the first constant is for the results
        parts: list[tuple[bool, list[Any]]] = []
        for call in calls:
            indices: list[int] = []
            nested = False
            for each in call.arguments:
                if not _slots(each):
                    indices.append(next_constant)
                    next_constant += 1
                elif isinstance(each, Slot):
                    indices.append(places[each.index])
                else:
                    nested = True
            named = tuple(_moved(call.keywords, places).items())
            flat = None if nested or named or not indices else itemgetter(*indices)
            given = None if flat else [
                _moved(each, places) if _slots(each) else each for each in call.arguments
            ]  # fmt: skip
            if not parts or parts[-1][0] is not call.lowered:
                parts.append((call.lowered, []))
            parts[-1][1].append((call.function, flat, len(indices) == 1, given, named, call.several))
        self._parts, self._results = tuple(parts), _getter(_moved(results, places), inputs)

    def replay(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return the results for the tensors of a call."""
        values = [*tensors, *self._constants]
        autocast = self._autocast
        try:
            for lowered, steps in self._parts:
                if autocast is not None:
                    torch.set_autocast_enabled(autocast, lowered)
                for function, flat, single, given, named, several in steps:
                    if flat is None:
                        arguments = [_filled(each, values) for each in given]
                        made = function(*arguments, **{name: _filled(each, values) for name, each in named})
                    else:
                        made = function(flat(values)) if single else function(*flat(values))
                    if several:
                        values += made
                    else:
                        values.append(made)
        finally:
            if autocast is not None:
                torch.set_autocast_enabled(autocast, True)  # noqa: FBT003 - PyTorch names no such argument
        return self._results(values)


def _getter(results: Any, nothing: int) -> Callable[[list[Any]], Any]:
    """Return the function from the values of a replay to its results; ``nothing`` is the index of a ``None`` in the values."""
    if isinstance(results, Slot):
        return itemgetter(results.index)
    if type(results) is tuple and len(results) > 1 and all(each is None or isinstance(each, Slot) for each in results):
        return itemgetter(*(nothing if each is None else each.index for each in results))
    return partial(_filled, results)


def _moved(template: Any, places: Mapping[int, int]) -> Any:
    """Return a template whose slots have new indices."""
    if isinstance(template, Slot):
        return Slot(places[template.index])
    if isinstance(template, dict):
        return {name: _moved(each, places) for name, each in template.items()}
    if isinstance(template, (list, tuple)):
        made = [_moved(each, places) for each in template]
        return template._make(made) if hasattr(template, "_make") else made if type(template) is list else tuple(made)
    return template
