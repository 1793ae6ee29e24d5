"""Definition of an operation: a mathematical contract with an oracle, an input maker, a cost and variants.

``contract.py`` of each operation creates an :class:`Operation` through ``registry.py``, which also calls :func:`check_name`. The
dispatcher, the workbench, the commands, ``examples.py`` and the engines of ``decode`` read it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, TypeVar

import torch

from onelaunch.device.architectures import architecture_of
from onelaunch.errors import ArgumentError, UnknownVariant
from onelaunch.launch.planned import Planned
from onelaunch.operation.accuracy import StatedErrors, checked_errors
from onelaunch.operation.case import Case, Reading
from onelaunch.operation.cost import Cost
from onelaunch.operation.probe import Probe, Probes
from onelaunch.operation.query import AUTO, NAME, Call, Direction, Outputs, P, Query, R, Shapes, parse_dtype
from onelaunch.operation.variant import Control, LoopMaker, Variant
from onelaunch.wording import did_you_mean, listing


class Operation(Generic[P, R]):
    """Mathematical contract with an oracle, an input maker, a cost and variants. Calling it calls the public function.

    The files of its folder build it up: ``contract.py`` creates it with :func:`operation`, and the other files register into it.

    Attributes:
        name: Name in the registry and on the command line.
        dimensions: Names of its sizes, in the order in which :class:`Query` holds them.
        outputs: Names of the public function's results, or a function that returns them for the arguments of a call.
        options: Options of the input maker with their defaults. A case may override them.
        stages: Number of consecutive operations that it consists of, each of which rounds its result. The caps on errors of the
            verification gate hold for one stage. They grow with the square root of this number, as independent errors do.
        stated_errors: Norm-wise errors that float32 results and gradients may have in calls of 16-bit inputs, by name and by the
            dtype of the inputs. Twice the error of the PyTorch baseline is allowed where that is more.
        defaults: Variants to prefer where nothing was measured, by device type.
        variants: Variants by name, in order of registration.
        controls: Controls by name, in order of registration.

    The argument ``planned`` says that calls are replayed (:class:`onelaunch.launch.planned.Planned`), which asks of the public
    function that it depends on nothing but facts about its arguments that are known without reading them.
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
        planned: bool = False,
        stated_errors: StatedErrors | None = None,
    ) -> None:
        functools.update_wrapper(self, function)
        self.name = function.__name__
        self.dimensions = dimensions
        self.outputs = outputs
        self.bind = bind
        """Function that checks the public function's arguments (without ``variant``) and returns the checked call."""
        self.options = dict(options)
        self.defaults = dict(defaults)
        self.stages = stages
        self.stated_errors = checked_errors(self.name, stated_errors or {})
        self.variants: dict[str, Variant] = {}
        self.controls: dict[str, Control] = {}
        self.loops: dict[str, LoopMaker] = {}
        """Functions that make a :class:`Loop` from a variant and the public function's arguments, by regime of a study."""
        self._function: Callable[P, R] = Planned(function, taped=True) if planned else function
        self._oracle: Callable[..., tuple[torch.Tensor | None, ...]] | None = None
        self._inputs: Callable[[Case, torch.device, torch.Generator], Reading] | None = None
        self._cost: Callable[[Case, Variant | None, Direction], Cost] | None = None
        self._preference: Callable[[Query], tuple[str, ...]] | None = None
        self._query: Callable[[Case, str, bool], Query] | None = None
        self._probes: Probes | None = None
        self._typical: Callable[[str], Iterable[Case]] | None = None
        self.shapes_of: Callable[[Any], Shapes] | None = None
        """Function registered with :meth:`shapes`, or ``None``."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<operation {self.name}: {listing(self.variants)}>"

    # A process has one object per operation, the registered one, and plug-ins register into it. So a pickle holds its name only,
    # and a deep copy of a model that holds an operation shares it.

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, ...]]:
        from onelaunch.operation.registry import operation_by_name  # imported here, since the registry imports this module

        return operation_by_name, (self.__module__, self.name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Operation[P, R]:
        return self

    # Registration: decorators for the files of the operation's folder and for plug-ins

    def variant(self, name: str, **tags: Any) -> Callable[[Callable[..., Any]], Variant]:
        """Register the decorated function, from a checked call to the tuple of results, as a variant.

        Args:
            name: Name of the variant, which must be new in this operation.
            **tags: Facts about the variant. The library acts on those that are fields of
                :class:`~onelaunch.operation.Capabilities`, and checks their types. Studies select variants by the tags in the
                attribute ``tags`` of a variant: all but some of these fields. Common tags that are not such fields are ``fuses``
                (tuple of the names of fused steps), ``hands`` (tuple of the names of intermediates that launches pass on through
                device memory; the operation's ``cost.py`` reads it), ``gemm`` (how matrix products are made: ``cublas``,
                ``triton``...), ``maker`` (author of code of another project: ``pytorch``, ``liger``...), ``usual`` (whether that
                project's own layers call it so) and ``yardstick`` (marks the PyTorch baseline, whose error sets the tolerance).

        Raises:
            ArgumentError: The operation already has a variant or a control of this name, or a capability has a wrong type.
        """

        def register_variant(run: Callable[..., Any]) -> Variant:
            check_name("variant", name)
            if name in self.variants:
                raise ArgumentError(f"{self.name} has a variant {name!r} already; choose another name.")
            if name in self.controls:
                raise ArgumentError(f"{self.name} has a control {name!r} already; studies could not tell them apart.")
            self.variants[name] = Variant(self, name, run, tags)
            return self.variants[name]

        return register_variant

    def control(
        self, name: str, *, oracle: Callable[..., torch.Tensor], cost: Callable[[Case], Cost]
    ) -> Callable[[Callable[[Any], torch.Tensor]], Control]:
        """Register the decorated function as a control: a part of the operation that studies time in addition.

        Args:
            name: Name of the control, which must be new in this operation.
            oracle: Reference for its result, from the public function's float64 arguments.
            cost: Function from a case to the control's cost.

        Raises:
            ArgumentError: The operation already has a control or a variant of this name.
        """

        def register_control(run: Callable[[Any], torch.Tensor]) -> Control:
            check_name("control", name)
            if name in self.controls:
                raise ArgumentError(f"{self.name} has a control {name!r} already; choose another name.")
            if name in self.variants:
                raise ArgumentError(f"{self.name} has a variant {name!r} already; studies could not tell them apart.")
            self.controls[name] = Control(name, run, oracle, cost, (inspect.getdoc(run) or "").partition("\n")[0])
            return self.controls[name]

        return register_control

    def loop(self, regime: str) -> Callable[[LoopMaker], LoopMaker]:
        """Register the decorated function, which makes loops of many steps for one regime of a study.

        :class:`onelaunch.operation.Loop` describes such a loop.

        Args:
            regime: ``running`` for consecutive steps on the device, ``served`` for steps as the public Python loop runs them.
        """

        def register_loop(make: LoopMaker) -> LoopMaker:
            if regime in self.loops:
                raise ArgumentError(f"{self.name} has a loop for the regime {regime!r} already; an operation takes one.")
            self.loops[regime] = make
            return make

        return register_loop

    def oracle(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Register the decorated function as the oracle: from the public function's float64 arguments to all results."""
        self._oracle = _only(self._oracle, function, self, "oracle")
        return function

    def inputs(self, function: Callable[..., Reading]) -> Callable[..., Reading]:
        """Register the decorated function, which makes random arguments for a case, a device and a generator on it."""
        self._inputs = _only(self._inputs, function, self, "inputs")
        return function

    def costs(self, function: Callable[..., Cost]) -> Callable[..., Cost]:
        """Register the decorated function, which returns the cost of a case for a variant; for ``None``, the smallest."""
        self._cost = _only(self._cost, function, self, "costs")
        return function

    def queries(self, function: Callable[[Case, str, bool], Query]) -> Callable[[Case, str, bool], Query]:
        """Register the decorated function, which returns the query of a case on a device without creating tensors."""
        self._query = _only(self._query, function, self, "queries")
        return function

    def shapes(self, function: Callable[[Any], Shapes]) -> Callable[[Any], Shapes]:
        """Register the decorated function, which returns the shapes of a checked call's results in the order of ``outputs``.

        ``None`` stands for a result that this call does not ask for. If an operation declares shapes, the first results that a
        variant returns for a query are compared with them.
        """
        self.shapes_of = _only(self.shapes_of, function, self, "shapes")
        return function

    def prefers(self, function: Callable[[Query], tuple[str, ...]]) -> Callable[[Query], tuple[str, ...]]:
        """Register the decorated function, which returns the variants to prefer to ``defaults`` for an unmeasured query."""
        self._preference = _only(self._preference, function, self, "prefers")
        return function

    def probes(self, function: Probes) -> Probes:
        """Register the decorated function, which yields the operation's edge cases, as :class:`Case` or :class:`Probe` objects.

        They are few and small, so that judging a variant on all of them takes seconds on a CPU.
        """
        self._probes = _only(self._probes, function, self, "probes")
        return function

    def typical(self, function: Callable[[str], Iterable[Case]]) -> Callable[[str], Iterable[Case]]:
        """Register the decorated function, which yields typical cases on a type of device, ``cuda`` or ``cpu``.

        ``onelaunch tune`` measures them where no shape is given. They are few, and those for a CPU are small.
        """
        self._typical = _only(self._typical, function, self, "typical")
        return function

    # Queries: methods for tests, studies and the dispatcher

    def typical_cases(self, device_type: str) -> list[Case]:
        """Return the typical cases on a type of device, ``cuda`` or ``cpu``; none if the operation lists none.

        Raises:
            ArgumentError: The registered function yields something else than cases of this operation.
        """
        cases = list(self._typical(device_type)) if self._typical else []
        if (
            wrong := next((each for each in cases if not isinstance(each, Case) or each.operation != self.name), None)
        ) is not None:
            raise ArgumentError(f"The typical cases of {self.name} hold {wrong!r}; each must be a Case of {self.name}.")
        return cases

    def listed_probes(self) -> list[Probe]:
        """Return the probes of the operation, or none if it has registered none.

        Raises:
            ArgumentError: The registered function yields something else, or two probes of one name.
        """
        probes = [Probe(each) if isinstance(each, Case) else each for each in (self._probes() if self._probes else ())]
        if (wrong := next((each for each in probes if not isinstance(each, Probe)), None)) is not None:
            raise ArgumentError(f"The probes of {self.name} hold {wrong!r}; each must be a Case or a Probe.")
        names = [str(each) for each in probes]
        if (twice := next((name for name in names if names.count(name) > 1), None)) is not None:
            raise ArgumentError(f"Two probes of {self.name} are named {twice!r}; each needs a name of its own.")
        return probes

    @property
    def judging_modules(self) -> tuple[str, ...]:
        """Names of the modules that list the operation's probes, compute its reference outputs and make its inputs."""
        names = [getattr(each, "__module__", None) for each in (self._probes, self._oracle, self._inputs)]
        return tuple(dict.fromkeys(name for name in names if name))

    def preference(self, query: Query) -> list[str]:
        """Return the names of all variants in the order of preference that decides where no similar call was measured.

        The meta device, on which nothing is computed, has the order of a CPU, since those variants read no tensor on the host.
        """
        return [name for name in dict.fromkeys((*self.preferred(query), *self.variants)) if name in self.variants]

    def preferred(self, query: Query) -> tuple[str, ...]:
        """Return the names that the operation itself prefers for a query; some may be names of variants that do not exist."""
        kind = "cpu" if query.device_type == "meta" else query.device_type
        return (*(self._preference(query) if self._preference else ()), *self.defaults.get(kind, ()))

    def case(self, dtype: torch.dtype | str, *, name: str = "", **given: Any) -> Case:
        """Return a checked case of sizes and options, such as ``linear_rnn.case("float16", B=4, T=2048, D=256, V=64)``."""
        sizes = {key: given.pop(key) for key in self.dimensions if key in given}
        if missing := [key for key in self.dimensions if key not in sizes]:
            raise ArgumentError(f"{self.name} needs the sizes {listing(self.dimensions)}; these are missing: {listing(missing)}.")
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
        """Return the value of an option of a case, or the option's default."""
        return case.options.get(name, self.options[name])

    def query(self, case: Case, device: str, *, grad: bool = False) -> Query:
        """Return the dispatch key of a case."""
        return _declared(self._query, self, "queries")(case, device, grad)

    def cost(self, case: Case, variant: Variant | None = None, direction: Direction = "forward") -> Cost:
        """Return the cost of a case for a variant, or for ``None`` the smallest cost that any implementation can have."""
        return _declared(self._cost, self, "costs")(case, variant, direction)

    def make_inputs(self, case: Case, device: torch.device, seed: int) -> Reading:
        """Return random arguments of the public function for a case. The same seed gives the same values on a device."""
        # A pretended device (fake tensors, no GPU) has no generator of its own, so the CPU's stands in for it.
        generator = torch.Generator("cpu" if architecture_of(device) else device).manual_seed(seed)
        return _declared(self._inputs, self, "inputs")(case, device, generator)

    def reference(self, **arguments: Any) -> tuple[torch.Tensor | None, ...]:
        """Return the oracle's results for float64 arguments."""
        return _declared(self._oracle, self, "oracle")(**arguments)

    def get(self, name: str) -> Variant:
        """Return the variant of a name.

        Raises:
            UnknownVariant: The operation has no variant of this name, or ``name`` is not a string.
        """
        try:
            return self.variants[name]
        except (KeyError, TypeError):
            raise UnknownVariant(name, self.variants) from None

    def variants_for(self, device: str) -> list[str]:
        """Return the names of the variants that can run on a device, judged by a small float16 call in which all sizes are 64.

        It is for users and their tests; the package calls :meth:`Variant.why_not` with the query of the actual call.
        """
        case = Case(self.name, dict.fromkeys(self.dimensions, 64), torch.float16)
        query = self.query(case, device)
        return [name for name, variant in self.variants.items() if variant.why_not(query) is None]


def check_name(kind: str, name: str) -> None:
    """Raise :class:`ArgumentError` unless a name is valid for an operation, a variant or a control."""
    if not isinstance(name, str) or not NAME.fullmatch(name) or name == AUTO:
        raise ArgumentError(
            f"The name of {'an' if kind == 'operation' else 'a'} {kind} is {name!r}; it must begin with a letter, hold at most "
            f"64 letters, digits, '_', '.' and '-', and not be {AUTO!r}, which stands for the choice among variants."
        )


def _declared(part: Callable[..., Any] | None, owner: Operation[..., Any], decorator: str) -> Callable[..., Any]:
    """Return a registered function; raise NotImplementedError if the operation has not registered it."""
    if part is None:
        raise NotImplementedError(f"Operation {owner.name!r} has not declared @{owner.name}.{decorator}.")
    return part


F = TypeVar("F", bound=Callable[..., Any])


def _only(present: Callable[..., Any] | None, function: F, owner: Operation[..., Any], decorator: str) -> F:
    """Return a function to register; raise :class:`ArgumentError` if the operation has registered one before."""
    if present is not None:
        raise ArgumentError(f"Operation {owner.name} has declared @{owner.name}.{decorator} already; it takes only one.")
    return function
