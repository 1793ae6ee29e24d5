"""Tune an operation on this machine: measure its variants at some calls, and write the user's table, from which ``auto`` chooses.

A tuning is a study of the variants that ``auto`` may choose, in the cold regime, without criteria. ``workbench/run.py`` runs it,
so that no time counts without a verdict, finished calls are never lost, and an interrupted run can be resumed. ``adopt.py``
merges its result into the table. Command ``onelaunch tune`` calls the functions here.
"""

from __future__ import annotations

import functools
import multiprocessing
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch

from onelaunch import dispatch, folders
from onelaunch.device.hardware import describe
from onelaunch.dispatch import measured
from onelaunch.dispatch.measured import TUNE, Key, Measured
from onelaunch.errors import ArgumentError, ResultCorrupt, ResultMismatch, TableNotice, UnknownOperation, VariantUnsupported
from onelaunch.operation import Case, Direction, Operation, find_operation
from onelaunch.operation.sources import digest_of, installed_version
from onelaunch.workbench.adopt import adopt, flags_of, read_table, table_path, write_table
from onelaunch.workbench.files import probe_file
from onelaunch.workbench.result import Result
from onelaunch.workbench.result.sources import variant_sources
from onelaunch.workbench.run import Progress, partial_path, run_study
from onelaunch.workbench.stored import NAME
from onelaunch.workbench.study import Shape, Study
from onelaunch.workbench.supervise import CALL_LIMIT_SECONDS

ROUNDS = 20
"""Rounds of each call by default, as in a study. The time cap usually ends them sooner."""

TIME_CAP_SECONDS = 10.0
"""Seconds by default after which no new round of a call in one direction begins."""

TIME_LIMIT_SECONDS = 600.0
"""Seconds by default after which no new call is measured."""

FOLDER = "tuning"
"""Folder within the user's folder of tables that holds the results of tunings, from which an interrupted one goes on."""

P = ParamSpec("P")
R = TypeVar("R")


class Place(NamedTuple):
    """Device as its table knows it."""

    device: str
    """Name for PyTorch, such as ``cuda:0``."""
    name: str
    """Name that the driver reports."""
    table: str
    """File name of its table, without suffix."""


@dataclass(frozen=True)
class Tuning:
    """Plan of a tuning: the study to measure, and what ``auto`` chooses for each of its calls before it runs."""

    study: Study
    place: Place
    before: Mapping[tuple[str, Direction], str]
    """Variant that ``auto`` takes, or an empty string if it finds none, by shape and direction."""
    left_out: Mapping[tuple[str, Direction], str]
    """Reason why no variant can run a call, by shape and direction. These are not measured."""

    @property
    def calls(self) -> list[tuple[Shape, Direction]]:
        """Shapes in the directions in which they are measured."""
        return [(shape, direction) for shape in self.study.shapes for direction in self.study.directions_at(shape)]

    @property
    def table(self) -> Path:
        """File of the user's table."""
        return table_path(self.place.table)

    @property
    def path(self) -> Path:
        """File of the result."""
        return folders.tables_folder() / FOLDER / self.place.table / f"{self.study.operation}.json"


class Change(NamedTuple):
    """Choice of ``auto`` for one call, before and after it was measured."""

    shape: str
    direction: Direction
    before: str
    """Variant that ``auto`` took; empty if it found none."""
    after: str
    """Variant that ``auto`` takes now."""
    microseconds: Mapping[str, float]
    """Cold medians of the correct variants; empty if the call was not measured."""
    noise: float | None
    """A/A noise of these times, as a factor."""
    problem: str = ""
    """Reason why there are no times, as a phrase; empty if there are."""


@dataclass(frozen=True)
class Tuned:
    """Outcome of a tuning."""

    result: Result
    table: Path | None
    """File of the table; ``None`` if there was nothing to write."""
    changes: tuple[Change, ...]


def cases_of(operation: Operation[..., Any], device_type: str, given: Iterable[Case] = ()) -> list[Case]:
    """Return the calls to measure: the given ones, or the operation's typical calls on a type of device.

    Raises:
        ArgumentError: There is none.
    """
    cases = list(given) or operation.typical_cases(device_type)
    if not cases:
        raise ArgumentError(
            f"{operation.name} lists no typical calls on a device of type {device_type}. Name calls, as in --shape "
            f"{','.join(f'{name}=64' for name in operation.dimensions)}."
        )
    return [case for index, case in enumerate(cases) if case not in cases[:index]]


def name_of(case: Case) -> str:
    """Return the name of a call in results and tables: its own, or one such as "B=4, T=512, V=64, float32, gate=False"."""
    if case.name:
        return case.name
    parts = [f"{key}={value}" for key, value in case.sizes.items()]
    parts.append(str(case.dtype).removeprefix("torch."))
    return ", ".join([*parts, *(f"{key}={value}" for key, value in case.options.items())])


def prepare(operation: Operation[..., Any], cases: Sequence[Case], directions: Sequence[Direction], device: str) -> Tuning:
    """Return the tuning of some calls on a device: its study, and the choices before it.

    Args:
        operation: Operation to tune.
        cases: Calls, such as :func:`cases_of` returns.
        directions: Directions in which they are measured.
        device: Device, as PyTorch names it.

    Raises:
        ArgumentError: The operation has no variant that ``auto`` may choose, or an option of a case changes no flag of its query,
            so that the dispatcher could not tell the call from others.
        VariantUnsupported: No variant that ``auto`` may choose can run any of the calls.
    """
    variants = tuple(name for name, variant in operation.variants.items() if variant.capabilities.automatic)
    if not variants:
        raise ArgumentError(f"{operation.name} has no variant that auto may choose, so there is nothing to tune.")
    names = _shape_names(cases)
    place, found = _apart(device, _choices, operation.name, tuple(cases), tuple(directions), device)
    before, left_out, first = {}, {}, ""
    for name, choices in zip(names, found, strict=True):
        for direction, (chosen, baseline, problem) in zip(directions, choices, strict=True):
            (left_out if problem else before)[name, direction] = problem or chosen
            first = first or baseline
    if not before:
        raise VariantUnsupported(operation.name, "auto", reason=next(iter(left_out.values())), instead=())
    shapes = [
        Shape(
            name=name,
            dtype=str(case.dtype).removeprefix("torch."),
            sizes=dict(case.sizes),
            options=dict(case.options),
            directions=tuple(each for each in directions if (name, each) in before),
        )
        for name, case in zip(names, cases, strict=True)
    ]
    study = Study(
        name=f"tune-{operation.name}",
        question=f"Which variant of {operation.name} is the fastest at these calls on this device?",
        operation=operation.name,
        baseline=first,
        variants=variants,
        directions=tuple(directions),
        regimes=("cold",),
        rounds=ROUNDS,
        shapes=tuple(shape for shape in shapes if shape.directions),
    )
    for shape in study.shapes:
        if flags_of(study, shape) is None:
            raise ArgumentError(
                f"{shape.name}: an option here changes nothing by which the dispatcher recognizes a call of {operation.name}, so "
                "a time of this call would count for all calls of its sizes. Leave the option out."
            )
    return Tuning(study, place, before, left_out)


def tune(
    tuning: Tuning,
    *,
    rounds: int = ROUNDS,
    time_cap: float = TIME_CAP_SECONDS,
    time_limit: float | None = TIME_LIMIT_SECONDS,
    resume: bool = False,
    in_process: bool = True,
    call_limit: float = CALL_LIMIT_SECONDS,
    on_progress: Callable[[Progress], None] | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> Tuned:
    """Measure the calls of a tuning, merge their times into the user's table, and return what changed.

    Args:
        tuning: Calls to measure.
        rounds: Number of timing rounds.
        time_cap: Seconds after which no new round of a call in one direction begins, once three are measured.
        time_limit: Seconds after which no new call is measured; ``None`` for no limit. Calls that are left are interrupted.
        resume: Whether to go on where an interrupted tuning of the same calls ended. One that has finished is not run again.
        in_process: Whether to measure in this process, as for :func:`~onelaunch.workbench.run.run_study`.
        call_limit: Seconds after which a variant counts as hung, in a run that is not in this process.
        on_progress: Callback for the progress.
        tell: Callback with a sentence if an interrupted tuning cannot be resumed, so that it begins anew.

    Returns:
        The result, the table and the changes. After Ctrl-C they hold the finished calls, and the result is interrupted.

    Raises:
        TableCorrupt, TableFolderError, OutputUnwritable: The user's table cannot be read or written. Raised before anything is
            measured.
        ResultMismatch: The user's table holds times of another device.
        OneLaunchError: Any error of :func:`~onelaunch.workbench.run.run_study`.
    """
    read_table(tuning.table, tuning.place.name)
    probe_file(tuning.table)
    if not resume:
        begin_anew([tuning])
    result = _finished(tuning) if resume else None
    if result is None:
        measure = functools.partial(
            run_study,
            tuning.study,
            device=tuning.place.device,
            scale="full",
            rounds=rounds,
            time_cap=time_cap,
            count=False,
            on_progress=on_progress,
            save_to=tuning.path,
            force=True,
            in_process=in_process,
            call_limit=call_limit,
            time_limit=time_limit,
        )
        try:
            result = measure(resume=resume)
        except (ResultMismatch, ResultCorrupt) as error:
            if not resume:
                raise
            tell(f"{error.problem if isinstance(error, ResultMismatch) else error} The tuning begins anew.")
            result = measure(resume=False)
    table = adopt([result], tuned=True) if any(_times(result, *call) for call in tuning.calls) else None
    dispatch.forget()
    measured.forget()
    return Tuned(result, table, tuple(_changes(tuning, result)))


def begin_anew(tunings: Iterable[Tuning]) -> None:
    """Remove the results of earlier tunings of the same operations. Their times are in the table already."""
    for tuning in tunings:
        tuning.path.unlink(missing_ok=True)
        partial_path(tuning.path).unlink(missing_ok=True)


def _finished(tuning: Tuning) -> Result | None:
    """Return the stored result of a tuning that measured the same calls with the same code and software to their end."""
    try:
        found = Result.load(tuning.path) if tuning.path.exists() else None
    except ResultCorrupt:
        return None
    if found is None or found.interrupted or found.study_digest != tuning.study.digest():
        return None
    versions = {"torch": str(torch.__version__), "triton": installed_version("triton")}
    same = all(found.provenance.versions.get(name) == version for name, version in versions.items())
    return found if same and found.provenance.variants == variant_sources(tuning.study) else None


def _changes(tuning: Tuning, result: Result) -> Iterable[Change]:
    """Yield a change for each call, in the order of the study."""
    study, direction_names = tuning.study, tuning.study.directions
    cases = tuple(study.case(shape) for shape in study.shapes)
    _, found = _apart(tuning.place.device, _choices, study.operation, cases, direction_names, tuning.place.device)
    after = {
        (shape.name, direction): choice.chosen
        for shape, choices in zip(study.shapes, found, strict=True)
        for direction, choice in zip(direction_names, choices, strict=True)
    }
    for shape, direction in tuning.calls:
        name, times = (shape.name, direction), _times(result, shape, direction)
        noise = result.noise_at(*name, "cold")
        problem = "" if times else _problem(result, shape, direction)
        yield Change(*name, tuning.before[name], after[name], times, noise.floor if noise else None, problem)
    for (name, direction), problem in tuning.left_out.items():
        yield Change(name, direction, "", "", {}, None, problem)


def _times(result: Result, shape: Shape, direction: Direction) -> dict[str, float]:
    """Return the cold medians in microseconds of the correct variants at a finished call, the fastest first; else none."""
    cells = [cell for cell in result.cells if (cell.shape, cell.direction) == (shape.name, direction)]
    if any(cell.status == "interrupted" for cell in cells):
        return {}
    times = {
        cell.variant: timing.microseconds.median for cell in cells if cell.status == "ok" and (timing := cell.timing("cold"))
    }
    return dict(sorted(times.items(), key=lambda entry: entry[1]))


def _problem(result: Result, shape: Shape, direction: Direction) -> str:
    """Return why a call has no times."""
    cells = [cell for cell in result.cells if (cell.shape, cell.direction) == (shape.name, direction)]
    if any(cell.status == "interrupted" for cell in cells):
        return "not measured yet"
    tried = [cell for cell in cells if cell.status not in ("unsupported", "not_installed")]
    return "; ".join(f"{cell.variant}: {cell.status.replace('_', ' ')}" for cell in tried) or "no variant could run"


class _Choice(NamedTuple):
    """Choice of ``auto`` for one call."""

    chosen: str
    """Name of the variant; empty if ``auto`` finds none."""
    baseline: str
    """First variant in the order of preference that ``auto`` may choose after a tuning and that can run the call, or empty."""
    problem: str = ""
    """Reason why no variant can run the call; empty if one can."""


def _choices(name: str, cases: Sequence[Case], directions: Sequence[Direction], device: str) -> tuple[Place, list[list[_Choice]]]:
    """Return facts about the device, and the choice of ``auto`` for each case in each direction."""
    facts, operation = describe(device), find_operation(name)
    found = [[_choice(operation, case, direction, device) for direction in directions] for case in cases]
    return Place(device, facts.name, facts.table), found


def _choice(operation: Operation[..., Any], case: Case, direction: Direction, device: str) -> _Choice:
    """Return the choice of ``auto`` for a case in a direction."""
    query = operation.query(case, device, grad=direction == "forward_backward")
    automatic = (name for name in operation.preference(query) if operation.variants[name].capabilities.automatic)
    baseline = next((name for name in automatic if operation.variants[name].why_not(query) is None), "")
    try:
        return _Choice(dispatch.choose(query).name, baseline)
    except VariantUnsupported as error:  # also if variants of other packages could run it, but are held back until measured
        return _Choice("", baseline, "" if baseline else error.reason)


def _apart(device: str, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a function, for a GPU in a process of its own, because this one must not initialise CUDA while a child measures.

    Notices about tables are dropped: a table that is stale is what tuning mends, and a damaged one is an error of its own.
    """
    if torch.device(device).type == "cpu" or torch.cuda.is_initialized():
        return _quietly(function, *args, **kwargs)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_quietly, function, *args, **kwargs).result()


def _quietly(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TableNotice)
        return function(*args, **kwargs)


def _shape_names(cases: Sequence[Case]) -> list[str]:
    """Return the names of the shapes of a study: those of the cases, or numbers where these are no names of results."""
    names = [name_of(case) for case in cases]
    usable = (NAME.fullmatch(name) and names.count(name) == 1 for name in names)
    return [name if good else f"call {index + 1}" for index, (name, good) in enumerate(zip(names, usable, strict=True))]


# The user's table


class Row(NamedTuple):
    """Row of the user's table that ``onelaunch tune`` wrote."""

    key: Key
    row: Measured
    stale: str | None
    """Reason why the row is not used; ``None`` if it is."""


def tuned_rows(device: str, operation: str | None = None) -> tuple[Path, list[Row]]:
    """Return the user's table of a device, and its rows that ``onelaunch tune`` wrote, of one operation or of all.

    Raises:
        TableCorrupt: The table cannot be read.
    """
    path = table_path(describe(device).table)
    read_table(path)  # raises an error that names the file
    rows = measured.read(path)[2] if path.exists() else {}
    mine = {key: row for key, row in rows.items() if row.by == TUNE and operation in (None, key.operation)}
    return path, [Row(key, row, _stale(key.operation, row)) for key, row in sorted(mine.items())]


def _stale(name: str, row: Measured) -> str | None:
    """Return why a row is not used, or ``None``."""
    try:
        operation = find_operation(name)
    except UnknownOperation:
        return f"no operation {name} is installed"
    return measured.staleness(name, row, lambda each: digest_of(operation.variants[each]) if each in operation.variants else "")


def remove(device: str, operation: str | None = None) -> tuple[Path, int]:
    """Remove the rows that ``onelaunch tune`` wrote, of one operation or of all, and the results that they are of.

    Returns:
        The table, which is removed too if nothing is left in it, and the number of removed rows.

    Raises:
        TableCorrupt: The table cannot be read.
        OutputUnwritable: It cannot be written.
    """
    name = describe(device).table
    path = table_path(name)
    known, sources, rows = read_table(path)
    kept = {key: row for key, row in rows.items() if row.get("by") != TUNE or operation not in (None, key.operation)}
    if not kept:
        path.unlink(missing_ok=True)
    elif len(kept) < len(rows):
        gone = {key.operation for key in rows.keys() - kept.keys()} - {
            key.operation for key in kept if rows[key].get("by") == TUNE
        }
        begins = tuple(f"tune-{each} of " for each in gone)
        write_table(path, known, [line for line in sources if not line.startswith(begins)], kept)
    for result in (folders.tables_folder() / FOLDER / name).glob("*.json"):
        if operation is None or re.sub(r"\.partial$", "", result.stem) == operation:
            result.unlink()
    return path, len(rows) - len(kept)
