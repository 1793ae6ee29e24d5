"""Tapes: the functions of PyTorch and the operators of ours that a differentiable call consists of, to be called again.

A call that takes gradients cannot be replayed below autograd, as :class:`~onelaunch.launch.plan.Plan` does. Its argument checks
and the choice of a variant can be left out all the same: what remains is a list of calls, mostly of a single operator. A tape is
recorded by a mode that sees PyTorch's functions, and :class:`~onelaunch.launch.operator.Operator` reports its own calls.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from onelaunch.launch.parameters import NotPlannable

CONSTANTS = (type(None), bool, int, float, str, slice, torch.dtype, torch.device, torch.memory_format, type(Ellipsis))
"""Types of arguments that a tape repeats as they are."""

FACTS = frozenset(
    {
        "__get__", "__len__", "data_ptr", "dim", "element_size", "get_device", "is_complex", "is_contiguous",
        "is_floating_point", "is_neg", "ndimension", "numel", "size", "storage_offset", "stride", "untyped_storage",
    }
)  # fmt: skip
"""Functions that tell of a tensor what the key of a call holds, or nothing that matters, and leave it unchanged."""


@dataclass(frozen=True)
class Slot:
    """Place of a tensor of a taped call: the inputs first, then the results of the steps in order."""

    index: int


class _Active(threading.local):
    """Tape that is recorded in this thread, ``None`` while none is."""

    tape: Tape | None = None


_ACTIVE = _Active()


def active_tape() -> Tape | None:
    """Return the tape that is recorded in this thread, or ``None`` while none is."""
    return _ACTIVE.tape


class Tape(TorchFunctionMode):
    """Mode that records a call.

    Args:
        inputs: Tensors of the call.
    """

    def __init__(self, inputs: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.problem: str | None = None
        self._inside = False
        self._slots: list[torch.Tensor] = []  # keeps the tensors alive, so that their identities stay theirs
        self._at: dict[int, int] = {}
        self._calls: list[tuple[Callable[..., Any], Any, Any, tuple[int, ...], bool]] = []
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

        What PyTorch functions the operator calls is its own matter.
        """
        before, self._inside = self._inside, True
        try:
            result = run()
        finally:
            self._inside = before
        if not before:
            self._note(repeat, inputs, {}, result, operator=True)
        return result

    def fail(self, problem: str) -> None:
        """Give up: what was recorded cannot be repeated."""
        self.problem = self.problem or problem

    def _note(self, func: Any, args: Any, keywords: dict[str, Any], result: Any, *, operator: bool = False) -> None:
        """Record one call."""
        name = "" if operator else getattr(func, "__name__", "")
        several = isinstance(result, (tuple, list))
        results = list(result) if several else [result]
        tensors = [each for each in results if isinstance(each, torch.Tensor)]
        if not tensors:
            if name not in FACTS:
                self.fail(f"{name} returns no tensor")
            return
        writes = name.endswith("_") and not name.endswith("__")
        if len(tensors) != len(results) or writes or "out" in keywords:
            self.fail(f"{name} cannot be repeated")
            return
        try:
            given = self._template(args), self._template(keywords)
        except NotPlannable as reason:
            self.fail(str(reason))
            return
        self._calls.append((func, *given, tuple(self._add(each) for each in results), several))

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
        if not isinstance(value, CONSTANTS):
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
        steps = []
        for func, args, keywords, made, several in reversed(self._calls):
            if needed & set(made):
                needed |= _slots((args, keywords))
                steps.append((func, args, keywords, made, several))
        steps.reverse()
        places = {index: index for index in range(self._inputs)}
        for *_, made, _ in steps:
            for index in made:
                places[index] = len(places)
        return Taped(
            tuple(
                (func, _moved(args, places), tuple(_moved(keywords, places).items()), several)
                for func, args, keywords, _, several in steps
            ),
            _moved(wanted, places),
        )


def _slots(template: Any) -> set[int]:
    """Return the indices of the slots in a template."""
    if isinstance(template, Slot):
        return {template.index}
    if isinstance(template, dict):
        template = tuple(template.values())
    return {index for each in template for index in _slots(each)} if isinstance(template, (list, tuple)) else set()


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


def _filled(template: Any, tensors: list[Any]) -> Any:
    """Return a template with its slots filled."""
    kind = type(template)
    if kind is Slot:
        return tensors[template.index]
    if kind is tuple or kind is list:
        return kind([_filled(each, tensors) for each in template])
    if isinstance(template, tuple):
        return template._make([_filled(each, tensors) for each in template])  # type: ignore[attr-defined]
    return template


class Taped:
    """Calls that repeat a recorded one, with autograd.

    Args:
        steps: For each call the function, its arguments and keywords, and whether it returns several tensors.
        results: Results of the whole.
    """

    __slots__ = ("_results", "_steps")

    def __init__(self, steps: tuple[tuple[Any, Any, Any, bool], ...], results: Any) -> None:
        self._steps, self._results = steps, results

    def replay(self, tensors: list[Any]) -> Any:
        """Return the results for the tensors of a call; the list is extended."""
        for function, arguments, keywords, several in self._steps:
            given = [tensors[each.index] if type(each) is Slot else _filled(each, tensors) for each in arguments]
            made = function(*given, **{name: _filled(each, tensors) for name, each in keywords}) if keywords else function(*given)
            if several:
                tensors.extend(made)
            else:
                tensors.append(made)
        return _filled(self._results, tensors)
