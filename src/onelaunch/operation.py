"""Operations and their variants: the one registry that everything else reads.

An :class:`Operation` is a mathematical contract, a :class:`Variant` one way to carry it out. The public functions, the
tests, the studies, the dispatcher and the documentation all read these objects; nothing else in the project lists variants.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from numbers import Real
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, ParamSpec, Protocol, TypeAlias, TypeVar

import torch

from onelaunch.builds import Build
from onelaunch.errors import (
    ArgumentError,
    CostError,
    UnknownOperation,
    UnknownVariant,
    did_you_mean,
    in_a_line,
    listing,
)
from onelaunch.plugins import Plugin, load_once
from onelaunch.tracing import is_traced

if TYPE_CHECKING:
    from typing_extensions import Self  # in typing from Python 3.11 on

Direction = Literal["forward", "forward_backward"]
DIRECTIONS: tuple[Direction, ...] = ("forward", "forward_backward")

AUTO = "auto"
"""Name by which a call asks for the variant that the dispatcher chooses."""

NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")
"""Pattern of the names of operations, variants and controls: a letter, then at most 63 letters, digits, ``_``, ``.`` and ``-``.
They become file names, rows of reports and words of the command line."""

P = ParamSpec("P")
R = TypeVar("R")

Outputs: TypeAlias = tuple[str, ...] | Callable[[Mapping[str, Any]], tuple[str, ...]]
"""Names of an operation's results; or, where a call decides what it gives, the function that tells them from its arguments."""


Shapes: TypeAlias = tuple[tuple[int, ...] | None, ...]
"""Shapes of an operation's results, in the order of its outputs; ``None`` where a call does not ask for a result."""


def names_of(outputs: Outputs, arguments: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of the results of a call with these arguments."""
    return outputs(arguments) if callable(outputs) else outputs


class Query(NamedTuple):
    """What decides which variant may run and which is fastest: a call without its tensors. Hashable: the dispatch key."""

    operation: str
    device: str
    """As PyTorch prints it: ``cpu``, ``cuda:0``."""
    dtype: torch.dtype
    sizes: tuple[int, ...]
    """In the order of ``Operation.dimensions``."""
    grad: bool = False
    flags: tuple[str, ...] = ()
    """Of the operation's own, such as ``packed`` or ``initial_state``."""

    @property
    def device_type(self) -> str:
        return self.device.partition(":")[0]

    @property
    def direction(self) -> Direction:
        return "forward_backward" if self.grad else "forward"


def fixed(*sizes: int) -> tuple[int, ...]:
    """Return sizes as plain numbers: where a tracer keeps symbols, each set of sizes gets a graph of its own."""
    if not torch.compiler.is_compiling() and all(type(size) is int for size in sizes):
        return sizes
    from torch.fx.experimental.symbolic_shapes import guard_scalar  # slow to import, and there already when compiling

    return tuple(int(guard_scalar(size)) for size in sizes)


def remembered(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator: keep the answers of a function of hashable facts, such as a contract's checks and the query that follows.

    Errors are not kept. For a tracer, sizes may be symbols, which have no hash; its guards remember instead.
    """
    kept = functools.lru_cache(maxsize=4096)(function)

    @functools.wraps(function)
    def ask(*args: P.args, **kwargs: P.kwargs) -> R:
        return function(*args, **kwargs) if is_traced() else kept(*args, **kwargs)

    return ask


@dataclass(frozen=True, eq=False)
class Bundle:
    """Several tensors that make one argument, such as a quantized matrix and its scales. Base of immutable dataclasses.

    Whoever copies, casts or watches arguments does it through :meth:`tensors` and :meth:`map`, and need not know what they mean.
    """

    def tensors(self) -> dict[str, torch.Tensor]:
        """Those that there are, by name."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        """The same with a function applied to each tensor."""
        return replace(self, **{name: function(value) for name, value in self.tensors().items()})

    def to(self, device: torch.device | str) -> Self:
        """The same on a device."""
        return self.map(lambda tensor: tensor.to(device))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors().values())


class Call(Protocol):
    """The checked arguments of one call of an operation."""

    def query(self) -> Query: ...


@dataclass(frozen=True)
class Case:
    """One call of an operation, described without its tensors: what tests and studies enumerate."""

    operation: str
    sizes: Mapping[str, int]
    dtype: torch.dtype
    options: Mapping[str, Any] = field(default_factory=dict)
    """Choices of the operation's input maker that differ from its defaults."""
    name: str = ""

    def __str__(self) -> str:
        parts = [f"{key}{value}" for key, value in self.sizes.items()] + [str(self.dtype).removeprefix("torch.")]
        parts += [f"{key}={value}" for key, value in self.options.items()]
        return self.name or "-".join(parts)


@dataclass(frozen=True, slots=True)
class Cost:
    """Work that a way of computing cannot avoid: pure arithmetic, no measurement."""

    flops: int
    """FLOPs of the matrix products; the elementwise rest never decides here. 0 sets no bound."""
    bytes: int
    """Fewest bytes to and from memory: every launch reads its inputs once and writes its outputs once. 0 sets no bound."""
    launches: int | None = None
    """Kernels in the default path; ``None`` when a compiler decides."""
    matrix_dtype: str | None = None
    """Dtype of the matrix products' operands, where it is not the case's: the peak of this dtype bounds ``flops``."""
    written: int | None = None
    """Bytes of ``bytes`` that are written. Where they are few, the bandwidth of reads sets the bound; ``None``, where nothing is
    said, leaves it to that of copies."""

    def __post_init__(self) -> None:
        for name in ("flops", "bytes", "launches", "written"):
            value = getattr(self, name)
            if value is None and name in ("launches", "written"):
                continue
            if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) < math.inf:
                raise CostError(name, got=value, want="a number of at least 0 (0 sets no bound)")
        if self.written is not None and self.written > self.bytes:
            raise CostError("written", got=self.written, want=f"at most bytes, {self.bytes}, of which it is a part")

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.flops + other.flops,
            self.bytes + other.bytes,
            _sum(self.launches, other.launches),
            self.matrix_dtype,
            _sum(self.written, other.written),
        )


def _sum(one: int | None, other: int | None) -> int | None:
    """Return the sum of two numbers, or ``None`` where one of them is not known."""
    return None if one is None or other is None else one + other


@dataclass(frozen=True)
class Reading:
    """The public function's inputs for one case, and which of them take gradients."""

    arguments: dict[str, Any]
    differentiable: tuple[str, ...]


class Variant:
    """One way to carry out an operation. Made by ``@operation.variant(...)``; calling it runs it, unchecked."""

    def __init__(self, operation: Operation[..., Any], name: str, run: Callable[..., Any], tags: Mapping[str, Any]) -> None:
        self.operation = operation
        self.name = name
        self.run = run
        self.tags = dict(tags)
        self.summary = (inspect.getdoc(run) or "").partition("\n")[0]
        self.confirmed: set[Query] = set()
        """Queries for which the dispatcher has accepted the results of this variant."""
        self.latest: Query | None = None
        """The last of them that a call came with."""
        self._supports: list[Callable[[Query], str | None]] = []
        self._kernels: Callable[[str], Iterable[Build]] | None = None

    def __repr__(self) -> str:
        return f"<variant {self.operation.name}.{self.name}>"

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, ...]]:
        return _variant_by_name, (self.operation.__module__, self.operation.name, self.name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Variant:
        return self

    def __call__(self, call: Any) -> Any:
        return self.run(call)

    @property
    def launches(self) -> int | None:
        """Kernels that a forward call launches; ``None`` when a compiler decides."""
        return self.tags.get("launches")

    def supports(self, predicate: Callable[[Query], str | None]) -> Callable[[Query], str | None]:
        """Decorator: add a predicate that returns ``None`` when the variant can run, else why not ("needs a GPU")."""
        self._supports.append(predicate)
        return predicate

    def kernels(self, builds: Callable[[str], Iterable[Build]]) -> Callable[[str], Iterable[Build]]:
        """Decorator: the function that lists this variant's kernels, as it would launch them on an architecture."""
        self._kernels = builds
        return builds

    def why_not(self, query: Query) -> str | None:
        """Return why this variant cannot run the call, in words that complete "it ...", or ``None`` when it can.

        A predicate that raises, or that answers with something else than a string or ``None``, counts as "cannot run".
        """
        if query.grad and not self.tags.get("backward", True):
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
        """The kernels this variant launches on an architecture such as ``sm_90a`` (none for library calls)."""
        return list(self._kernels(architecture)) if self._kernels else []


@dataclass(frozen=True)
class Control:
    """A part of the operation timed beside its variants, such as its matrix product alone. Never dispatched to."""

    name: str
    run: Callable[[Any], torch.Tensor]
    """From the operation's call to one tensor."""
    oracle: Callable[..., torch.Tensor]
    """The same from the float64 arguments of the public function."""
    cost: Callable[[Case], Cost]
    summary: str = ""


class Loop(Protocol):
    """Many steps in a row of an operation that is a step, by one variant: each on what the one before gave."""

    def seconds(self) -> float:
        """Of a step, in the mean over one run of the loop."""

    def problem(self) -> str | None:
        """What is wrong with what the last run made, or ``None``; single steps, which the oracle judges, say what is right."""


LoopMaker = Callable[[Variant, Mapping[str, Any]], Loop]


class Operation(Generic[P, R]):
    """A mathematical contract with an oracle, an input maker, a cost and variants. Calling it is the public function.

    Built up by the files of its folder: the contract makes it with :func:`operation`, the others register into it.

    Attributes:
        name: what the registry and the command line call it.
        dimensions: names of its sizes, in the order that :class:`Query` holds them.
        outputs: names of the public function's results, or how they follow from its arguments.
        options: the input maker's choices with their defaults; a case may override them.
        stages: how many operations in a row it is made of, each of which rounds what it hands on: the gate's caps on errors are
            for one, and grow with the root of their number, as errors that know nothing of each other add up.
        defaults: per device type, the variants to prefer where nothing was measured.
        variants: by name, in order of registration.
    """

    def __init__(
        self,
        function: Callable[P, R],
        *,
        dimensions: tuple[str, ...],
        outputs: Outputs,
        bind: Callable[..., Call],
        options: Mapping[str, Any],
        defaults: Mapping[str, tuple[str, ...]],
        stages: int = 1,
    ) -> None:
        functools.update_wrapper(self, function)
        self.name = function.__name__
        self.dimensions = dimensions
        self.outputs = outputs
        self.bind = bind
        """The checked call made of the public function's arguments (without ``variant``)."""
        self.options = dict(options)
        self.defaults = dict(defaults)
        self.stages = stages
        self.variants: dict[str, Variant] = {}
        self.controls: dict[str, Control] = {}
        self.loops: dict[str, LoopMaker] = {}
        """By the regime in which studies time them: what makes the loop of a variant from the public function's arguments."""
        self._function = function
        self._oracle: Callable[..., tuple[torch.Tensor | None, ...]] | None = None
        self._inputs: Callable[[Case, torch.device, torch.Generator], Reading] | None = None
        self._cost: Callable[[Case, Variant | None, Direction], Cost] | None = None
        self._preference: Callable[[Query], tuple[str, ...]] = lambda query: ()
        self._query: Callable[[Case, str, bool], Query] | None = None
        self.shapes_of: Callable[[Any], Shapes] | None = None
        """The function registered with :meth:`shapes`, if any."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<operation {self.name}: {listing(self.variants)}>"

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, ...]]:
        return _operation_by_name, (self.__module__, self.name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Operation[P, R]:
        return self

    # Registration, used by the files of the operation's folder and by plugins

    def variant(self, name: str, **tags: Any) -> Callable[[Callable[..., Any]], Variant]:
        """Decorator: register a function from the checked call to the tuple of results as a variant.

        Common tags: ``launches`` (int), ``fuses`` (tuple of step names), ``gemm`` (``cublas``, ``triton``...),
        ``backward`` (bool, default True), ``requires`` (a package that must be installed), ``maker`` (whose code it is, where
        it is not ours: ``pytorch``, ``liger``...), ``tunes`` (bool: at its first call Triton's autotuner chooses among its
        kernels' configurations), ``barriers`` (a function that makes a checked call and returns how many barriers over the grid
        its kernel counted).
        """

        def register_variant(run: Callable[..., Any]) -> Variant:
            _check_name("variant", name)
            if name in self.variants:
                raise ArgumentError(f"{self.name} has a variant {name!r} already; choose another name.")
            self.variants[name] = Variant(self, name, run, tags)
            return self.variants[name]

        return register_variant

    def control(
        self, name: str, *, oracle: Callable[..., torch.Tensor], cost: Callable[[Case], Cost]
    ) -> Callable[[Callable[[Any], torch.Tensor]], Control]:
        """Decorator: register a part of the operation that studies time beside its variants."""

        def register_control(run: Callable[[Any], torch.Tensor]) -> Control:
            _check_name("control", name)
            self.controls[name] = Control(name, run, oracle, cost, (inspect.getdoc(run) or "").partition("\n")[0])
            return self.controls[name]

        return register_control

    def loop(self, regime: str) -> Callable[[LoopMaker], LoopMaker]:
        """Decorator: how a variant makes many steps in a row, ``running`` or ``served``, from the public function's arguments."""
        return lambda make: self.loops.setdefault(regime, make)

    def oracle(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Decorator: the float64 reference; takes the public function's arguments, returns all results."""
        self._oracle = function
        return function

    def inputs(self, function: Callable[..., Reading]) -> Callable[..., Reading]:
        """Decorator: make random arguments for a case, on a device, from a generator on that device."""
        self._inputs = function
        return function

    def costs(self, function: Callable[..., Cost]) -> Callable[..., Cost]:
        """Decorator: the cost of a case for a variant, or of the operation itself (its minimum) for ``None``."""
        self._cost = function
        return function

    def queries(self, function: Callable[[Case, str, bool], Query]) -> Callable[[Case, str, bool], Query]:
        """Decorator: the query that a call of this case on this device makes, without making the tensors."""
        self._query = function
        return function

    def shapes(self, function: Callable[[Any], Shapes]) -> Callable[[Any], Shapes]:
        """Decorator: the shapes of all results of a checked call, in the order of ``outputs``.

        ``None`` stands for a result that this call does not ask for. Where an operation declares them, the first results that a
        variant returns for a query are held against them.
        """
        self.shapes_of = function
        return function

    def prefers(self, function: Callable[[Query], tuple[str, ...]]) -> Callable[[Query], tuple[str, ...]]:
        """Decorator: the variants to try before ``defaults`` for a query of this size, where nothing near was measured."""
        self._preference = function
        return function

    # What tests, studies and the dispatcher ask

    def preference(self, query: Query) -> list[str]:
        """Return all variants in the order to prefer them in where nothing near was measured.

        On the meta device, where nothing is computed, it is the order of a CPU: those variants read no tensor on the host.
        """
        kind = "cpu" if query.device_type == "meta" else query.device_type
        first = (*self._preference(query), *self.defaults.get(kind, ()), *self.variants)
        return [name for name in dict.fromkeys(first) if name in self.variants]

    def case(self, dtype: torch.dtype | str, *, name: str = "", **given: Any) -> Case:
        """A case from its sizes and options, checked: ``linear_rnn.case("float16", B=4, T=2048, D=256, V=64)``."""
        sizes = {key: given.pop(key) for key in self.dimensions if key in given}
        if missing := [key for key in self.dimensions if key not in sizes]:
            raise ArgumentError(f"{self.name} needs the sizes {listing(self.dimensions)}; {listing(missing)} not given.")
        for key, value in sizes.items():
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ArgumentError(f"Size {key} of {self.name} is {value!r}; it must be an integer of at least 0.")
        for key in given:
            if key not in self.options:
                known = (*self.dimensions, *self.options)
                raise ArgumentError(
                    f"{self.name} has no size or option {key!r}.{did_you_mean(key, known)} Known: {listing(known)}."
                )
        return Case(self.name, sizes, parse_dtype(dtype), given, name)

    def option(self, case: Case, name: str) -> Any:
        """A case's option, or its default."""
        return case.options.get(name, self.options[name])

    def query(self, case: Case, device: str, *, grad: bool = False) -> Query:
        """The dispatch key of a case."""
        return _declared(self._query, self, "queries")(case, device, grad)

    def cost(self, case: Case, variant: Variant | None = None, direction: Direction = "forward") -> Cost:
        """What a variant must do for a case, or, for ``None``, the least that any way of computing it must do."""
        return _declared(self._cost, self, "costs")(case, variant, direction)

    def make_inputs(self, case: Case, device: torch.device, seed: int) -> Reading:
        """Random arguments of the public function for a case; the same seed gives the same values on a device."""
        generator = torch.Generator(device=device).manual_seed(seed)
        return _declared(self._inputs, self, "inputs")(case, device, generator)

    def reference(self, **arguments: Any) -> tuple[torch.Tensor | None, ...]:
        """The oracle's results; pass float64 tensors."""
        return _declared(self._oracle, self, "oracle")(**arguments)

    def get(self, name: str) -> Variant:
        """Return the variant of that name.

        Raises:
            UnknownVariant: There is none, or ``name`` is no string.
        """
        try:
            return self.variants[name]
        except (KeyError, TypeError):
            raise UnknownVariant(name, self.variants) from None

    def variants_for(self, device: str) -> list[str]:
        """Names of the variants that can run on a device type at all (judged at a typical small call)."""
        case = Case(self.name, dict.fromkeys(self.dimensions, 64), torch.float16)
        query = self.query(case, device)
        return [name for name, variant in self.variants.items() if variant.why_not(query) is None]


_REGISTRY: dict[str, Operation[..., Any]] = {}


def operation(**facts: Any) -> Callable[[Callable[P, R]], Operation[P, R]]:
    """Decorator: make a public function an operation and register it. Takes the arguments of :class:`Operation`."""

    def register(function: Callable[P, R]) -> Operation[P, R]:
        made = Operation(function, **facts)
        _check_name("operation", made.name)
        _check_parts(made.name, made.dimensions, made.outputs, made.bind)
        if made.name in _REGISTRY:
            raise ArgumentError(f"An operation {made.name!r} is registered already; choose another name.")
        _REGISTRY[made.name] = made
        return made

    return register


def find_operation(name: str) -> Operation[..., Any]:
    """Return the operation of that name; onelaunch's own are imported when the name is not known yet.

    Raises:
        UnknownOperation: There is none.
    """
    plugins()
    if name not in _REGISTRY:
        _load_our_own()
    try:
        return _REGISTRY[name]
    except KeyError:
        raise UnknownOperation(name, _REGISTRY) from None


def operations() -> Iterator[Operation[..., Any]]:
    """Yield all registered operations by name, those of plug-ins included."""
    _load_our_own()
    plugins()
    yield from (_REGISTRY[name] for name in sorted(_REGISTRY))


def plugins() -> tuple[Plugin, ...]:
    """Return the plug-ins that installed packages announce, loaded at the first call, with the reason where one was not.

    A plug-in that asks for an operation while it is being loaded gets the operations that are registered by then.
    """
    return load_once(_load_our_own, _snapshot)


def _snapshot() -> Callable[[], None]:
    """Return the function that puts the registry, every operation and every variant back into their present state."""
    known = dict(_REGISTRY)
    parts = [part for each in known.values() for part in (each, *each.variants.values())]
    states = [(part, {name: _copied(value) for name, value in vars(part).items()}) for part in parts]

    def put_back() -> None:
        _REGISTRY.clear()
        _REGISTRY.update(known)
        for part, state in states:
            vars(part).clear()
            vars(part).update(state)

    return put_back


def _copied(value: Any) -> Any:
    """Return a copy of what registration adds to, and anything else itself."""
    return value.copy() if isinstance(value, (dict, list, set)) else value


def _operation_by_name(module: str, name: str) -> Operation[..., Any]:
    """Return an operation that was pickled, after importing the module that registers it."""
    importlib.import_module(module)
    return find_operation(name)


def _variant_by_name(module: str, operation_name: str, name: str) -> Variant:
    """Return a variant that was pickled."""
    return _operation_by_name(module, operation_name).get(name)


def _check_name(kind: str, name: str) -> None:
    if not isinstance(name, str) or not NAME.fullmatch(name) or name == AUTO:
        raise ArgumentError(
            f"The name of {'an' if kind == 'operation' else 'a'} {kind} is {name!r}; it must begin with a letter, hold at most "
            f"64 letters, digits, '_', '.' and '-', and not be {AUTO!r}, which stands for the choice among variants."
        )


def _check_parts(name: str, dimensions: object, outputs: object, bind: object) -> None:
    """Raise :class:`ArgumentError` unless an operation's facts are of the kinds that :class:`Operation` names."""

    def names(value: object) -> bool:
        return isinstance(value, tuple) and all(isinstance(each, str) for each in value) and len(set(value)) == len(value)

    if not names(dimensions):
        raise ArgumentError(f"dimensions of {name} is {dimensions!r}; it must be a tuple of different names.")
    if not callable(outputs) and not names(outputs):
        raise ArgumentError(f"outputs of {name} is {outputs!r}; it must be a tuple of different names, or a function.")
    if not callable(bind):
        raise ArgumentError(f"bind of {name} is {bind!r}; it must be the function that checks a call's arguments.")


def parse_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """``"float16"`` or ``torch.float16`` to ``torch.float16``; anything else is an :class:`ArgumentError`."""
    if isinstance(dtype, torch.dtype):
        return dtype
    known = ("float16", "bfloat16", "float32")
    if dtype not in known:
        raise ArgumentError(f"dtype is {dtype!r}; it must be one of {listing(known)}.{did_you_mean(str(dtype), known)}")
    return getattr(torch, dtype)


@functools.cache
def _load_our_own() -> None:
    for room in ("onelaunch.ops", "onelaunch.decode"):
        importlib.import_module(room)


def _declared(part: Callable[..., Any] | None, owner: Operation[..., Any], decorator: str) -> Callable[..., Any]:
    if part is None:
        raise NotImplementedError(f"operation {owner.name!r} has not declared @{owner.name}.{decorator}")
    return part
