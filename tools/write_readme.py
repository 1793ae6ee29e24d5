"""Write README's table of times, and the picture of it for light and dark pages, from the results of this repository.

Run it from the root of the repository after a result was added: ``python -m tools.write_readme``. ``tests/test_readme.py`` fails
if that was forgotten. The files depend on nothing but the results, byte for byte: no font is measured, and no package draws.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

from onelaunch.model_studies.result import Alone, ModelResult, Timed
from onelaunch.operation import Direction
from onelaunch.workbench.report.comparison import Comparison, compare
from onelaunch.workbench.report.documents import NONE, code, markdown_table
from onelaunch.workbench.result import Result
from onelaunch.workbench.stats import ratio

ROOT = Path(__file__).parents[1]
"""Root of the repository."""

BEGIN, END = "<!-- Written by `python -m tools.write_readme`. -->", "<!-- End of the written part. -->"
"""Lines of README that enclose the written part."""

PICTURES = {"light": "docs/_static/times-light.svg", "dark": "docs/_static/times-dark.svg"}
"""Path of the picture by the colour scheme of the page."""


class Row(NamedTuple):
    """A case of the table: an operation, and a shape of a committed result."""

    operation: str
    page: str
    result: str
    shape: str
    directions: tuple[Direction, ...]


BOTH: tuple[Direction, ...] = ("forward", "forward_backward")

ROWS = (
    Row("gla", "operations/gla", "nvidia-h100/everyday-calls", "4x2048x16x128 channel", BOTH),
    Row("gated_scan", "operations/gated_scan", "nvidia-h100/everyday-calls", "chunk_hgrn 4x2048", BOTH),
    Row("linear_rnn", "operations/linear_rnn", "nvidia-h100/everyday-calls", "linear_rnn 4x2048", BOTH),
    Row("gla_layer", "operations/gla_layer", "nvidia-h100/everyday-calls", "GatedLinearAttention 4x2048x1024", BOTH),
    Row("projections", "operations/projections", "nvidia-h100/058-projection-chain", "8x4096x2048", BOTH),
    Row("output_chain", "operations/output_chain", "nvidia-h100/058-output-chain", "8x4096x2048", BOTH),
    Row("swiglu", "operations/swiglu", "nvidia-h200/dual-gemm-swiglu", "512x4096x7168", BOTH),
    Row("decode_step", "decode", "nvidia-h200/decode-megakernel", "position 1000", ("forward",)),
)
"""Cases of the table: one of each operation, at its study's main shape."""

NAMES = {"compiled": "torch.compile", "eager": "PyTorch", "unfused": "PyTorch", "captured": "PyTorch, CUDA graph"}
"""Names of the variants of PyTorch, as a reader knows them. Other variants keep theirs."""

SIZES = {"decode_step": ("layers", "hidden", "position")}
"""Sizes that the table shows of an operation that has too many for it; all sizes of the others."""


MODELS, MODEL = "nvidia-h100/models/in-model", "12 layers"
"""Result of whole models, and the model of it that README names."""


@dataclass(frozen=True)
class Entry:
    """A line of the table and of the picture."""

    row: Row
    result: Result
    found: Comparison

    @property
    def direction(self) -> str:
        """Direction in short words: ``forward``, or ``+ backward`` for both passes together."""
        return "forward" if self.found.direction == "forward" else "+ backward"

    @property
    def gpu(self) -> str:
        """Name of the device in one word."""
        return self.result.provenance.device.split()[1]


def entries(results: Path) -> list[Entry]:
    """Return the lines of the table, from the results below a folder."""
    stored = {name: Result.load(results / f"{name}.json") for name in dict.fromkeys(row.result for row in ROWS)}
    return [
        Entry(row, stored[row.result], compare(stored[row.result], row.shape, direction))
        for row in ROWS
        for direction in row.directions
    ]


def written(lines: Sequence[Entry], model: str) -> str:
    """Return the written part of README: the picture, the table, where the times come from, and a sentence on a whole model."""
    light, dark = PICTURES["light"], PICTURES["dark"]
    picture = (
        f'<picture><source media="(prefers-color-scheme: dark)" srcset="{dark}">'
        f'<img alt="Times of onelaunch beside the fastest other library, with the roofline bound" src="{light}"></picture>'
    )
    table = markdown_table(
        ["operation", "sizes", "pass", "GPU", "ours", "fastest other", "bound", "speed"], map(_cells, lines), right=(4, 6, 7)
    )
    return "\n\n".join([BEGIN, picture, table, "  \n".join([*_sources(lines), model]), END]) + "\n"


def _cells(line: Entry) -> list[str]:
    found = line.found
    first = found.direction == "forward"
    other = NONE if found.other is None else f"{_number(found.other_microseconds)} {_name(found.other.variant)}"
    outside = ", outside the gate" if found.other is not None and found.other.outside else ""
    return [
        f"[{code(line.row.operation)}](docs/{line.row.page}.md)" if first else "",
        _sizes(line) if first else "",
        line.direction,
        line.gpu,
        _number(found.microseconds),
        other + outside,
        _number(found.bound_microseconds),
        f"{found.gain.median:.2f}x" if found.gain else NONE,
    ]


def _sizes(line: Entry) -> str:
    """Return the sizes of a case; equal neighbours share their value, as in ``K=V=128``."""
    shape = line.found.shape
    kept = SIZES.get(line.row.operation, tuple(shape.sizes))
    parts: list[tuple[str, int]] = []
    for name, value in ((name, value) for name, value in shape.sizes.items() if name in kept):
        if parts and parts[-1][1] == value and name.isupper():
            parts[-1] = (f"{parts[-1][0]}={name}", value)
        else:
            parts.append((name, value))
    without = [f"no {name}" for name in ("gate",) if shape.options.get(name) is False]
    return " ".join([*(f"{name}={value}" for name, value in parts), *without])


def _sources(lines: Sequence[Entry]) -> list[str]:
    """Return one sentence for each device: versions, dates and files of the results."""
    said = []
    for gpu in dict.fromkeys(line.gpu for line in lines):
        results = {line.row.result: line.result for line in lines if line.gpu == gpu}
        facts = [result.provenance for result in results.values()]
        known = dict.fromkeys(
            f"{name} {each.versions[name]}"
            for name in ("torch", "triton", "fla", "liger_kernel")
            for each in facts
            if name in each.versions
        )
        dates = sorted(each.date[:10] for each in facts)
        when = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
        drivers = " and ".join(dict.fromkeys(str(each.driver) for each in facts))
        files = ", ".join(f"[{name.partition('/')[2]}](results/{name}.json)" for name in results)
        said.append(f"{gpu}: {facts[0].device}, driver {drivers}, {', '.join(known)}; measured {when}; {files}.")
    return said


def whole_model(results: Path) -> str:
    """Return a sentence on a whole model before and after ``accelerate``, from the result of a study of models."""
    found = ModelResult.load(results / f"{MODELS}.json")
    timed, size = found.find("timed", MODEL, "training"), found.study.model(MODEL)
    peaks = [found.find("alone", MODEL, variant) for variant in ("accelerated", "fla")]
    if not isinstance(timed, Timed) or not all(isinstance(each, Alone) and each.peak_bytes for each in peaks):
        raise ValueError(f"{MODELS}.json has no times or no memory of {MODEL!r}")
    ours, theirs = (statistics.median(timed.rounds[variant]) for variant in ("accelerated", "fla"))
    speed = ratio(timed.rounds["fla"], timed.rounds["accelerated"]).median
    memory = peaks[0].peak_bytes / peaks[1].peak_bytes  # pyrefly: ignore[missing-attribute]
    return (
        f"A whole model, fla's `GLAForCausalLM` of {size.layers} layers and {size.width:,} channels in {size.precision}: with "
        f"[`accelerate`](docs/accelerate.md#whole-models) a training step takes {_number(ours / 1e3)} ms in place of "
        f"{_number(theirs / 1e3)} ({speed:.2f}x) and {memory:.2f} of the memory, on an "
        f"{found.provenance.device.split()[1]} ([{found.study.name}](results/{MODELS}.json))."
    )


def _number(value: float | None) -> str:
    return NONE if value is None else f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"


def _name(variant: str) -> str:
    return NAMES.get(variant, variant)


# The picture

COLOURS = {
    "light": {"text": "#1f2328", "faint": "#59636e", "ours": "#1a7f64", "other": "#c2c8cf", "bound": "#d1242f"},
    "dark": {"text": "#e6edf3", "faint": "#9198a1", "ours": "#3fb68b", "other": "#4a525c", "bound": "#ff7b72"},
}
"""Colours of the picture by the colour scheme of the page."""

WIDTH, SHOWN, BAR, STEP, TOP = 400, 520, 8, 46, 34
"""Pixels: width of the picture on a phone and where there is room, and heights of a bar, of a line and of the legend."""


def picture(lines: Sequence[Entry], scheme: str) -> str:
    """Return the picture as SVG: per line a text and two bars, the longer one as wide as the picture, and a mark at the bound.

    It is so narrow that its text can be read on a phone.
    """
    colours = COLOURS[scheme]
    height = TOP + STEP * len(lines)
    size = f'viewBox="0 0 {WIDTH} {height}" width="{SHOWN}" height="{height * SHOWN // WIDTH}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
        "<title>Times of onelaunch beside the fastest other library, with the roofline bound</title>",
        '<g font-family="system-ui, sans-serif" font-size="12">',
        *_legend(colours),
    ]
    for index, line in enumerate(lines):
        parts += _line(line, TOP + STEP * index, colours)
    return "\n".join([*parts, "</g>", "</svg>"]) + "\n"


def _legend(colours: dict[str, str]) -> Iterable[str]:
    at = 1
    for key, label, space in (
        ("ours", "onelaunch", 100),
        ("other", "fastest other library", 165),
        ("bound", "roofline bound", 0),
    ):
        yield f'<rect x="{at}" y="6" width="{3 if key == "bound" else 12}" height="12" fill="{colours[key]}"/>'
        yield _text(at + 18, 16, label, colours["faint"])
        at += space


def _line(line: Entry, top: int, colours: dict[str, str]) -> list[str]:
    found, longest = line.found, max(line.found.microseconds, line.found.other_microseconds or 0.0)
    ours, other, bound = (
        (WIDTH - 2) * (value or 0.0) / longest
        for value in (found.microseconds, found.other_microseconds, found.bound_microseconds)
    )
    label = f"{line.row.operation}, {line.direction}"
    rival = "" if found.other is None else f", {_name(found.other.variant)} {_number(found.other_microseconds)} µs"
    bars = top + 19
    return [
        _text(1, top + 14, label, colours["text"]),
        _text(WIDTH - 1, top + 14, f"{_number(found.microseconds)} µs{rival}", colours["faint"], "end"),
        f'<rect x="1" y="{bars}" width="{ours:.1f}" height="{BAR}" fill="{colours["ours"]}"/>',
        f'<rect x="1" y="{bars + BAR}" width="{other:.1f}" height="{BAR}" fill="{colours["other"]}"/>',
        f'<rect x="{max(1.0, bound):.1f}" y="{bars - 2}" width="2" height="{2 * BAR + 4}" fill="{colours["bound"]}"/>',
    ]


def _text(x: int, y: int, text: str, colour: str, anchor: str = "start") -> str:
    return f'<text x="{x}" y="{y}" fill="{colour}" text-anchor="{anchor}">{escape(text)}</text>'


def files(root: Path) -> dict[Path, str]:
    """Return the content of every file that this command writes, by its path."""
    lines = entries(root / "results")
    readme = (root / "README.md").read_text(encoding="utf-8")
    before, rest = readme.split(BEGIN, 1)
    _, after = rest.split(END + "\n", 1)
    drawn = {root / path: picture(lines, scheme) for scheme, path in PICTURES.items()}
    return {root / "README.md": before + written(lines, whole_model(root / "results")) + after, **drawn}


if __name__ == "__main__":
    for path, text in files(ROOT).items():
        path.write_text(text, encoding="utf-8")
