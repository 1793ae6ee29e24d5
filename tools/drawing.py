"""Pieces of SVG that the pictures of the documentation share: text, fills and their colours.

Colours are CSS variables of ``docs/_static/custom.css``, with a fallback for a look at a file by itself. ``draw_data_flow.py``
and ``draw_decode_plan.py`` use them. :func:`figure` returns HTML for a built page, and :func:`image` the same as one SVG file
for GitHub, which shows no SVG within a page.
"""

from __future__ import annotations

import html
import re
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from xml.sax.saxutils import escape

FALLBACK = {
    "ink": "#1f2328", "soft": "#59636e", "memory": "#f1f3f5", "chip": "#e3f1fb",
    "argument": "#d5dae0", "between": "#f6d7a7", "result": "#bfe3d0", "barrier": "#e5484d",
    "argument-line": "#6b7280", "between-line": "#b45f06", "result-line": "#18794e",
}  # fmt: skip
"""Colour of each variable ``--flow-NAME`` where a page defines none."""

DARK = {
    "ink": "#e6edf3", "soft": "#9198a1", "memory": "#1d2024", "chip": "#17293a",
    "argument": "#3a4048", "between": "#6b4a14", "result": "#1d5138", "barrier": "#e5484d",
    "argument-line": "#a3abb5", "between-line": "#e09a4f", "result-line": "#4cc38a",
}  # fmt: skip
"""Colour of each variable of an image in dark mode. Those of shapes are the same in ``custom.css``."""


def colour(name: str) -> str:
    """Return the CSS value of a colour of :data:`FALLBACK`."""
    return f"var(--flow-{name}, {FALLBACK[name]})"


def fill(name: str) -> str:
    """Return the attribute that fills a shape or a text."""
    return f'fill="{colour(name)}"'


def stroke(name: str, width: float = 1.5) -> str:
    """Return the attributes of a line."""
    return f'stroke="{colour(name)}" stroke-width="{width:g}"'


def text(x: float, y: float, said: str, name: str, anchor: str = "start", *, bold: bool = False, small: bool = False) -> str:
    """Return a text of 12 pixels, or of 11 if ``small``, which begins, ends or is centred (``anchor``) at x."""
    weight = ' font-weight="600"' if bold else ""
    size = ' font-size="11"' if small else ""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{weight}{size} {fill(name)}>{escape(said)}</text>'


def rectangle(x: float, y: float, width: float, height: float, name: str, radius: float = 4) -> str:
    """Return a filled rectangle with round corners."""
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}" {fill(name)}/>'


def svg(width: int, height: int, title: str, parts: list[str], kind: str) -> str:
    """Return an SVG element of a CSS class, with a title for readers that show no pictures."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" class="{kind}">'
    group = '<g font-family="system-ui, sans-serif" font-size="12">'
    return "\n".join([head, f"<title>{escape(title)}</title>", group, *parts, "</g>", "</svg>"])


def figure(panels: list[str], caption: str) -> str:
    """Return panels that stand side by side where there is room, above a caption in HTML."""
    body = [
        '<figure class="flow">',
        '<div class="flow-panels">',
        *panels,
        "</div>",
        f"<figcaption>{caption}</figcaption>",
        "</figure>",
    ]
    return "\n".join(body) + "\n"


def key(name: str) -> str:
    """Return a small square of a colour for the legend in a caption."""
    return f'<span class="flow-key" style="background: {colour(name)}"></span>'


IMAGE_WIDTH, SPACE, LETTERS, LINE = 760, 24, 104, 18
"""Width of an image in pixels, space between two, letters in a line of its caption, and height of such a line."""

_PANEL = re.compile(r'<svg xmlns="[^"]*" viewBox="0 0 (\d+) (\d+)"')
"""Beginning of a panel, with its width and height."""

_KEY = re.compile(r'<span class="flow-key" style="background: ([^"]*)"></span>')
"""Square of the legend in a caption, with its colour."""

_SQUARE = "\u25a0"
"""Character for a square of the legend."""


def image(panels: list[str], caption: str) -> str:
    """Return an SVG file with the panels of a figure, side by side where there is room, above its caption."""
    parts: list[str] = []
    left, top, row, height = 0, 0, 0, 0
    for panel in panels:
        wide, high = map(int, _PANEL.findall(panel)[0])
        if left and left + wide > IMAGE_WIDTH:
            left, top, row = 0, top + row + SPACE, 0
        parts.append(_PANEL.sub(f'<svg x="{left}" y="{top}" width="{wide}" height="{high}" viewBox="0 0 {wide} {high}"', panel))
        left, row = left + wide + SPACE, max(row, high)
    top += row + SPACE
    for number, line in enumerate(_lines(caption)):
        parts.append(f'<text x="0" y="{top + LINE * number}" font-size="13" {fill("ink")}>{line}</text>')
        height = top + LINE * number + 8
    dark = "; ".join(f"--flow-{name}: {value}" for name, value in DARK.items())
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {IMAGE_WIDTH} {height}" width="{IMAGE_WIDTH}" height="{height}">'
    )
    style = f"<style>@media (prefers-color-scheme: dark) {{ svg {{ {dark} }} }}</style>"
    group = '<g font-family="system-ui, sans-serif" font-size="12">'
    return "\n".join([head, style, group, *parts, "</g>", "</svg>"]) + "\n"


def _lines(caption: str) -> Iterator[str]:
    """Yield the lines of a caption in HTML as contents of SVG texts, in which squares of the legend have their colour."""
    colours = iter(_KEY.findall(caption))
    text = re.sub(r"</?code>", "", _KEY.sub(_SQUARE, caption))
    for paragraph in text.split("<br/>"):
        for line in textwrap.wrap(html.unescape(paragraph), LETTERS):
            first, *others = escape(line).split(_SQUARE)
            yield first + "".join(f'<tspan fill="{next(colours)}">{_SQUARE}</tspan>\u00a0{other}' for other in others)


def files(folder: Path, figures: Mapping[str, tuple[list[str], str]]) -> dict[Path, str]:
    """Return the two files of each figure, by their paths: HTML for a built page, and an SVG file for GitHub.

    Args:
        folder: Folder of the files.
        figures: Panels and caption of each figure, by its name.
    """
    built = {folder / f"{name}.html": figure(panels, caption) for name, (panels, caption) in figures.items()}
    return built | {folder / f"{name}.svg": image(panels, caption) for name, (panels, caption) in figures.items()}
