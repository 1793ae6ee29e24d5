"""Variants of an operation, and what studies time beside them: controls and loops."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Protocol

import torch

from onelaunch.errors import ArgumentError
from onelaunch.launch.build import Build
from onelaunch.wording import in_a_line

if TYPE_CHECKING:
    from onelaunch.operation.definition import Operation
from onelaunch.operation.case import Case
from onelaunch.operation.cost import Cost
from onelaunch.operation.query import Direction, Query


@dataclass(frozen=True)
class Capabilities:
    """Facts about a variant that the library acts on. Given as keywords where the variant is registered."""

    launches: int | None = None
    """Kernels that a forward call launches; ``None`` when a compiler or a library decides."""
    backward_launches: int | None = None
    """Kernels that its backward pass launches beside the forward call's."""
    backward: bool = True
    """Flag that it has a backward pass."""
    requires: str | None = None
    """Package of others that must be installed. Such a variant runs by name alone: ``auto`` never chooses it."""
    by_name_only: bool = False
    """Flag that ``auto`` never chooses it, as for variants that are kept as lessons."""
    experimental: bool = False
    """Flag that it has not run on the hardware it is meant for; ``auto`` never chooses it."""
    tunes: bool = False
    """Flag that Triton's autotuner chooses among its kernels' configurations at its first call."""
    architectures: tuple[str, ...] | None = None
    """Architectures that its kernels are made for, such as ``("sm_90a",)``; ``None`` for all."""
    barriers: Callable[[Any], int] | None = None
    """Function that makes a checked call and returns how many grid barriers its kernel counted."""
    engine: Callable[..., Any] | None = None
    """Function that makes the decoding engine of a model's weights; see :mod:`onelaunch.decode`."""
    engine_bytes: Callable[..., int] | None = None
    """Function that returns the bytes that this engine needs beside the weights."""
    prompt_steps: Callable[..., int] | None = None
    """Function that returns how many prompt tokens this engine reads one by one rather than in one forward pass."""
    in_a_row: Callable[..., Any] | None = None
    """Function that makes many steps in one launch, from a checked call and a number of steps."""

    @classmethod
    def of(cls, operation: str, variant: str, tags: Mapping[str, Any]) -> Capabilities:
        """Return the capabilities among a variant's keywords.

        Raises:
            ArgumentError: One has a value of a wrong type; names the variant, the keyword and what it must be.
        """
        given = {each.name: tags[each.name] for each in fields(cls) if each.name in tags}
        for key, value in given.items():
            if (want := _wrong(key, value)) is not None:
                raise ArgumentError(f"{key} of variant {variant!r} of {operation} is {value!r}; it must be {want}.")
        return cls(**given)

    @property
    def automatic(self) -> bool:
        """Flag that ``auto`` may choose the variant."""
        return self.requires is None and not self.by_name_only and not self.experimental


_UNSELECTABLE = (
    "barriers",
    "by_name_only",
    "engine",
    "engine_bytes",
    "experimental",
    "in_a_row",
    "prompt_steps",
)
"""Capabilities that studies do not select by: functions, and what only ``auto`` asks."""

_COUNTS = ("launches", "backward_launches")
_FLAGS = ("backward", "by_name_only", "experimental", "tunes")


def _wrong(key: str, value: object) -> str | None:
    """Return the kind of value that a capability must have, or ``None`` where it has one."""
    if key in _COUNTS:
        good = value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 0)
        return None if good else "an integer of at least 0, or None"
    if key in _FLAGS:
        return None if isinstance(value, bool) else "True or False"
    if key == "requires":
        return None if value is None or (isinstance(value, str) and value) else "the name of a package, or None"
    if key == "architectures":
        good = value is None or (isinstance(value, tuple) and all(isinstance(each, str) for each in value))
        return None if good else "a tuple of names such as 'sm_90a', or None"
    return None if value is None or callable(value) else "a function, or None"


@dataclass(frozen=True)
class Example:
    """A call that a variant's kernels are compiled and inspected for."""

    case: Case
    direction: Direction = "forward"
    architectures: tuple[str, ...] | None = None
    """Architectures that the call can run on; ``None`` for all that the variant's kernels are made for."""
    name: str = ""
    """Name in reports, where several calls launch the same kernel; by default the case's."""
    wants: tuple[str, ...] = ()
    """Arguments whose gradients the call asks for; all where there are none, and only ``forward_backward`` asks for any."""


class Variant:
    """One way to carry out an operation. Made by ``@operation.variant(...)``; calling it runs it, unchecked."""

    def __init__(self, operation: Operation[..., Any], name: str, run: Callable[..., Any], tags: Mapping[str, Any]) -> None:
        self.operation = operation
        self.name = name
        self.run = run
        self.capabilities = Capabilities.of(operation.name, name, tags)
        self.tags = {key: value for key, value in tags.items() if key not in _UNSELECTABLE}
        """Facts that studies select by."""
        self.summary = (inspect.getdoc(run) or "").partition("\n")[0]
        self.confirmed: set[Query] = set()
        """Queries for which the dispatcher has accepted the results of this variant."""
        self.latest: Query | None = None
        """The last of them that a call came with."""
        self._supports: list[Callable[[Query], str | None]] = []
        self._kernels: Callable[[str], Iterable[Build]] | None = None
        self._examples: Callable[[], Iterable[Example]] | None = None

    def __repr__(self) -> str:
        return f"<variant {self.operation.name}.{self.name}>"

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, ...]]:
        from onelaunch.operation.registry import variant_by_name  # the registry is made of operations, and these of variants

        return variant_by_name, (self.operation.__module__, self.operation.name, self.name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Variant:
        return self

    def __call__(self, call: Any) -> Any:
        return self.run(call)

    @property
    def launches(self) -> int | None:
        """Kernels that a forward call launches; ``None`` when a compiler decides."""
        return self.capabilities.launches

    def supports(self, predicate: Callable[[Query], str | None]) -> Callable[[Query], str | None]:
        """Decorator: add a predicate that returns ``None`` when the variant can run, else why not ("needs a GPU")."""
        self._supports.append(predicate)
        return predicate

    def examples(self, function: Callable[[], Iterable[Example]]) -> Callable[[], Iterable[Example]]:
        """Decorator: register the function that lists the calls whose kernels are compiled and inspected without a GPU.

        They reach every kernel of the variant in each of its configurations.
        """
        self._examples = function
        return function

    def listed_examples(self) -> list[Example]:
        """Return the example calls of this variant; none for one that launches no kernels of its own."""
        return list(self._examples()) if self._examples else []

    def kernels(self, builds: Callable[[str], Iterable[Build]]) -> Callable[[str], Iterable[Build]]:
        """Decorator: register the function that lists this variant's kernels, as it would launch them on an architecture.

        Kernels launched by :class:`~onelaunch.launch.launch.Launch` need no such list: see :meth:`examples`.
        """
        self._kernels = builds
        return builds

    def why_not(self, query: Query) -> str | None:
        """Return why this variant cannot run the call, in words that complete "it ...", or ``None`` when it can.

        A predicate that raises, or that answers with something else than a string or ``None``, counts as "cannot run".
        """
        if query.grad and not self.capabilities.backward:
            return "has no backward pass"
        for predicate in self._supports:
            try:
                reason = predicate(query)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - one broken variant must not stop the choice among others
                return f"cannot say whether it can run: its predicate raised {type(error).__name__}: {in_a_line(error)}"
            if reason is not None:
                return reason if isinstance(reason, str) and reason else f"cannot run, and its predicate returned {reason!r}"
        return None

    def builds(self, architecture: str) -> list[Build]:
        """Return the kernels that this variant launches on an architecture such as ``sm_90a``; none for library calls.

        The function of :meth:`kernels` decides itself what it lists; example calls are made on the variant's architectures alone.
        """
        listed = list(self._kernels(architecture)) if self._kernels else []
        made_for = self.capabilities.architectures
        if self._examples is None or (made_for is not None and architecture not in made_for):
            return listed
        from onelaunch.operation.examples import recorded_builds  # it runs calls, and so needs what is below the registry

        return [*listed, *recorded_builds(self, self._examples(), architecture)]


@dataclass(frozen=True)
class Control:
    """A part of the operation timed beside its variants, such as its matrix product alone. Never dispatched to."""

    name: str
    run: Callable[[Any], torch.Tensor]
    """Function from the operation's checked call to one tensor."""
    oracle: Callable[..., torch.Tensor]
    """Reference of it: from the float64 arguments of the public function to the tensor that is right."""
    cost: Callable[[Case], Cost]
    summary: str = ""


class Loop(Protocol):
    """Many steps in a row of an operation that is a step, by one variant: each on what the one before gave."""

    def seconds(self) -> float:
        """Return the seconds of a step, in the mean over one run of the loop."""

    def problem(self) -> str | None:
        """Return what is wrong with the last run's results, or ``None``; single steps, which the oracle judges, are right."""


LoopMaker = Callable[[Variant, Mapping[str, Any]], Loop]
