"""Writes the parts of the documentation that are data: the variants of each operation, and what was measured where."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from onelaunch.operation import Operation, operations
from onelaunch.workbench.result import Cell, Result
from onelaunch.workbench.study import LOOPS, Regime

NOTHING_MEASURED = "Nothing has been measured yet: there is no result of this operation under `results/`.\n"


def write(folder: Path, results: Path, notebook: Path) -> None:
    """``variants-NAME.md`` and ``measured-NAME.md`` for every operation, ``notebook.md`` for the pages of the notebook."""
    folder.mkdir(parents=True, exist_ok=True)
    stored = [(path, Result.load(path)) for path in sorted(results.glob("**/*.json"))] if results.is_dir() else []
    for operation in operations():
        _replace(folder / f"variants-{operation.name}.md", _variants(operation))
        about = [(path, result) for path, result in stored if result.study.operation == operation.name]
        measured = "\n".join(_measured(path.relative_to(results.parent), result) for path, result in about)
        _replace(folder / f"measured-{operation.name}.md", measured or NOTHING_MEASURED)
    pages = sorted(path.stem for path in notebook.glob("*.md") if path.stem != "index")
    contents = "\n".join(["```{toctree}", *pages, "```"]) if pages else "There is no entry yet."
    _replace(folder / "notebook.md", contents + "\n")


def _replace(path: Path, text: str) -> None:
    """Written only when it differs, so that Sphinx reads no page again for nothing."""
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def _variants(operation: Operation) -> str:
    products = any("gemm" in variant.tags for variant in operation.variants.values())
    rows = [
        [
            f"`{variant.name}`",
            "many" if variant.launches is None else str(variant.launches),
            ", ".join(variant.tags.get("fuses", ())) or "-",
            *([variant.tags.get("gemm", "PyTorch")] if products else []),
            variant.summary,
        ]
        for variant in operation.variants.values()
    ]
    return _table(["variant", "launches", "steps in one kernel", *(["matrix product"] if products else []), "what it is"], rows)


def _measured(path: Path, result: Result) -> str:
    """One stored result: where and when, medians per shape, cold and of steps in a row, the decision."""
    facts = result.provenance
    versions = ", ".join(f"{name} {facts.versions[name]}" for name in ("torch", "triton", "fla-core") if name in facts.versions)
    text = [
        f"### {result.study.name} on {facts.device}",
        f"{facts.date}, {versions}, driver {facts.driver or '-'}, commit `{facts.commit}`, {facts.rounds} rounds; `{path}`.",
    ]
    if result.interrupted:
        text.append("The run was interrupted: shapes that are missing here were not reached.")
    for direction in result.study.directions:
        cells = [cell for cell in result.cells if cell.direction == direction]
        for regime in ("cold", *LOOPS):
            if any(_microseconds(cell, regime) for cell in cells):
                text += [f"Median microseconds, {direction.replace('_', ' and ')}, {regime}:", _times(cells, regime)]
    if result.decision:
        text += [
            f"Decision: **{result.decision.kind.replace('_', ' ')}**.",
            "\n".join(f"- {why}" for why in result.decision.because),
        ]
    return "\n\n".join(text) + "\n"


def _times(cells: Sequence[Cell], regime: Regime) -> str:
    shapes = list(dict.fromkeys(cell.shape for cell in cells if _microseconds(cell, regime)))
    variants = list(dict.fromkeys(cell.variant for cell in cells if _microseconds(cell, regime)))
    found = {(cell.variant, cell.shape): _microseconds(cell, regime) for cell in cells}
    rows = [[shape, *(found.get((variant, shape), "") for variant in variants)] for shape in shapes]
    return _table(["shape", *(f"`{variant}`" for variant in variants)], rows)


def _microseconds(cell: Cell, regime: Regime) -> str:
    timing = cell.timing(regime)
    return f"{timing.microseconds.median:,.1f}" if timing is not None and cell.status == "ok" else ""


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(value).replace("|", "\\|") for value in line) + " |" for line in lines) + "\n"
