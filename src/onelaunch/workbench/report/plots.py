"""The plots of a report as SVG to be placed inside a page: colours come from the page, so that light and dark both work.

Drawn by matplotlib with stand-in colours that are replaced by CSS variables (``--ink``, ``--faint``, ``--floor``, ``--v0`` to
``--v9``). A plot is narrow enough to be read on a phone; a page puts several side by side. Names may hold anything: they are
clipped to one line without hidden characters, are never read as mathematics, and the SVG is serialized from a tree.
"""

from __future__ import annotations

import hashlib
import io
import math
import re
import warnings
import xml.etree.ElementTree as ET
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from onelaunch.operation import Direction
from onelaunch.workbench import quantities as q
from onelaunch.workbench.report.series import COLOURS, Series
from onelaunch.workbench.report.summary import (
    believed,
    cells_at,
    directions,
    main_regime,
    shapes,
    times_floor,
    way,
)
from onelaunch.workbench.report.text import clipped, one_line
from onelaunch.workbench.result import Cell, Regime, Result
from onelaunch.workbench.study import Shape

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, FAINT, FLOOR, SOFT = "#010101", "#020202", "#030303", "#050505"
STAND_INS = {INK: "var(--ink)", FAINT: "var(--faint)", FLOOR: "var(--floor)", SOFT: "var(--soft)"} | {
    colour: f"var(--v{index})" for index, colour in enumerate(COLOURS)
}
DASHES = (0, (2, 1.4))
CROWDED = 5
"""More labels than this on an axis need care."""

WIDTH = 4.6
"""Inches; a page shows an inch as about 80 pixels."""

LONGEST_LABEL = 28
"""Characters of a name in a plot; the rest is an ellipsis."""

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
    series = Series.of(result)
    made: list[Plot] = []
    for direction in directions(result):
        made += _times(result, series, direction, regime) + _distance(result, series, direction, regime)
    return tuple(made + _bytes(result, series))


# Time against size


def _times(result: Result, series: Series, direction: Direction, regime: Regime) -> list[Plot]:
    """One plot for every group of shapes that differ in batch and time alone."""
    groups: dict[tuple[Any, ...], list[Shape]] = {}
    for shape in shapes(result, direction):
        fixed = tuple((key, value) for key, value in shape.sizes.items() if key not in SWEPT)
        if _timed(result, shape, direction, regime):
            options = tuple((key, str(value)) for key, value in shape.options.items())
            groups.setdefault((fixed, options, shape.dtype), []).append(shape)
    made = []
    for (fixed, options, dtype), members in groups.items():
        model = " ".join([*(f"{key}={value}" for key, value in (*fixed, *options)), dtype])
        title = f"Time, {way(direction)}, {model}"
        if len(members) == 1:
            name = members[0].name
            caption = f"{name} ({regime}): each variant's median with its 95 % interval; the line is the roofline bound."
            made.append(
                _plot(
                    title,
                    caption,
                    direction,
                    lambda axes, at=members[0]: _time_bars(axes, result, series, at, direction, regime),
                    0.0,
                )
            )
        else:
            caption = f"Medians ({regime}) with their 95 % intervals; nothing can run below the roofline bound. Lower is better."
            draw: Callable[[Axes], int] = lambda axes, at=members: _time_lines(axes, result, series, at, direction, regime)  # noqa: E731
            made.append(_plot(title, caption, direction, draw, 3.2))
    return made


def _time_lines(
    axes: Axes, result: Result, series: Series, members: Sequence[Shape], direction: Direction, regime: Regime
) -> int:
    """Draw times against the size that varies, joined by lines; or, where no such axis exists, as points shape by shape."""
    members = sorted(members, key=lambda shape: (_amount(shape), shape.sizes.get("T", 0)))
    places, joined = _size_axis(axes, members)
    ls = "-" if joined else "none"
    shown, order = series.prominent, series.order
    spread = 0.0 if joined else 0.5 / max(1, len(shown))
    for variant in sorted(order, key=lambda name: name in shown):  # the faint ones below
        points = [
            (places[shape.name], timing.microseconds)
            for shape in members
            if (timing := believed(result.cell(shape.name, variant, direction), regime))
        ]
        if not points:
            continue
        dodge = spread * (shown.index(variant) - (len(shown) - 1) / 2) if variant in shown else 0.0
        x, times = [x + dodge for x, _ in points], [time for _, time in points]
        medians = [time.median for time in times]
        if variant not in shown:
            axes.plot(x, medians, marker=".", color=SOFT, lw=0.8, ms=3.5, alpha=0.55, ls=ls)
            continue
        colour = series.colour(variant)
        axes.plot(x, medians, marker=series.marker(variant), label=_label(variant), color=colour, lw=1.3, ms=4.5, ls=ls)
        axes.vlines(x, [time.low for time in times], [time.high for time in times], color=colour, lw=1.6)
    if series.others:
        axes.plot([], [], marker=".", color=SOFT, lw=0.8, ms=3.5, alpha=0.55, label=f"{series.others} others", ls=ls)
    bounds = [(places[shape.name], bound) for shape in members if (bound := _floor(result, shape, direction))]
    _bounds(axes, bounds, joined=joined)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _: _tick(value))
    axes.yaxis.set_minor_formatter(lambda *_: "")
    axes.grid(axis="y", color=FAINT, lw=0.6)
    return len(axes.lines)


def _bounds(axes: Axes, bounds: Sequence[tuple[float, float]], *, joined: bool) -> None:
    """Draw the roofline bounds: one line along an axis of sizes, a tick for each shape where there is none."""
    if not bounds:
        return
    x, y = zip(*bounds, strict=True)
    if joined:
        axes.plot(x, y, color=FLOOR, lw=2.2, ls=DASHES, label="roofline bound")
    else:
        axes.hlines(y, [at - 0.32 for at in x], [at + 0.32 for at in x], color=FLOOR, lw=2.2)
        axes.plot([], [], color=FLOOR, lw=2.2, label="roofline bound")


def _size_axis(axes: Axes, members: Sequence[Shape]) -> tuple[dict[str, int], bool]:
    """Place each shape at the one size that varies, else at its amount of work, else side by side in that order.

    Returns:
        The places by shape, and whether they are sizes: a line from shape to shape says nothing where they are not.
    """
    swept = [key for key in SWEPT if all(key in shape.sizes for shape in members)]
    varied = [key for key in swept if len({shape.sizes[key] for shape in members}) > 1]
    along = [shape.sizes[varied[0]] for shape in members] if len(varied) == 1 else [_amount(shape) for shape in members]
    if len(set(along)) < len(members) or min(along) < 1:
        axes.set_xticks(range(len(members)), [_short(shape) for shape in members], rotation=45 if len(members) > CROWDED else 0)
        axes.set_xlabel(f"{' × '.join(swept)}, by their product" if swept else "")
        axes.set_xlim(-0.6, len(members) - 0.4)
        return {shape.name: place for place, shape in enumerate(members)}, False
    axes.set_xscale("log", base=2)
    ticks = _spaced(along)
    axes.set_xticks(ticks, [f"{value:,}" for value in ticks])
    axes.minorticks_off()
    fixed = ", ".join(f"{key}={members[0].sizes[key]}" for key in swept if key not in varied)
    axes.set_xlabel(" × ".join(varied) + (f" ({fixed})" if fixed else ""))
    return dict(zip([shape.name for shape in members], along, strict=True)), True


def _time_bars(axes: Axes, result: Result, series: Series, shape: Shape, direction: Direction, regime: Regime) -> int:
    cells = _timed(result, shape, direction, regime)
    cells.sort(key=lambda cell: -_median(cell, regime))
    for place, cell in enumerate(cells):
        timing = believed(cell, regime)
        if timing:
            time = timing.microseconds
            axes.plot([time.low, time.high], [place, place], color=series.colour(cell.variant), lw=3)
            axes.plot(time.median, place, marker=series.marker(cell.variant), ms=6, color=series.colour(cell.variant))
            axes.annotate(q.time(time.median), (time.high, place), (7, 0), textcoords="offset points", va="center", color=INK)
    if floor := _floor(result, shape, direction):
        axes.axvline(floor, color=FLOOR, lw=2.2, ls=DASHES)
        axes.annotate(
            f"roofline bound {q.time(floor)}", (floor, len(cells) - 0.4), (3, 0), textcoords="offset points", color=FLOOR
        )
    _rows(axes, [_label(cell.variant) for cell in cells], "time")
    return len(cells)


# Distance from the roofline


def _distance(result: Result, series: Series, direction: Direction, regime: Regime) -> list[Plot]:
    rows = [
        shape
        for shape in shapes(result, direction)
        if any(times_floor(c, regime) for c in _timed(result, shape, direction, regime))
    ]
    if not rows:
        return []
    title = f"Distance from the roofline, {way(direction)}"
    caption = f"Time over the roofline bound ({regime}). The bar is the fastest variant, the marks are all; 1 is the bound."
    return [_plot(title, caption, direction, lambda axes: _distance_bars(axes, result, series, rows, direction, regime), 0.0)]


def _distance_bars(
    axes: Axes, result: Result, series: Series, rows: Sequence[Shape], direction: Direction, regime: Regime
) -> int:
    shown, order = series.prominent, series.order
    marks: dict[str, list[tuple[float, int]]] = {variant: [] for variant in order}
    for place, shape in enumerate(reversed(rows)):
        far = {cell.variant: value for cell in _timed(result, shape, direction, regime) if (value := times_floor(cell, regime))}
        best = min(far, key=lambda name: far[name])
        axes.barh(place, far[best] - 1, left=1, height=0.56, color=series.colour(best), alpha=0.45, lw=0)
        for variant, value in far.items():
            marks[variant].append((value, place))
    for variant in sorted(order, key=lambda name: name in shown):
        x, y = [x for x, _ in marks[variant]], [y for _, y in marks[variant]]
        if x and variant in shown:
            axes.plot(x, y, ls="", ms=5, label=_label(variant), marker=series.marker(variant), color=series.colour(variant))
        elif x:
            axes.plot(x, y, ls="", ms=3.5, marker=".", color=SOFT, alpha=0.55)
    if series.others:
        axes.plot([], [], ls="", ms=3.5, marker=".", color=SOFT, alpha=0.55, label=f"{series.others} others")
    axes.axvline(1, color=FLOOR, lw=2.2, ls=DASHES)
    _rows(axes, [_label(shape.name) for shape in reversed(rows)], "ratio")
    return len(rows)


# Bytes


def _bytes(result: Result, series: Series) -> list[Plot]:
    """The shapes with counted bytes, or the first one where nothing was counted."""
    candidates = []
    for direction in directions(result):
        for shape in shapes(result, direction):
            cells = [cell for cell in cells_at(result, shape.name, direction) if cell.traffic and cell.plan and not cell.control]
            if any(0 < cell.traffic.total < math.inf for cell in cells if cell.traffic):
                candidates.append((any(cell.traffic.source == "ncu" for cell in cells if cell.traffic), direction, shape, cells))
    chosen = [entry for entry in candidates if entry[0]] or candidates[:1]
    made = []
    for counted, direction, shape, cells in chosen[:4]:
        title = f"DRAM bytes, {way(direction)}, {shape.name}"
        how = "counted by the hardware (ncu) where the bar is solid" if counted else "by arithmetic, not counted"
        caption = f"Bytes of one call, {how}; the tick is what this way of computing must move, the line the least of any."
        made.append(_plot(title, caption, direction, lambda axes, cells=cells: _bytes_bars(axes, cells, series), 0.0))
    return made


def _bytes_bars(axes: Axes, cells: Sequence[Cell], series: Series) -> int:
    ordered = sorted(cells, key=lambda cell: -_moved(cell))
    most = max(max(_moved(cell), cell.plan.bytes, cell.plan.least_bytes) for cell in ordered if cell.plan)
    for place, cell in enumerate(ordered):
        if cell.traffic and cell.plan:
            alpha = 0.8 if cell.traffic.source == "ncu" else 0.3
            axes.barh(place, _moved(cell), height=0.6, color=series.colour(cell.variant), alpha=alpha, lw=0)
            axes.plot([cell.plan.bytes] * 2, [place - 0.38, place + 0.38], color=INK, lw=2)
            axes.annotate(q.size(_moved(cell)), (1.4 * most, place), ha="right", va="center", color=INK)  # right of all ticks
            axes.axvline(cell.plan.least_bytes, color=FLOOR, lw=2.2, ls=DASHES)
    axes.set_yticks(range(len(ordered)), [_label(cell.variant) for cell in ordered])
    unit = next((scale for scale, _ in q.BYTES if most >= scale), 1.0)
    axes.set_xlim(0, 1.42 * most)
    axes.set_xticks([unit * step for step in _steps(most / unit) if unit * step <= 1.05 * most])
    axes.xaxis.set_major_formatter(lambda value, _: f"{value / unit:g}" if value else "0")
    axes.set_xlabel(q.size(unit).partition(" ")[2])
    return len(ordered)


def _moved(cell: Cell) -> float:
    total = cell.traffic.total if cell.traffic else 0.0
    return total if math.isfinite(total) else 0.0


# What the plots share


def _plot(title: str, caption: str, direction: Direction, draw: Callable[[Axes], int], height: float) -> Plot:
    """Draw on a fresh figure; a height of 0 grows with the number of rows drawn."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    settings = {
        "svg.fonttype": "none",
        "text.parse_math": False,
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
    with mpl.rc_context(settings), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # the page's fonts draw the text
        figure = Figure(figsize=(WIDTH, height or 3.0), layout="constrained")
        axes = figure.add_subplot()
        rows = draw(axes)
        handles, labels = axes.get_legend_handles_labels()
        lines = math.ceil(len(labels) / 2) if labels else 0
        if labels:
            figure.legend(handles, labels, loc="outside lower left", ncols=2, frameon=False, fontsize=9)
        figure.set_figheight((height or 0.75 + 0.27 * rows) + 0.19 * lines)
        return Plot(one_line(title), one_line(caption), direction, _svg(figure, title))


def _svg(figure: Figure, title: str) -> str:
    """Return the figure as one SVG element whose ids are its own and whose colours are the page's."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    root = ET.fromstring(buffer.getvalue())  # noqa: S314 - written by matplotlib just now
    own = f"plot-{hashlib.sha256(title.encode(errors='replace')).hexdigest()[:12]}-"
    for parent in root.iter():
        for child in [child for child in parent if _local(child.tag) == "metadata"]:
            parent.remove(child)
    for element in root.iter():
        element.tag = _local(element.tag)
        given = {_local(name): value for name, value in element.attrib.items()}
        element.attrib.clear()
        element.attrib.update({name: _page_value(name, value, own) for name, value in given.items()})
    for size in ("width", "height"):
        del root.attrib[size]
    root.attrib.update({"role": "img", "aria-label": one_line(title)})
    return ET.tostring(root, encoding="unicode").strip()


def _local(name: str) -> str:
    """Return a name of XML without its namespace."""
    return name.rpartition("}")[2]


def _page_value(name: str, value: str, own: str) -> str:
    """Return an attribute's value with the page's colours and font, ids prefixed."""
    if name == "id":
        return own + value
    value = re.sub(r"^#(?=[A-Za-z])", f"#{own}", value) if name == "href" else value.replace("url(#", f"url(#{own}")
    for colour, variable in STAND_INS.items():
        value = value.replace(colour, variable)
    return re.sub(r"(font: [\d.]+px )[^;]*", r"\1var(--font)", value)


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


def _label(name: str) -> str:
    """Return a name as a plot shows it. Matplotlib hides what begins with an underscore from legends: a thin space goes first."""
    label = clipped(name, LONGEST_LABEL)
    return f"\u2009{label}" if label.startswith("_") else label


def _floor(result: Result, shape: Shape, direction: Direction) -> float | None:
    """Return the roofline bound of a shape, or ``None`` where it is not known or zero."""
    plans = (cell.plan for cell in cells_at(result, shape.name, direction) if cell.plan and not cell.control)
    bound = next((plan.floor_microseconds for plan in plans), 0.0)
    return bound if 0 < bound < math.inf else None


def _median(cell: Cell, regime: Regime) -> float:
    timing = believed(cell, regime)
    return timing.microseconds.median if timing else math.inf


def _amount(shape: Shape) -> int:
    return math.prod(value for key, value in shape.sizes.items() if key in SWEPT)


def _short(shape: Shape) -> str:
    return "×".join(str(shape.sizes[key]) for key in SWEPT if key in shape.sizes) or _label(shape.name)


def _spaced(values: Sequence[int]) -> list[int]:
    """Those of the rising values whose labels have room on a logarithmic axis."""
    kept: list[int] = []
    for value in values:
        if not kept or value >= (values[-1] / values[0]) ** (1 / CROWDED) * kept[-1]:
            kept.append(value)
    return kept
