"""Which variants a plot draws prominently, and in which order they take their colours."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from onelaunch.workbench import stats
from onelaunch.workbench.report.summary import believed, directions, fastest, main_regime, peer_names, reference, shapes
from onelaunch.workbench.result import Result

COLOURS = tuple(f"#04{index:02x}04" for index in range(10))
"""Stand-ins that the page's own colours ``--v0`` to ``--v9`` replace."""

MARKERS = "osD^vPX*<>"

MOST_SERIES = 8
"""Lines that a reader can tell apart in one plot."""

PROMINENT = 6
"""Lines drawn prominently where there are more than that."""


@dataclass(frozen=True)
class Series:
    """The variants of a result, as all of its plots draw them: each has one colour and one marker in a report."""

    prominent: tuple[str, ...]
    """Drawn in colour and named; the others are faint."""
    order: tuple[str, ...]
    """All variants, the prominent ones first."""
    others: int
    """Variants with a time that are not prominent."""

    @classmethod
    def of(cls, result: Result) -> Series:
        """Choose the prominent variants.

        All of up to :data:`MOST_SERIES`; of more, the reference, the peers' libraries and those that are fastest somewhere,
        filled up to :data:`PROMINENT` by speed.
        """
        every = list(dict.fromkeys(cell.variant for cell in result.cells if not cell.control))
        timed = {cell.variant for cell in result.cells if cell.status == "ok" and cell.timings}
        names = [name for name in every if name in timed]
        if len(names) <= MOST_SERIES:
            return cls(tuple(names), (*names, *(name for name in every if name not in timed)), 0)
        libraries = peer_names(result)
        wanted = dict.fromkeys([reference(result), *(name for name in names if name in libraries), *_winners(result)])
        most = max(PROMINENT, min(len(wanted), MOST_SERIES))
        kept = list(dict.fromkeys([*wanted, *_by_speed(result, names)]))[:most]
        shown = tuple(name for name in names if name in kept)
        return cls(shown, (*shown, *(name for name in every if name not in shown)), len(names) - len(shown))

    def colour(self, variant: str) -> str:
        """Return the stand-in colour of a variant."""
        return COLOURS[self.order.index(variant) % len(COLOURS)]

    def marker(self, variant: str) -> str:
        """Return matplotlib's name of a variant's marker."""
        return MARKERS[self.order.index(variant) % len(MARKERS)]


def _winners(result: Result) -> list[str]:
    """Return the variants that are fastest at some shape."""
    places = [(shape.name, direction) for direction in directions(result) for shape in shapes(result, direction)]
    return [best.variant for place in places if (best := fastest(result, *place))]


def _by_speed(result: Result, names: Iterable[str]) -> list[str]:
    """Return the timed variants by their mean distance from the fastest at each shape, the nearest first."""
    regime = main_regime(result)
    ratios: dict[str, list[float]] = {name: [] for name in names}
    for cell in result.cells:
        timing = believed(cell, regime)
        best = believed(fastest(result, cell.shape, cell.direction), regime)
        if timing and best and cell.variant in ratios and not cell.control:
            ratios[cell.variant].append(timing.microseconds.median / best.microseconds.median)
    timed = [name for name in ratios if ratios[name]]
    return sorted(timed, key=lambda name: stats.geometric_mean(ratios[name]))
