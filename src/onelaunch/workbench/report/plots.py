"""The plots of a report as SVG to be placed inside a page: colours come from the page, so that light and dark both work.

Drawn by matplotlib with stand-in colours that are replaced by CSS variables (``--ink``, ``--faint``, ``--floor``, ``--v0`` to
``--v9``). A plot is narrow enough to be read on a phone; a page puts several side by side.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from onelaunch.operation import Direction
from onelaunch.workbench import quantities as q
from onelaunch.workbench.report.summary import (
    believed,
    cells_at,
    directions,
    main_regime,
    shapes,
    times_floor,
    way,
)
from onelaunch.workbench.result import Cell, Regime, Result
from onelaunch.workbench.study import Shape

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, FAINT, FLOOR = "#010101", "#020202", "#030303"
SERIES = tuple(f"#04{index:02x}04" for index in range(10))
STAND_INS = {INK: "var(--ink)", FAINT: "var(--faint)", FLOOR: "var(--floor)"} | {
    colour: f"var(--v{index})" for index, colour in enumerate(SERIES)
}
MARKERS = "osD^vPX*<>"
DASHES = (0, (2, 1.4))
CROWDED = 5
"""More labels than this on an axis need care."""

WIDTH = 4.6
"""Inches; a page shows an inch as about 80 pixels."""

SWEPT = ("B", "T", "N")
"""Dimensions whose product is the amount of work at one size of the model: batch, time, tokens."""


@dataclass(frozen=True)
class Plot:
    """A picture with the sentence that says what to see in it."""

    title: str
    caption: str
    direction: Direction
    svg: str


def plots(result: Result) -> tuple[Plot, ...]:
    """All plots that this result has numbers for."""
    regime = main_regime(result)
    if regime is None:
        return ()
    made: list[Plot] = []
    for direction in directions(result):
        made += _times(result, direction, regime) + _distance(result, direction, regime)
    return tuple(made + _bytes(result))


# Time against size


def _times(result: Result, direction: Direction, regime: Regime) -> list[Plot]:
    """One plot for every group of shapes that differ in batch and time alone."""
    groups: dict[tuple[Any, ...], list[Shape]] = {}
    for shape in shapes(result, direction):
        fixed = tuple((key, value) for key, value in shape.sizes.items() if key not in SWEPT)
        if _timed(result, shape, direction, regime):
            groups.setdefault((fixed, tuple(shape.options.items()), shape.dtype), []).append(shape)
    made = []
    for (fixed, options, dtype), members in groups.items():
        model = " ".join([*(f"{key}={value}" for key, value in (*fixed, *options)), dtype])
        title = f"Time, {way(direction)}, {model}"
        if len(members) == 1:
            name = members[0].name
            caption = f"{name} ({regime}): each variant's median with its 95 % interval; the line is the floor."
            made.append(
                _plot(title, caption, direction, lambda axes, at=members[0]: _time_bars(axes, result, at, direction, regime), 0.0)
            )
        else:
            caption = f"Medians ({regime}) with their 95 % intervals; nothing can run below the floor. Lower is better."
            draw: Callable[[Axes], int] = lambda axes, at=members: _time_lines(axes, result, at, direction, regime)  # noqa: E731
            made.append(_plot(title, caption, direction, draw, 3.4))
    return made


def _time_lines(axes: Axes, result: Result, members: Sequence[Shape], direction: Direction, regime: Regime) -> int:
    members = sorted(members, key=lambda shape: (_amount(shape), shape.sizes.get("T", 0)))
    places = _size_axis(axes, members)
    for variant in _variants(result):
        points = [
            (places[shape.name], timing.microseconds)
            for shape in members
            if (timing := believed(result.cell(shape.name, variant, direction), regime))
        ]
        if points:
            x, times = [x for x, _ in points], [time for _, time in points]
            colour = _colour(result, variant)
            medians = [time.median for time in times]
            axes.plot(x, medians, marker=_marker(result, variant), label=variant, color=colour, lw=1.3, ms=4.5)
            axes.vlines(x, [time.low for time in times], [time.high for time in times], color=colour, lw=1.6)
    floors = [(places[shape.name], floor) for shape in members if (floor := _floor(result, shape, direction))]
    axes.plot([x for x, _ in floors], [floor for _, floor in floors], color=FLOOR, lw=2.2, ls=DASHES, label="floor")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _: _tick(value))
    axes.yaxis.set_minor_formatter(lambda *_: "")
    axes.grid(axis="y", color=FAINT, lw=0.6)
    return len(axes.lines)


def _size_axis(axes: Axes, members: Sequence[Shape]) -> dict[str, int]:
    """Where each shape stands: at the one size that varies, else at its amount of work, else side by side in that order."""
    swept = [key for key in SWEPT if key in members[0].sizes]
    varied = [key for key in swept if len({shape.sizes[key] for shape in members}) > 1]
    along = [shape.sizes[varied[0]] for shape in members] if len(varied) == 1 else [_amount(shape) for shape in members]
    if len(set(along)) < len(members):
        axes.set_xticks(range(len(members)), [_short(shape) for shape in members], rotation=45 if len(members) > CROWDED else 0)
        axes.set_xlabel(f"{' × '.join(swept)}, by their product" if swept else "")
        return {shape.name: place for place, shape in enumerate(members)}
    axes.set_xscale("log", base=2)
    ticks = _spaced(along)
    axes.set_xticks(ticks, [f"{value:,}" for value in ticks])
    axes.minorticks_off()
    fixed = ", ".join(f"{key}={members[0].sizes[key]}" for key in swept if key not in varied)
    axes.set_xlabel(" × ".join(varied) + (f" ({fixed})" if fixed else ""))
    return dict(zip([shape.name for shape in members], along, strict=True))


def _time_bars(axes: Axes, result: Result, shape: Shape, direction: Direction, regime: Regime) -> int:
    cells = _timed(result, shape, direction, regime)
    cells.sort(key=lambda cell: -_median(cell, regime))
    for place, cell in enumerate(cells):
        timing = believed(cell, regime)
        if timing:
            time = timing.microseconds
            axes.plot([time.low, time.high], [place, place], color=_colour(result, cell.variant), lw=3)
            axes.plot(time.median, place, marker=_marker(result, cell.variant), ms=6, color=_colour(result, cell.variant))
            axes.annotate(q.time(time.median), (time.high, place), (7, 0), textcoords="offset points", va="center", color=INK)
    if floor := _floor(result, shape, direction):
        axes.axvline(floor, color=FLOOR, lw=2.2, ls=DASHES)
        axes.annotate(f"floor {q.time(floor)}", (floor, len(cells) - 0.4), (3, 0), textcoords="offset points", color=FLOOR)
    _rows(axes, [cell.variant for cell in cells], "time")
    return len(cells)


# Distance from the roofline


def _distance(result: Result, direction: Direction, regime: Regime) -> list[Plot]:
    rows = [
        shape
        for shape in shapes(result, direction)
        if any(times_floor(c, regime) for c in _timed(result, shape, direction, regime))
    ]
    if not rows:
        return []
    title = f"Distance from the roofline, {way(direction)}"
    caption = (
        f"Time over the floor ({regime}). The bar is the fastest variant, the marks are all; 1 would be the roofline itself."
    )
    return [_plot(title, caption, direction, lambda axes: _distance_bars(axes, result, rows, direction, regime), 0.0)]


def _distance_bars(axes: Axes, result: Result, rows: Sequence[Shape], direction: Direction, regime: Regime) -> int:
    marks: dict[str, list[tuple[float, int]]] = {variant: [] for variant in _variants(result)}
    for place, shape in enumerate(reversed(rows)):
        far = {cell.variant: value for cell in _timed(result, shape, direction, regime) if (value := times_floor(cell, regime))}
        best = min(far, key=lambda name: far[name])
        axes.barh(place, far[best] - 1, left=1, height=0.56, color=_colour(result, best), alpha=0.45, lw=0)
        for variant, value in far.items():
            marks[variant].append((value, place))
    for variant, points in marks.items():
        if points:
            style = {"marker": _marker(result, variant), "color": _colour(result, variant)}
            axes.plot([x for x, _ in points], [y for _, y in points], ls="", ms=5, label=variant, **style)
    axes.axvline(1, color=FLOOR, lw=2.2, ls=DASHES)
    _rows(axes, [shape.name for shape in reversed(rows)], "ratio")
    return len(rows)


# Bytes


def _bytes(result: Result) -> list[Plot]:
    """The shapes with counted bytes, or the first one where nothing was counted."""
    candidates = []
    for direction in directions(result):
        for shape in shapes(result, direction):
            cells = [cell for cell in cells_at(result, shape.name, direction) if cell.traffic and cell.plan and not cell.control]
            if cells:
                candidates.append((any(cell.traffic.source == "ncu" for cell in cells if cell.traffic), direction, shape, cells))
    chosen = [entry for entry in candidates if entry[0]] or candidates[:1]
    made = []
    for counted, direction, shape, cells in chosen[:4]:
        title = f"DRAM bytes, {way(direction)}, {shape.name}"
        how = "counted by the hardware (ncu) where the bar is solid" if counted else "by arithmetic, not counted"
        caption = f"Bytes of one call, {how}; the tick is what this way of computing must move, the line the least of any."
        made.append(_plot(title, caption, direction, lambda axes, cells=cells: _bytes_bars(axes, cells, result), 0.0))
    return made


def _bytes_bars(axes: Axes, cells: Sequence[Cell], result: Result) -> int:
    ordered = sorted(cells, key=lambda cell: -(cell.traffic.total if cell.traffic else 0))
    for place, cell in enumerate(ordered):
        if cell.traffic and cell.plan:
            counted = cell.traffic.source == "ncu"
            axes.barh(
                place, cell.traffic.total, height=0.6, color=_colour(result, cell.variant), alpha=0.8 if counted else 0.3, lw=0
            )
            axes.plot([cell.plan.bytes] * 2, [place - 0.38, place + 0.38], color=INK, lw=2)
            axes.annotate(
                q.size(cell.traffic.total),
                (cell.traffic.total, place),
                (5, 0),
                textcoords="offset points",
                va="center",
                color=INK,
            )
            axes.axvline(cell.plan.least_bytes, color=FLOOR, lw=2.2, ls=DASHES)
    axes.set_yticks(range(len(ordered)), [cell.variant for cell in ordered])
    most = max(cell.traffic.total for cell in ordered if cell.traffic)
    unit = next((scale for scale, _ in q.BYTES if most >= scale), 1.0)
    axes.set_xlim(0, 1.25 * most)
    axes.set_xticks([unit * step for step in _steps(most / unit)])
    axes.xaxis.set_major_formatter(lambda value, _: f"{value / unit:g}" if value else "0")
    axes.set_xlabel(q.size(unit).partition(" ")[2])
    return len(ordered)


# What the plots share


def _plot(title: str, caption: str, direction: Direction, draw: Callable[[Axes], int], height: float) -> Plot:
    """Draw on a fresh figure; a height of 0 grows with the number of rows drawn."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    settings = {
        "svg.fonttype": "none",
        "svg.hashsalt": title,
        "font.family": "sans-serif",
        "font.size": 9.5,
        "text.color": INK,
        "axes.edgecolor": FAINT,
        "axes.labelcolor": INK,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "xtick.color": INK,
        "ytick.color": INK,
        "xtick.minor.visible": False,
    }
    with mpl.rc_context(settings):
        figure = Figure(figsize=(WIDTH, height or 3.0), layout="constrained")
        axes = figure.add_subplot()
        rows = draw(axes)
        handles, labels = axes.get_legend_handles_labels()
        lines = math.ceil(len(labels) / 2) if labels else 0
        if labels:
            figure.legend(handles, labels, loc="outside lower left", ncols=2, frameon=False, fontsize=9)
        figure.set_figheight((height or 0.75 + 0.27 * rows) + 0.19 * lines)
        return Plot(title, caption, direction, _svg(figure, title))


def _svg(figure: Figure, title: str) -> str:
    """The figure as one SVG element whose ids are its own and whose colours are the page's."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r' (?:width|height)="[\d.]+pt"', "", text, count=2)
    text = re.sub(r' xmlns(?::xlink)?="[^"]*"', "", text).replace("xlink:href", "href")
    own = re.sub(r"\W+", "-", title)
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{own}-", text)
    for colour, variable in STAND_INS.items():
        text = text.replace(colour, variable)
    text = re.sub(r"(font: [\d.]+px )[^;\"]*", r"\1inherit-family", text).replace("inherit-family", "var(--font)")
    return text.replace("<svg", f'<svg role="img" aria-label="{title}"', 1).strip()


def _rows(axes: Axes, labels: Sequence[str], kind: str) -> None:
    """Named rows against a logarithmic axis of times or ratios."""
    from matplotlib.ticker import LogLocator

    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(-0.6, len(labels) - 0.1)
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    axes.set_xlim(low, high * (high / low) ** 0.16)
    if high < 30 * low:  # powers of ten alone would leave one label
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(lambda value, _: _tick(value) if kind == "time" else f"{value:g}x")
    axes.xaxis.set_minor_formatter(lambda *_: "")
    axes.grid(axis="x", color=FAINT, lw=0.6)
    axes.tick_params(axis="y", length=0)


def _tick(microseconds: float) -> str:
    """A time without the zeros that say how exact it is: ``10 µs``."""
    value, _, unit = q.time(microseconds).partition(" ")
    return f"{float(value):g} {unit}"


def _steps(most: float) -> Sequence[float]:
    from matplotlib.ticker import MaxNLocator

    return [float(step) for step in MaxNLocator(4).tick_values(0, most)]


def _timed(result: Result, shape: Shape, direction: Direction, regime: Regime) -> list[Cell]:
    return [cell for cell in cells_at(result, shape.name, direction) if not cell.control and believed(cell, regime)]


def _variants(result: Result) -> list[str]:
    """In the order in which they first appear: a variant has one colour in all plots of a report."""
    return list(dict.fromkeys(cell.variant for cell in result.cells if not cell.control))


def _colour(result: Result, variant: str) -> str:
    return SERIES[_variants(result).index(variant) % len(SERIES)]


def _marker(result: Result, variant: str) -> str:
    return MARKERS[_variants(result).index(variant) % len(MARKERS)]


def _floor(result: Result, shape: Shape, direction: Direction) -> float | None:
    return next((c.plan.floor_microseconds for c in cells_at(result, shape.name, direction) if c.plan and not c.control), None)


def _median(cell: Cell, regime: Regime) -> float:
    timing = believed(cell, regime)
    return timing.microseconds.median if timing else math.inf


def _amount(shape: Shape) -> int:
    return math.prod(value for key, value in shape.sizes.items() if key in SWEPT)


def _short(shape: Shape) -> str:
    return "×".join(str(shape.sizes[key]) for key in SWEPT if key in shape.sizes) or shape.name


def _spaced(values: Sequence[int]) -> list[int]:
    """Those of the rising values whose labels have room on a logarithmic axis."""
    kept: list[int] = []
    for value in values:
        if not kept or value >= (values[-1] / values[0]) ** (1 / CROWDED) * kept[-1]:
            kept.append(value)
    return kept
