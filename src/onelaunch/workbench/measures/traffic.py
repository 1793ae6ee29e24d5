"""Measures of DRAM bytes. A criterion on them is measured only if the hardware counted the bytes.

A criterion of a study names a measure by its ``name``. The class attributes are explained at
:class:`onelaunch.workbench.decide.measured.JudgedMeasure` and its base.

A criterion reads a value of ``of``, or compares ``of`` with ``over`` (by default the baseline). Each is the name of a variant or
control, or tags that stand for the fastest variant with them. Bytes have the source ``ncu`` if the hardware counted them, and
``analytic`` if they are computed. ``among`` is the number of measurements from which one was chosen as the fastest.
"""

from __future__ import annotations

from collections.abc import Sequence

from onelaunch.wording import listing
from onelaunch.workbench import quantities as q
from onelaunch.workbench.decide.judging import Finding, exactly
from onelaunch.workbench.decide.measured import JudgedMeasure
from onelaunch.workbench.result import Cell, Result
from onelaunch.workbench.stats import geometric_mean
from onelaunch.workbench.study import Alone, Criterion, Shape, Study, register
from onelaunch.workbench.study.plan import least_cost, most_bytes


@register
class DramBytesRatio(JudgedMeasure):
    """DRAM bytes of ``over`` divided by those of ``of``."""

    name = "dram_bytes_ratio"
    meaning = "DRAM bytes of `over` / DRAM bytes of `of`"
    better = "higher"
    needs_dram_bytes = True
    rank = 3
    evidence = "the bytes of {over} over those of {of} are"
    demand = "DRAM bytes of {over} {bound} those of {of}"
    told = "the DRAM bytes of {over} are {amount} those of {of}"

    def infeasibility(self, study: Study, criterion: Criterion) -> str | None:
        if criterion.combine != "geomean":
            return super().infeasibility(study, criterion)
        asked = study.asked(criterion)
        moved = [_most_and_least(study, each.criterion, each.shape) for each in asked]
        if criterion.at_least is None or not all(most and least for most, least in moved):
            return None
        mean = geometric_mean([most / least for most, least in moved])
        if mean >= criterion.at_least:
            return None
        return (
            f"at most {mean:.2f}x fewer bytes is possible in the geometric mean over {len(asked)} shapes, "
            f"the study asks for at least {criterion.at_least:g}x"
        )

    def infeasible_at(self, study: Study, criterion: Criterion, shape: Shape) -> str | None:
        if criterion.at_least is None:
            return None
        most, least = _most_and_least(study, criterion, shape)
        if not least or most / least >= criterion.at_least:
            return None
        return (
            f"at most {most / least:.2f}x fewer bytes is possible at {shape.name} ({q.size(most)} against "
            f"{q.size(least)}), the study asks for at least {criterion.at_least:g}x"
        )

    def judge(self, result: Result, criterion: Criterion, cells: Sequence[Cell], among: int) -> Finding:
        del result
        of, over = cells
        if of.traffic is None or over.traffic is None or not of.traffic.total:
            missing = listing(cell.variant for cell in (of, over) if cell.traffic is None or not cell.traffic.total)
            text = f"not measured: there is no traffic of {missing} at {of.shape}"
            return Finding(of.shape, "not_measured", text, "no traffic")
        value = over.traffic.total / of.traffic.total
        amounts = f"{q.size(over.traffic.total)} of {over.label} against {q.size(of.traffic.total)} of {of.variant}"
        if {of.traffic.source, over.traffic.source} != {"ncu"}:
            return _by_arithmetic(criterion, of.shape, value, amounts, among)
        chosen = f", best of {among}" if among > 1 else ""
        return _counted(criterion, of.shape, value, f"{amounts}{chosen}", among)


@register
class DramBytesOverLeast(JudgedMeasure):
    """DRAM bytes of ``of`` divided by the fewest bytes that any implementation must move, by the plan."""

    name = "dram_bytes_over_least"
    meaning = "DRAM bytes of `of` / the fewest bytes that any implementation must move, by the plan"
    alone = Alone("bytes are compared with the least", "bytes over the least are")
    needs_dram_bytes = True
    rank = 4
    evidence = "the bytes of {of} over the least are"
    demand = "DRAM bytes of {of} {bound} the least"
    told = "the DRAM bytes of {of} are {amount} the least"

    def infeasible_at(self, study: Study, criterion: Criterion, shape: Shape) -> str | None:
        if criterion.at_most is None or criterion.at_most >= 1:
            return None
        least = least_cost(study, shape, criterion.direction).bytes
        least_words = f"fewer than the least bytes cannot move at {shape.name} ({q.size(least)})"
        return f"{least_words}, the study asks for {criterion.at_most:g}x"

    def guaranteed_at(self, study: Study, criterion: Criterion, shape: Shape) -> str | None:
        del study, shape
        least = criterion.at_least is not None and criterion.at_least <= 1
        return "no variant moves fewer than the least bytes" if least else None

    def judge(self, result: Result, criterion: Criterion, cells: Sequence[Cell], among: int) -> Finding:
        del result
        (cell,) = cells
        if cell.traffic is None or cell.plan is None or not cell.plan.least_bytes:
            text = f"not measured: there is no traffic of {cell.variant} at {cell.shape}"
            return Finding(cell.shape, "not_measured", text, "no traffic")
        value = cell.traffic.total / cell.plan.least_bytes
        chosen = f", best of {among}" if among > 1 else ""
        amounts = f"{q.size(cell.traffic.total)} of {cell.variant} against {q.size(cell.plan.least_bytes)} at the least{chosen}"
        if cell.traffic.source != "ncu":
            return _by_arithmetic(criterion, cell.shape, value, amounts, among)
        return _counted(criterion, cell.shape, value, amounts, among)


def _most_and_least(study: Study, criterion: Criterion, shape: Shape) -> tuple[int, int]:
    """Return the most bytes, by arithmetic, of the variants of ``over``, and the fewest of any implementation."""
    most = most_bytes(study, study.over(criterion), shape, criterion.direction)
    return most, least_cost(study, shape, criterion.direction).bytes


def _by_arithmetic(criterion: Criterion, shape: str, value: float, amounts: str, among: int) -> Finding:
    """Return the finding ``not_measured``: bytes by arithmetic follow from the plan, and would decide without a measurement."""
    text = f"not measured: no counted bytes at {shape}; by arithmetic {value:.2f} ({amounts}), {criterion.bound} was asked"
    return Finding(shape, "not_measured", text, f"{value:.2f} by arithmetic, not counted", None, among)


def _counted(criterion: Criterion, shape: str, value: float, amounts: str, among: int) -> Finding:
    text = f"counted by ncu at {shape}: {value:.2f}x ({amounts}), {criterion.bound} was asked"
    return exactly(criterion, shape, value, text, f"{value:.2f}", among)
