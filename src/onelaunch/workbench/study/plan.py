"""Plan of a study before anything runs: costs, roofline bounds, variants that can run, criteria that cannot be met.

``supervise/job.py`` and command ``onelaunch study show`` call :func:`plan_study`, and ``running.py`` calls it again with peaks
that it has measured anew. ``running.py`` and ``cells.py`` turn its cells into those of the result. Decisions, measures and
``study show`` call the functions on bounds and on what arithmetic refutes, and timings those on which variants can run here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from onelaunch.device.tools import package_installed
from onelaunch.dispatch.choice import pick
from onelaunch.errors import OneLaunchError, VariantUnsupported
from onelaunch.operation import AUTO, Cost, Direction, Operation, Query, Variant
from onelaunch.workbench.stored import Bound, Count, Grown, Stored
from onelaunch.workbench.study.declare import Criterion, Scale, Selector, Shape, Study


class Rates(Protocol):
    """Measured peaks of a device: :class:`onelaunch.device.hardware.Ceilings`, or the stored ones of a result."""

    @property
    def copy_bytes_per_second(self) -> float: ...
    @property
    def read_bytes_per_second(self) -> float | None: ...
    @property
    def matrix_flops_per_second(self) -> dict[str, float]: ...
    @property
    def launch_seconds(self) -> float: ...


_READ_MOSTLY = 0.1
"""Fraction of written bytes below which the read bandwidth sets the roofline bound; from there on the copy bandwidth does."""

LEFT_OUT = "is left out at this shape by the study"
"""Reason of a measurement that its shape skips."""


class Plan(Grown, Stored):
    """Costs and bounds of a variant at a shape, by arithmetic, before anything runs."""

    LATER = ("written", "least_written")

    flops: Count
    bytes: Count
    """Fewest bytes that this variant must move."""
    least_bytes: Count
    """Fewest bytes that any implementation must move."""
    launches: Count | None
    """Number of launches of one call; ``None`` if a compiler or a library decides it."""
    floor_microseconds: Bound
    """Roofline bound: no variant can be faster in the cold regime. It follows from the least cost of any implementation, for a
    control from its own cost."""
    planned_microseconds: Bound
    """Time of this variant's own bytes, FLOPs and launches at the measured peaks."""
    written: Count | None = None
    """Bytes of ``bytes`` that are written; ``None`` where the operation does not say."""
    least_written: Count | None = None
    """Bytes of ``least_bytes`` that are written; ``None`` where the operation does not say."""


@dataclass(frozen=True)
class PlannedCell:
    """One variant (or control) at one shape in one direction, before it runs."""

    shape: Shape
    direction: Direction
    variant: str
    plan: Plan
    control: bool = False
    status: Literal["unsupported", "not_installed"] | None = None
    """Status that says why it will not run; ``None`` if it will."""
    reason: str = ""


@dataclass(frozen=True)
class StudyPlan:
    """Plan of a study on a device, before anything runs."""

    study: Study
    device: str
    scale: Scale
    cells: tuple[PlannedCell, ...]
    """Planned measurements of the shapes of this scale, by shape, direction and variant: the baseline first, controls last."""
    infeasible: dict[str, str]
    """Reasons, as clauses, by the name of the criterion that no implementation could meet. Criteria on shapes of another scale
    are among them, although these shapes do not run. ``study show`` reads them; decisions ask :func:`infeasibilities` again."""

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """Shapes that run."""
        planned = {cell.shape.name for cell in self.cells}
        return tuple(shape for shape in self.study.at_scale(self.scale) if shape.name in planned)

    def in_first_direction(self) -> StudyPlan:
        """Return the plan of the study's first direction alone, which a quick run measures."""
        return replace(self, cells=tuple(cell for cell in self.cells if cell.direction == self.study.directions[0]))


def plan_study(study: Study, ceilings: Rates, device: str, scale: Scale) -> StudyPlan:
    """Plan a study on a device (``cpu``, ``cuda:0``) at a scale: costs, bounds and feasibility. Nothing is run or allocated."""
    cells: list[PlannedCell] = []
    for shape in study.at_scale(scale):
        for direction in study.directions_at(shape):
            cells += [_planned_variant(study, shape, direction, name, ceilings, device) for name in study.variants_at(shape)]
            if direction == "forward":
                controls = [name for name in study.controls if name in study.operation_at(shape).controls]
                cells += [_planned_control(study, shape, name, ceilings) for name in controls]
    return StudyPlan(study, device, scale, tuple(cells), infeasibilities(study))


def floor_microseconds(least: Cost, dtype: str, rates: Rates) -> float:
    """Return the roofline bound: the longer of the times of the bytes and of the matrix products at the measured peaks.

    ``dtype`` is that of the matrix products unless the cost names another one. Matrix products of a dtype whose peak was not
    measured add no time.
    """
    by_bytes = least.bytes / bandwidth(least.bytes, least.written, rates)
    by_flops = least.flops / rates.matrix_flops_per_second.get(least.matrix_dtype or dtype, math.inf)
    return 1e6 * max(by_bytes, by_flops)


def bandwidth(moved: float, written: float | None, rates: Rates) -> float:
    """Return the bytes per second that bound a variant: the read bandwidth if less than a tenth of its bytes are written.

    Otherwise the copy bandwidth bounds it. It also does so if the operation does not say how many bytes are written, or if the
    read bandwidth was not measured, as in older results. If the measured copy bandwidth is higher than the read bandwidth, the
    device can read as fast as it copies, so the higher one is taken.
    """
    read = rates.read_bytes_per_second
    if read is None or written is None or not written < _READ_MOSTLY * moved:
        return rates.copy_bytes_per_second
    return max(read, rates.copy_bytes_per_second)


def matrix_dtype(study: Study, shape: Shape) -> str:
    """Return the dtype of the operands of a shape's matrix products, by which the measured peak is looked up."""
    return least_cost(study, shape, "forward").matrix_dtype or shape.dtype


def infeasibilities(study: Study) -> dict[str, str]:
    """Return the reasons, as clauses, by the name of the criterion that no implementation could meet."""
    return {criterion.name: why for criterion in study.criteria if (why := infeasibility(study, criterion)) is not None}


def infeasibility(study: Study, criterion: Criterion) -> str | None:
    """Return why arithmetic alone refutes a criterion, or ``None``.

    Comparisons of two times cannot be refuted before the baseline is measured.
    """
    return criterion.quantity.infeasibility(study, criterion)


def guarantee(study: Study, criterion: Criterion) -> str | None:
    """Return why no measurement can miss a criterion, as a statement, or ``None``. Such a criterion says nothing.

    Without the operation or a variant of the study, as where a report is read on another machine, it is not known: ``None``.
    """
    try:
        return criterion.quantity.guarantee(study, criterion)
    except OneLaunchError:
        return None


def least_cost(study: Study, shape: Shape, direction: Direction) -> Cost:
    """Return the least cost of an operation at a shape: the fewest bytes and FLOPs of any implementation."""
    return study.operation_at(shape).cost(study.case(shape), None, direction)


def most_bytes(study: Study, selector: Selector, shape: Shape, direction: Direction) -> int:
    """Return the largest number of bytes, by arithmetic, of the variants that a selector stands for at a shape."""
    operation, case = study.operation_at(shape), study.case(shape)
    if isinstance(selector, str) and selector in operation.controls and selector not in operation.variants:
        return operation.controls[selector].cost(case).bytes
    variants = [None if name == AUTO else operation.get(name) for name in study.select(selector, shape)]
    return max(operation.cost(case, variant, direction).bytes for variant in variants)


def _plan(cost: Cost, least: Cost, dtype: str, rates: Rates) -> Plan:
    """Return the costs and bounds of a variant from its own cost and the least cost of the operation."""
    launching = 1e6 * (cost.launches or 0) * rates.launch_seconds
    return Plan(
        flops=cost.flops,
        bytes=cost.bytes,
        least_bytes=least.bytes,
        launches=cost.launches,
        floor_microseconds=floor_microseconds(least, dtype, rates),
        planned_microseconds=floor_microseconds(cost, dtype, rates) + launching,
        written=cost.written,
        least_written=least.written,
    )


def _planned_variant(study: Study, shape: Shape, direction: Direction, name: str, rates: Rates, device: str) -> PlannedCell:
    """Plan a variant at a shape, with the reason if it cannot run."""
    operation, case = study.operation_at(shape), study.case(shape)
    query = operation.query(case, device, grad=direction == "forward_backward")
    variant, refused = variant_for(operation, name, query)
    plan = _plan(operation.cost(case, variant, direction), least_cost(study, shape, direction), shape.dtype, rates)
    if name in shape.skip:
        return PlannedCell(shape, direction, name, plan, status="unsupported", reason=LEFT_OUT)
    if variant is not None and (package := missing_package(variant)) is not None:
        return PlannedCell(shape, direction, name, plan, status="not_installed", reason=f"needs the package {package}")
    if refused is not None:
        return PlannedCell(shape, direction, name, plan, status="unsupported", reason=refused)
    return PlannedCell(shape, direction, name, plan)


def variant_for(operation: Operation[..., Any], name: str, query: Query) -> tuple[Variant | None, str | None]:
    """Return the variant that a name stands for at a call, and the reason why it cannot run the call, or ``None``.

    For ``auto`` it is the dispatcher's choice; ``None`` if no variant can run the call.
    """
    if name != AUTO:
        variant = operation.get(name)
        return variant, variant.why_not(query)
    try:
        return pick(AUTO, query), None
    except VariantUnsupported as error:
        return None, error.reason


def _planned_control(study: Study, shape: Shape, name: str, rates: Rates) -> PlannedCell:
    """Plan a control at a shape. It is forward only, and its own cost is its bound."""
    cost = study.operation_at(shape).controls[name].cost(study.case(shape))
    cell = PlannedCell(shape, "forward", name, _plan(cost, cost, shape.dtype, rates), control=True)
    return replace(cell, status="unsupported", reason=LEFT_OUT) if name in shape.skip else cell


def missing_package(variant: Variant) -> str | None:
    """Return the package that the variant's capability ``requires`` names if it is not installed here, else ``None``."""
    package = variant.capabilities.requires
    return None if package is None or package_installed(package) else package


def scale_for(device_type: str) -> Scale:
    """Return the scale that suits a device: full on a GPU, small on a CPU."""
    return "small" if device_type == "cpu" else "full"
