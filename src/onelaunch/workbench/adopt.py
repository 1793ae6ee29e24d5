"""From stored results to the dispatcher's tables: what was measured on a device decides which variant runs there."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from onelaunch.errors import ResultCorrupt, ResultMismatch
from onelaunch.operation import find_operation
from onelaunch.workbench.result import Cell, Result
from onelaunch.workbench.study import Shape, Study

RowKey = tuple[str, str, str, tuple[str, ...], tuple[tuple[str, int], ...]]


def adopt(results: Sequence[Result], into: Path) -> Path:
    """Merge results of one device into its table, ``into/<slug>.json``, in the format that :mod:`onelaunch.measured` reads.

    A row is one operation, direction, dtype, size and set of flags; its microseconds are cold medians of the variants that are
    correct. Rows that the results do not measure again stay as they are; in rows that they do, only the variants measured again
    change.

    Returns:
        The path of the table.

    Raises:
        ResultMismatch: the results are of several devices, or none was given, or none holds a time to adopt.
        ResultCorrupt: the table that is there already cannot be read.
    """
    slugs = sorted({result.provenance.slug for result in results})
    if len(slugs) != 1:
        named = ", ".join(slugs) if slugs else "no device at all"
        raise ResultMismatch(f"One table is of one device, the results are of {named}. Adopt those of each device on their own.")
    path = into / f"{slugs[0]}.json"
    table = _read(path)
    rows = {_key(row): row for row in table["rows"]}
    found = [row for result in results for row in _rows(result)]
    if not found:
        raise ResultMismatch("No correct variant has a cold time in these results. Run the study to its end, then adopt it.")
    for row in found:
        kept = rows.get(_key(row), {"microseconds": {}})["microseconds"]
        rows[_key(row)] = {**row, "microseconds": kept | row["microseconds"]}
    sources = [*table["source"], *(_source(result) for result in results)]
    written = {
        "device": results[-1].provenance.device,
        "source": list(dict.fromkeys(sources)),
        "rows": [rows[key] for key in sorted(rows)],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(written, indent=1) + "\n")
    partial.replace(path)
    return path


def _read(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {"source": [], "rows": []}
    try:
        table = json.loads(path.read_text())
        for row in table["rows"]:
            _key(row), row["microseconds"].items()
        return {"source": list(table["source"]), "rows": table["rows"]}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ResultCorrupt(path, f"it is no table of measured times ({type(error).__name__}: {error})") from error


def _key(row: dict[str, Any]) -> RowKey:
    return row["operation"], row["direction"], row["dtype"], tuple(row.get("flags", ())), tuple(row["sizes"].items())


def _rows(result: Result) -> list[dict[str, Any]]:
    """One row for each shape and direction with a believed time. Shapes of which flags do not say all are left out."""
    dimensions = find_operation(result.study.operation).dimensions
    rows = []
    for shape in result.study.shapes:
        if (flags := _flags(result.study, shape)) is None:
            continue
        for direction in result.study.directions:
            cells = [cell for cell in result.cells if (cell.shape, cell.direction) == (shape.name, direction)]
            times = {cell.variant: time for cell in cells if (time := _adoptable(cell)) is not None}
            if times:
                rows.append(
                    {
                        "operation": result.study.operation,
                        "direction": direction,
                        "dtype": shape.dtype,
                        **({"flags": flags} if flags else {}),
                        "sizes": {name: shape.sizes[name] for name in dimensions},
                        "microseconds": dict(sorted(times.items(), key=lambda entry: entry[1])),
                    }
                )
    return rows


def _flags(study: Study, shape: Shape) -> list[str] | None:
    """What tells a dispatcher the options of a shape, or ``None`` where one of them shows in no flag."""

    def shown(options: Mapping[str, Any]) -> frozenset[str]:
        given: dict[str, Any] = {**shape.sizes, **options}
        return frozenset(operation.query(operation.case(shape.dtype, **given), "cpu").flags)

    operation = find_operation(study.operation)
    flags = shown(shape.options)
    for option in shape.options:
        if shown({name: value for name, value in shape.options.items() if name != option}) == flags:
            return None
    return sorted(flags)


def _adoptable(cell: Cell) -> float | None:
    """The cold median of a variant that is correct and believed."""
    timing = cell.timing("cold")
    verified = cell.verdict is not None and cell.verdict.ok
    return round(timing.microseconds.median, 3) if timing and verified and cell.status == "ok" and not cell.control else None


def _source(result: Result) -> str:
    facts = result.provenance
    software = ", ".join(f"{name} {facts.versions[name]}" for name in ("torch", "triton") if name in facts.versions)
    return f"{result.study.name} of {facts.date}, commit {facts.commit}, {software}"
