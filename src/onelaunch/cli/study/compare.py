"""Command ``onelaunch study compare``: compare two results, or repeated runs of two versions of the code."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from onelaunch.cli import output
from onelaunch.cli.study.report import ResultPath
from onelaunch.workbench import quantities as q
from onelaunch.workbench.decide.compare import Change, Comparison, MemoryChange, TimeChange, require_repeat, require_two_runs
from onelaunch.workbench.decide.compare import compare as compare_sides
from onelaunch.workbench.report.summary import direction_words
from onelaunch.workbench.report.tables import ROOMY, Table, columns, words
from onelaunch.workbench.result import Result

_STATUS_COLUMNS = columns("variant", "shape", "direction", "first", "second", "reason")

NAMES: dict[Change, str] = {
    "FASTER": "faster",
    "SLOWER": "slower",
    "UNREPEATED": "differs",
    "SAME": "same",
    "AMBIGUOUS": "ambiguous",
}
"""Words for changes of times, in the order in which they are counted."""


def compare(
    first: ResultPath,
    second: ResultPath,
    more_first: Annotated[
        list[Path] | None,
        typer.Option(
            "--first", metavar="RESULT", help="Another run of the first result's code. May be repeated.", show_default=False
        ),
    ] = None,
    more_second: Annotated[
        list[Path] | None,
        typer.Option(
            "--second", metavar="RESULT", help="Another run of the second result's code. May be repeated.", show_default=False
        ),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Also list times that are the same or ambiguous.")] = False,
) -> None:
    """Show what changed from one result to another beyond the noise within and between runs.

    A change of a time is claimed only if it exceeds both kinds of noise. One run of each version cannot show the noise between
    runs, so no change is claimed. Run both versions again, in turn, and pass the repeats with --first and --second.

    Example: onelaunch study compare before.json after.json --first before-2.json --second after-2.json
    """
    paths = [first, *(more_first or [])], [second, *(more_second or [])]
    firsts, seconds = map(_side, paths)
    # compare_sides checks the same, but does not know the files. An error from here names them, the second side's first.
    for path, run in zip(paths[0], firsts, strict=True):
        for other_path, other in zip(paths[1], seconds, strict=True):
            require_two_runs(run, other, (str(other_path), str(path)))
    a, b = firsts[0], seconds[0]
    found = compare_sides(firsts, seconds)
    console = output.stdout()
    _identity(console, a, b, found)
    if found.incomparable:
        rows = tuple((each.shape, each.reason) for each in found.incomparable)
        note = "The two results declare different cases under these names, so the shapes are left out below."
        output.table(console, Table("Shapes that are not comparable", columns("shape", "reason"), rows, note))
    _print_times(console, found, everything=everything)
    if found.memory:
        rows = tuple(
            (
                change.variant,
                change.shape,
                direction_words(change.direction),
                q.size(change.before),
                q.size(change.after),
                _factor(change),
            )
            for change in found.memory
        )
        heads = columns("variant", "shape", "direction", ">first", ">second", ">ratio")
        output.table(
            console, Table("Peak memory", heads, rows, "Measurements whose peak memory differs by more than one percent.")
        )
    if found.statuses:
        rows = tuple(
            (
                change.variant,
                change.shape,
                direction_words(change.direction),
                words(change.before),
                words(change.after),
                change.reason,
            )
            for change in found.statuses
        )
        output.table(console, Table("Other statuses", _STATUS_COLUMNS, rows))
    if found.outcomes:
        rows = tuple(
            (change.criterion, *(words(status) if status else "not declared" for status in (change.before, change.after)))
            for change in found.outcomes
        )
        output.table(console, Table("Criteria", columns("criterion", "first", "second"), rows))
    for which, measurements in (("first", found.only_first), ("second", found.only_second)):
        if measurements:
            console.print(f"Only in the {which}: {'; '.join(measurements)}.", markup=False)


def _side(paths: Sequence[Path]) -> list[Result]:
    """Load a result and its repeats, and check them as ``compare_sides`` does, but with the names of their files in an error."""
    runs = [Result.load(each) for each in paths]
    for index, run in enumerate(runs):
        for earlier in range(index):
            require_repeat(run, runs[earlier], (str(paths[index]), str(paths[earlier])))
    return runs


def _identity(console: Console, a: Result, b: Result, found: Comparison) -> None:
    """Print which results are compared, how their declarations and provenance differ, and their decisions."""
    output.heading(console, f"{a.study.name} against {b.study.name}", f"{a.provenance.date} and {b.provenance.date}")
    for sentence in found.declarations:
        console.print(f"! {sentence}", markup=False)
    if found.provenance:
        rows = tuple((name, *pair) for name, pair in found.provenance.items())
        output.table(console, Table("Different provenance", columns("fact", "first", "second"), rows))
    if found.runs != (1, 1):
        console.print(
            f"Times are from {q.plural(found.runs[0], 'run')} of the first and {q.plural(found.runs[1], 'run')} of the second; "
            "everything else is from the first run of each."
        )
    if found.same_code:
        console.print(
            "Both sides are runs of the same code, so differences of times are noise between runs. List them with --all."
        )
    if not found.same_device:
        console.print(
            "! The devices differ: times show which device is faster, not what the code changed, and only if both sides have "
            "repeated runs."
        )
    before, after = (words(result.decision.kind) if result.decision else "not decided" for result in (a, b))
    console.print(f"Decision: {before}, as before." if before == after else f"Decision: {before}, then {after}.")


def _print_times(console: Console, found: Comparison, *, everything: bool) -> None:
    """Print the number of changes of each kind, a table of the changes, and advice if runs have to be repeated."""
    unrepeated = found.count("UNREPEATED")
    counts = [f"{found.count(change)} {name}" for change, name in NAMES.items() if change != "UNREPEATED"]
    if unrepeated:
        cause = "one run each" if found.same_device else "not repeated on both devices"
        # At index 2, its place in NAMES.
        counts.insert(2, f"{unrepeated} {'differs' if unrepeated == 1 else 'differ'} ({cause}: noise between runs is unknown)")
    console.print(f"Times: {', '.join(counts)}.")
    listed = [time for time in found.times if everything or time.change in ("FASTER", "SLOWER", "UNREPEATED")]
    if listed:
        output.table(console, _times(listed, console.width))
    if unrepeated:
        console.print(
            "A time that only differs is no claim of a change. Run both versions again, in turn, and add the results with "
            "--first and --second; three runs of each can show changes of a few percent."
        )


def _factor(change: MemoryChange) -> str:
    return q.ratio(change.after / change.before)


def _times(changes: list[TimeChange], width: int) -> Table:
    rows = tuple(
        (
            f"{change.variant} (peer outside the gate)" if change.outside else change.variant,
            change.shape,
            direction_words(change.direction),
            change.regime,
            NAMES[change.change],
            q.time(change.before),
            q.time(change.after),
            q.ratio_interval(change.ratio),
            "unknown" if math.isinf(change.noise) else q.ratio(change.noise),
        )
        for change in changes
    )
    note = "Ratio: time in the second over time in the first, with the interval that the intervals of the two times allow."
    if width >= ROOMY:  # narrower terminals leave the column out
        note += " Noise: the largest factor that noise explains, within runs and, where runs were repeated, between them."
    # > aligns a column to the right, ? leaves it out on terminals narrower than ROOMY.
    heads = columns("variant", "shape", "direction", "regime", "change", ">first", ">second", ">ratio", "?>noise")
    return Table("", heads, rows, note)
