"""Variants (implementations) of an operation, and the controls and loops that studies time in addition.

Functions here take a *checked call* or a *query*. A checked call holds the arguments of the public function after all checks. It
is an object of the operation's own class, such as ``SwigluCall``, made by the ``bind`` function of the operation's contract. A
:class:`Query` is the call's dispatch key, without tensors. The dispatcher runs variants, the workbench times all three, and the
inspector and ``onelaunch prebuild`` compile the kernels of variants.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Protocol

import torch

from onelaunch.errors import ArgumentError
from onelaunch.launch.build import Build, CudaBuild
from onelaunch.launch.planned import forget_plans
from onelaunch.wording import in_a_line

if TYPE_CHECKING:
    from onelaunch.operation.definition import Operation
from onelaunch.operation.case import Case
from onelaunch.operation.cost import Cost
from onelaunch.operation.query import Direction, Query


@dataclass(frozen=True)
class Capabilities:
    """Facts about a variant that the library acts on. They are keywords of the variant's registration."""

    launches: int | None = None
    """Number of kernels that a forward call launches; ``None`` if it is not fixed, as if a compiler or library decides it."""
    backward_launches: int | None = None
    """Number of kernels that the backward pass launches in addition."""
    backward: bool = True
    """Flag that the variant has a backward pass."""
    requires: str | None = None
    """Name of another project's package that must be installed. ``auto`` never chooses such a variant."""
    own_tolerance: float | None = None
    """Largest norm-wise error that the tests of that project allow.

    A peer whose errors are larger than the verification gate allows, but within this tolerance, is incorrect by the gate. A study
    times it all the same, as a *peer outside the gate*, with which other variants may be compared.
    """
    by_name_only: bool = False
    """Flag that ``auto`` never chooses the variant, as for ablations."""
    experimental: bool = False
    """Flag that the variant has never run on the hardware it is made for. ``auto`` never chooses it."""
    tunes: bool = False
    """Flag that the first call runs Triton's autotuner."""
    compiles: bool = False
    """Flag that a call can be part of a function that ``torch.compile`` traces as a whole. A study examines it so too."""
    recompiles: bool = False
    """Flag that ``torch.compile`` makes its kernels anew for each set of sizes.

    A study does not judge it on probes, since each would be compiled for many seconds and would tell nothing of other sizes.
    """
    architectures: tuple[str, ...] | None = None
    """Architectures that its kernels are written for, such as ``("sm_90a",)``; ``None`` for all."""
    barriers: Callable[[Any], int] | None = None
    """Function that runs a checked call and returns the number of grid barriers that its kernel counted; studies report it."""
    engine: Callable[..., Any] | None = None
    """Function that makes the decoding engine for a model's weights.

    :mod:`onelaunch.decode.step.capabilities` states the arguments and results of this function, of ``barriers`` and of the five
    functions below.
    """
    engine_bytes: Callable[..., int] | None = None
    """Function that returns the bytes of device memory that this engine needs in addition to plain weights."""
    load: Callable[..., Any] | None = None
    """Function that loads a model's weights in the form that this engine reads, from folder, configuration and device."""
    load_bytes: Callable[..., int] | None = None
    """Function that returns the bytes of device memory that loaded weights and this engine need."""
    prompt_steps: Callable[..., int] | None = None
    """Function that returns the longest prompt, in tokens, that this engine feeds one token per step instead of in one pass."""
    in_a_row: Callable[..., Any] | None = None
    """Function that runs several steps in one launch, from a checked call and the number of steps."""

    @classmethod
    def of(cls, operation: str, variant: str, tags: Mapping[str, Any]) -> Capabilities:
        """Return the capabilities among the keywords of a variant's registration; ignore its other keywords.

        Args:
            operation: Name of the operation, for the message.
            variant: Name of the variant, for the message.
            tags: All keywords of the registration.

        Raises:
            ArgumentError: A value has a wrong type. The message names the variant, the keyword and the right type.
        """
        given = {each.name: tags[each.name] for each in fields(cls) if each.name in tags}
        for key, value in given.items():
            if (want := _wrong(key, value)) is not None:
                raise ArgumentError(f"{key} of variant {variant!r} of {operation} is {value!r}; it must be {want}.")
        if given.get("own_tolerance") is not None and given.get("requires") is None:
            raise ArgumentError(
                f"own_tolerance of variant {variant!r} of {operation} is {given['own_tolerance']!r} without requires; only a "
                "variant that needs another project's package may have the tolerance of that project's tests."
            )
        return cls(**given)

    @property
    def automatic(self) -> bool:
        """Flag that ``auto`` may choose the variant."""
        return self.requires is None and not self.by_name_only and not self.experimental


_UNSELECTABLE = (
    "barriers",
    "by_name_only",
    "compiles",
    "engine",
    "engine_bytes",
    "experimental",
    "in_a_row",
    "load",
    "load_bytes",
    "own_tolerance",
    "prompt_steps",
    "recompiles",
)
"""Capabilities that studies cannot select by: functions, and facts that only ``auto`` or the verification uses."""

_COUNTS = ("launches", "backward_launches")
"""Capabilities whose values are counts."""
_FLAGS = ("backward", "by_name_only", "compiles", "experimental", "recompiles", "tunes")
"""Capabilities whose values are flags."""


def _wrong(key: str, value: object) -> str | None:
    """Return what the value of a capability must be, or ``None`` if the given value is right."""
    if key in _COUNTS:
        good = value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 0)
        return None if good else "an integer of at least 0, or None"
    if key in _FLAGS:
        return None if isinstance(value, bool) else "True or False"
    if key == "requires":
        return None if value is None or (isinstance(value, str) and value) else "the name of a package, or None"
    if key == "own_tolerance":
        good = value is None or (isinstance(value, float) and 0 < value < 1)
        return None if good else "a number above 0 and below 1, or None"
    if key == "architectures":
        good = value is None or (isinstance(value, tuple) and all(isinstance(each, str) for each in value))
        return None if good else "a tuple of names such as 'sm_90a', or None"
    return None if value is None or callable(value) else "a function, or None"


@dataclass(frozen=True)
class Example:
    """Example call for which a variant's kernels are compiled and inspected."""

    case: Case
    direction: Direction = "forward"
    architectures: tuple[str, ...] | None = None
    """Architectures that the call can run on; ``None`` for all that the variant's kernels are written for."""
    name: str = ""
    """Name in reports if several calls launch the same kernel; by default the name of the case."""
    wants: tuple[str, ...] = ()
    """Names of the arguments whose gradients a ``forward_backward`` call asks for; empty for all arguments."""


class Variant:
    """Implementation of an operation, made by ``@operation.variant(...)``. Calling it runs it without checks."""

    def __init__(self, operation: Operation[..., Any], name: str, run: Callable[..., Any], tags: Mapping[str, Any]) -> None:
        self.operation = operation
        self.name = name
        self.run = run
        self.registered = run
        """Function that was registered. It differs from ``run`` if somebody replaced that later."""
        self.capabilities = Capabilities.of(operation.name, name, tags)
        self.tags = {key: value for key, value in tags.items() if key not in _UNSELECTABLE}
        """Keywords of the registration by which studies select variants: capabilities, and free ones such as ``gemm``."""
        self.summary = (inspect.getdoc(run) or "").partition("\n")[0]
        self.confirmed: set[Query] = set()
        """Queries for which the dispatcher has checked the number, devices and shapes of this variant's results.

        It checks the first results for each query only; :mod:`onelaunch.dispatch.choice` fills this set, and empties it when it
        has grown large, so that they are checked once more.
        """
        self.latest: Query | None = None
        """Query of the latest checked call: comparing its identity saves a look-up in ``confirmed``."""
        self._supports: list[Callable[[Query], str | None]] = []
        self._by_name: list[Callable[[Query], str | None]] = []
        self._slower: list[tuple[str, Callable[[Query], str | None]]] = []
        self._kernels: Callable[[str], Iterable[Build]] | None = None
        self._kernels_of_case: Callable[[Case, torch.device], Iterable[CudaBuild]] | None = None
        self._smaller: Callable[[Case], Case] | None = None
        self._examples: Callable[[], Iterable[Example]] | None = None

    def __repr__(self) -> str:
        return f"<variant {self.operation.name}.{self.name}>"

    # A process has one object per variant, the registered one. So a pickle holds its names only, and a deep copy of a model that
    # holds a variant shares the variant.

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, ...]]:
        from onelaunch.operation.registry import variant_by_name  # imported here, since the registry imports this module

        return variant_by_name, (self.operation.__module__, self.operation.name, self.name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Variant:
        return self

    def __call__(self, call: Any) -> Any:
        return self.run(call)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "run":
            forget_plans()  # they repeat what the former function did

    @property
    def is_repeatable(self) -> bool:
        """Flag that calls can be replayed from plans: the variant is of its operation's package, as registered, and of no other.

        The dispatcher asks while a call is recorded. Kernels of other libraries are launched in ways that no recording sees.
        """
        return self.run is self.registered and self.is_own and self.capabilities.requires is None

    @property
    def is_recordable(self) -> bool:
        """Flag that calls can be run on tensors without memory, to see what they launch. The dispatcher asks before it runs one.

        The variant has example calls, which are run so too, or is composed of variants of other operations, which the tag
        ``parts`` names. Other variants may change a state that their calls refer to, or launch other libraries' kernels, which
        nothing would keep from running.
        """
        known = self._examples is not None or "parts" in self.tags
        return known and self.run is self.registered and self.capabilities.requires is None

    @property
    def package(self) -> str:
        """Name of the top-level package that holds the variant's function, such as ``onelaunch``; empty if it has none.

        It follows the function that runs: if another package replaces ``run``, this is the name of that package.
        """
        return _root_of(self.run)

    @property
    def is_own(self) -> bool:
        """Flag that the variant belongs to the package of its operation, whose tests run the operation's probes on it.

        So the dispatcher lets ``auto`` choose it without a measurement.
        """
        return self.package == _root_of(self.operation)

    @property
    def launches(self) -> int | None:
        """Number of kernels that a forward call launches; ``None`` if it is not fixed, see :class:`Capabilities`."""
        return self.capabilities.launches

    def supports(self, predicate: Callable[[Query], str | None]) -> Callable[[Query], str | None]:
        """Add the decorated predicate, which returns ``None`` if the variant can run, else a reason such as "needs a GPU"."""
        self._supports.append(predicate)
        return predicate

    def examples(self, function: Callable[[], Iterable[Example]]) -> Callable[[], Iterable[Example]]:
        """Register the decorated function, which lists example calls for compiling and inspecting the kernels without a GPU.

        Together the calls must launch every kernel of the variant in each of its configurations.
        """
        self._examples = function
        return function

    def listed_examples(self) -> list[Example]:
        """Return the example calls of this variant; an empty list if none are registered. Tests run them."""
        return list(self._examples()) if self._examples else []

    def kernels(self, builds: Callable[[str], Iterable[Build]]) -> Callable[[str], Iterable[Build]]:
        """Register the decorated function, which lists the kernels that this variant would launch on an architecture.

        Kernels launched through :class:`~onelaunch.launch.launch.Launch` need no such list; see :meth:`examples`.
        """
        self._kernels = builds
        return builds

    def kernels_of_case(
        self, builds: Callable[[Case, torch.device], Iterable[CudaBuild]]
    ) -> Callable[[Case, torch.device], Iterable[CudaBuild]]:
        """Register the decorated function, which lists the CUDA C++ kernels that a call of a case compiles on a GPU.

        A study that compiles ahead in other processes then compiles these, and calls the variant only at probes there, which are
        small. So it needs no memory of the GPU for the inputs of the case. A variant that compiles nothing which another process
        finds in a cache, such as one by PyTorch's own kernels, lists none.
        """
        self._kernels_of_case = builds
        return builds

    def smaller(self, function: Callable[[Case], Case]) -> Callable[[Case], Case]:
        """Register the decorated function, which returns a smaller case whose call compiles the same kernels as that of a case.

        A study that compiles ahead in other processes calls the variant at this case there, once for all cases that have it.
        """
        self._smaller = function
        return function

    def builds_of_case(self, case: Case, device: torch.device) -> list[CudaBuild] | None:
        """Return the kernels that a call of a case compiles on a GPU, or ``None`` if the variant does not list them."""
        return None if self._kernels_of_case is None else list(self._kernels_of_case(case, device))

    def smaller_case(self, case: Case) -> Case:
        """Return a case whose call compiles what one of the given case does: that case itself, or what :meth:`smaller` names."""
        return case if self._smaller is None else self._smaller(case)

    @property
    def lists_kernels(self) -> bool:
        """Flag that :meth:`builds_of_case` lists the kernels of a call."""
        return self._kernels_of_case is not None

    def why_not(self, query: Query) -> str | None:
        """Return why this variant cannot run a call, as a predicate that completes "it ...", or ``None`` if it can.

        A registered predicate that raises, or that returns neither a string nor ``None``, counts as "cannot run".
        """
        if query.grad and not self.capabilities.backward:
            return "has no backward pass"
        return _first_reason(self._supports, query, "can run", "cannot run")

    def by_name_where(self, predicate: Callable[[Query], str | None]) -> Callable[[Query], str | None]:
        """Add the decorated predicate about calls that the variant can run, and for which ``auto`` leaves it out.

        Tables of measured times are looked up at the nearest measured call, which may be one that the variant is much better at.
        The predicate returns ``None`` if ``auto`` may choose the variant, else the reason as a predicate that completes "it ...".
        """
        self._by_name.append(predicate)
        return predicate

    def why_by_name(self, query: Query) -> str | None:
        """Return why ``auto`` leaves the variant out for a call that it can run, as a predicate that completes "it ...".

        ``None`` if no registered predicate says so. One that raises, or that returns neither a string nor ``None``, does.
        """
        return _first_reason(self._by_name, query, "may be chosen", "runs only by name")

    def slower_than(self, other: str) -> Callable[[Callable[[Query], str | None]], Callable[[Query], str | None]]:
        """Return a decorator for a predicate about calls that this variant runs more slowly than another variant.

        ``onelaunch explain`` quotes it where no table of measured times says which of the two is faster. It has no influence on
        the choice.

        Args:
            other: Name of the other variant of the operation, such as a peer that runs only by name.

        Returns:
            Decorator for a function from a query to ``None``, or to a clause that says what was measured, or that nothing was.
        """

        def add(predicate: Callable[[Query], str | None]) -> Callable[[Query], str | None]:
            self._slower.append((other, predicate))
            return predicate

        return add

    def why_slower(self, query: Query) -> dict[str, str]:
        """Return the reason why this variant is slower, by the name of the faster variant; empty if nothing is known.

        A predicate that raises, or that returns no string, says nothing: only explanations ask.
        """
        found: dict[str, str] = {}
        for other, predicate in self._slower:
            with contextlib.suppress(Exception):
                if isinstance(reason := predicate(query), str) and reason:
                    found.setdefault(other, reason)
        return found

    def builds(self, architecture: str) -> list[Build]:
        """Return the kernels of its own that this variant launches on an architecture such as ``sm_90a``.

        The function registered with :meth:`kernels` is called for every architecture. Example calls are recorded only for the
        architectures in the variant's capabilities.
        """
        listed = list(self._kernels(architecture)) if self._kernels else []
        made_for = self.capabilities.architectures
        if self._examples is None or (made_for is not None and architecture not in made_for):
            return listed
        from onelaunch.operation.examples import recorded_builds  # imported here, since it imports this module

        return [*listed, *recorded_builds(self, self._examples(), architecture)]


def _first_reason(predicates: Iterable[Callable[[Query], str | None]], query: Query, asked: str, refused: str) -> str | None:
    """Return the first reason that a predicate gives for a call, or ``None``. One that fails gives one too.

    ``asked`` and ``refused`` are clauses about the variant, for a predicate that raises and for one that returns something else.
    """
    for predicate in predicates:
        try:
            reason = predicate(query)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - one broken variant must not prevent the choice among the others
            return f"cannot say whether it {asked}: its predicate raised {type(error).__name__}: {in_a_line(error)}"
        if reason is not None:
            return reason if isinstance(reason, str) and reason else f"{refused}, and its predicate returned {reason!r}"
    return None


def _root_of(part: object) -> str:
    """Return the name of the top-level package of a function or an operation, or an empty string if it names no module."""
    return (getattr(part, "__module__", None) or "").partition(".")[0]


@dataclass(frozen=True)
class Control:
    """Part of an operation that studies time in addition, such as its matrix product alone. It is never dispatched to."""

    name: str
    """Name of the control."""
    run: Callable[[Any], torch.Tensor]
    """Function from the operation's checked call to one tensor, the control's result."""
    oracle: Callable[..., torch.Tensor]
    """Reference: function from the public function's float64 arguments to the correct result."""
    cost: Callable[[Case], Cost]
    """Function from a case to the control's cost."""
    summary: str = ""
    """First line of the docstring of ``run``."""


class Loop(Protocol):
    """Protocol of a loop of many steps of an operation by one variant. Each step takes the previous step's results."""

    def seconds(self) -> float:
        """Run the loop once, and return the mean seconds per step."""

    def problem(self) -> str | None:
        """Return how the last run's results differ from those of single steps, or ``None`` if they agree.

        Single steps count as right, since the oracle has judged them.
        """


LoopMaker = Callable[[Variant, Mapping[str, Any]], Loop]
"""Function that makes a loop from a variant and the public function's arguments."""
