"""Choose the measurements that a criterion compares: those of a named variant, or of the fastest variant with some tags.

Other modules of ``decide``, the measures, and ``report/headline.py`` call these functions.

A criterion reads a value of ``of``, or compares ``of`` with ``over`` (by default the baseline). Each is the name of a variant or
control, or tags that stand for the fastest variant with them. ``over_regime`` is the regime in which ``over`` is timed, if it is
another one. A peer outside the gate (``outside``) is another project's variant whose errors are larger than the verification gate
allows, but within the tolerance of that project's tests; others are compared with its times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from onelaunch.wording import listing
from onelaunch.workbench import quantities as q
from onelaunch.workbench.result import Cell, Result, Timing
from onelaunch.workbench.study import Criterion, Selector, Shape

STATUS_WORDS = {
    "unsupported": "cannot run here",
    "not_installed": "is not installed",
    "peer_outside_the_gate": "is a peer outside the gate",
    "incorrect": "is incorrect",
    "invalid": "was faster than its floor and is not believed",
    "out_of_memory": "ran out of memory",
    "error": "failed",
    "crashed": "ended the process that measured it",
    "timed_out": "ran longer than the limit of a call",
    "interrupted": "was interrupted",
}
"""Words for each status except ``ok``, for the sentences of decisions. A stored decision keeps the words that it was written
with: only statuses and values are compared when it is recomputed."""


LAUNCH_TAGS = ("launches", "backward_launches")
"""Tags that declare how many kernels a variant launches. Where a run counted launches, the count is believed instead."""


@dataclass(frozen=True)
class Selected:
    """The measurement that a selector stands for at one shape."""

    cell: Cell | None
    among: int = 1
    """Number of measurements from which it was chosen as the fastest."""
    reason: str = ""
    """The reason if there is no measurement."""


def select_cell(
    result: Result, criterion: Criterion, selector: Selector, shape: str, but: str | None = None, *, over: bool = False
) -> Selected:
    """Return the measurement that a selector stands for at a shape.

    It is that of the named variant or control, or of the fastest correct variant with the selector's tags, except ``but``. A
    variant that a selector finds by its declared launches is left out if other launches were counted at this shape. A peer
    outside the gate counts only on the side that others are compared with, ``over``; one that its own tests refuse too takes no
    part in means.
    """
    names = [name for name in result.study.select(selector, result.study.shape(shape)) if name != but]
    cells = [cell for name in names if (cell := result.cell(shape, name, criterion.direction)) is not None]
    if isinstance(selector, dict) and "launches" in selector:
        forward = [result.cell(shape, cell.variant, "forward") for cell in cells]  # launches are declared of a forward call
        told = {cell.variant: problem for cell in forward if cell is not None and (problem := miscounted(cell))}
        cells = [cell for cell in cells if cell.variant not in told]
        if told and not cells:
            return Selected(None, 0, "; ".join(told.values()))
    each = criterion.combine == "each"
    counting = [cell for cell in cells if cell.status == "ok" or (over and cell.outside and (each or not cell.wrong_peer))]
    timed = [cell for cell in counting if cell.timing(criterion.regime) is not None]
    # A measure of no time, such as memory, also accepts measurements without a time. The first of them is then chosen.
    untimed = [] if criterion.quantity.timed else counting
    usable = timed or untimed
    if not usable:
        return Selected(None, 0, why_none(names, cells, shape, criterion))
    return Selected(min(usable, key=lambda cell: _median(cell, criterion)), len(usable))


def miscounted(cell: Cell) -> str:
    """Return a clause on a forward measurement whose counted launches differ from the declared ones, else an empty string."""
    declared = cell.plan.launches if cell.plan is not None else None
    if cell.direction != "forward" or cell.control or None in (declared, cell.launches) or declared == cell.launches:
        return ""
    said = q.plural(declared or 0, "launch", "launches")
    return f"{cell.variant} declares {said}, and {cell.launches} were counted at {cell.shape}"


def compared(result: Result, criterion: Criterion, shape: Shape) -> list[Selected]:
    """Return the measurement for ``of`` and, if the measure compares two, the one for ``over``.

    If both selectors stand for the same fastest variant, it is compared with the fastest of the others. Against itself, noise
    alone would decide.
    """
    asked = zip((criterion, asked_of_over(criterion)), result.study.sides(criterion, shape), strict=False)
    sides = [
        select_cell(result, asking, selector, where.name, over=index > 0)
        for index, (asking, (selector, where)) in enumerate(asked)
    ]
    if criterion.quantity.timed and len(sides) == 2 and criterion.over_regime is None and sides[0].cell is sides[1].cell:
        _, (selector, where) = result.study.sides(criterion, shape)
        if sides[0].cell is not None and not isinstance(selector, str):
            other = select_cell(result, criterion, selector, where.name, but=sides[0].cell.variant, over=True)
            sides[1] = sides[1] if other.cell is None else other
    return sides


def asked_of_over(criterion: Criterion) -> Criterion:
    """Return the criterion with the regime in which ``over`` is timed."""
    return criterion if criterion.over_regime is None else criterion.model_copy(update={"regime": criterion.over_regime})


def timing_of(cell: Cell, criterion: Criterion) -> Timing:
    """Return a measurement's timing in the criterion's regime, which one that was selected for a measure of time has.

    Raises:
        LookupError: The measurement has none.
    """
    timing = cell.timing(criterion.regime)
    if timing is None:
        raise LookupError(f"{cell.variant} has no {criterion.regime} time")
    return timing


def _median(cell: Cell, criterion: Criterion) -> float:
    timing = cell.timing(criterion.regime)
    return timing.microseconds.median if timing else float("inf")


def why_none(names: Sequence[str], cells: Sequence[Cell], shape: str, criterion: Criterion) -> str:
    """Explain why none of a criterion's variants has a usable measurement."""
    if not cells:
        return f"{listing(names)} did not run at {shape}"
    if len(cells) > 1 and {cell.status for cell in cells} - {"unsupported", "not_installed"} == {"interrupted"}:
        return f"the run was interrupted before {shape} was done"  # any of these variants might have been the fastest
    reasons = []
    for cell in cells:
        if cell.status == "ok":
            reasons.append(f"{cell.variant} has no {criterion.regime} time at {shape}")
        else:
            detail = f" ({cell.reason})" if cell.reason else ""
            reasons.append(f"{cell.variant} {STATUS_WORDS[cell.status]} at {shape}{detail}")
    return "; ".join(reasons)
