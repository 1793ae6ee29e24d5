"""Draw the decode plan for its page: the phases of a layer, the exchanges between CTAs, and the weight stream of a CTA.

Run ``python -m tools.draw_decode_plan`` from the root of the repository after the plan changed. The pictures are made of the
plans of Qwen3-0.6B for the 132 SMs of a Hopper GPU, from which the kernel is generated too. ``tests/test_draw_decode_plan.py``
fails if the committed files differ from what this command makes, and compares the plan with the text of the page.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from onelaunch.decode.codegen.layout import Tuning, layout_of
from onelaunch.decode.plan import Plan, plan_for
from onelaunch.decode.plan.packing import piece_bytes, pieces
from onelaunch.decode.plan.phases import CHUNK, PRODUCTS, Assignment, Op, Phase, Slice
from onelaunch.decode.step.contract import decode_step
from onelaunch.decode.step.reference import config_of
from onelaunch.decode.step.typical import QWEN3_0_6B
from onelaunch.device.architectures import HOPPER_SMS
from onelaunch.workbench import quantities as q
from tools import drawing

ROOT = Path(__file__).parents[1]
"""Root of the repository."""

FOLDER = "docs/pictures/decode"
"""Folder of the pictures."""

MODEL = "Qwen3-0.6B"
"""Model of the pictures."""

READER = 41
"""CTA whose exchanges and weight stream are shown; any other one looks alike."""

CONTEXTS = {1: "below 64", 8: "64 to 1279", 16: "from 1280 on"}
"""Positions by the number of KV splits that have some, for the plan of the pictures; a test compares them with the plan."""


def plan(level: str, used: int | None = None) -> Plan:
    """Return the plan of a level for :data:`MODEL`; ``used`` is the number of KV splits that have positions."""
    case = decode_step.case("bfloat16", position=1000, **QWEN3_0_6B)
    return plan_for(config_of(case), level, HOPPER_SMS, used)


# Facts of a plan


def working(phase: Phase) -> list[Assignment]:
    """Return the assignments of the CTAs that have work in a phase."""
    return [each for each in phase.assignments if each.units]


def overlapping(one: Slice, other: Slice) -> bool:
    """Return whether two slices share words."""
    return one.buffer == other.buffer and one.begin < other.end and other.begin < one.end


def sources(made: Plan, index: int, cta: int) -> list[int]:
    """Return the CTAs that wrote, or added to, the words that a CTA waits for in a phase of a layer.

    Args:
        made: The plan.
        index: Index of the phase in the layer.
        cta: The CTA that waits.
    """
    found: set[int] = set()
    for polled in made.layer[index].assignments[cta].polls:
        before = [made.layer[(index - step) % len(made.layer)] for step in range(1, len(made.layer) + 1)]
        for phase in before:  # the latest phase that makes these words; the previous layer's follow those of this one
            makers = {
                other
                for other, assignment in enumerate(phase.assignments)
                if any(overlapping(polled, each) for each in (*assignment.writes, *assignment.adds))
            }
            if makers:
                found |= makers
                break
    return sorted(found)


def polled_words(assignment: Assignment) -> int:
    """Return the number of words that a CTA waits for."""
    return sum(each.end - each.begin for each in assignment.polls)


def chunks(made: Plan, op: Op, cta: int) -> int:
    """Return the chunks of the weight stream that a CTA loads in a phase."""
    return pieces(made, op, cta) * piece_bytes(made.config) // CHUNK


# Phases of a layer

UNITS: dict[str, str] = {
    "norm": "the whole vector", "rope": "1 key head", "attention": "1 key head", "rope_attention": "1 part of a head",
}  # fmt: skip
"""Words for the work of a CTA in phases that are no products."""

WIDTH, STEP, BOX = 360, 62, 36
"""Width of a panel, height of a phase with the synchronization before it, and height of a phase's box."""


def phases(level: str) -> str:
    """Return the phases of a layer as a panel: each with its CTAs and weights, and before it what a CTA waits for."""
    made = plan(level)
    barriers = sum(phase.edge == "grid" for phase in made.layer)
    parts = [
        drawing.text(0, 14, level, "ink", bold=True),
        drawing.text(0, 30, f"{len(made.layer)} phases and {q.plural(barriers, 'grid barrier')} per layer", "soft"),
    ]
    for index, phase in enumerate(made.layer):
        parts += _phase(made, index, phase, 44 + STEP * index)
    height = 44 + STEP * len(made.layer)
    return drawing.svg(WIDTH, height, f"Phases of a layer in the level {level}", parts, "flow-panel")


def _phase(made: Plan, index: int, phase: Phase, top: int) -> Iterable[str]:
    """Return the elements of a phase: a line for what its CTAs wait for, and a box."""
    if phase.edge == "grid":
        yield f'<path d="M0 {top + 10}H{WIDTH}" {drawing.stroke("barrier", 3)}/>'
        yield drawing.rectangle(WIDTH / 2 - 84, top + 2, 168, 16, "memory", 8)
        yield drawing.text(WIDTH / 2, top + 14, f"grid barrier of {made.ctas} CTAs", "ink", "middle", small=True)
    elif phase.edge == "data":
        count, words = len(sources(made, index, READER)), polled_words(phase.assignments[READER])
        said = f"each CTA waits for {words:,} words of {q.plural(count, 'CTA')}"
        yield f'<path d="M0 {top + 10}H{WIDTH}" stroke-dasharray="3 4" {drawing.stroke("between-line")}/>'
        yield drawing.rectangle(WIDTH / 2 - 130, top + 2, 260, 16, "memory", 8)
        yield drawing.text(WIDTH / 2, top + 14, said, "ink", "middle", small=True)
    busy, box = working(phase), top + 21
    work = UNITS.get(phase.op) or (
        q.plural(busy[0].units, "block") if phase.op == "o" and made.blocks else q.plural(busy[0].units, "tile")
    )
    weights = q.size(pieces(made, phase.op, READER) * piece_bytes(made.config)) if phase.op in PRODUCTS else "no weights"
    yield drawing.rectangle(0, box, WIDTH, BOX, "chip")
    yield drawing.text(8, box + 15, phase.name, "ink", bold=True)
    yield drawing.text(8, box + 30, f"{len(busy)} of {made.ctas} CTAs", "soft")
    yield drawing.text(WIDTH - 8, box + 15, f"{work} per CTA", "soft", "end")
    yield drawing.text(WIDTH - 8, box + 30, f"{weights} per CTA", "soft", "end")


def phases_figure() -> tuple[list[str], str]:
    """Return the panels and the caption of the figure of the phases: the first level of the ablation beside the last one."""
    most = len(sources(plan("streaming"), 0, READER))
    caption = (
        f"Phases of a layer of {MODEL} on {HOPPER_SMS} SMs, and what each CTA waits for before them, at position 1280 or "
        "later. A grid barrier waits for all CTAs. <code>streaming</code> waits for the words themselves, made by at most "
        f"{most} CTAs; in the first layer <code>qkv</code> reads the embedding's row instead."
    )
    return [phases("eight_barriers"), phases("streaming")], caption


# Exchanges between CTAs

COLUMNS, CELL, GRID_WIDTH = 12, 10, 124
"""CTAs in a row of a grid, pixels from one CTA to the next, and width of a grid with its margins."""


def exchange(made: Plan, index: int, said: Sequence[str]) -> str:
    """Return a grid of all CTAs in which those are coloured whose words the reader waits for in a phase."""
    found = sources(made, index, READER)
    top = 4 + 14 * len(said)
    parts = [drawing.text(0, 12 + 14 * row, line, "soft" if row else "ink", bold=not row) for row, line in enumerate(said)]
    for name, chosen in (("argument", False), ("between-line", True)):
        cells = (divmod(cta, COLUMNS) for cta in range(made.ctas) if (cta in found) is chosen)
        squares = "".join(f"M{column * CELL + 1} {top + row * CELL + 1}h8v8h-8z" for row, column in cells)
        parts.append(f'<path d="{squares}" {drawing.fill(name)}/>')
    row, column = divmod(READER, COLUMNS)
    at = f'x="{column * CELL}" y="{top + row * CELL}" width="{CELL}" height="{CELL}"'
    parts.append(f'<rect {at} fill="none" {drawing.stroke("ink", 2)}/>')
    height = top + CELL * -(-made.ctas // COLUMNS) + 4
    return drawing.svg(GRID_WIDTH, height, f"CTAs that CTA {READER} waits for: {', '.join(said)}", parts, "flow-grid")


def exchanges_figure() -> tuple[list[str], str]:
    """Return the panels and the caption of the exchanges of ``streaming``: who waits for whom, in each phase and context."""
    usual = plan("streaming", 8)
    names = [phase.op for phase in usual.layer]
    panels = []
    for index, phase in enumerate(usual.layer):
        contexts = CONTEXTS if phase.op in ("rope_attention", "o") else {8: "any position"}
        for used, where in contexts.items():
            made = plan("streaming", used)
            count = len(sources(made, names.index(phase.op), READER))
            panels.append(exchange(made, index, (phase.name, f"{q.plural(count, 'CTA')},", where)))
    waited, others = drawing.key("between-line"), drawing.key("argument")
    caption = (
        f"Exchanges of <code>streaming</code>, {MODEL} on {HOPPER_SMS} SMs: each square is a CTA. {waited}CTAs whose words CTA "
        f"{READER} (framed) waits for before the phase; {others}other CTAs. Before <code>o</code> below position 64 these are "
        "words of its own."
    )
    return panels, caption


# The weight stream

SHADES: dict[Op, str] = {
    "qkv": "argument-line",
    "o": "result-line",
    "gate_up": "between-line",
    "down": "result",
    "lm_head": "between",
}
"""Colour of each product's chunks."""


def stream() -> str:
    """Return the weight stream of a CTA: the chunks of a layer, the ring in shared memory, and a whole token."""
    made = plan("streaming")
    layer = [(phase.op, chunks(made, phase.op, READER)) for phase in made.layer if phase.op in PRODUCTS]
    count, stages = sum(number for _, number in layer), layout_of(made, Tuning()).stages
    cell = WIDTH / count
    parts = [drawing.text(0, 14, f"One layer: {count} chunks of {q.size(CHUNK)}", "ink", bold=True)]
    at = 0
    for op, number in layer:
        parts += [drawing.rectangle((at + each) * cell + 1, 22, cell - 2, 20, SHADES[op], 2) for each in range(number)]
        parts.append(drawing.text((at + number / 2) * cell, 56, op, "soft", "middle", small=True))
        at += number
    first = (count - stages) // 2
    frame = f'x="{first * cell:g}" y="82" width="{stages * cell:g}" height="26" rx="4"'
    parts += [
        f'<rect {frame} fill="none" {drawing.stroke("ink", 2)}/>',
        *(drawing.rectangle((first + each) * cell + 2, 85, cell - 4, 20, "chip", 2) for each in range(stages)),
        drawing.text(0, 77, f"Ring in shared memory: {stages} chunks, {q.size(stages * CHUNK)}", "ink", bold=True),
        drawing.text(WIDTH / 2, 122, "filled across phases and layers while warps multiply", "soft", "middle", small=True),
    ]
    return drawing.svg(WIDTH, 128, f"Weight stream of a CTA: a layer and the ring of {stages} chunks", parts, "flow-panel")


def token() -> str:
    """Return the weight stream of a whole token, to scale: all layers, then the LM head."""
    made = plan("streaming")
    layers, head = made.config.num_hidden_layers, chunks(made, "lm_head", READER)
    layer = sum(chunks(made, phase.op, READER) for phase in made.layer if phase.op in PRODUCTS)
    total = layers * layer + head
    scale = WIDTH / total
    parts = [drawing.text(0, 14, f"One token: {total:,} chunks, {q.size(total * CHUNK)} per CTA", "ink", bold=True)]
    for number in range(layers):
        at = number * layer
        for op in (phase.op for phase in made.layer if phase.op in PRODUCTS):
            width = chunks(made, op, READER)
            parts.append(drawing.rectangle(at * scale, 22, max(width * scale, 0.5), 20, SHADES[op], 0))
            at += width
    parts.append(drawing.rectangle(layers * layer * scale, 22, head * scale, 20, SHADES["lm_head"], 0))
    parts += [
        drawing.text(layers * layer * scale / 2, 56, f"{layers} layers", "soft", "middle", small=True),
        drawing.text(WIDTH, 56, f"LM head, {head} chunks", "soft", "end", small=True),
    ]
    return drawing.svg(WIDTH, 62, "Weight stream of a CTA: a token, to scale", parts, "flow-panel")


def stream_figure() -> tuple[list[str], str]:
    """Return the panels and the caption of the figure of the weight stream."""
    everything = q.size(sum(_token_bytes(cta) for cta in range(HOPPER_SMS)))
    caption = (
        f"The weights that CTA {READER} reads for each token of {MODEL}, in the order in which they lie in memory. All CTAs "
        f"together read {everything}. The producer thread copies chunk after chunk into the ring, as far ahead as the ring has "
        "room, and does not wait for other CTAs."
    )
    return [stream(), token()], caption


def _token_bytes(cta: int) -> int:
    """Return the bytes of a CTA's stream."""
    made = plan("streaming")
    layer = sum(pieces(made, op, cta) for op in PRODUCTS if op != "lm_head")
    return (made.config.num_hidden_layers * layer + pieces(made, "lm_head", cta)) * piece_bytes(made.config)


def files(root: Path) -> dict[Path, str]:
    """Return the content of every file that this command writes, by its path."""
    figures = {"phases": phases_figure(), "exchanges": exchanges_figure(), "stream": stream_figure()}
    return drawing.files(root / FOLDER, figures)


if __name__ == "__main__":
    for path, text in files(ROOT).items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
