"""Choice of the variant that runs a call.

Three parts: the key (:class:`onelaunch.operation.Query`), the tables of what was measured on a device (the user's and the
package's, see :mod:`onelaunch.dispatch.measured`), and the choice. Where nothing near was measured, the operation's own order of
preference decides.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from onelaunch.device.architectures import architecture_of
from onelaunch.device.hardware import describe
from onelaunch.dispatch.measured import Measured, nearest
from onelaunch.dispatch.results import check_results
from onelaunch.errors import ArgumentError, UnknownVariant, VariantUnsupported
from onelaunch.operation import AUTO, Call, Operation, Query, Variant, find_operation

CONFIRMED = 4096
"""Number of queries for which a variant remembers that its results were accepted."""


TIE = 1.03
"""Ratio of times up to which variants count as equal to the fastest; the operation's own order then decides."""


def run(operation: Operation[..., Any], call: Call, variant: str) -> Any:
    """Run a checked call by the named variant, or the one that :func:`choose` names for ``"auto"``.

    The first results of a variant for a query are checked in number, device and shape; not while ``torch.compile`` traces.

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


@functools.lru_cache(maxsize=4096)
def choose(query: Query) -> Variant:
    """Return the variant for a call: the fastest measured near it that can run, else the first of the operation's defaults.

    Other libraries run by name alone: they are measured beside ours, and promise less (such as for decays of -inf, or accuracy).
    """
    operation = find_operation(query.operation)
    runnable = [operation.variants[name] for name in able(operation, query)]
    automatic = {variant.name: variant for variant in runnable if variant.capabilities.automatic}
    if not automatic:
        reasons = {name: variant.why_not(query) or "runs by name alone" for name, variant in operation.variants.items()}
        raise VariantUnsupported(
            operation.name, AUTO, reason="; ".join(f"{name} {reason}" for name, reason in reasons.items()), instead=()
        )
    if (measured := measured_near(operation, query)) is not None:
        times = {name: time for name, time in measured.microseconds.items() if name in automatic}
        if times:
            close = [name for name, time in times.items() if time <= TIE * min(times.values())]
            return automatic[min(close, key=operation.preference(query).index)]
    return automatic[min(automatic, key=operation.preference(query).index)]


def pick(variant: str, query: Query) -> Variant:
    """Return the variant that would run a call: :func:`choose`'s for ``"auto"``, else the named one, which must support it."""
    return find_operation(query.operation).variants[_name(variant, query)]


def _name(variant: str, query: Query) -> str:
    """Return the name of the variant that will run, checked."""
    if not isinstance(variant, str):
        raise ArgumentError(f"variant is {variant!r}; it must be the name of a variant of {query.operation}, or {AUTO!r}.")
    return choose(query).name if variant == AUTO else _checked(variant, query)


def _constant_name(variant: str, *query: Any) -> str:
    """Return the name as a constant under ``torch.compile``, since shapes are known when a graph is traced."""
    return _name(variant, Query(*query))


# What torch.compiler.assume_constant_result does; to call that would import the compiler, a second at every start.
vars(_constant_name)["_dynamo_marked_constant"] = True


@functools.lru_cache(maxsize=4096)
def _checked(variant: str, query: Query) -> str:
    """Return the name of a variant that supports a call; raise where there is none of that name, or it does not."""
    operation = find_operation(query.operation)
    if variant not in operation.variants:
        raise UnknownVariant(variant, (AUTO, *operation.variants))
    if (reason := operation.get(variant).why_not(query)) is not None:
        raise VariantUnsupported(operation.name, variant, reason=reason, instead=able(operation, query))
    return variant


def forget() -> None:
    """Forget all choices and checked names, as a new process would have none."""
    choose.cache_clear()
    _checked.cache_clear()


def able(operation: Operation[..., Any], query: Query) -> list[str]:
    """Return the names of the variants that can run a call."""
    return [name for name, variant in operation.variants.items() if variant.why_not(query) is None]


def measured_near(operation: Operation[..., Any], query: Query) -> Measured | None:
    """Return what was measured nearest to a query; nothing for a device that is not here, or that computes nothing."""
    if architecture_of(torch.device(query.device)) is not None:
        return None
    if query.device_type != "cpu" and not (query.device_type == "cuda" and torch.cuda.is_available()):
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
