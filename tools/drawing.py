"""Pieces of SVG that the pictures of the documentation share: text, fills and their colours.

Colours are CSS variables of ``docs/_static/custom.css``, with a fallback for a look at a file by itself. ``draw_data_flow.py``
and ``draw_decode_plan.py`` use them.
"""

from __future__ import annotations

from xml.sax.saxutils import escape

FALLBACK = {
    "ink": "#1f2328", "soft": "#59636e", "memory": "#f1f3f5", "chip": "#e3f1fb",
    "argument": "#d5dae0", "between": "#f6d7a7", "result": "#bfe3d0", "barrier": "#e5484d",
    "argument-line": "#6b7280", "between-line": "#b45f06", "result-line": "#18794e",
}  # fmt: skip
"""Colour of each variable ``--flow-NAME`` where a page defines none."""


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
