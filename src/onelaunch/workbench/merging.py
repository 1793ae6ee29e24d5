"""Merge the results of the parts of one run, which processes measured in parallel, each on a device of its own.

``supervise/parent.py`` calls :func:`merged` for partial results and for the last one. :func:`refuse_other_devices` is called once
for each part, before its first case.
"""

from __future__ import annotations

from collections.abc import Sequence

from onelaunch.errors import ResultMismatch
from onelaunch.workbench.cells import bounded
from onelaunch.workbench.decide.decision import concluded
from onelaunch.workbench.result import Cell, Noise, ProbeReport, Result, Spent
from onelaunch.workbench.result.provenance import merge_clocks
from onelaunch.workbench.resume import differences


def merged(parts: Sequence[Result], earlier: Result | None = None) -> Result:
    """Return the results of all parts of a run as one, with its outcomes and decision.

    Each measurement comes from the part that made it. Where a part has measured higher peaks, because a time was below its
    roofline bound, all bounds follow them.

    Args:
        parts: Results of the parts, interrupted ones included. Each holds a cell for every planned measurement of the whole
            run, in one order; cells of other parts have the status ``interrupted``.
        earlier: Interrupted run that all parts continue, if any. Each part's result holds its measurements and what it took.
    """
    latest = max(parts, key=lambda part: part.ceilings.measured_at)
    same = zip(*(part.cells for part in parts), strict=True)
    cells = tuple(_bounded(_measured(each), cell) for each, cell in zip(same, latest.cells, strict=True))
    noise: dict[tuple[str, str, str], Noise] = {}
    probes: dict[str, ProbeReport] = {}
    for part in parts:
        noise |= {(each.shape, each.direction, each.regime): each for each in part.noise}
        for label, report in part.probes.items():
            # Parts that have not judged a variant may hold an earlier report, of a quick run in one direction.
            if label not in probes or len(report.directions) > len(probes[label].directions):
                probes[label] = report
    provenance = max((part.provenance for part in parts), key=lambda each: each.date)
    clocks = [part.provenance.clocks for part in parts if part.provenance.clocks]
    found = Result(
        study=latest.study,
        study_digest=latest.study_digest,
        provenance=provenance.model_copy(update={"clocks": merge_clocks(clocks)}),
        ceilings=latest.ceilings,
        cells=cells,
        noise=tuple(noise.values()),
        notes=tuple(dict.fromkeys(note for part in parts for note in part.notes)),
        interrupted=any(cell.status == "interrupted" for cell in cells),
        probes=probes,
        spent=_spent([part.spent for part in parts if part.spent is not None], earlier),
    )
    return concluded(found)


def refuse_other_devices(first: Result, other: Result) -> None:
    """Refuse to measure a part of a run on a device that differs from that of the first part.

    Raises:
        ResultMismatch: Device, driver or software differ.
    """
    if found := differences(first, other):
        facts = "; ".join(found).replace(" then, ", " on the first device, ").replace(" now", " on another")
        raise ResultMismatch(f"The devices of one run must be alike: {facts}.", advice="Name devices of one kind, or run on one.")


def _measured(same: Sequence[Cell]) -> Cell:
    """Return the cell of the part that made the measurement: the one that has ended, or else the one with the most rounds."""
    return max(same, key=lambda cell: (cell.status != "interrupted", sum(len(each.rounds) for each in cell.timings)))


def _bounded(cell: Cell, latest: Cell) -> Cell:
    """Return a cell with the bound that rests on the latest peaks."""
    return cell if latest.plan is None or cell.plan == latest.plan else bounded(cell, latest.plan)


def _spent(parts: Sequence[Spent], earlier: Result | None) -> Spent | None:
    """Return what a run took: the wall time of the longest part, and the seconds of all devices, those of before counted once."""
    if not parts:
        return None
    longest = max(parts, key=lambda part: part.wall_seconds)
    before = earlier.spent.device_seconds if earlier is not None and earlier.spent is not None else 0.0
    seconds = before + sum(part.device_seconds - before for part in parts)
    return longest.model_copy(update={"device_seconds": max(0.0, seconds)})
