"""Where a token's time goes: what a kernel made with ``Tuning(stamps=True)`` has noted, in microseconds a phase.

Each CTA notes its processor's clock, in every phase of the last token, once the vector is there that the phase multiplies
(or the heads it attends to) and once its results are handed on; and beside the clock the time, at both ends of the token.
"""

from __future__ import annotations

from statistics import median
from typing import NamedTuple

import torch

from onelaunch.decode.codegen.layout import MARKER_HEADER, MARKER_ROWS, marker_words
from onelaunch.decode.plan.phases import Plan


class PhaseTime(NamedTuple):
    """A phase as its CTAs saw it: medians over them and over layers, in microseconds."""

    waits: float
    """Since the CTA's mark before: edges, reading and laying out."""
    works: float


def phase_times(plan: Plan, state: torch.Tensor) -> dict[str, PhaseTime]:
    """Phases of the last token, in the order of the plan.

    Args:
        plan: of one launch, not of a launch for each phase.
        state: int32, as the launch left it: ``Kernels(..., Tuning(stamps=True)).memory.state``.

    Raises:
        ValueError: the plan has a launch for each phase, or ``state`` has no stamps.
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
    seen = (table[:, MARKER_HEADER:] != 0).view_as(marks) & (marks <= span[:, None, None, None])  # else of an earlier token
    waits: dict[str, list[int]] = {}
    works: dict[str, list[int]] = {}
    order = [(layer, phase.name, _row(phase.op)) for layer, phase in plan.instances() if phase.op != "norm"]
    for cta in range(plan.ctas):
        before = 0
        for layer, name, row in order:
            if not bool(seen[cta, layer, row].all()):
                continue  # no share in it
            ready, done = marks[cta, layer, row].tolist()
            waits.setdefault(name, []).append(ready - before)
            works.setdefault(name, []).append(done - ready)
            before = done
    names = [name for name in dict.fromkeys(name for _, name, _ in order) if name in waits]
    return {name: PhaseTime(median(waits[name]) * microseconds, median(works[name]) * microseconds) for name in names}


def _row(op: str) -> int:
    return MARKER_ROWS.index("attention" if op == "rope_attention" else op)
