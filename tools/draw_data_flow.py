"""Draw the data flow of each operation as SVG for its page: the unfused launches beside the fused ones.

Run ``python -m tools.draw_data_flow`` from the root of the repository after an operation's contract, cost or launches changed.
``tests/test_data_flow.py`` fails if that was forgotten. ``tools/data_flows.py`` holds what is drawn. The files depend on nothing
else, byte for byte. A built page includes the HTML file of its operation: text stays text, and colours are CSS variables of
``docs/_static/custom.css``, so that both colour schemes work. Panels stand side by side on a wide page, one below the other on a
phone. On GitHub the page shows the SVG file.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

from onelaunch.workbench import quantities as q
from tools import drawing
from tools.data_flows import Flow, Kind, Launch, Panel, Tensor, dtype_name, flows

ROOT = Path(__file__).parents[1]
"""Root of the repository."""

FOLDER = "docs/pictures/flow"
"""Folder of the pictures: two files for each operation."""

WIDTH, MEMORY, CHIP = 360, 122, 206
"""Width of a panel, right edge of the tensors in memory, and left edge of the launches, in pixels of a phone."""

ROW, BOX, GAP, LINE, TOP = 30, 22, 16, 15, 66
"""Height of a tensor's row and of its box, gap between launches, height of a line of text, and height of the panel's head."""

TITLE_LETTERS, NOTE_LETTERS = 20, 20
"""Letters of a launch's name and of a note that fit into a line of its box."""

KINDS: dict[Kind, str] = {"argument": "argument", "between": "goes through memory between launches", "result": "result"}
"""Words for the kinds of tensors, in the order of the legend."""


class Arrow(NamedTuple):
    """Tensor that a launch reads or writes, with its bytes."""

    tensor: Tensor
    bytes: int
    reads: bool


def _arrows(launch: Launch) -> list[Arrow]:
    reads = [Arrow(tensor, launch.read_bytes(tensor), reads=True) for tensor in launch.reads]
    return reads + [Arrow(tensor, tensor.bytes, reads=False) for tensor in launch.writes]


def panel(drawn: Panel, about: str, unit: str) -> str:
    """Return a panel as SVG: tensors in device memory at the left, launches at the right, bytes on the arrows between them.

    Args:
        drawn: The panel.
        about: Title of the picture.
        unit: Word for what a variant consists of: ``launch``, or ``step`` where PyTorch decides the launches.
    """
    parts: list[str] = []
    top = TOP
    for launch in drawn.launches:
        lines, height = _launch(drawn, launch, top)
        parts += lines
        top += height + GAP
    height = top - GAP + 10
    steps = q.plural(sum(launch.times for launch in drawn.launches), unit, "launches" if unit == "launch" else "steps")
    title = f"{drawn.title} ({drawn.variant})"
    head = [
        drawing.text(0, 14, title, "ink", bold=True),
        drawing.text(0, 30, f"{steps}, {q.size(drawn.read)} read, {q.size(drawn.written)} written", "soft"),
        drawing.rectangle(0, 38, MEMORY, height - 40, "memory"),
        drawing.text(MEMORY / 2, 54, "device memory", "soft", "middle"),
        drawing.text((CHIP + WIDTH) / 2, 54, "on chip", "soft", "middle"),
    ]
    return drawing.svg(WIDTH, height, f"{about}, {title}", head + parts, "flow-panel")


def _launch(drawn: Panel, launch: Launch, top: int) -> tuple[list[str], int]:
    """Return the elements of a launch, its tensors and arrows, and its height."""
    arrows = _arrows(launch)
    name = textwrap.wrap(launch.name, TITLE_LETTERS)
    notes = [(line, index == 0) for note in launch.on_chip for index, line in enumerate(textwrap.wrap(note, NOTE_LETTERS))]
    height = max(ROW * len(arrows), LINE * (len(name) + len(notes)) + 14)
    parts = [drawing.rectangle(CHIP, top, WIDTH - CHIP, height, "chip")]
    parts += [drawing.text(CHIP + 7, top + 17 + LINE * index, line, "ink", bold=True) for index, line in enumerate(name)]
    for index, (line, first) in enumerate(notes, len(name)):
        left, shown = (CHIP + 7, f"\u00b7 {line}") if first else (CHIP + 14, line)
        parts.append(drawing.text(left, top + 17 + LINE * index, shown, "soft"))
    for index, arrow in enumerate(arrows):
        parts += _arrow(drawn, arrow, top + ROW * index + (height - ROW * len(arrows)) // 2)
    return parts, height


def _arrow(drawn: Panel, arrow: Arrow, top: int) -> Iterable[str]:
    """Return a tensor's box, and the arrow from it to the launch or back, with the bytes above it."""
    kind, middle = drawn.kind(arrow.tensor), top + ROW // 2 + 2
    yield drawing.rectangle(6, middle - BOX // 2, MEMORY - 12, BOX, kind, 3)
    yield drawing.text(MEMORY / 2, middle + 4, arrow.tensor.name, "ink", "middle")
    start, end = (MEMORY - 4, CHIP - 2) if arrow.reads else (CHIP, MEMORY - 4)
    side = -6 if end > start else 6
    yield f'<path d="M{start} {middle}H{end}m{side} -4L{end} {middle}l{side} 4" fill="none" {drawing.stroke(f"{kind}-line")}/>'
    yield drawing.text((MEMORY + CHIP) / 2, middle - 4, q.size(arrow.bytes), "ink", "middle", small=True)


def figure(flow: Flow) -> tuple[list[str], str]:
    """Return the panels of an operation's figure, and its caption: the shape, the sentence on it, and the legend."""
    units = ["step" if flow.operation.get(each.variant).launches is None else "launch" for each in flow.panels]
    sizes = " ".join(f"{name}={size}" for name, size in flow.case.sizes.items())
    name = flow.operation.name
    legend = "; ".join(f"{drawing.key(kind)}{words}" for kind, words in KINDS.items())
    least = flow.operation.cost(flow.case, None, "forward").bytes
    said = (
        f"Forward pass of <code>{name}</code> at {sizes}, {dtype_name(flow.case.dtype)}: bytes if each launch reads its tensors "
        f"once and writes its results once. Any implementation moves at least {q.size(least)}. {_code(flow.about)}"
    )
    panels = [panel(each, f"Data flow of {name}", unit) for each, unit in zip(flow.panels, units, strict=True)]
    return panels, f"{said}<br/>{legend}."


def _code(text: str) -> str:
    """Return a sentence as HTML, with words between backticks as code."""
    pieces = escape(text).split("`")
    return "".join(f"<code>{piece}</code>" if index % 2 else piece for index, piece in enumerate(pieces))


def files(root: Path) -> dict[Path, str]:
    """Return the content of every file that this command writes, by its path."""
    figures = {flow.operation.name: figure(flow) for flow in flows()}
    return drawing.files(root / FOLDER, figures)


if __name__ == "__main__":
    for path, text in files(ROOT).items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
