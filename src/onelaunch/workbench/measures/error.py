"""Measure of correctness: the error against the oracle, which computes the operation in float64.

A criterion of a study names a measure by its ``name``. The class attributes are explained at
:class:`onelaunch.workbench.decide.measured.JudgedMeasure` and its base.

A criterion reads the error of ``of``, the name of a variant or tags of several. A peer outside the gate (``outside``) is another
project's variant whose errors are larger than the verification gate allows, but within the tolerance of that project's tests;
others are compared with its times.
"""

from __future__ import annotations

from collections.abc import Sequence

from onelaunch.workbench import quantities as q
from onelaunch.workbench.decide.judging import Finding, exactly
from onelaunch.workbench.decide.measured import JudgedMeasure
from onelaunch.workbench.decide.selection import why_none
from onelaunch.workbench.result import Cell, Estimate, Result
from onelaunch.workbench.study import Alone, Criterion, Shape, Study, register

ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24}
"""Unit roundoff of each dtype."""

_EXACTNESS = 0.25
"""Fraction of the unit roundoff below which an error cannot be asked for.

An output that is rounded once has a norm-wise error between 0.29 and 0.58 of the unit roundoff. Unless the exact results happen
to be representable, no implementation that stores its output in that dtype can reach an error below this fraction.
"""


@register
class Error(JudgedMeasure):
    """Largest norm-wise error of ``of`` against the oracle."""

    name = "error"
    meaning = "largest norm-wise error of `of` against the oracle"
    unit = ""
    alone = Alone("an error is judged against the oracle", "an error is")
    no_mean = "of errors the largest counts, not their mean"
    rank = 9
    evidence = "the error of {of} is"
    demand = "norm-wise error of {of} {bound}"
    told = "the norm-wise error of {of} is {amount}"
    limited_by_time = False

    def infeasible_at(self, study: Study, criterion: Criterion, shape: Shape) -> str | None:
        del study
        if criterion.at_most is None or criterion.at_most >= (finest := _EXACTNESS * ROUNDING[shape.dtype]):
            return None
        return (
            f"rounding to {shape.dtype} alone makes an error above {finest:.1e} at {shape.name}, "
            f"the study asks for at most {criterion.at_most:.1e}"
        )

    def finding(self, result: Result, criterion: Criterion, shape: Shape) -> Finding:
        """Judge the largest error of all selected variants, not of the fastest alone, since every variant has to be accurate."""
        names = result.study.select(criterion.of, shape)
        cells = [cell for name in names if (cell := result.cell(shape.name, name, criterion.direction)) is not None]
        judged = [cell for cell in cells if cell.verdict is not None and (cell.verdict.components or not cell.verdict.ok)]
        if not judged:
            reason = why_none(names, cells, shape.name, criterion)
            return Finding(shape.name, "not_measured", f"not measured: {reason}", f"not measured ({reason})")
        return self.judge(result, criterion, judged, 1)

    def judge(self, result: Result, criterion: Criterion, cells: Sequence[Cell], among: int) -> Finding:
        del result, among
        shape = cells[0].shape
        for cell in cells:
            if cell.verdict is not None and cell.outside:
                text = f"{cell.label} at {shape}: {cell.verdict.explain()}"
                return Finding(shape, "missed", text, "outside the gate")
            if cell.verdict is not None and not cell.verdict.ok:
                return Finding(shape, "missed", f"{cell.variant} is incorrect at {shape}: {cell.verdict.explain()}", "incorrect")
        errors = [(part.error, part.name, cell.variant) for cell in cells if cell.verdict for part in cell.verdict.components]
        error, part, variant = max(errors)
        found = f"the largest norm-wise error of {variant} at {shape} is {error:.2g} ({part})"
        return exactly(criterion, shape, error, f"{found}, at most {criterion.at_most:g} was asked", f"{error:.2g}")

    def amount(self, value: Estimate) -> str:
        return q.scientific(value.median)
