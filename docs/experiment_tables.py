"""Tables of the page ``experiments``: times of the variants that an experiment asked about, and what its study decided."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from onelaunch.operation import Direction
from onelaunch.workbench.report.comparison import median
from onelaunch.workbench.report.documents import NONE, code, docs_table, folded, markdown_table
from onelaunch.workbench.report.headline import headline
from onelaunch.workbench.report.summary import valid_timing
from onelaunch.workbench.report.text import markdown
from onelaunch.workbench.result import Result
from onelaunch.workbench.study import Regime


class Experiment(NamedTuple):
    """Part of a committed result that the page shows: a row for each shape and direction, a column for each variant."""

    result: str
    shapes: tuple[str, ...]
    variants: tuple[str, ...]
    directions: tuple[Direction, ...] = ("forward",)


BOTH: tuple[Direction, ...] = ("forward", "forward_backward")

EXPERIMENTS = {
    "039": Experiment(
        "nvidia-h200/039-chunkwise-gla",
        ("4x1024x32x64", "4x2048x32x64", "4x4096x32x64", "4x2048x16x128"),
        ("sequential", "pipelined", "hopper", "fla"),
    ),
    "039-overlap": Experiment(
        "nvidia-h100/039-overlap",
        ("4x1024x32x64", "4x2048x32x64", "4x4096x32x64", "4x2048x16x128", "4x2048x16x128-head"),
        ("sequential", "hopper_in_turns", "hopper"),
        BOTH,
    ),
    "040": Experiment(
        "nvidia-h200/040-linear-rnn",
        ("1x512", "4x512", "target", "8x2048", "16x512", "16x1024", "16x2048"),
        ("three_launch", "three_launch_cublas", "semi_fused", "fused_stepwise", "fused_chunked", "fla"),
    ),
    "058-input": Experiment(
        "nvidia-h200/058-projection-chain",
        ("8x4096x2048", "4x512x2048", "4x1024x2048", "4x2048x2048", "4x4096x2048"),
        ("unfused", "wide", "compiled", "wide_activated", "cluster_weight", "epilogue_persistent"),
    ),
    "058-input-h100": Experiment(
        "nvidia-h100/058-projection-chain",
        ("8x4096x2048", "4x512x2048", "4x1024x2048", "4x2048x2048", "4x4096x2048"),
        ("unfused", "wide", "compiled", "wide_activated", "cluster_weight", "epilogue_persistent"),
    ),
    "058-output-h100": Experiment(
        "nvidia-h100/058-output-chain", ("8x4096x2048",), ("unfused", "compiled", "norm_gate", "prologue"), BOTH
    ),
    "058-layer-h100": Experiment(
        "nvidia-h100/058-gla-layer",
        ("4x2048x2048", "8x4096x2048-fla"),
        ("unfused", "compiled", "composed", "packed", "fla"),
        BOTH,
    ),
    "058-output": Experiment(
        "nvidia-h200/058-output-chain", ("8x4096x2048",), ("unfused", "compiled", "norm_gate", "prologue"), BOTH
    ),
    "058-layer": Experiment(
        "nvidia-h200/058-gla-layer", ("8x4096x2048",), ("unfused", "compiled", "composed", "packed", "fla"), BOTH
    ),
    "dual-gemm": Experiment(
        "nvidia-h200/dual-gemm-swiglu",
        ("512x4096x7168", "512x4096x7168-fp8", "512x4096x7168-nvfp4", "1x4096x7168-nvfp4"),
        ("three_node", "two_node", "fused", "persistent", "stream_k", "small_m"),
    ),
    "decode": Experiment(
        "nvidia-h200/decode-megakernel",
        ("position 1", "position 10", "position 50", "position 100", "position 200", "position 1000", "position 16000"),
        ("eight_barriers", "redundant_norm", "head_local", "fused_phases", "tagged_words", "streaming", "graph", "compiled"),
    ),
}
"""What the page shows, by the name of its part."""


def parts(stored: Mapping[str, Result]) -> dict[str, str]:
    """Return the written parts of the page by their names, from results by name."""
    sections = {f"experiment-{name}": _section(each, stored[each.result]) for name, each in EXPERIMENTS.items()}
    return sections | {"experiment-cards": _cards(stored)}


def criteria(stored: Mapping[str, Result]) -> dict[str, str]:
    """Return the content of the generated files by their names: every criterion with its evidence, folded."""
    return {
        f"criteria-{name}.md": folded("Every criterion with its evidence", [docs_table(stored[each.result], "criteria")]) + "\n"
        for name, each in EXPERIMENTS.items()
    }


def _section(experiment: Experiment, result: Result) -> str:
    """Return the times in microseconds, and the decision with its strongest evidence."""
    facts, decision = result.provenance, result.decision
    regime: Regime = "running" if "running" in result.study.regimes else "cold"
    several = len(experiment.directions) > 1
    rows = [
        [
            markdown(shape),
            *([direction.replace("_", " and ")] if several else []),
            *_times(result, experiment, shape, direction, regime),
        ]
        for shape in experiment.shapes
        for direction in experiment.directions
    ]
    heads = ["shape", *(["measured"] if several else []), *map(code, experiment.variants), "bound"]
    first = len(heads) - len(experiment.variants) - 1
    where = f"{facts.device}, {facts.date[:10]}, commit {facts.commit[:12]}, results/{experiment.result}.json"
    kind = f"**{markdown(decision.kind.replace('_', ' '))}**" if decision else "none"
    said = f"Decision: {kind}. {markdown(headline(result).sentence)}"
    return "\n\n".join(
        [
            f"Medians in µs ({regime}; {markdown(where)}):",
            markdown_table(heads, rows, right=range(first, len(heads))),
            said,
        ]
    )


def _cards(stored: Mapping[str, Result]) -> str:
    """Return the times of studies on an H100 over those on an H200, for the variants of the page that both results hold."""
    shown: dict[str, tuple[str, ...]] = {}
    for each in EXPERIMENTS.values():
        name = each.result.partition("/")[2]
        shown[name] = tuple(dict.fromkeys((*shown.get(name, ()), *each.variants)))
    rows, runs = [], []
    for name, variants in shown.items():
        pair = [stored.get(f"{slug}/{name}") for slug in ("nvidia-h100", "nvidia-h200")]
        if (h100 := pair[0]) is None or (h200 := pair[1]) is None:
            continue
        runs.append(f"{name} {h100.provenance.commit[:7]} and {h200.provenance.commit[:7]}")
        for direction in BOTH:
            rows += [row for variant in variants if (row := _ratios(name, h100, h200, variant, direction))]
    heads = ["study", "measured", "variant", "shapes", "H100 over H200", "by peaks", "least", "most"]
    said = f"Cold medians on an H100 over those on an H200, geometric means (commits: {markdown('; '.join(runs))}):"
    return "\n\n".join([said, markdown_table(heads, rows, right=range(3, 6))])


def _ratios(name: str, h100: Result, h200: Result, variant: str, direction: Direction) -> list[str] | None:
    """Return the row of a variant in a direction, or ``None`` if there is no shape at which both results hold its time."""
    found: dict[str, tuple[float, float]] = {}
    for shape in h200.study.shapes:
        cells = [result.cell(shape.name, variant, direction) for result in (h100, h200)]
        if all(cell is not None and valid_timing(cell, "cold") and cell.plan is not None for cell in cells):
            times = [median(cell, "cold") for cell in cells if cell is not None]
            plans = [cell.plan.planned_microseconds for cell in cells if cell is not None and cell.plan is not None]
            found[shape.name] = times[0] / times[1], plans[0] / plans[1]
    if not found:
        return None
    means = [math.exp(sum(math.log(each[index]) for each in found.values()) / len(found)) for index in (0, 1)]
    least, most = (pick(found, key=lambda shape: found[shape][0]) for pick in (min, max))
    ends = [f"{found[shape][0]:.2f} at {markdown(shape)}" for shape in (least, most)]
    return [name, direction.replace("_", " and "), code(variant), str(len(found)), *(f"{mean:.2f}" for mean in means), *ends]


def _times(result: Result, experiment: Experiment, shape: str, direction: Direction, regime: Regime) -> list[str]:
    cells = [result.cell(shape, name, direction) for name in experiment.variants]
    bound = next((cell.plan.floor_microseconds for cell in cells if cell and cell.plan), None)
    times = [f"{median(cell, regime):,.1f}" if cell and valid_timing(cell, regime) else NONE for cell in cells]
    return [*times, NONE if bound is None else f"{bound:,.1f}"]
