"""Cells of a result from the plan's cells: before a run reaches them, once they are measured, and with new peaks.

``running.py`` makes and replaces the cells of its result with these functions, and ``merging.py`` those of several parts.

``floor_microseconds`` of a plan is the roofline bound. A cell is ``invalid`` if its cold time (inputs not in the caches) is so
far below it that it must be wrong.
"""

from __future__ import annotations

from typing import Any

from onelaunch.operation import Cost, Direction
from onelaunch.workbench.measure.count import analytic
from onelaunch.workbench.measure.outcomes import below
from onelaunch.workbench.result import Cell, Traffic
from onelaunch.workbench.study.plan import Plan, PlannedCell

Key = tuple[str, Direction, str, bool]
"""Shape, direction and name of a measurement, and whether it is of a control. No control of a study has a variant's name."""


def key_of(planned: PlannedCell) -> Key:
    """Return the key of a planned measurement."""
    return planned.shape.name, planned.direction, planned.variant, planned.control


def cell_of(planned: PlannedCell, **facts: Any) -> Cell:
    """Return the cell of a planned measurement with these facts."""
    return Cell(
        shape=planned.shape.name,
        direction=planned.direction,
        variant=planned.variant,
        control=planned.control,
        plan=planned.plan,
        **facts,
    )


def bounded(cell: Cell, plan: Plan) -> Cell:
    """Return a finished cell with a new bound. An ``invalid`` cold time that the new bound allows counts again.

    The status becomes ``ok``, or that of the verdict for a peer outside the gate: another project's variant that fails the gate
    but keeps the tolerance of its own tests. Its times are used only for others to be compared with.
    """
    changes: dict[str, Any] = {"plan": plan}
    if cell.status == "invalid" and not below(cell.timing("cold"), plan.floor_microseconds):
        outside = cell.verdict if cell.verdict and cell.verdict.outside else None
        changes |= {"status": outside.status if outside else "ok", "reason": outside.explain() if outside else ""}
        changes |= {"traffic": by_arithmetic(plan)}  # an invalid measurement holds no bytes
    return cell.model_copy(update=changes)


def unreached(planned: PlannedCell) -> Cell:
    """Return the cell of a measurement that the run did not reach."""
    if planned.status is not None:
        return cell_of(planned, status=planned.status, reason=planned.reason)
    return cell_of(planned, status="interrupted", reason="the run ended before it")


def by_arithmetic(plan: Plan) -> Traffic:
    """Return the DRAM bytes of a planned measurement by arithmetic."""
    return analytic(Cost(plan.flops, plan.bytes, plan.launches, written=plan.written))
