"""Times of our fastest variant of a case beside the fastest other one and the roofline bound.

``tools/write_readme.py`` writes README's table and picture from them, and ``docs/tables.py`` the tables of the experiments.
Others are the peers (variants of other libraries), torch.compile and plain PyTorch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from onelaunch.operation import Direction, find_operation
from onelaunch.workbench.report.documents import COMPILED
from onelaunch.workbench.report.summary import peer_names, speedup, valid_timing
from onelaunch.workbench.result import Cell, Estimate, Result
from onelaunch.workbench.study import Regime, Shape


@dataclass(frozen=True)
class Comparison:
    """Our fastest variant and the fastest other one at a shape, in one direction."""

    shape: Shape
    direction: Direction
    regime: Regime
    ours: Cell
    other: Cell | None
    """Fastest peer or PyTorch variant, or ``None`` if none of them has a valid time."""

    @property
    def microseconds(self) -> float:
        """Median time of our variant."""
        return median(self.ours, self.regime)

    @property
    def other_microseconds(self) -> float | None:
        """Median time of the other variant."""
        return None if self.other is None else median(self.other, self.regime)

    @property
    def bound_microseconds(self) -> float | None:
        """Roofline bound: the least time that the case takes at the measured peaks of the device."""
        return self.ours.plan.floor_microseconds if self.ours.plan else None

    @property
    def gain(self) -> Estimate | None:
        """Speed of ours over the other, from ratios taken round by round."""
        return speedup(self.ours, self.other, self.regime)


def compare(result: Result, shape: str, direction: Direction) -> Comparison:
    """Return the comparison at a shape of a result, in the regime ``running`` where it was timed, else cold.

    Raises:
        LookupError: The study has no such shape, or none of our variants has a valid time there.
    """
    declared = next((each for each in result.study.shapes if each.name == shape), None)
    if declared is None:
        raise LookupError(f"The study {result.study.name} has no shape {shape!r}.")
    cells = [cell for cell in result.cells if (cell.shape, cell.direction) == (shape, direction) and not cell.control]
    regime: Regime = "running" if any(valid_timing(cell, "running") for cell in cells) else "cold"
    foreign = _others(result, declared.operation or result.study.operation_names()[0])
    ours = _fastest((cell for cell in cells if cell.variant not in foreign and not cell.outside), regime)
    if ours is None:
        raise LookupError(f"No variant of onelaunch has a valid time at {shape!r} of {result.study.name} ({direction}).")
    return Comparison(declared, direction, regime, ours, _fastest((cell for cell in cells if cell.variant in foreign), regime))


def median(cell: Cell, regime: Regime) -> float:
    """Return the median time of a measurement in microseconds, or infinity without a valid time in this regime."""
    timing = valid_timing(cell, regime)
    return timing.microseconds.median if timing else float("inf")


def _fastest(cells: Iterable[Cell], regime: Regime) -> Cell | None:
    timed = [cell for cell in cells if valid_timing(cell, regime)]
    return min(timed, key=lambda cell: median(cell, regime), default=None)


def _others(result: Result, name: str) -> frozenset[str]:
    """Return the names of the variants of an operation that are not ours: peers, torch.compile and plain PyTorch."""
    pytorch = (
        each.name
        for each in find_operation(name).variants.values()
        if each.tags.get("maker") == "pytorch" or each.tags.get("yardstick")
    )
    return frozenset((*peer_names(result), COMPILED, *pytorch))
