"""From stored results to the dispatcher's tables: what was measured on a device decides which variant runs there."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onelaunch
from onelaunch import folders
from onelaunch.device.hardware import SLUG, table_name
from onelaunch.dispatch.measured import Key, is_time, key_of, read
from onelaunch.errors import OutputUnwritable, ResultMismatch, TableCorrupt, TableFolderError
from onelaunch.files import reason, replace
from onelaunch.operation import find_operation
from onelaunch.wording import in_a_line
from onelaunch.workbench.result import Cell, Result
from onelaunch.workbench.study import Shape, Study

PACKAGE = Path(onelaunch.__file__).resolve().parent


def adopt(results: Sequence[Result], into: Path | None = None) -> Path:
    """Merge results of one device into its table, in the format that :mod:`onelaunch.dispatch.measured` reads.

    A row is one operation, direction, dtype, size and set of flags; its microseconds are cold medians of the variants that are
    correct. Rows that the results do not measure again stay as they are; in rows that they do, only the variants measured again
    change.

    Args:
        results: what was measured.
        into: the folder of the table; by default the user's own, :func:`onelaunch.folders.tables_folder`, which the dispatcher
            reads.

    Returns:
        The path of the table.

    Raises:
        ResultMismatch: the results are of several devices, or none was given, or none holds a time to adopt, or their device's
            name or one of their times cannot be.
        TableCorrupt: the table that is there already cannot be read.
        TableFolderError: the folder is this package's, which an upgrade would overwrite.
        OutputUnwritable: the table cannot be written there.
    """
    remedy = _other_folder(into)
    into = folders.tables_folder() if into is None else into
    if into.resolve().is_relative_to(PACKAGE):
        problem = "lies within the installed package, where an upgrade would overwrite a table"
        raise TableFolderError(into, problem, remedy=remedy)
    names = sorted({_table_name(result) for result in results})
    if len(names) != 1:
        said = f"the results are of {', '.join(names) or 'no device at all'}"
        raise ResultMismatch(f"One table is of one device, {said}. Adopt those of each device on their own.")
    path = into / f"{names[0]}.json"
    device, sources, rows = _read(path)
    if names[0].startswith("cpu-") and device not in (None, results[-1].provenance.device):
        raise ResultMismatch(f"{path} is of {device}, the results are of {results[-1].provenance.device}. Name another folder.")
    found = [row for result in results for row in _rows(result)]
    if not found:
        raise ResultMismatch("No correct variant has a cold time in these results. Run the study to its end, then adopt it.")
    for row in found:
        kept = rows.get(key_of(row), {"microseconds": {}})["microseconds"]
        rows[key_of(row)] = {**row, "microseconds": kept | row["microseconds"]}
    written = {
        "device": results[-1].provenance.device,
        "source": list(dict.fromkeys([*sources, *(_source(result) for result in results)])),
        "rows": [rows[key] for key in sorted(rows)],
    }
    try:
        replace(path, (json.dumps(written, indent=1) + "\n").encode())
    except OSError as error:
        raise OutputUnwritable(into, reason(error), remedy=remedy) from error
    return path


def _other_folder(into: Path | None) -> str:
    """Return how another folder is named, which depends on what named this one."""
    if into is not None:
        return "Leave --into out for the user's own folder, or name a folder of yours."
    if os.environ.get(folders.TABLES):
        return f"The environment variable {folders.TABLES} names it: set it to a folder of yours, or pass one with --into."
    return f"Pass a folder that can be written with --into, or name one in the environment variable {folders.TABLES}."


def _table_name(result: Result) -> str:
    """Return the name of the file for a result's device, which comes from the result and so may be anything."""
    slug, device = result.provenance.slug, result.provenance.device
    if not SLUG.fullmatch(slug):
        raise ResultMismatch(
            f"The result of {result.study.name} is of a device with the slug {slug[:100]!r}, which cannot name a file. It must "
            "be 1 to 80 small letters, digits, dots, hyphens and underscores, with no two dots in a row, such as nvidia-h200."
        )
    return table_name(slug, device)


def _read(path: Path) -> tuple[str | None, list[str], dict[Key, dict[str, Any]]]:
    """Return the device, the sources and the rows of a table, as they are stored; nothing where there is no table yet."""
    try:
        device, sources, rows = read(path)
    except (FileNotFoundError, NotADirectoryError):
        return None, [], {}
    except (OSError, ValueError) as error:
        raise TableCorrupt(path, in_a_line(error)) from error
    stored = {
        key: _row(key.operation, key.direction, key.dtype, key.flags, row.sizes, row.microseconds) for key, row in rows.items()
    }
    return device, sources, stored


def _row(
    operation: str, direction: str, dtype: str, flags: Sequence[str], sizes: Mapping[str, int], times: Mapping[str, float]
) -> dict[str, Any]:
    return {
        "operation": operation,
        "direction": direction,
        "dtype": dtype,
        **({"flags": list(flags)} if flags else {}),
        "sizes": dict(sizes),
        "microseconds": dict(times),
    }


def _rows(result: Result) -> list[dict[str, Any]]:
    """One row for each shape and direction with a believed time. Shapes of which flags do not say all are left out."""
    dimensions = find_operation(result.study.operation).dimensions
    rows = []
    for shape in result.study.shapes:
        if (flags := _flags(result.study, shape)) is None:
            continue
        for direction in result.study.directions:
            cells = [cell for cell in result.cells if (cell.shape, cell.direction) == (shape.name, direction)]
            times = {cell.variant: time for cell in cells if (time := _adoptable(result, cell)) is not None}
            if times:
                sizes = {name: shape.sizes[name] for name in dimensions}
                fastest_first = dict(sorted(times.items(), key=lambda entry: entry[1]))
                rows.append(_row(result.study.operation, direction, shape.dtype, flags, sizes, fastest_first))
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


def _adoptable(result: Result, cell: Cell) -> float | None:
    """Return the cold median of a variant that is correct and believed.

    Raises:
        ResultMismatch: it is no positive number of microseconds, so the result was not written by a run.
    """
    timing = cell.timing("cold")
    verified = cell.verdict is not None and cell.verdict.ok
    if timing is None or not verified or cell.status != "ok" or cell.control:
        return None
    for time in (timing.microseconds.median, *timing.rounds):
        if not is_time(time) or not round(time, 3):
            raise ResultMismatch(
                f"{cell.variant} at {cell.shape} takes {time:g} µs in the result of {result.study.name}; a time must be a "
                "positive number. Run the study again, or restore the file."
            )
    return round(timing.microseconds.median, 3)


def _source(result: Result) -> str:
    facts = result.provenance
    software = ", ".join(f"{name} {facts.versions[name]}" for name in ("torch", "triton") if name in facts.versions)
    return f"{result.study.name} of {facts.date}, commit {facts.commit}, {software}"
