"""Explanations of the dispatcher's choice, with a line for every variant."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onelaunch.dispatch.choice import TIE, able, choose, measured_near
from onelaunch.dispatch.measured import Measured
from onelaunch.operation import Operation, Query, find_operation


@dataclass(frozen=True)
class Standing:
    """Standing of one variant for one call in the dispatcher's choice."""

    variant: str
    chosen: bool
    reason_against: str | None
    """Reason why it cannot run; ``None`` when it can."""
    microseconds: float | None
    """Time measured nearest to this call; ``None`` where there is none."""
    times_slower: float | None
    """Time as a multiple of that of the fastest measured variant that can run."""


@dataclass(frozen=True)
class Explanation:
    """Dispatcher's answer with its grounds."""

    query: Query
    chosen: str
    because: str
    standings: tuple[Standing, ...]
    table: Path | None = None
    """File that the measured times were read from, where something near was measured."""


def explain(query: Query) -> Explanation:
    """Explain the answer of :func:`choose`, with a line for every variant."""
    operation = find_operation(query.operation)
    chosen = choose(query)
    measured = measured_near(operation, query)
    times = measured.microseconds if measured else {}
    can_run = able(operation, query)
    fastest = min((times[name] for name in can_run if name in times), default=None)
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
    other = measured_near(operation, query._replace(grad=not query.grad))
    if other is None:
        return "nothing near was measured"
    said = "forward was measured near it, forward_backward was not"
    return said if query.grad else "forward_backward was measured near it, forward was not"
