"""Merge stored results into the dispatcher's tables, so that measured times decide which variant runs on a device."""

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
"""Folder of the installed package, into which no table is written."""


def adopt(results: Sequence[Result], into: Path | None = None) -> Path:
    """Merge results of one device into its table, in the format that :mod:`onelaunch.dispatch.measured` reads.

    A row is one operation, direction, dtype, set of sizes and set of flags. Its microseconds are the cold medians of the correct
    variants. Rows that the results did not measure stay unchanged. In the other rows only the variants that were measured change.

    Args:
        results: Results of one device. Times of later ones replace those of earlier ones.
        into: Folder of the table. By default the user's own, :func:`onelaunch.folders.tables_folder`, which the dispatcher reads.

    Returns:
        The path of the table.

    Raises:
        ResultMismatch: The results are of several devices, there is none, none holds a time to adopt, or a device name or time in
            them is invalid.
        TableCorrupt: The existing table cannot be read.
        TableFolderError: The folder lies in the installed package, where an upgrade would overwrite the table.
        OutputUnwritable: The table cannot be written.
    """
    remedy = _other_folder(into)
    into = folders.tables_folder() if into is None else into
    if into.resolve().is_relative_to(PACKAGE):
        problem = "lies within the installed package, where an upgrade would overwrite a table"
        raise TableFolderError(into, problem, remedy=remedy)
    names = sorted({_table_name(result) for result in results})
    if len(names) != 1:
        devices = f"the results are of {', '.join(names)}" if names else "no result was given"
        raise ResultMismatch(f"A table holds the times of one device, but {devices}. Adopt the results of one device at a time.")
    path = into / f"{names[0]}.json"
    device, sources, rows = _read(path)
    # The file name of a CPU's table is a shortened form of the CPU's name. The dispatcher ignores a table of another CPU.
    if names[0].startswith("cpu-") and device not in (None, results[-1].provenance.device):
        raise ResultMismatch(
            f"{path} holds times of {device}, but the results are of {results[-1].provenance.device}. Name another folder."
        )
    found = [row for result in results for row in _rows(result)]
    if not found:
        raise ResultMismatch(
            "These results hold no cold time of a correct variant. Run the study to its end, then adopt its result."
        )
    for row in found:
        earlier = rows.get(key_of(row), {"microseconds": {}})["microseconds"]
        rows[key_of(row)] = {**row, "microseconds": earlier | row["microseconds"]}
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
    """Return the advice on how to choose another folder, which depends on how this one was chosen."""
    if into is not None:
        return "Leave out --into to use your own data folder, or pass a folder of yours."
    if os.environ.get(folders.TABLES):
        return f"The environment variable {folders.TABLES} names it. Set it to a folder of yours, or pass one with --into."
    return f"Pass a writable folder with --into, or set the environment variable {folders.TABLES} to one."


def _table_name(result: Result) -> str:
    """Return the name of the table file for a result's device, after a check, because the result may come from anywhere."""
    slug, device = result.provenance.slug, result.provenance.device
    if not SLUG.fullmatch(slug):
        raise ResultMismatch(
            f"The result of {result.study.name} is of a device with the slug {slug[:100]!r}, which cannot name a file. It must "
            "be 1 to 80 small letters, digits, dots, hyphens and underscores, with no two dots in a row, such as nvidia-h200."
        )
    return table_name(slug, device)


def _read(path: Path) -> tuple[str | None, list[str], dict[Key, dict[str, Any]]]:
    """Return the device, the sources and the rows of a table as they are stored; empty values if there is no table yet."""
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
    """Return a row as a table stores it."""
    return {
        "operation": operation,
        "direction": direction,
        "dtype": dtype,
        **({"flags": list(flags)} if flags else {}),
        "sizes": dict(sizes),
        "microseconds": dict(times),
    }


def _rows(result: Result) -> list[dict[str, Any]]:
    """Return a row for each shape and direction with a usable time.

    The dispatcher looks a call up by sizes, dtype and the flags of its :class:`~onelaunch.operation.Query`, such as ``packed``. A
    shape with an option that changes no flag is left out, because the dispatcher could not tell it from other calls.
    """
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
                fastest_first = dict(sorted(times.items(), key=lambda entry: entry[1]))  # for people who open the table
                row = _row(result.study.operation, direction, shape.dtype, flags, sizes, fastest_first)
                reports = {name: result.probes[name] for name in times if name in result.probes}
                met = sorted(name for name, report in reports.items() if report.passed and not report.failed)
                rows.append(row | ({"probes": met} if met else {}))
    return rows


def _flags(study: Study, shape: Shape) -> list[str] | None:
    """Return the query flags by which the dispatcher recognizes the options of a shape.

    Returns:
        Sorted flags, or ``None`` if an option changes no flag: without it the shape would have the same ones.
    """

    def flags_with(options: Mapping[str, Any]) -> frozenset[str]:
        given: dict[str, Any] = {**shape.sizes, **options}
        return frozenset(operation.query(operation.case(shape.dtype, **given), "cpu").flags)  # the device is not compared

    operation = find_operation(study.operation)
    flags = flags_with(shape.options)
    for option in shape.options:
        if flags_with({name: value for name, value in shape.options.items() if name != option}) == flags:
            return None
    return sorted(flags)


def _adoptable(result: Result, cell: Cell) -> float | None:
    """Return the cold median in microseconds of a correct variant with status ``ok``, or ``None``. Controls have none.

    Raises:
        ResultMismatch: A time is not a positive number, so the result was not written by a run.
    """
    timing = cell.timing("cold")
    verified = cell.verdict is not None and cell.verdict.ok
    if timing is None or not verified or cell.status != "ok" or cell.control:
        return None
    for time in (timing.microseconds.median, *timing.rounds):
        if not is_time(time) or not round(time, 3):  # a table stores nanoseconds, and a time below half of one would become 0
            raise ResultMismatch(
                f"{cell.variant} at {cell.shape} takes {time:g} µs in the result of {result.study.name}, but a time must be a "
                "positive number. Run the study again, or restore the file."
            )
    return round(timing.microseconds.median, 3)


def _source(result: Result) -> str:
    """Return the line that names a result as a source of a table: study, date, commit and versions."""
    facts = result.provenance
    software = ", ".join(f"{name} {facts.versions[name]}" for name in ("torch", "triton") if name in facts.versions)
    return f"{result.study.name} of {facts.date}, commit {facts.commit}, {software}"
