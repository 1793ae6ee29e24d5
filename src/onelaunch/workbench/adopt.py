"""Merge stored results into the dispatcher's tables, so that measured times decide which variant runs on a device.

Command ``onelaunch study adopt`` calls :func:`adopt`, and so does ``tune.py``.
"""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import onelaunch
from onelaunch import folders
from onelaunch.device.hardware import SLUG, table_name
from onelaunch.dispatch.measured import TUNE, Key, is_time, key_of, read
from onelaunch.errors import AdoptNotice, OutputUnwritable, ResultMismatch, TableCorrupt, TableFolderError
from onelaunch.files import reason, replace
from onelaunch.operation import AUTO, Direction, Operation, find_operation
from onelaunch.wording import in_a_line, listing
from onelaunch.workbench.result import Cell, Result
from onelaunch.workbench.result.consistency import BELOW_BOUND
from onelaunch.workbench.study import Shape, Study

PACKAGE = Path(onelaunch.__file__).resolve().parent
"""Folder of the installed package, into which no table is written."""

_RUN = "run"
"""Key of a row with the date of the run that measured it."""

_AUTO = "auto"
"""Key of a row that tells nothing about the order of our variants, with the variant whose time is that of ``auto``."""

_OF_GRADIENTS = frozenset({"state_gradients"})
"""Options of cases that say what takes gradients. A forward call is the same with and without them."""


def adopt(results: Sequence[Result], into: Path | None = None, *, tuned: bool = False) -> Path:
    """Merge results of one device into its table, in the format that :mod:`onelaunch.dispatch.measured` reads.

    A row is one operation, direction, dtype, set of sizes and set of flags. Its microseconds are the cold medians of the correct
    variants, all of one run, so that they were measured side by side. A row of a newer run replaces that of an older one as a
    whole, whatever the order of the results; of two runs of one date the later one in ``results`` counts. Rows that the results
    did not measure stay unchanged.

    The names of variants that refused the call are stored too, so that a later version in which they run it is not held to times
    without them.

    The time of ``auto`` counts as that of the variant that it chose, unless that one was measured by its name too. If no other
    variant that ``auto`` may choose has a time there, the row names it under ``auto``: it compares one variant with those of
    other libraries, and takes part in no choice among ours. It never replaces a row that compares several that ``auto`` may
    choose. A row with one of them beside ablations, from a study of causes, never replaces one that compares it with others.

    A variant whose probes (edge cases of the operation) failed or were not run is left out of its rows, with three exceptions.
    ``torch.compile`` makes its kernels anew for each set of sizes (capability ``recompiles``). It needs another library
    (capability ``requires``), so ``auto`` never chooses it. Or ``auto`` chose it, and it belongs to the package of its operation,
    whose own tests run the probes on it; variants of other packages must have passed them. A result without any probes is adopted
    all the same. An :class:`~onelaunch.errors.AdoptNotice` says what is left out, and which times a replaced row loses.

    Args:
        results: Results of one device, each of a finished run of committed code.
        into: Folder of the table. By default the user's own, :func:`onelaunch.folders.tables_folder`, which the dispatcher reads.
        tuned: Whether the results are of ``onelaunch tune``. Their rows name that command, and hold the noise of their times, the
            software and digests of the variants' code, so that they are stale elsewhere. The results may therefore be of an
            interrupted run and of code that was not committed.

    Returns:
        The path of the table.

    Raises:
        ResultMismatch: The results are of several devices or of another device than the table, there is none, none holds a time
            to adopt, or one is of an interrupted run or of a checkout with changes that were not committed, has no valid date,
            names a device that cannot name a file, or holds an impossible time.
        TableCorrupt: The existing table cannot be read.
        TableFolderError: The folder lies in the installed package, where an upgrade would overwrite the table.
        OutputUnwritable: The table cannot be written.
    """
    names = sorted({_table_name(result) for result in results})
    if len(names) != 1:
        devices = f"the results are of {', '.join(names)}" if names else "no result was given"
        raise ResultMismatch(f"A table holds the times of one device, but {devices}. Adopt the results of one device at a time.")
    for result in results:
        _check(result, tuned=tuned)
    path = table_path(names[0], into)
    device, sources, rows = read_table(path, *sorted({result.provenance.device for result in results}))
    found = {(index, key_of(row)): row for index, result in enumerate(results) for row in _rows(result, tuned=tuned)}
    if not found:
        raise ResultMismatch(
            "These results hold no cold time of a correct variant. Run the study to its end, then adopt its result."
        )
    _merge(rows, found, results, sources)
    used = {row.get(_RUN) for row in rows.values()}
    sources = list(dict.fromkeys([*sources, *(_source(each) for each in results if each.provenance.date in used)]))
    write_table(path, device, sources, rows, into)
    return path


def table_path(name: str, into: Path | None = None) -> Path:
    """Return the file of the table of this name in a folder, by default the user's own.

    Raises:
        TableFolderError: The folder lies in the installed package.
    """
    folder = folders.tables_folder() if into is None else into
    if folder.resolve().is_relative_to(PACKAGE):
        problem = "lies within the installed package, where an upgrade would overwrite a table"
        raise TableFolderError(folder, problem, remedy=_other_folder(into))
    return folder / f"{name}.json"


def read_table(path: Path, *devices: str) -> tuple[str, list[str], dict[Key, dict[str, Any]]]:
    """Return the device, the sources and the rows of a table as they are stored, to which times of these devices are added.

    Raises:
        TableCorrupt: The existing table cannot be read.
        ResultMismatch: The devices are several, or the table holds times of another one.
    """
    found, sources, rows = _read(path)
    # Two devices can have one file name, such as CPUs whose names differ in their punctuation only.
    for other in devices:
        if found not in (None, other):
            raise ResultMismatch(f"{path} holds times of {found}, but the results are of {other}. Name another folder.")
        found = other
    return found or "", sources, rows


def write_table(
    path: Path, device: str, sources: Sequence[str], rows: Mapping[Key, Mapping[str, Any]], into: Path | None = None
) -> None:
    """Write a table.

    Raises:
        OutputUnwritable: It cannot be written. The advice depends on ``into``, the folder that the caller was given.
    """
    written = {"device": device, "source": list(sources), "rows": [rows[key] for key in sorted(rows)]}
    try:
        replace(path, (json.dumps(written, indent=1) + "\n").encode())
    except OSError as error:
        raise OutputUnwritable(path.parent, reason(error), remedy=_other_folder(into)) from error


def _merge(
    rows: dict[Key, dict[str, Any]],
    found: Mapping[tuple[int, Key], dict[str, Any]],
    results: Sequence[Result],
    sources: Sequence[str],
) -> None:
    """Put the rows of results into those of a table, the oldest run first, with a notice for what is left out or lost.

    Args:
        rows: Rows of the table, which are changed.
        found: Rows of the results, by the index of the result and the identity of the row.
        results: The results.
        sources: Sources of the table.
    """
    by_date = sorted(found, key=lambda which: _date_of(results[which[0]]))  # stable: of equal dates the later result stays
    for index, key in by_date:
        result, row = results[index], found[index, key]
        earlier = rows.get(key)
        if earlier is not None and _AUTO in row and _AUTO not in earlier and not _alone(earlier):
            _notice(
                f"{_described(key)} of {_source(result)} is not adopted, because of our variants it holds only the one that auto "
                "chose, and the table holds a row that compares several."
            )
            continue
        if earlier is not None and _alone(row) and _alone(row) < earlier["microseconds"].keys():
            _notice(
                f"{_described(key)} of {_source(result)} is not adopted, because it compares {listing(sorted(_alone(row)))} with "
                "no variant that a caller may take, and the table holds a row that does."
            )
            continue
        comparing = earlier is not None and _AUTO in earlier and _AUTO not in row
        if earlier is not None and not comparing and (newer := _newer(earlier, sources, result)):
            _notice(f"{_described(key)} of {_source(result)} is not adopted, because the table holds a row of {newer}.")
            continue
        if earlier is not None and (lost := sorted(earlier["microseconds"].keys() - row["microseconds"].keys())):
            _notice(f"{_described(key)} loses its times of {listing(lost)}, which {_source(result)} did not measure.")
        rows[key] = {**row, _RUN: result.provenance.date}


def _alone(row: Mapping[str, Any]) -> set[str]:
    """Return the variant of a row that ``auto`` may choose, if all others are ablations of ours; an empty set otherwise."""
    known = find_operation(row["operation"]).variants
    own = {name for name in row["microseconds"] if name in known and known[name].capabilities.requires is None}
    taken = row["microseconds"].keys() - {name for name in own if not known[name].capabilities.automatic}
    return taken if len(taken) == 1 and len(row["microseconds"]) > 1 else set()


def _check(result: Result, *, tuned: bool) -> None:
    """Check that a result may be adopted: with a date, and unless it is ``tuned`` of a finished run of committed code.

    Raises:
        ResultMismatch: It may not.
    """
    name, facts = f"The result of {result.study.name} of {result.provenance.date or 'an unknown date'}", result.provenance
    if result.interrupted and not tuned:
        raise ResultMismatch(
            f"{name} is of an interrupted run.", advice="Finish it with onelaunch study run --resume, then adopt its result."
        )
    if facts.commit.endswith("-dirty") and not tuned:
        raise ResultMismatch(
            f"{name} is of commit {facts.commit}, with changes that no commit holds, so nobody can tell which code it measured.",
            advice="Commit the changes and run the study again.",
        )
    try:
        _date_of(result)
    except ValueError:
        raise ResultMismatch(
            f"{name} has no valid date (ISO 8601), so it is not known which rows are newer. Run the study again, or restore it."
        ) from None


def _date_of(result: Result) -> datetime:
    """Return the date and time at which a run ended.

    Raises:
        ValueError: The stored date is not in ISO 8601.
    """
    return _date(result.provenance.date)


def _date(text: str) -> datetime:
    found = datetime.fromisoformat(text.replace("Z", "+00:00"))
    return found if found.tzinfo else found.replace(tzinfo=timezone.utc)


def _newer(row: Mapping[str, Any], sources: Sequence[str], result: Result) -> str:
    """Return the date of a stored row if it is newer than a result, else an empty string.

    A row that an older onelaunch wrote has no date. It then counts as of the newest source of the same study in the table.
    """
    begins = f"{result.study.name} of "
    of_study = [line.removeprefix(begins).partition(",")[0] for line in sources if line.startswith(begins)]
    said = [row[_RUN]] if _RUN in row else of_study
    dates = {}
    for text in said:
        with contextlib.suppress(ValueError, AttributeError):  # a line or date that somebody wrote by hand
            dates[_date(text)] = text
    newest = max(dates, default=None)
    return dates[newest] if newest is not None and newest > _date_of(result) else ""


def _described(key: Key) -> str:
    """Return the words for a row in a notice."""
    sizes = ", ".join(f"{name}={size}" for name, size in key.sizes)
    return f"The row of {key.operation} at {', '.join([sizes, *key.flags, key.dtype, key.direction.replace('_', ' and ')])}"


def _notice(text: str) -> None:
    warnings.warn(AdoptNotice(text), stacklevel=3)


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
        device, sources, known = read(path)
        stored = json.loads(path.read_bytes())["rows"]
    except (FileNotFoundError, NotADirectoryError):
        return None, [], {}
    except (OSError, ValueError) as error:
        raise TableCorrupt(path, in_a_line(error)) from error
    rows = {key_of(row): row for row in stored}
    return device, sources, {key: rows[key] for key in known}


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


def _rows(result: Result, *, tuned: bool) -> list[dict[str, Any]]:
    """Return a row for each shape and direction with a usable time.

    The dispatcher looks a call up by sizes, dtype and the flags of its :class:`~onelaunch.operation.Query`, such as ``packed``. A
    shape with an option that changes no flag is left out, because the dispatcher could not tell it from other calls. So is a case
    that the run did not reach with all its variants, because the fastest may be missing, and a variant that failed its probes. A
    peer outside the gate (``outside``), which is another project's variant that fails the verification gate but not the tests of
    that project, has no row either.
    """
    unproven = _unproven(result, tuned=tuned)
    for name in dict.fromkeys(cell.variant for cell in result.cells if cell.outside):
        _notice(
            f"{name} of {result.study.name} is not adopted where it is a peer outside the gate, with which others are compared."
        )
    rows = []
    for shape in result.study.shapes:
        operation = result.study.operation_at(shape)
        for direction in result.study.directions:
            cells = [cell for cell in result.cells if (cell.shape, cell.direction) == (shape.name, direction)]
            times = {
                _variant(cell): time
                for cell in cells
                if result.study.label(operation.name, _variant(cell)) not in unproven
                and (cell.variant != AUTO or all(cell.chosen != each.variant for each in cells))
                and (time := _adoptable(result, cell)) is not None
            }
            if not times or (flags := flags_of(result.study, shape, direction)) is None:
                continue
            if all(cell.status != "interrupted" for cell in cells):
                sizes = {name: shape.sizes[name] for name in operation.dimensions}
                fastest_first = dict(sorted(times.items(), key=lambda entry: entry[1]))  # for people who open the table
                row = _row(operation.name, direction, shape.dtype, flags, sizes, fastest_first)
                labels = {name: result.study.label(operation.name, name) for name in times}
                reports = {name: result.probes[label] for name, label in labels.items() if label in result.probes}
                met = sorted(name for name, report in reports.items() if report.passed and not report.failed)
                refused = sorted(cell.variant for cell in cells if cell.status == "unsupported" and cell.variant != AUTO)
                row |= ({"probes": met} if met else {}) | ({"unsupported": refused} if refused else {})
                row |= _only_auto(operation, times, cells)
                rows.append(row | (_conditions(result, shape, direction, labels) if tuned else {}))
    return rows


def _variant(cell: Cell) -> str:
    """Return the name of the variant that ran: for ``auto`` the one that it chose."""
    return cell.chosen if cell.variant == AUTO and cell.chosen else cell.variant


def _only_auto(operation: Operation[..., Any], times: Mapping[str, float], cells: Sequence[Cell]) -> dict[str, str]:
    """Return the part of a row that names the variant of ``auto`` if ``auto`` may choose no other with a time, else nothing."""
    by_auto = {cell.chosen for cell in cells if cell.variant == AUTO} - {cell.variant for cell in cells}
    known = operation.variants
    ours = {name for name in times if name in by_auto or name not in known or known[name].capabilities.automatic}
    return {_AUTO: next(iter(ours))} if len(ours) == 1 and ours <= by_auto else {}


def _conditions(result: Result, shape: Shape, direction: Direction, labels: Mapping[str, str]) -> dict[str, Any]:
    """Return the parts of a row that say how certain its times are, and with which software and code they hold.

    Args:
        result: Result that holds the times.
        shape: Shape of the row.
        direction: Direction of the row.
        labels: Labels of the row's variants in the result, by name.
    """
    noise = result.noise_at(shape.name, direction, "cold")
    facts = result.provenance
    digests = {name: facts.variants[label].source for name, label in labels.items() if label in facts.variants}
    return {
        "by": TUNE,
        **({"noise": round(max(noise.floor, 1.0), 4)} if noise is not None else {}),
        "software": {name: facts.versions[name] for name in ("torch", "triton") if name in facts.versions},
        "code": {name: digest for name, digest in digests.items() if digest},
    }


def _unproven(result: Result, *, tuned: bool) -> set[str]:
    """Return the variants that may not be adopted because their probes failed or were not run, with a notice for each.

    Variants that are compiled anew for each set of sizes are not asked for probes, nor are those that need another library, which
    ``auto`` never chooses. A study runs no probes for ``auto``. The variant that it chose is believed if the package of its
    operation holds it, as the dispatcher believes it without a measurement: that package's tests run the probes on it. Any other
    must have passed them in this run. Results of older versions hold no probes, nor do those of operations without any. One
    notice says so, and all may be adopted.
    """
    probes: Mapping[str, Any] = getattr(result, "probes", None) or {}
    if not probes and tuned:
        return set()  # this version has run them, so the operation lists none
    if not probes:
        _notice(
            f"The result of {result.study.name} holds no probes, which are calls at the edges of an operation, such as a length "
            "of 1. Its variants were judged at the measured cases alone. Run the study again with this version of onelaunch."
        )
        return set()
    found = set()
    study = result.study
    adoptable = [cell for cell in result.cells if _adoptable(result, cell) is not None]
    named = {(study.operation_at(study.shape(cell.shape)), cell.variant) for cell in adoptable}
    for operation, variant in dict.fromkeys((study.operation_at(study.shape(cell.shape)), _variant(cell)) for cell in adoptable):
        known = operation.variants.get(variant)
        if known is not None and known.capabilities.recompiles:  # its kernels at other sizes are other kernels
            continue
        name = study.label(operation.name, variant)
        report = probes.get(name)
        if report is None and known is not None:
            by_auto = known.is_own and (operation, variant) not in named
            if by_auto or known.capabilities.requires is not None:
                continue
        if report is not None and report.passed and not report.failed:
            continue
        why = f"it failed a probe: {report.failed[0]}" if report and report.failed else "no probe of it was judged correct"
        _notice(f"{name} of {result.study.name} is not adopted, because {why.rstrip('.')}.")
        found.add(name)
    return found


def flags_of(study: Study, shape: Shape, direction: Direction | None = None) -> list[str] | None:
    """Return the query flags by which the dispatcher recognizes the options of a shape.

    Args:
        study: Study with the shape.
        shape: Shape whose options are asked about.
        direction: Direction that is measured; by default all. Options that say what takes gradients change no forward call.

    Returns:
        Sorted flags, or ``None`` if an option changes no flag: without it the shape would have the same ones.
    """

    def flags_with(options: Mapping[str, Any]) -> frozenset[str]:
        given: dict[str, Any] = {**shape.sizes, **options}
        return frozenset(operation.query(operation.case(shape.dtype, **given), "cpu").flags)  # the device is not compared

    operation = study.operation_at(shape)
    flags = flags_with(shape.options)
    for option in shape.options:
        if option in _OF_GRADIENTS and direction == "forward":
            continue
        if flags_with({name: value for name, value in shape.options.items() if name != option}) == flags:
            return None
    return sorted(flags)


def _adoptable(result: Result, cell: Cell) -> float | None:
    """Return the cold median in microseconds of a correct variant with status ``ok``, or ``None`` if there is none to adopt.

    Controls have none, nor has ``auto`` in an older result that does not say what it chose.

    Raises:
        ResultMismatch: A time is not a positive number, or below its roofline bound, so the result was not written by a run.
    """
    timing = cell.timing("cold")
    verified = cell.verdict is not None and cell.verdict.ok
    if timing is None or not verified or cell.status != "ok" or cell.control or _variant(cell) == AUTO:
        return None
    for time in (timing.microseconds.median, *timing.rounds):
        if not is_time(time) or not round(time, 3):  # a table stores nanoseconds, and a time below half of one would become 0
            raise ResultMismatch(
                f"{cell.variant} at {cell.shape} takes {time:g} µs in the result of {result.study.name}, but a time must be a "
                "positive number. Run the study again, or restore the file."
            )
    bound = cell.plan.floor_microseconds if cell.plan is not None else 0.0
    if timing.microseconds.median < BELOW_BOUND * bound:
        raise ResultMismatch(
            f"{cell.variant} at {cell.shape} takes {timing.microseconds.median:.3g} µs in the result of {result.study.name}, "
            f"which is below its roofline bound of {bound:.3g} µs. Run the study again, or restore the file."
        )
    return round(timing.microseconds.median, 3)


def _source(result: Result) -> str:
    """Return the line that names a result as a source of a table: study, date, commit and versions."""
    facts = result.provenance
    software = ", ".join(f"{name} {facts.versions[name]}" for name in ("torch", "triton") if name in facts.versions)
    return f"{result.study.name} of {facts.date}, commit {facts.commits}, {software}"
