"""Command ``onelaunch tune``: measure variants on this machine, and write the user's own table from which ``auto`` chooses."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from onelaunch.cli import output
from onelaunch.cli.arguments import DeviceName, parse_case
from onelaunch.cli.measuring import INTERRUPTED, reported_termination, shown_progress
from onelaunch.cli.study.arguments import CallLimit, InProcess
from onelaunch.device.hardware import resolve
from onelaunch.device.peaks import ceilings
from onelaunch.errors import ArgumentError, MeasuringFailed, VariantUnsupported
from onelaunch.operation import DIRECTIONS, Case, Direction, Operation, find_operation, operations
from onelaunch.workbench import quantities as q
from onelaunch.workbench.report.summary import direction_words
from onelaunch.workbench.report.tables import Table, columns
from onelaunch.workbench.run import partial_path
from onelaunch.workbench.supervise import CALL_LIMIT_SECONDS
from onelaunch.workbench.tune import (
    ROUNDS,
    TIME_CAP_SECONDS,
    TIME_LIMIT_SECONDS,
    Change,
    Tuned,
    Tuning,
    begin_anew,
    cases_of,
    prepare,
    remove,
    tuned_rows,
)
from onelaunch.workbench.tune import tune as tune_operation


@dataclass(frozen=True)
class _Options:
    """Options of the measurements."""

    rounds: int
    time_cap: float
    time_limit: float
    resume: bool
    in_process: bool
    call_limit: float


def tune(
    operation: Annotated[
        str | None, typer.Argument(metavar="OPERATION", help="Name of the operation, such as gla.", show_default=False)
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Tune all operations, at their typical calls.")] = False,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            "--shape",
            metavar="B=4,T=2048,...",
            help="Sizes and options of a call to measure. May be repeated.",
            show_default="the operation's typical calls",
        ),
    ] = None,
    dtype: Annotated[str, typer.Option("--dtype", help="Dtype of --shape: float16, bfloat16 or float32.")] = "float16",
    direction: Annotated[
        Direction | None, typer.Option("--direction", help="Measure this direction alone.", show_default="both")
    ] = None,
    device: DeviceName = "auto",
    rounds: Annotated[int, typer.Option("--rounds", min=3, help="Number of timing rounds.")] = ROUNDS,
    time_cap: Annotated[
        float,
        typer.Option(
            "--time-cap",
            min=0.1,
            help="Seconds of timing after which no new round of a call in one direction begins. Three are always measured.",
        ),
    ] = TIME_CAP_SECONDS,
    time_limit: Annotated[
        float, typer.Option("--time-limit", min=0.1, help="Seconds of measuring after which no further call is measured.")
    ] = TIME_LIMIT_SECONDS,
    resume: Annotated[bool, typer.Option("--resume", help="Go on after the calls that an interrupted tuning finished.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List what would be measured, and measure nothing.")] = False,
    show: Annotated[bool, typer.Option("--show", help="Show the times that this command wrote into your own table.")] = False,
    remove_rows: Annotated[bool, typer.Option("--remove", help="Remove these times from your own table.")] = False,
    in_process: InProcess = False,
    call_limit: CallLimit = CALL_LIMIT_SECONDS,
) -> None:
    """Measure the variants of an operation on this machine, and let auto take the fastest from then on.

    The times go into your own table, which comes before that of the package. Variants within 3 % of the fastest, or within the
    noise, count as equally fast, and the operation's order of preference decides among them. The times count as long as PyTorch,
    Triton and the code of the variants stay the same. Ctrl-C keeps the calls that are finished, and --resume measures the rest.

    Example: onelaunch tune linear_rnn --shape B=4,T=2048,D=256,V=64 --dtype float32
    """
    if everything == (operation is not None):
        raise ArgumentError("Name one operation, as in onelaunch tune gla, or give --all for all of them.")
    if everything and shape:
        raise ArgumentError("--shape belongs to one operation; name it in place of --all.")
    if show + remove_rows + dry_run > 1:
        raise ArgumentError("--dry-run, --show and --remove exclude each other; give one of them.")
    if operation is not None:
        find_operation(operation)  # an unknown name is an error for --show and --remove too
    where = str(resolve(device))
    if show:
        _show(where, operation)
        return
    if remove_rows:
        table, count = remove(where, operation)
        output.stdout().print(f"Removed: {q.plural(count, 'row')} of {table}", soft_wrap=True, markup=False)
        return
    directions = DIRECTIONS if direction is None else (direction,)
    if operation is None:
        tunings = _all_tunings(directions, where)
    else:
        known = find_operation(operation)
        tunings = [_tuning(known, [parse_case(known, each, dtype) for each in shape or ()], directions, where)]
    if dry_run:
        _list(tunings, time_cap, time_limit)
        return
    _measure(tunings, _Options(rounds, time_cap, time_limit, resume, in_process, call_limit), where)


def _tuning(operation: Operation[..., Any], given: Sequence[Case], directions: Sequence[Direction], device: str) -> Tuning:
    return prepare(operation, cases_of(operation, device.partition(":")[0], given), directions, device)


def _all_tunings(directions: Sequence[Direction], device: str) -> list[Tuning]:
    """Return the tunings of all operations, and say on stderr which are left out."""
    found = []
    for each in operations():
        with _noted(each.name, ArgumentError, VariantUnsupported):
            found.append(_tuning(each, (), directions, device))
    return found


@contextmanager
def _noted(operation: str, *errors: type[Exception]) -> Iterator[None]:
    """Print one of these errors on stderr, as the reason why an operation is left out, and go on."""
    try:
        yield
    except errors as reason:
        output.stderr().print(f"{operation} is left out: {reason}", soft_wrap=True, markup=False)


def _measure(tunings: Sequence[Tuning], options: _Options, device: str) -> None:
    """Measure tunings one after another, and print what each changed."""
    if not options.resume:
        begin_anew(tunings)
    if options.in_process or device == "cpu":  # else the child does it, since this process must not initialise CUDA
        with output.busy(f"Reading the measured peaks of {device} (measured once, then stored)"):
            ceilings(device)
    left, failed, began = list(tunings), len(tunings), time.monotonic()
    while left and (len(left) == len(tunings) or time.monotonic() - began < options.time_limit):
        with _noted(left[0].study.operation, *((MeasuringFailed,) if len(tunings) > 1 else ())):
            done = _measure_one(left[0], options, began)
            failed -= 1
            _print(left[0], done)
            if done.result.interrupted and time.monotonic() - began < options.time_limit:
                rest = "interrupted: the finished calls are in the table; --resume measures the rest"
                output.stderr().print(rest, soft_wrap=True)
                raise typer.Exit(INTERRUPTED)
            if done.result.interrupted:
                break
        left = left[1:]
    if left:
        names = ", ".join(tuning.study.operation for tuning in left)
        limit = f"The time limit of {q.duration(options.time_limit)} is reached. --resume measures the rest of {names}."
        output.stdout().print(limit, soft_wrap=True, markup=False)
    elif failed:
        raise typer.Exit(1)


def _measure_one(tuning: Tuning, options: _Options, began: float) -> Tuned:
    """Measure a tuning in the time that is left, and show its progress."""
    with reported_termination(partial_path(tuning.path)), shown_progress() as report:
        return tune_operation(
            tuning,
            rounds=options.rounds,
            time_cap=options.time_cap,
            time_limit=max(options.time_limit - (time.monotonic() - began), 0.0),
            resume=options.resume,
            in_process=options.in_process,
            call_limit=options.call_limit,
            on_progress=report,
            tell=lambda text: output.stderr().print(text, soft_wrap=True, markup=False),
        )


def _print(tuning: Tuning, done: Tuned) -> None:
    """Print what a tuning changed."""
    console = output.stdout()
    output.heading(console, tuning.study.operation, f"on {tuning.place.device} ({tuning.place.name})")
    heads = columns("call", "direction", "auto took", "auto takes", ">time before", ">time now", ">noise")
    note = "Times: cold medians of this measurement. Noise: the factor within which times count as equal, less 1."
    output.table(console, Table("", heads, tuple(map(_row, done.changes)), note))
    changed = sum(bool(each.microseconds) and each.before != each.after for each in done.changes)
    console.print(f"Changed: {changed} of {q.plural(len(done.changes), 'call')}.")
    if done.table is not None:
        console.print(f"Written: {done.table}", soft_wrap=True, markup=False)


def _row(change: Change) -> tuple[str, ...]:
    head = (change.shape, direction_words(change.direction))
    if not change.microseconds:
        return (*head, change.before or q.NONE, change.problem, q.NONE, q.NONE, q.NONE)
    before, after = (change.microseconds.get(name) for name in (change.before, change.after))
    times = (q.time(time) if time is not None else q.NONE for time in (before, after))
    return (*head, change.before or q.NONE, change.after, *times, q.percent(change.noise) if change.noise else q.NONE)


def _list(tunings: Sequence[Tuning], time_cap: float, time_limit: float) -> None:
    """Print what would be measured."""
    console, calls = output.stdout(), 0
    for tuning in tunings:
        output.heading(console, tuning.study.operation, f"on {tuning.place.device} ({tuning.place.name})")
        rows = [(shape.name, direction_words(each), tuning.before[shape.name, each] or q.NONE) for shape, each in tuning.calls]
        rows += [(name, direction_words(direction), f"not measured: {why}") for (name, direction), why in tuning.left_out.items()]
        output.table(console, Table("", columns("call", "direction", "auto takes"), tuple(rows)))
        console.print(f"Variants: {', '.join(tuning.study.variant_names())}", soft_wrap=True, markup=False)
        console.print(f"Table: {tuning.table}", soft_wrap=True, markup=False)
        calls += len(tuning.calls)
    console.print(
        f"{q.plural(calls, 'call')} of at most {q.duration(time_cap)} of timing each, beside compiling and verifying; none begins"
        f" after {q.duration(time_limit)}."
    )


def _show(device: str, operation: str | None) -> None:
    """Print the rows that this command wrote into the user's table."""
    path, found = tuned_rows(device, operation)
    console = output.stdout()
    if not found:
        console.print(f"onelaunch tune has written no times for {operation or device} into {path}.", soft_wrap=True, markup=False)
        return
    rows = []
    for key, row, stale in found:
        fastest = min(row.microseconds, key=lambda name: row.microseconds[name])
        sizes = ", ".join([*(f"{name}={size}" for name, size in key.sizes), *key.flags, key.dtype])
        times = (fastest, q.time(row.microseconds[fastest]), q.percent(row.noise))
        rows.append((key.operation, sizes, direction_words(key.direction), *times, row.run[:10], stale or "used"))
    heads = columns("operation", "call", "direction", "fastest", ">time", "?>noise", "?date", "state")
    output.table(console, Table("", heads, tuple(rows)))
    console.print(f"Table: {path}", soft_wrap=True, markup=False)
