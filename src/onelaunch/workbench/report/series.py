"""Choice of the variants that plots draw prominently, and of their colours and markers.

``plots.py`` makes one :class:`Series` for all plots of a report.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from onelaunch.workbench import stats
from onelaunch.workbench.report.summary import directions, fastest, main_regime, peer_names, reference, shapes, valid_timing
from onelaunch.workbench.result import Result

COLOURS = tuple(f"#04{index:02x}04" for index in range(10))
"""Placeholder colours, which the page's own colours ``--v0`` to ``--v9`` replace."""

_MARKERS = "osD^vPX*<>"
"""Matplotlib's names of the markers."""

MOST_SERIES = 8
"""Largest number of lines that a reader can tell apart in one plot."""

_PROMINENT = 6
"""Number of lines drawn prominently if more than :data:`MOST_SERIES` variants have times; more only for peers and winners."""


@dataclass(frozen=True)
class Series:
    """Variants of a result in the order of their colours. A variant has the same colour and marker in all plots of a report."""

    prominent: tuple[str, ...]
    """Variants drawn in colour and named in the legend. The others are drawn faintly."""
    order: tuple[str, ...]
    """All variants, the prominent ones first."""
    others: int
    """Number of timed variants that are not prominent."""

    @classmethod
    def of(cls, result: Result) -> Series:
        """Choose the prominent variants.

        Up to :data:`MOST_SERIES` timed variants are all prominent. If there are more, the reference (over which speeds are
        taken), the peers (variants of other libraries) and the variants that are fastest at some shape are prominent, at most
        :data:`MOST_SERIES` of them. The fastest others follow as long as there are fewer than :data:`_PROMINENT`.
        """
        every = list(dict.fromkeys(cell.variant for cell in result.cells if not cell.control))
        timed = {cell.variant for cell in result.cells if cell.measured and cell.timings}
        names = [name for name in every if name in timed]
        if len(names) <= MOST_SERIES:
            return cls(tuple(names), (*names, *(name for name in every if name not in timed)), 0)
        libraries = peer_names(result)
        wanted = dict.fromkeys([reference(result), *(name for name in names if name in libraries), *_winners(result)])
        most = max(_PROMINENT, min(len(wanted), MOST_SERIES))
        chosen = list(dict.fromkeys([*wanted, *_by_speed(result, names)]))[:most]
        shown = tuple(name for name in names if name in chosen)
        return cls(shown, (*shown, *(name for name in every if name not in shown)), len(names) - len(shown))

    def colour(self, variant: str) -> str:
        """Return the placeholder colour of a variant."""
        return COLOURS[self.order.index(variant) % len(COLOURS)]

    def marker(self, variant: str) -> str:
        """Return matplotlib's name of a variant's marker."""
        return _MARKERS[self.order.index(variant) % len(_MARKERS)]


def _winners(result: Result) -> list[str]:
    """Return the variants that are fastest at some shape."""
    cases = [(shape.name, direction) for direction in directions(result) for shape in shapes(result, direction)]
    return [best.variant for case in cases if (best := fastest(result, *case))]


def _by_speed(result: Result, names: Iterable[str]) -> list[str]:
    """Return the timed variants, sorted by the geometric mean of their times over the fastest at each shape."""
    regime = main_regime(result)
    ratios: dict[str, list[float]] = {name: [] for name in names}
    for cell in result.cells:
        timing = valid_timing(cell, regime)
        best = valid_timing(fastest(result, cell.shape, cell.direction), regime)
        if timing and best and cell.variant in ratios and not cell.control:
            ratios[cell.variant].append(timing.microseconds.median / best.microseconds.median)
    timed = [name for name in ratios if ratios[name]]
    return sorted(timed, key=lambda name: stats.geometric_mean(ratios[name]))
