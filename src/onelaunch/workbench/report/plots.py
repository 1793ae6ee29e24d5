"""Plots of a report as inline SVG. Their colours come from the page, so that light and dark mode both work.

Matplotlib draws with placeholder colours, which are replaced by CSS variables (``--ink``, ``--faint``, ``--floor``, ``--soft``,
``--v0`` to ``--v9``); the font becomes ``--font``. A plot is narrow enough for a phone, and a page puts several side by side.
Names may hold any characters. They are clipped to one line without invisible characters and never parsed as mathematics, and the
SVG is serialized from a tree. ``page.py`` calls :func:`plots`; reports in Markdown and on the terminal have none. Bytes that the
hardware counted have the source ``ncu``.
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
from typing import TYPE_CHECKING

from onelaunch.operation import Direction
from onelaunch.workbench import quantities as q
from onelaunch.workbench.report.series import COLOURS, Series
from onelaunch.workbench.report.summary import (
    cells_at,
    direction_words,
    directions,
    main_regime,
    over_roofline,
    shapes,
    valid_timing,
)
from onelaunch.workbench.report.sweeps import Model, amount, model_of, spaced, swept
from onelaunch.workbench.report.text import clipped, one_line
from onelaunch.workbench.result import Cell, Regime, Result
from onelaunch.workbench.study import Shape

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

_INK, _FAINT, BOUND, _SOFT = "#010101", "#020202", "#030303", "#050505"
"""Placeholder colours of text, grid, roofline bound and faint variants."""

STAND_INS = {_INK: "var(--ink)", _FAINT: "var(--faint)", BOUND: "var(--floor)", _SOFT: "var(--soft)"} | {
    colour: f"var(--v{index})" for index, colour in enumerate(COLOURS)
}
"""CSS variable of the page by the placeholder colour that it replaces."""

_DASHES = (0, (2, 1.4))
"""Line style of the roofline bound as matplotlib takes it: offset, then lengths of dash and gap in line widths."""

_CROWDED = 5
"""Largest number of labels that fit on an axis without rotation or thinning."""

WIDTH = 4.6
"""Width of a plot in inches. A page shows an inch as about 80 pixels."""

LONGEST_LABEL = 28
"""Largest number of characters of a name in a plot. A longer name ends in an ellipsis."""


@dataclass(frozen=True)
class Plot:
    """A plot with a caption that says what it shows."""

    title: str
    caption: str
    direction: Direction
    svg: str


def plots(result: Result) -> tuple[Plot, ...]:
    """Return all plots for which a result has numbers."""
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
    """Return a plot for every group of shapes that differ only in the dimensions that :func:`swept` names."""
    groups: dict[Model, list[Shape]] = {}
    for shape in shapes(result, direction):
        if _timed(result, shape, direction, regime):
            groups.setdefault(model_of(shape), []).append(shape)
    made = []
    for (operation, fixed, options, dtype), members in groups.items():
        model = " ".join([*filter(None, [operation]), *(f"{key}={value}" for key, value in (*fixed, *options)), dtype])
        title = f"Time, {direction_words(direction)}, {model}"
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
            made.append(times_over_sizes(result, series, members, direction, regime, title))
    return made


def times_over_sizes(
    result: Result, series: Series, members: Sequence[Shape], direction: Direction, regime: Regime, title: str
) -> Plot:
    """Return the plot of times over the size in which shapes differ, with the roofline bound."""
    caption = f"Medians ({regime}) with their 95 % intervals; nothing can run below the roofline bound. Lower is better."
    return _plot(title, caption, direction, lambda axes: _time_lines(axes, result, series, members, direction, regime), 3.2)


def _time_lines(
    axes: Axes, result: Result, series: Series, members: Sequence[Shape], direction: Direction, regime: Regime
) -> int:
    """Draw times as lines over the size that varies, or as points shape by shape without one; return the number of lines."""
    members = sorted(members, key=lambda shape: (amount(shape), shape.sizes.get("T", 0)))
    positions, joined = _size_axis(axes, members)
    ls = "-" if joined else "none"
    shown, order = series.prominent, series.order
    spread = 0.0 if joined else 0.5 / max(1, len(shown))  # points at one tick stand side by side
    for variant in sorted(order, key=lambda name: name in shown):  # faint variants first, so that they lie below
        points = [
            (positions[shape.name], timing.microseconds)
            for shape in members
            if (timing := valid_timing(result.cell(shape.name, variant, direction), regime))
        ]
        if not points:
            continue
        dodge = spread * (shown.index(variant) - (len(shown) - 1) / 2) if variant in shown else 0.0
        x, times = [x + dodge for x, _ in points], [time for _, time in points]
        medians = [time.median for time in times]
        if variant not in shown:
            axes.plot(x, medians, marker=".", color=_SOFT, lw=0.8, ms=3.5, alpha=0.55, ls=ls)
            continue
        colour = series.colour(variant)
        axes.plot(
            x, medians, marker=series.marker(variant), label=_label(_named(result, variant)), color=colour, lw=1.3, ms=4.5, ls=ls
        )
        axes.vlines(x, [time.low for time in times], [time.high for time in times], color=colour, lw=1.6)
    if series.others:
        axes.plot([], [], marker=".", color=_SOFT, lw=0.8, ms=3.5, alpha=0.55, label=f"{series.others} others", ls=ls)
    bounds = [(positions[shape.name], bound) for shape in members if (bound := _bound(result, shape, direction))]
    _bounds(axes, bounds, joined=joined)
    axes.set_yscale("log")
    _label_between_powers(axes.yaxis, *axes.get_ylim())
    axes.yaxis.set_major_formatter(lambda value, _: _tick(value))
    axes.yaxis.set_minor_formatter(lambda *_: "")
    axes.grid(axis="y", color=_FAINT, lw=0.6)
    return len(axes.lines)


def _bounds(axes: Axes, bounds: Sequence[tuple[float, float]], *, joined: bool) -> None:
    """Draw the roofline bounds: one line along an axis of sizes, or a tick for each shape without such an axis."""
    if not bounds:
        return
    x, y = zip(*bounds, strict=True)
    if joined:
        axes.plot(x, y, color=BOUND, lw=2.2, ls=_DASHES, label="roofline bound")
    else:
        axes.hlines(y, [at - 0.32 for at in x], [at + 0.32 for at in x], color=BOUND, lw=2.2)
        axes.plot([], [], color=BOUND, lw=2.2, label="roofline bound")


def _size_axis(axes: Axes, members: Sequence[Shape]) -> tuple[dict[str, int], bool]:
    """Set up the horizontal axis: the one size that varies, else the amount of work, else one tick for each shape.

    Returns:
        The position of each shape by name, and whether positions are sizes. If not, a line between shapes has no meaning.
    """
    names = swept(members[0])
    varied = [key for key in names if len({shape.sizes[key] for shape in members}) > 1]
    along = [shape.sizes[varied[0]] for shape in members] if len(varied) == 1 else [amount(shape) for shape in members]
    if len(set(along)) < len(members) or min(along) < 1:
        axes.set_xticks(range(len(members)), [_short(shape) for shape in members], rotation=45 if len(members) > _CROWDED else 0)
        axes.set_xlabel(f"{' × '.join(names)}, by their product" if names else "")
        axes.set_xlim(-0.6, len(members) - 0.4)
        return {shape.name: position for position, shape in enumerate(members)}, False
    axes.set_xscale("log", base=2)
    ticks = spaced(along, _CROWDED)
    axes.set_xticks(ticks, [f"{value:,}" for value in ticks])
    axes.minorticks_off()
    fixed = ", ".join(f"{key}={members[0].sizes[key]}" for key in names if key not in varied)
    axes.set_xlabel(" × ".join(varied) + (f" ({fixed})" if fixed else ""))
    return dict(zip([shape.name for shape in members], along, strict=True)), True


def _time_bars(axes: Axes, result: Result, series: Series, shape: Shape, direction: Direction, regime: Regime) -> int:
    """Draw the times at one shape, one row for each variant. Return the number of rows."""
    cells = _timed(result, shape, direction, regime)
    cells.sort(key=lambda cell: -_median(cell, regime))
    for row, cell in enumerate(cells):
        timing = valid_timing(cell, regime)
        if timing:
            time = timing.microseconds
            axes.plot([time.low, time.high], [row, row], color=series.colour(cell.variant), lw=3)
            axes.plot(time.median, row, marker=series.marker(cell.variant), ms=6, color=series.colour(cell.variant))
            axes.annotate(q.time(time.median), (time.high, row), (7, 0), textcoords="offset points", va="center", color=_INK)
    if bound := _bound(result, shape, direction):
        axes.axvline(bound, color=BOUND, lw=2.2, ls=_DASHES)
        axes.annotate(
            f"roofline bound {q.time(bound)}", (bound, len(cells) - 0.4), (3, 0), textcoords="offset points", color=BOUND
        )
    _rows(axes, [_label(_row_name(cell)) for cell in cells], "time")
    return len(cells)


# Distance from the roofline


def _distance(result: Result, series: Series, direction: Direction, regime: Regime) -> list[Plot]:
    """Return the plot of times over the roofline bound, one row for each shape; none if no bound is known."""
    rows = [
        shape
        for shape in shapes(result, direction)
        if any(over_roofline(c, regime) for c in _timed(result, shape, direction, regime))
    ]
    if not rows:
        return []
    title = f"Distance from the roofline, {direction_words(direction)}"
    caption = f"Time over the roofline bound ({regime}). The bar is the fastest variant, the marks are all; 1 is the bound."
    return [_plot(title, caption, direction, lambda axes: _distance_bars(axes, result, series, rows, direction, regime), 0.0)]


def _distance_bars(
    axes: Axes, result: Result, series: Series, rows: Sequence[Shape], direction: Direction, regime: Regime
) -> int:
    """Draw the times over the roofline bound, one row for each shape. Return the number of rows."""
    shown, order = series.prominent, series.order
    marks: dict[str, list[tuple[float, int]]] = {variant: [] for variant in order}
    for row, shape in enumerate(reversed(rows)):
        far = {cell.variant: value for cell in _timed(result, shape, direction, regime) if (value := over_roofline(cell, regime))}
        best = min(far, key=lambda name: far[name])
        axes.barh(row, far[best] - 1, left=1, height=0.56, color=series.colour(best), alpha=0.45, lw=0)
        for variant, value in far.items():
            marks[variant].append((value, row))
    for variant in sorted(order, key=lambda name: name in shown):
        x, y = [x for x, _ in marks[variant]], [y for _, y in marks[variant]]
        if x and variant in shown:
            axes.plot(
                x,
                y,
                ls="",
                ms=5,
                label=_label(_named(result, variant)),
                marker=series.marker(variant),
                color=series.colour(variant),
            )
        elif x:
            axes.plot(x, y, ls="", ms=3.5, marker=".", color=_SOFT, alpha=0.55)
    if series.others:
        axes.plot([], [], ls="", ms=3.5, marker=".", color=_SOFT, alpha=0.55, label=f"{series.others} others")
    axes.axvline(1, color=BOUND, lw=2.2, ls=_DASHES)
    _rows(axes, [_label(shape.name) for shape in reversed(rows)], "ratio")
    return len(rows)


# Bytes


def _bytes(result: Result, series: Series) -> list[Plot]:
    """Return plots of the shapes with counted bytes, or of the first shape if nothing was counted; four at most."""
    candidates = []
    for direction in directions(result):
        for shape in shapes(result, direction):
            cells = [cell for cell in cells_at(result, shape.name, direction) if cell.traffic and cell.plan and not cell.control]
            if any(0 < cell.traffic.total < math.inf for cell in cells if cell.traffic):
                candidates.append((any(cell.traffic.source == "ncu" for cell in cells if cell.traffic), direction, shape, cells))
    chosen = [entry for entry in candidates if entry[0]] or candidates[:1]
    made = []
    for counted, direction, shape, cells in chosen[:4]:
        title = f"DRAM bytes, {direction_words(direction)}, {shape.name}"
        how = "counted by the hardware (ncu) where the bar is solid" if counted else "by arithmetic, not counted"
        caption = f"Bytes of one call, {how}; the tick is what the variant must move, the line what any implementation must move."
        made.append(_plot(title, caption, direction, lambda axes, cells=cells: _bytes_bars(axes, cells, series), 0.0))
    return made


def _bytes_bars(axes: Axes, cells: Sequence[Cell], series: Series) -> int:
    """Draw the DRAM bytes at one shape, one row for each variant. Return the number of rows."""
    ordered = sorted(cells, key=lambda cell: -_moved(cell))
    most = max(max(_moved(cell), cell.plan.bytes, cell.plan.least_bytes) for cell in ordered if cell.plan)
    for row, cell in enumerate(ordered):
        if cell.traffic and cell.plan:
            alpha = 0.8 if cell.traffic.source == "ncu" else 0.3
            axes.barh(row, _moved(cell), height=0.6, color=series.colour(cell.variant), alpha=alpha, lw=0)
            axes.plot([cell.plan.bytes] * 2, [row - 0.38, row + 0.38], color=_INK, lw=2)
            axes.annotate(q.size(_moved(cell)), (1.4 * most, row), ha="right", va="center", color=_INK)  # right of all ticks
            axes.axvline(cell.plan.least_bytes, color=BOUND, lw=2.2, ls=_DASHES)
    axes.set_yticks(range(len(ordered)), [_label(_row_name(cell)) for cell in ordered])
    unit = next((scale for scale, _ in q.BYTES if most >= scale), 1.0)
    axes.set_xlim(0, 1.42 * most)
    axes.set_xticks([unit * step for step in _steps(most / unit) if unit * step <= 1.05 * most])
    axes.xaxis.set_major_formatter(lambda value, _: f"{value / unit:g}" if value else "0")
    axes.set_xlabel(q.size(unit).partition(" ")[2])
    return len(ordered)


def _moved(cell: Cell) -> float:
    total = cell.traffic.total if cell.traffic else 0.0
    return total if math.isfinite(total) else 0.0


# Functions that all plots use


def _plot(title: str, caption: str, direction: Direction, draw: Callable[[Axes], int], height: float) -> Plot:
    """Draw on a new figure and return it as SVG.

    Args:
        title: Title above the plot.
        caption: Sentence below the plot.
        direction: Direction of the plotted measurements.
        draw: Function that draws on the axes and returns the number of rows.
        height: Height in inches; 0 for a height that follows from the number of rows.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    settings = {
        "svg.fonttype": "none",
        "text.parse_math": False,
        "svg.hashsalt": title,  # by default ids are random, and a report of one result would differ from run to run
        "font.family": "sans-serif",
        "font.size": 9.5,
        "text.color": _INK,
        "axes.edgecolor": _FAINT,
        "axes.labelcolor": _INK,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "xtick.color": _INK,
        "ytick.color": _INK,
        "xtick.minor.visible": False,
    }
    with mpl.rc_context(settings), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # the browser draws the text with the page's fonts
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
    """Return the figure as one SVG element with unique ids and with the page's colours."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    root = ET.fromstring(buffer.getvalue())  # noqa: S314 - written by matplotlib just now
    own = f"plot-{hashlib.sha256(title.encode(errors='replace')).hexdigest()[:12]}-"
    for parent in root.iter():
        for child in [child for child in parent if _local(child.tag) == "metadata"]:
            parent.remove(child)
    for element in root.iter():
        element.tag = _local(element.tag)  # SVG inside HTML has no namespaces, and ElementTree would write prefixes
        given = {_local(name): value for name, value in element.attrib.items()}
        element.attrib.clear()
        element.attrib.update({name: _page_value(name, value, own) for name, value in given.items()})
    for size in ("width", "height"):  # the page sets the size; the proportions stay in viewBox
        del root.attrib[size]
    root.attrib.update({"role": "img", "aria-label": one_line(title)})
    return ET.tostring(root, encoding="unicode").strip()


def _local(name: str) -> str:
    """Return an XML name without its namespace."""
    return name.rpartition("}")[2]


def _page_value(name: str, value: str, own: str) -> str:
    """Return an attribute's value with prefixed ids and with the page's colours and font."""
    if name == "id":
        return own + value
    value = re.sub(r"^#(?=[A-Za-z])", f"#{own}", value) if name == "href" else value.replace("url(#", f"url(#{own}")
    for colour, variable in STAND_INS.items():
        value = value.replace(colour, variable)
    return re.sub(r"(font: [\d.]+px )[^;]*", r"\1var(--font)", value)


def _rows(axes: Axes, labels: Sequence[str], kind: str) -> None:
    """Set up the axes of a plot with one row for each label, over a logarithmic axis of times or ratios (``kind``)."""
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(-0.6, len(labels) - 0.1)
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    axes.set_xlim(low, high * (high / low) ** 0.16)  # room for the label to the right of the last mark
    _label_between_powers(axes.xaxis, low, high)
    axes.xaxis.set_major_formatter(lambda value, _: _tick(value) if kind == "time" else f"{value:g}x")
    axes.xaxis.set_minor_formatter(lambda *_: "")
    axes.grid(axis="x", color=_FAINT, lw=0.6)
    axes.tick_params(axis="y", length=0)


def _label_between_powers(axis: Axis, low: float, high: float) -> None:
    """Label 2 and 5 times powers of ten too on a logarithmic axis so short that it would have one label or none."""
    from matplotlib.ticker import LogLocator

    if high < 30 * low:
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))


def _tick(microseconds: float) -> str:
    """Format a time for a tick, without trailing zeros: ``10 µs``."""
    value, _, unit = q.time(microseconds).partition(" ")
    return f"{float(value):g} {unit}"


def _steps(most: float) -> Sequence[float]:
    """Return about four round numbers from 0 to ``most``, for the ticks of an axis."""
    from matplotlib.ticker import MaxNLocator

    return [float(step) for step in MaxNLocator(4).tick_values(0, most)]


def _timed(result: Result, shape: Shape, direction: Direction, regime: Regime) -> list[Cell]:
    """Return the measurements of variants with a valid time at a shape; controls are left out."""
    return [cell for cell in cells_at(result, shape.name, direction) if not cell.control and valid_timing(cell, regime)]


def _named(result: Result, variant: str) -> str:
    """Return the name of a variant, which says if it is a peer outside the gate at any shape of a result."""
    outside = any(cell.outside for cell in result.cells if cell.variant == variant)
    return f"{variant} (outside the gate)" if outside else variant


def _row_name(cell: Cell) -> str:
    """Return the name of a measurement's variant, which says if it is a peer outside the gate."""
    return f"{cell.variant} (outside the gate)" if cell.outside else cell.variant


def _label(name: str) -> str:
    """Return a name as a plot shows it.

    Matplotlib hides names that begin with an underscore from legends, so a thin space is put before them.
    """
    label = clipped(name, LONGEST_LABEL)
    return f"\u2009{label}" if label.startswith("_") else label


def _bound(result: Result, shape: Shape, direction: Direction) -> float | None:
    """Return the roofline bound of a shape in microseconds, or ``None`` if it is not known or 0."""
    plans = (cell.plan for cell in cells_at(result, shape.name, direction) if cell.plan and not cell.control)
    bound = next((plan.floor_microseconds for plan in plans), 0.0)
    return bound if 0 < bound < math.inf else None


def _median(cell: Cell, regime: Regime) -> float:
    timing = valid_timing(cell, regime)
    return timing.microseconds.median if timing else math.inf


def _short(shape: Shape) -> str:
    """Return the label of a shape on an axis: its swept sizes, such as ``4×2048``, else its name."""
    return "×".join(str(shape.sizes[key]) for key in swept(shape)) or _label(shape.name)
