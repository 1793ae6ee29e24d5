"""Measure of peak memory: the bytes that PyTorch allocates during one call, without the inputs.

A criterion of a study names a measure by its ``name``. The class attributes are explained at
:class:`onelaunch.workbench.decide.measured.JudgedMeasure` and its base.

A criterion reads a value of ``of``, or compares ``of`` with ``over`` (by default the baseline). Each is the name of a variant or
control, or tags that stand for the fastest variant with them. ``among`` is the number of measurements from which one was chosen
as the fastest.
"""

from __future__ import annotations

from collections.abc import Sequence

from onelaunch.wording import listing
from onelaunch.workbench import quantities as q
from onelaunch.workbench.decide.judging import Finding, exactly
from onelaunch.workbench.decide.measured import JudgedMeasure
from onelaunch.workbench.result import Cell, Result
from onelaunch.workbench.study import Criterion, register


@register
class PeakMemoryRatio(JudgedMeasure):
    """Peak memory of ``of`` divided by that of ``over``."""

    name = "peak_memory_ratio"
    meaning = "peak memory of `of` / peak memory of `over`"
    rank = 2
    evidence = "the peak memory of {of} over that of {over} is"
    demand = "{of} takes {bound} the peak memory of {over}"
    told = "{of} takes {amount} the peak memory of {over}"
    limited_by_time = False

    def judge(self, result: Result, criterion: Criterion, cells: Sequence[Cell], among: int) -> Finding:
        del result
        of, over = cells
        if not of.peak_bytes or not over.peak_bytes:
            missing = listing(cell.variant for cell in (of, over) if not cell.peak_bytes)
            text = f"not measured: there is no peak memory of {missing} at {of.shape}"
            return Finding(of.shape, "not_measured", text, "not measured")
        value = of.peak_bytes / over.peak_bytes
        chosen = f", best of {among}" if among > 1 else ""
        amounts = f"{q.size(of.peak_bytes)} against {q.size(over.peak_bytes)}{chosen}"
        relation = f"takes {value:.3g}x the peak memory of"
        text = f"{of.variant} {relation} {over.label} at {of.shape} ({amounts}), {criterion.bound} was asked"
        return exactly(criterion, of.shape, value, text, f"{value:.3g}", among)
