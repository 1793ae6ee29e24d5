"""Choose the variant that runs a call.

The choice is a function of the dispatch key (:class:`onelaunch.operation.Query`) and of the tables of measured times for the
device (the user's and the package's, see :mod:`onelaunch.dispatch.measured`). If no similar call was measured, the operation's
own order of preference decides; on a Hopper GPU the order of our variants at a similar call on the most similar Hopper GPU does.
A row with the time of ``auto`` and no other that ``auto`` may choose is no such call. It only compares with other libraries.

A variant of another package than the operation's is chosen only where something speaks for its results: the operation prefers
it by name, or near calls were measured in a run in which it passed the operation's probes (edge cases), or else the call has
exactly the sizes and flags that were measured.

The public functions of operations call :func:`run`, and so does the variant ``module`` of ``gla_layer``. Decoding, the variants
``packed`` and ``packed_states`` of ``gla_layer``, and the planner and the timing of studies ask :func:`pick` or :func:`choose`.
``explanation.py`` asks :func:`choose`, and imports the functions by which it decides: :func:`able`, :func:`borrowed_for`,
:func:`held_back`, :func:`is_outdated`, :func:`is_trusted`, :func:`measured_near`, :func:`sizes_of`, :func:`tie` and
:func:`timed_near`.
``onelaunch.integrations`` asks :func:`why_not_faster` where it could take the place of a function of another library.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import torch

from onelaunch.device.architectures import architecture_of
from onelaunch.device.hardware import describe
from onelaunch.dispatch.measured import Measured, nearest
from onelaunch.dispatch.results import check_results
from onelaunch.dispatch.symbolic import decided, note_sizes, within
from onelaunch.errors import ArgumentError, UnknownVariant, VariantUnsupported
from onelaunch.launch.planned import forget_plans, is_recording, unrecorded
from onelaunch.launch.side_by_side import Launching
from onelaunch.operation import AUTO, Call, Operation, Query, SymbolicSizes, Variant, find_operation
from onelaunch.operation.sources import digest_of

CONFIRMED = 4096
"""Largest number of queries for which a variant remembers that its results were checked."""

TIE = 1.03
"""Ratio to the fastest time up to which variants count as equally fast. Among these the operation's own order decides."""


def run(operation: Operation[..., Any], call: Call, variant: str) -> Any:
    """Run a checked call with the named variant, or for ``"auto"`` with the one that :func:`choose` returns.

    The number, devices and shapes of a variant's first results for each query are checked, except while ``torch.compile`` or
    another tracer with symbolic sizes traces.

    Raises:
        ArgumentError: ``variant`` is not a string.
        UnknownVariant: The operation has no variant of this name.
        VariantUnsupported: The variant cannot run this call.
        VariantResultError: The variant did not return the operation's results.
    """
    query = call.query()
    if torch.compiler.is_compiling() or type(query.sizes) is SymbolicSizes:
        return operation.variants[_traced_name(variant, query)].run(call)
    chosen = operation.variants[_name(variant, query)]
    if is_recording() and not chosen.is_repeatable:
        with unrecorded(f"the variant {chosen.name} may launch kernels in other ways"):
            results = chosen.run(call)
    elif chosen.is_recordable:
        with Launching(chosen.run, call):
            results = chosen.run(call)
    else:
        results = chosen.run(call)
    # An operation's argument checks cache queries, so that equal calls share one object. Comparing identity saves a hash.
    if query is not chosen.latest:
        if query not in chosen.confirmed:
            check_results(chosen, call, results)
            if len(chosen.confirmed) >= CONFIRMED:
                chosen.confirmed.clear()
            chosen.confirmed.add(query)
        chosen.latest = query
    return results


@functools.lru_cache(maxsize=4096)
def choose(query: Query) -> Variant:
    """Return the variant for a call: the fastest one measured at a similar call that can run, else the first in preference.

    On a Hopper GPU without a similar measured call, :func:`borrowed_for` decides before the preference. Times that are older
    than the ability of the first in preference (:func:`is_outdated`) decide nothing.

    Variants of other libraries run only by name. They are measured too, but guarantee less, for example for decays of -inf or in
    accuracy. :func:`held_back` says which other variants are left out.
    """
    operation = find_operation(query.operation)
    measured = measured_near(operation, query)
    runnable = [operation.variants[name] for name in able(operation, query)]
    automatic = {variant.name: variant for variant in runnable if held_back(variant, query, measured) is None}
    if not automatic:
        reasons = {
            name: variant.why_not(query) or held_back(variant, query, measured) for name, variant in operation.variants.items()
        }
        said = "; ".join(f"{name} {reason}" for name, reason in reasons.items())
        raise VariantUnsupported(operation.name, AUTO, reason=f"finds no variant for it ({said})", instead=())
    source = measured if measured is not None else borrowed_for(operation, query)
    if source is not None and not is_outdated(operation, query, source, automatic):
        times = {name: time for name, time in source.microseconds.items() if name in automatic}
        if times:
            close = [name for name, time in times.items() if time <= tie(source) * min(times.values())]
            return automatic[min(close, key=operation.preference(query).index)]
    return automatic[min(automatic, key=operation.preference(query).index)]


def tie(row: Measured) -> float:
    """Return the ratio to the fastest time up to which variants count as equally fast: :data:`TIE`, or a row's larger noise."""
    return max(TIE, row.noise)


def is_outdated(operation: Operation[..., Any], query: Query, row: Measured, names: Collection[str]) -> bool:
    """Return whether a measured row is older than the ability of the variant that comes first in preference among ``names``.

    That variant refused the call when the row was measured and runs it today, so the row does not tell which one is fastest.
    """
    return min(names, key=operation.preference(query).index) in row.unsupported


def is_trusted(variant: Variant, query: Query) -> bool:
    """Return whether the operation's package answers for a variant: it contains its function, or prefers it by name.

    A preference says nothing about a function that somebody put in the place of the registered one.
    """
    preferred = variant.run is variant.registered and variant.name in variant.operation.preferred(query)
    return variant.is_own or preferred


def held_back(variant: Variant, query: Query, measured: Measured | None) -> str | None:
    """Return why ``auto`` leaves out a variant that can run a call, as a predicate that completes "it ...", or ``None``.

    A variant may say so itself (:meth:`Variant.by_name_where`). Variants of the operation's own package are tested on its probes
    there, and the operation may prefer others by name. Every other variant must have been measured near the call in a run in
    which it passed the probes, or at exactly the call's sizes and flags.

    Args:
        variant: Variant that can run the call.
        query: Dispatch key of the call.
        measured: Result of :func:`measured_near` for it.
    """
    if not variant.capabilities.automatic:
        return "runs only by name"
    if (reason := variant.why_by_name(query)) is not None:
        return reason
    operation = variant.operation
    if is_trusted(variant, query):
        return None
    comes = f"comes from the package {variant.package or 'of an unknown name'}"
    if measured is None or variant.name not in measured.microseconds:
        return f"{comes} and was not measured near this call, so it runs only by name"
    if variant.name in measured.probes or measured.is_at(sizes_of(operation, query), query.flags):
        return None
    return (
        f"{comes} and passed no probes of {operation.name} (edge cases) when it was measured, so it is chosen only at the sizes "
        f"and flags that were measured; the nearest are {measured.where()}"
    )


def pick(variant: str, query: Query) -> Variant:
    """Return the variant that would run a call: that of :func:`choose` for ``"auto"``, else the named one.

    Raises:
        ArgumentError, UnknownVariant, VariantUnsupported: As :func:`run` raises them.
    """
    return find_operation(query.operation).variants[_name(variant, query)]


def _name(variant: str, query: Query) -> str:
    """Return the checked name of the variant that will run a call."""
    if not isinstance(variant, str):
        raise ArgumentError(f"variant is {variant!r}; it must be the name of a variant of {query.operation}, or {AUTO!r}.")
    return choose(query).name if variant == AUTO else _checked(variant, query)


def _traced_name(variant: str, query: Query) -> str:
    """Return the checked name of the variant that will run a traced call, and guard the sizes for which it is chosen."""
    operation, device, dtype, sizes, grad, flags = query
    note_sizes(sizes)
    return within(sizes, _constant_name(variant, operation, device, dtype, grad, flags))


def _constant_name(variant: str, operation: str, device: str, dtype: torch.dtype, grad: bool, flags: tuple[str, ...]) -> str:
    """Return the name of the variant for the noted sizes and where it holds, as a constant for ``torch.compile``.

    The other arguments are the fields of a :class:`Query`. While it traces, the compiler can pass such a function strings, flags
    and tuples, but no named tuple.
    """
    return decided(lambda sizes: _name(variant, Query(operation, device, dtype, sizes, grad, flags)))


# This is what torch.compiler.assume_constant_result does. Calling that would import the compiler, which takes a second.
vars(_constant_name)["_dynamo_marked_constant"] = True


@functools.lru_cache(maxsize=4096)
def _checked(variant: str, query: Query) -> str:
    """Return the name of a variant if it exists and supports a call; else raise UnknownVariant or VariantUnsupported."""
    operation = find_operation(query.operation)
    if variant not in operation.variants:
        raise UnknownVariant(variant, (AUTO, *operation.variants))
    if (reason := operation.get(variant).why_not(query)) is not None:
        raise VariantUnsupported(operation.name, variant, reason=reason, instead=able(operation, query))
    return variant


def forget() -> None:
    """Clear the caches of choices, of checked names and of plans, so that later calls see changed variants.

    They also see another folder of tables, but a table that was read is not read again (:mod:`onelaunch.dispatch.measured`).
    """
    global _era  # noqa: PLW0603 - one value, which callers of era() compare by identity
    _era = object()
    forget_plans()
    choose.cache_clear()
    _checked.cache_clear()


_era = object()
"""Object that stands for the choices since they were last forgotten."""


def era() -> object:
    """Return an object that is another one after :func:`forget`, for callers that remember what they asked here."""
    return _era


def able(operation: Operation[..., Any], query: Query) -> list[str]:
    """Return the names of the variants that can run a call."""
    return [name for name, variant in operation.variants.items() if variant.why_not(query) is None]


def measured_near(operation: Operation[..., Any], query: Query) -> Measured | None:
    """Return the measured times of the call nearest to a query from which ``auto`` can choose, or ``None``.

    A row with the time of ``auto`` alone (:attr:`Measured.auto`) does not count, since it compares no variants of ours.

    It is ``None`` too for a pretended device (:mod:`onelaunch.device.architectures`), for CUDA on a machine without it, and for
    a device that computes nothing, such as the meta device.
    """
    return _looked_up(operation, query, borrow=False, which=_compares)


def timed_near(operation: Operation[..., Any], query: Query) -> Measured | None:
    """Return what :func:`measured_near` does, or without it the nearest row with the time of ``auto`` alone, or ``None``."""
    return measured_near(operation, query) or _looked_up(operation, query, borrow=False)


def _compares(row: Measured) -> bool:
    return not row.auto


def borrowed_for(operation: Operation[..., Any], query: Query) -> Measured | None:
    """Return the measured times of a query's nearest call on the most similar Hopper GPU, or ``None`` on other devices.

    Only the order of our variants is taken from it, where :func:`measured_near` finds nothing. Variants of other packages and
    variants that compile anew for other sizes are left out: another GPU's times neither speak for their results nor show that
    compiling pays here. A row without a time of the first variant in preference is not used, since it may be older than that
    variant's ability to run such calls.
    """
    row = _looked_up(operation, query, borrow=True, which=_compares)
    if row is None:
        return None
    ours = [
        name
        for name in operation.preference(query)
        if name in able(operation, query)
        and is_trusted(operation.variants[name], query)
        and not operation.variants[name].capabilities.recompiles
        and operation.variants[name].capabilities.automatic
    ]
    times = {name: row.microseconds[name] for name in ours if name in row.microseconds}
    return replace(row, microseconds=times) if ours and ours[0] in times else None


def why_not_faster(query: Query, peer: str, changes_beyond: int | None = None, changes_with: Collection[str] = ()) -> str | None:
    """Return why no measured row says that the variant which :func:`choose` returns is faster than a peer, or ``None``.

    The row is that of the nearest call on this device with times of both, or else of the most similar Hopper GPU that has one.
    Within the noise of the row no variant is faster.

    Args:
        query: Dispatch key of the call.
        peer: Name of the variant of another library. It need not be able to run here.
        changes_beyond: Number of steps T beyond which the peer calls another function of its library. Rows on the other side of
            it say nothing.
        changes_with: Flags of a query with which the peer does something else. Rows that differ from the call in one say nothing.

    Returns:
        A clause such as "no similar call was measured", or ``None`` if the chosen variant is faster.
    """
    operation = find_operation(query.operation)
    try:
        chosen = choose(query).name
    except VariantUnsupported:
        return f"no variant of {operation.name} can run the call"

    def is_alike(row: Measured) -> bool:
        if changes_beyond is not None and (row.sizes["T"] > changes_beyond) != (sizes_of(operation, query)["T"] > changes_beyond):
            return False
        return not (row.flags ^ set(query.flags)) & set(changes_with)

    def compares_both(row: Measured) -> bool:
        return {chosen, peer} <= row.microseconds.keys() and is_alike(row)

    row = _looked_up(operation, query, borrow=False, which=compares_both)
    row = row or _looked_up(operation, query, borrow=True, which=compares_both)
    row = row or timed_near(operation, query) or _looked_up(operation, query, borrow=True)
    if row is None:
        return "no similar call was measured"
    if not is_alike(row):
        return f"at the nearest measured call, {row.where()}, another function of the library was measured"
    for name in (chosen, peer):
        if name not in row.microseconds:
            could_not = " (it could not run then)" if name in row.unsupported else ""
            return f"at the nearest measured call, {row.where()}, the variant {name} was not measured{could_not}"
    ours, theirs = row.microseconds[chosen], row.microseconds[peer]
    if theirs > tie(row) * ours:
        return None
    return f"at the nearest measured call, {row.where()}, {chosen} took {ours:.1f} µs and {peer} {theirs:.1f} µs"


def _looked_up(
    operation: Operation[..., Any], query: Query, *, borrow: bool, which: Callable[[Measured], bool] | None = None
) -> Measured | None:
    """Return what :func:`nearest` finds for a query on a real device."""
    if architecture_of(torch.device(query.device)) is not None:  # None for a real device
        return None
    if query.device_type != "cpu" and not (query.device_type == "cuda" and torch.cuda.is_available()):
        return None
    return nearest(
        describe(query.device),
        operation.name,
        query.direction,
        query.dtype,
        sizes_of(operation, query),
        query.flags,
        variants=operation.variants.keys(),
        code=lambda name: digest_of(operation.variants[name]),
        which=which,
        borrow=borrow,
    )


def sizes_of(operation: Operation[..., Any], query: Query) -> dict[str, int]:
    """Return the sizes of a call by the operation's dimensions."""
    return dict(zip(operation.dimensions, query.sizes, strict=True))
