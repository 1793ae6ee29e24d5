"""Which variant runs a call here, and why.

Three parts: the key (:class:`onelaunch.operation.Query`), the tables of what was measured on a device (the user's and the
package's, see :mod:`onelaunch.measured`), and the choice. Where nothing near was measured, the operation's own order of
preference decides.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from onelaunch.errors import ArgumentError, UnknownVariant, VariantResultError, VariantUnsupported, listing
from onelaunch.hardware import describe
from onelaunch.measured import Measured, nearest
from onelaunch.operation import Call, Operation, Query, Variant, find_operation

AUTO = "auto"

CONFIRMED = 4096
"""Number of queries for which a variant remembers that its results were accepted."""

TIE = 1.03
"""Variants this close to the fastest measured one count as equal; the operation's own order then decides."""


@dataclass(frozen=True)
class Standing:
    """What dispatch thinks of one variant for one call."""

    variant: str
    chosen: bool
    reason_against: str | None
    """Why it cannot run; ``None`` when it can."""
    microseconds: float | None
    """As measured nearest to this call, if it was."""
    times_slower: float | None
    """Than the fastest measured variant that can run."""


@dataclass(frozen=True)
class Explanation:
    """The dispatcher's answer with its grounds."""

    query: Query
    chosen: str
    because: str
    standings: tuple[Standing, ...]
    table: Path | None = None
    """The file that the measured times were read from, where something near was measured."""


def run(operation: Operation[..., Any], call: Call, variant: str) -> Any:
    """Run a checked call by the named variant, or the one that :func:`choose` names for ``"auto"``.

    The first results of a variant for a query are checked in number, type and shape. Under ``torch.compile`` none are.

    Raises:
        ArgumentError: ``variant`` is no string.
        UnknownVariant: The operation has no variant of that name.
        VariantUnsupported: The variant cannot run this call.
        VariantResultError: The variant returned something else than the operation's results.
    """
    query = call.query()
    if torch.compiler.is_compiling():
        return operation.variants[_constant_name(variant, *query)].run(call)
    chosen = operation.variants[_name(variant, query)]
    results = chosen.run(call)
    if query is not chosen.latest:  # contracts hand out one query for one kind of call: comparing identity saves a hash
        if query not in chosen.confirmed:
            check_results(chosen, call, results)
            if len(chosen.confirmed) >= CONFIRMED:
                chosen.confirmed.clear()
            chosen.confirmed.add(query)
        chosen.latest = query
    return results


def check_results(variant: Variant, call: Call, results: Any) -> None:
    """Check number, type and shape of what a variant returned for a checked call.

    Shapes are checked where the operation declares them (:meth:`onelaunch.operation.Operation.shapes`).

    Raises:
        VariantResultError: They are not the results of the operation; names the variant and what it must return.
    """
    operation = variant.operation
    names = operation.outputs if isinstance(operation.outputs, tuple) else None
    shapes = operation.shapes_of(call) if operation.shapes_of else None
    count = len(names) if names is not None else len(shapes) if shapes is not None else None
    wanted = "a tuple of its results" if count is None else f"a tuple of {count}"
    wanted += f" ({listing(names)})" if names else ""
    problem = None
    if not isinstance(results, tuple):
        problem = f"returned {type(results).__name__}; it must return {wanted}"
    elif count is not None and len(results) != count:
        problem = f"returned {len(results)} results; it must return {wanted}"
    else:
        for index, value in enumerate(results):
            name = names[index] if names else f"result {index}"
            problem = problem or _wrong_result(name, value, shapes[index] if shapes else None)
    if problem is not None:
        raise VariantResultError(operation.name, variant.name, problem=problem)


def _wrong_result(name: str, value: object, want: tuple[int, ...] | None) -> str | None:
    """Return what is wrong with one result, in words that complete "the variant ...", or ``None``."""
    if value is not None and not isinstance(value, torch.Tensor):
        return f"returned {name} as {type(value).__name__}; it must be a torch.Tensor"
    if want is None or (value is not None and tuple(value.shape) == tuple(want)):
        return None
    got = "as None" if value is None else f"with shape {list(value.shape)}"
    return f"returned {name} {got}; its shape must be {list(want)}"


@functools.lru_cache(maxsize=4096)
def choose(query: Query) -> Variant:
    """The variant for a call: the fastest measured near it that can run, else the first of the operation's defaults.

    Other libraries run by name alone: they are measured beside ours, and promise less (such as for decays of -inf, or accuracy).
    """
    operation = find_operation(query.operation)
    able = {name: operation.variants[name] for name in _able(operation, query) if "requires" not in operation.variants[name].tags}
    if not able:
        reasons = {name: variant.why_not(query) or "runs by name alone" for name, variant in operation.variants.items()}
        raise VariantUnsupported(
            operation.name, AUTO, reason="; ".join(f"{name} {reason}" for name, reason in reasons.items()), instead=()
        )
    if (measured := _measured(operation, query)) is not None:
        times = {name: time for name, time in measured.microseconds.items() if name in able}
        if times:
            close = [name for name, time in times.items() if time <= TIE * min(times.values())]
            return able[min(close, key=operation.preference(query).index)]
    return able[min(able, key=operation.preference(query).index)]


def explain(query: Query) -> Explanation:
    """Why :func:`choose` answers as it does, with a line for every variant."""
    operation = find_operation(query.operation)
    chosen = choose(query)
    measured = _measured(operation, query)
    times = measured.microseconds if measured else {}
    able = _able(operation, query)
    fastest = min((times[name] for name in able if name in times), default=None)
    standings = tuple(
        Standing(
            variant=name,
            chosen=name == chosen.name,
            reason_against=variant.why_not(query),
            microseconds=times.get(name),
            times_slower=times[name] / fastest if fastest and name in times else None,
        )
        for name, variant in operation.variants.items()
    )
    if chosen.name in times and measured:
        because = f"fastest measured of ours, or within {TIE - 1:.0%} of it, at {measured.where()}"
    else:
        order = f"{operation.name}'s order of preference on {query.device_type}"
        because = f"first in {order} that can run; {_unmeasured(operation, query, measured)}"
    return Explanation(query, chosen.name, because, standings, measured.path if measured else None)


def _unmeasured(operation: Operation[..., Any], query: Query, measured: Measured | None) -> str:
    """Return why no measured time decides: for a call in one direction, times in the other say nothing."""
    if measured is not None:
        return f"near it only others were measured, at {measured.where()}"
    other = _measured(operation, query._replace(grad=not query.grad))
    if other is None:
        return "nothing near was measured"
    said = "forward was measured near it, forward_backward was not"
    return said if query.grad else "forward_backward was measured near it, forward was not"


def pick(variant: str, query: Query) -> Variant:
    """The variant that would run a call: that of :func:`choose` for ``"auto"``, else the named one, which must support it."""
    return find_operation(query.operation).variants[_name(variant, query)]


def _name(variant: str, query: Query) -> str:
    """Return the name of the variant that will run, checked."""
    if not isinstance(variant, str):
        raise ArgumentError(f"variant is {variant!r}; it must be the name of a variant of {query.operation}, or {AUTO!r}.")
    return choose(query).name if variant == AUTO else _checked(variant, query)


def _constant_name(variant: str, *query: Any) -> str:
    """A constant under ``torch.compile``, since shapes are known when a graph is traced."""
    return _name(variant, Query(*query))


# What torch.compiler.assume_constant_result does; to call that would import the compiler, a second at every start.
vars(_constant_name)["_dynamo_marked_constant"] = True


@functools.lru_cache(maxsize=4096)
def _checked(variant: str, query: Query) -> str:
    """The named variant, or why not."""
    operation = find_operation(query.operation)
    if variant not in operation.variants:
        raise UnknownVariant(variant, (AUTO, *operation.variants))
    if (reason := operation.get(variant).why_not(query)) is not None:
        raise VariantUnsupported(operation.name, variant, reason=reason, instead=_able(operation, query))
    return variant


def _able(operation: Operation[..., Any], query: Query) -> list[str]:
    return [name for name, variant in operation.variants.items() if variant.why_not(query) is None]


def _measured(operation: Operation[..., Any], query: Query) -> Measured | None:
    """Return what was measured nearest to a query; on the meta device nothing can be."""
    if query.device_type not in ("cpu", "cuda"):
        return None
    sizes = dict(zip(operation.dimensions, query.sizes, strict=True))
    return nearest(
        describe(query.device),
        operation.name,
        query.direction,
        query.dtype,
        sizes,
        query.flags,
        variants=operation.variants.keys(),
    )
