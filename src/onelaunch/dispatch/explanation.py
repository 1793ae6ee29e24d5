"""Explain the dispatcher's choice, with the standing of every variant.

Users call ``onelaunch.dispatch.explain``, and the command ``onelaunch explain`` prints its answer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onelaunch.dispatch.choice import (
    TIE,
    able,
    borrowed_for,
    choose,
    held_back,
    is_trusted,
    measured_near,
    sizes_of,
    tie,
    timed_near,
)
from onelaunch.dispatch.measured import Measured
from onelaunch.operation import Operation, Query, find_operation


@dataclass(frozen=True)
class Standing:
    """Standing of one variant in the dispatcher's choice for one call."""

    variant: str
    """Name of the variant."""
    chosen: bool
    """Flag that the dispatcher chooses this variant."""
    reason_against: str | None
    """Reason why the variant cannot run the call; ``None`` if it can."""
    microseconds: float | None
    """Time in microseconds of the nearest measured call; ``None`` if there is none."""
    times_slower: float | None
    """Ratio of this time to that of the fastest measured variant that can run."""
    held_back: str | None = None
    """Reason why ``auto`` leaves out a variant that can run the call, such as one of another package; ``None`` if it does not."""


@dataclass(frozen=True)
class Faster:
    """Variant that is known or expected to be faster than the chosen one, where no table of measured times compares the two."""

    variant: str
    """Name of the faster variant. It runs only by name, or ``auto`` has no times by which it could choose it."""
    reason: str
    """Clause that says what was measured or estimated."""


@dataclass(frozen=True)
class Explanation:
    """Dispatcher's choice for one call, with its reasons."""

    query: Query
    """Dispatch key of the call."""
    chosen: str
    """Name of the chosen variant."""
    because: str
    """Reason for the choice, as a clause that completes "chosen because ..."."""
    standings: tuple[Standing, ...]
    """Standing of every variant, in order of registration."""
    table: Path | None = None
    """File with the measured times, if a similar call was measured."""
    whose: str | None = None
    """Words for that file: "the package's table", or "your own table" with its date and the command that wrote it."""
    faster: tuple[Faster, ...] = ()
    """Variants that are known or expected to be faster, though no measured time says so."""


def explain(query: Query) -> Explanation:
    """Explain the choice of :func:`choose` for a call."""
    operation = find_operation(query.operation)
    chosen = choose(query)
    measured = measured_near(operation, query)
    shown = timed_near(operation, query)
    times = shown.microseconds if shown else {}
    can_run = able(operation, query)
    fastest = min((times[name] for name in can_run if name in times), default=None)
    standings = tuple(
        Standing(
            variant=name,
            chosen=name == chosen.name,
            reason_against=variant.why_not(query),
            microseconds=times.get(name),
            times_slower=times[name] / fastest if fastest and name in times else None,
            held_back=held_back(variant, query, measured) if name in can_run and variant.capabilities.automatic else None,
        )
        for name, variant in operation.variants.items()
    )
    compared = times
    if measured is not None and chosen.name in measured.microseconds:
        fastest_of = "the fastest of our variants" if is_trusted(chosen, query) else "the fastest variant"
        because = f"it is {fastest_of}, or {_margin(measured)}, as measured at {measured.where()}"
        because += f", by {measured.whose()}" if measured.is_users else ""
        because += _trusted(operation, query, chosen.name, measured) if not is_trusted(chosen, query) else ""
    else:
        because = _unmeasured(operation, query, shown, chosen.name)
        lent = borrowed_for(operation, query) if measured is None else None
        if lent is not None and chosen.name in lent.microseconds:
            compared = lent.microseconds
            because = (
                f"it is the fastest of our variants, or {_margin(lent)}, at {lent.where()}, whose table gives "
                f"the order of variants on Hopper GPUs that lack times of their own; {because}"
            )
        else:
            order = f"{operation.name}'s order of preference on {query.device_type}"
            because = f"it is the first in {order} that can run; {because}"
    because += _faster_but_held_back(standings, compared, chosen.name)
    faster = tuple(
        Faster(name, reason)
        for name, reason in chosen.why_slower(query).items()
        if not {name, chosen.name} <= times.keys()  # otherwise the standings show both times
    )
    if shown is None:
        return Explanation(query, chosen.name, because, standings, faster=faster)
    return Explanation(query, chosen.name, because, standings, shown.path, shown.whose(), faster)


def _margin(row: Measured) -> str:
    """Return how much slower than the fastest variant a chosen one may be."""
    within = " (the noise of these times)" if row.noise > TIE else ""
    return f"at most {tie(row) - 1:.0%} slower{within}"


def _trusted(operation: Operation[..., Any], query: Query, name: str, measured: Measured) -> str:
    """Return why a measured variant of another package may be chosen."""
    if name in measured.probes:
        return f"; there it passed the probes of {operation.name}"
    assert measured.is_at(sizes_of(operation, query), query.flags)  # noqa: S101 - otherwise it would have been held back
    return "; exactly these sizes and flags were measured"


def _faster_but_held_back(standings: Sequence[Standing], times: Mapping[str, float], chosen: str) -> str:
    """Return a clause for each variant that was faster at the measured call than the chosen one and is held back.

    ``times`` are the microseconds of that call, which may be of another GPU than those of the standings.
    """
    faster = [each for each in standings if each.variant in times and times[each.variant] < times.get(chosen, math.inf)]
    return "".join(f". {each.variant} was faster there, but {each.held_back}" for each in faster if each.held_back is not None)


def _unmeasured(operation: Operation[..., Any], query: Query, measured: Measured | None, chosen: str) -> str:
    """Return why no measured time decides. Times of one direction are not used for a call in the other."""
    if measured is not None and measured.auto:
        return f"at the nearest measured call, {measured.where()}, only {measured.auto} of our variants was measured"
    if measured is not None and chosen in measured.unsupported:
        return f"when the nearest measured call, {measured.where()}, was measured, it could not run such calls yet"
    if measured is not None:
        return f"at the nearest measured call, {measured.where()}, it was not measured"
    other = measured_near(operation, query._replace(grad=not query.grad))
    if other is None:
        return "no similar call was measured"
    measured_direction, this = ("forward", "forward_backward") if query.grad else ("forward_backward", "forward")
    return f"for a similar call, {measured_direction} was measured and {this} was not"
