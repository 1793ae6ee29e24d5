"""Markdown for the documentation of an operation: which variant wins at which sizes, and plots of times against the size.

All of it is made from committed results. ``docs/tables.py`` calls :func:`docs_sizes` when the documentation is built.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from onelaunch.operation import Direction
from onelaunch.workbench import quantities as q
from onelaunch.workbench.report.comparison import compare
from onelaunch.workbench.report.documents import code
from onelaunch.workbench.report.plots import times_over_sizes
from onelaunch.workbench.report.series import Series
from onelaunch.workbench.report.summary import (
    cells_at,
    direction_words,
    directions,
    noise_floor,
    shapes,
    speedup,
    valid_timing,
)
from onelaunch.workbench.report.sweeps import Model, amount, model_of, swept
from onelaunch.workbench.report.text import html, markdown
from onelaunch.workbench.result import Cell, Result
from onelaunch.workbench.study import Regime, Shape

FEWEST = 3
"""Smallest number of different amounts of work for which a plot is drawn."""

NAMED = 4
"""Largest number of shapes that are named; of more the range of sizes is given."""

_STYLE = re.compile(r"<defs>\s*<style[^>]*>[^<]*</style>\s*</defs>")
"""Style that Matplotlib writes into a plot. It would hold for the whole page; ``docs/_static/custom.css`` has it for plots."""

NOTHING = "Nothing has been measured yet, so nothing is known of which variant wins at which size.\n"


@dataclass(frozen=True)
class _Win:
    """Fastest variant at a shape."""

    shape: Shape
    variant: str
    """Name of the variant; of ``auto`` that of the variant which it chose."""
    tied: bool
    """True if another variant's time differs by no more than the noise."""
    ours: bool
    """True for a variant of onelaunch, false for one of another library or of PyTorch."""


def docs_sizes(results: Iterable[tuple[Result, str]], operation: str) -> str:
    """Return the winners in words, and the plots, of all results of an operation.

    Args:
        results: Results with the paths of their files, relative to the repository's root.
        operation: Name of the operation; of a study of several, only its shapes are taken.
    """
    blocks: list[str] = []
    drawn = False
    for result, source in results:
        for direction in directions(result):
            members = [shape for shape in shapes(result, direction) if _operation(result, shape) == operation]
            regime = _regime(result, direction, members)
            if regime is None:
                continue
            said = _winners(result, members, direction, regime)
            blocks += [said] if said else []
            figures = list(_figures(result, members, direction, regime))
            if figures:
                drawn = True
                blocks.append(_fenced(figures, result, source))
    if not blocks:
        return NOTHING
    if not drawn:
        few = (
            f"No committed result has this operation at {FEWEST} or more sizes that differ in nothing else, so no plot is drawn."
        )
        blocks.append(few)
    return "\n\n".join(blocks) + "\n"


def _operation(result: Result, shape: Shape) -> str:
    return shape.operation or result.study.operation_names()[0]


def _regime(result: Result, direction: Direction, members: Sequence[Shape]) -> Regime | None:
    """Return ``running`` where steps were timed, else ``cold``, or ``None`` if neither has times here."""
    names = {shape.name for shape in members}
    cells = [cell for cell in result.cells if cell.direction == direction and cell.shape in names and not cell.control]
    regimes: tuple[Regime, ...] = ("running", "cold")
    return next((each for each in regimes if any(valid_timing(cell, each) for cell in cells)), None)


# Winners in words


def _winners(result: Result, members: Sequence[Shape], direction: Direction, regime: Regime) -> str:
    """Return the fastest variants with the shapes at which they are, in one sentence for each."""
    wins = [win for shape in members if (win := _win(result, shape, direction, regime))]
    if not wins:
        return ""
    by_variant: dict[str, list[_Win]] = {}
    for win in wins:
        by_variant.setdefault(win.variant, []).append(win)
    ordered = sorted(by_variant.items(), key=lambda each: -len(each[1]))
    names = {shape.name for shape in members}
    timed = {cell.variant for cell in result.cells if cell.shape in names and not cell.control and valid_timing(cell, regime)}
    head = (
        f"**{markdown(result.study.name)} on {markdown(result.provenance.device)}, {markdown(direction_words(direction))} "
        f"({regime}).** Fastest of {q.plural(len(timed), 'variant')} at {q.plural(len(wins), 'shape')}:"
    )
    return "\n".join([head, "", *(f"- {_line(variant, each)}" for variant, each in ordered)])


def _line(variant: str, wins: Sequence[_Win]) -> str:
    """Return a list entry: the variant, its shapes, and how many of them are ties."""
    maker = "" if wins[0].ours else " (not of onelaunch)"
    names = ", ".join(markdown(win.shape.name) for win in wins)
    where = f"{len(wins)}: {names}" if len(wins) <= NAMED else f"{len(wins)}, with {_range(wins)}"
    ties = sum(win.tied for win in wins)
    among = f"at {ties} of them " if len(wins) > 1 else ""
    tied = f"; {among}another variant is within the noise" if ties else ""
    return f"{code(variant)}{maker} at {where}{tied}"


def _range(wins: Sequence[_Win]) -> str:
    """Return the range of the amounts of work, such as ``B × T from 512 to 32,768``."""
    amounts = [amount(win.shape) for win in wins]
    names = " × ".join(max((swept(win.shape) for win in wins), key=len)) or "size"
    return f"{names} from {min(amounts):,} to {max(amounts):,}" if min(amounts) < max(amounts) else f"{names} = {amounts[0]:,}"


def _win(result: Result, shape: Shape, direction: Direction, regime: Regime) -> _Win | None:
    """Return the fastest variant at a shape: of all makers, but no control and no peer outside the gate."""
    cells = [cell for cell in cells_at(result, shape.name, direction) if not cell.control and not cell.outside]
    timed = [cell for cell in cells if valid_timing(cell, regime)]
    if not timed:
        return None
    best = min(timed, key=lambda cell: _median(cell, regime))
    noise = noise_floor(result, best, regime)
    gains = [gain for cell in timed if (gain := speedup(best, cell, regime))]
    return _Win(
        shape, best.chosen or best.variant, any(gain.low <= noise for gain in gains), _is_ours(result, shape, direction, best)
    )


def _median(cell: Cell, regime: Regime) -> float:
    timing = valid_timing(cell, regime)
    return timing.microseconds.median if timing else float("inf")


def _is_ours(result: Result, shape: Shape, direction: Direction, cell: Cell) -> bool:
    """Return whether a variant is one of onelaunch, as :func:`compare` distinguishes them."""
    try:
        return compare(result, shape.name, direction).other is not cell
    except LookupError:  # no variant of ours has a time there
        return False


# Plots


def _figures(result: Result, members: Sequence[Shape], direction: Direction, regime: Regime) -> Iterator[str]:
    """Yield a figure as HTML for each group of shapes that differ only in their size."""
    groups: dict[Model, list[Shape]] = {}
    for shape in members:
        if any(valid_timing(cell, regime) for cell in cells_at(result, shape.name, direction)):
            groups.setdefault(model_of(shape), []).append(shape)
    series = Series.of(result)
    for (_, fixed, options, dtype), shapes_of in groups.items():
        if len({amount(shape) for shape in shapes_of}) < FEWEST:
            continue
        model = " ".join([*(f"{key}={value}" for key, value in (*fixed, *options)), dtype])
        title = f"{direction_words(direction)}, {model} ({result.study.name}, {result.provenance.device})"
        plot = times_over_sizes(result, series, shapes_of, direction, regime, title)
        svg = _STYLE.sub("", plot.svg)
        caption = f"<figcaption>{html(plot.caption)}</figcaption>"
        yield f'<figure class="plot"><p class="title">{html(plot.title)}</p>\n{svg}\n{caption}</figure>'


def _fenced(figures: Sequence[str], result: Result, source: str) -> str:
    """Return figures in a block of raw HTML, which Markdown leaves as it is, and a line with their source."""
    facts = result.provenance
    where = f"{markdown(facts.device)}, {facts.date[:10]}, commit {markdown(facts.commit[:12])}, {code(source)}"
    body = "\n".join(line for figure in figures for line in figure.splitlines() if line.strip())
    return f'```{{raw}} html\n<div class="plots">\n{body}\n</div>\n```\n\n*{where}*'
