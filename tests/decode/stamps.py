"""Timeline of one token: microseconds per phase, decoded from the profile markers of a persistent decode kernel.

A kernel made with ``Tuning(stamps=True)`` writes the markers behind its state. In every phase of a token but a norm, thread 0 of
each CTA that has work there records its SM's clock (the low 32 bits) twice: when the phase's input vector (or heads) has
arrived, and when its results are published. At both ends of the token it also records the global time in nanoseconds, which
calibrates the clock.
``test_kernels_host.py`` reads the markers with it.
"""

from __future__ import annotations

from statistics import median
from typing import NamedTuple

import torch

from onelaunch.decode.codegen.layout import MARKER_HEADER, MARKER_ROWS, marker_words
from onelaunch.decode.plan.phases import Plan


class PhaseTime(NamedTuple):
    """Times of one phase in microseconds: medians over its CTAs and layers."""

    waits: float
    """Time since the CTA's previous marker: waiting for other CTAs (grid barrier or flags), reading and laying out the input."""
    works: float
    """Time from the arrival of the phase's input until its results are published."""


def phase_times(plan: Plan, state: torch.Tensor) -> dict[str, PhaseTime]:
    """Return the times of the last token's phases, in the order of the plan.

    Args:
        plan: Plan of a single launch. A plan with a launch for each phase has no markers.
        state: The kernel's state after the launch, int32: ``Kernels(..., Tuning(stamps=True)).memory.state``.

    Raises:
        ValueError: The plan has a launch for each phase, or ``state`` has no markers.
    """
    words = marker_words(plan)
    if plan.separate:
        raise ValueError("Profile markers need a plan of a single launch; this plan has a launch for each phase.")
    if len(state) < plan.ctas * words:
        raise ValueError("The state has no profile markers, because the kernel was made without Tuning(stamps=True).")
    table = state[len(state) - plan.ctas * words :].cpu().long().view(plan.ctas, words)
    clock_begin, time_begin, clock_end, time_end = table[:, :MARKER_HEADER].unbind(1)
    # Differences are taken modulo 2^32, because both counters wrap.
    span, nanoseconds = (clock_end - clock_begin) % 2**32, (time_end - time_begin) % 2**32
    microseconds_per_cycle = 1e-3 * float(nanoseconds.double().sum() / span.double().sum().clamp(min=1))
    # [CTAs, layers + 1, rows of MARKER_ROWS, 2]: clock cycles since the token began.
    marks = ((table[:, MARKER_HEADER:] - clock_begin[:, None]) % 2**32).view(plan.ctas, -1, len(MARKER_ROWS), 2)
    # A marker that this token did not write is 0 or older than clock_begin, so that its difference wraps to more than the span.
    seen = (table[:, MARKER_HEADER:] != 0).view_as(marks) & (marks <= span[:, None, None, None])
    waits: dict[str, list[int]] = {}  # clock cycles of all CTAs and layers, by phase
    works: dict[str, list[int]] = {}
    # A norm phase writes no markers. Its time is part of the next phase's wait.
    order = [(layer, phase.name, _row(phase.op)) for layer, phase in plan.instances() if phase.op != "norm"]
    for cta in range(plan.ctas):
        before = 0
        for layer, name, row in order:
            if not bool(seen[cta, layer, row].all()):
                continue  # this CTA has no work in this phase
            ready, done = marks[cta, layer, row].tolist()
            waits.setdefault(name, []).append(ready - before)
            works.setdefault(name, []).append(done - ready)
            before = done
    names = [name for name in dict.fromkeys(name for _, name, _ in order) if name in waits]
    return {
        name: PhaseTime(median(waits[name]) * microseconds_per_cycle, median(works[name]) * microseconds_per_cycle)
        for name in names
    }


def _row(op: str) -> int:
    """Return the row of a phase's markers. Both kinds of attention phase share one, since a plan has only one of them."""
    return MARKER_ROWS.index("attention" if op == "rope_attention" else op)
