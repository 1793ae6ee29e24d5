"""Timeline of one token, from the profile markers of a kernel made with ``Tuning(stamps=True)``: microseconds per phase.

In every phase of the last token, each CTA records its SM's clock twice: when the phase's input vector (or heads) has arrived,
and when its results are published. At both ends of the token it also records the global time, which calibrates the clock.
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
    """Time since the CTA's previous marker: waiting at edges, reading and laying out the input."""
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
        raise ValueError("stamps are of one launch; this plan has a launch for each phase")
    if len(state) < plan.ctas * words:
        raise ValueError("there are no stamps: the kernel was made without Tuning(stamps=True)")
    table = state[len(state) - plan.ctas * words :].cpu().long().view(plan.ctas, words)
    begin, time_begin, end, time_end = table[:, :MARKER_HEADER].unbind(1)
    span, nanoseconds = (end - begin) % 2**32, (time_end - time_begin) % 2**32
    microseconds = 1e-3 * float(nanoseconds.double().sum() / span.double().sum().clamp(min=1))
    marks = ((table[:, MARKER_HEADER:] - begin[:, None]) % 2**32).view(plan.ctas, -1, len(MARKER_ROWS), 2)
    # other markers are left from an earlier token
    seen = (table[:, MARKER_HEADER:] != 0).view_as(marks) & (marks <= span[:, None, None, None])
    waits: dict[str, list[int]] = {}
    works: dict[str, list[int]] = {}
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
    return {name: PhaseTime(median(waits[name]) * microseconds, median(works[name]) * microseconds) for name in names}


def _row(op: str) -> int:
    return MARKER_ROWS.index("attention" if op == "rope_attention" else op)
