"""``onelaunch study compare``: two results held against each other."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from onelaunch.cli import output
from onelaunch.cli.study.report import ResultPath
from onelaunch.workbench import quantities as q
from onelaunch.workbench.compare import Comparison, MemoryChange, TimeChange
from onelaunch.workbench.compare import compare as hold_against
from onelaunch.workbench.report.summary import way
from onelaunch.workbench.report.tables import Table, columns, words
from onelaunch.workbench.result import Result

OTHER = columns("variant", "shape", "direction", "first", "second", "reason")


def compare(
    first: ResultPath,
    second: ResultPath,
    everything: Annotated[bool, typer.Option("--all", help="List also what stayed the same or is ambiguous.")] = False,
) -> None:
    """Say what changed from one result to another, beyond the noise of both.

    Example: onelaunch study compare before.json after.json
    """
    a, b = Result.load(first), Result.load(second)
    found = hold_against(a, b)
    console = output.stdout()
    _identity(console, a, b, found)
    counts = {change: found.count(change) for change in ("FASTER", "SLOWER", "SAME", "AMBIGUOUS")}
    listed = [time for time in found.times if everything or time.change in ("FASTER", "SLOWER")]
    console.print("Times: " + ", ".join(f"{count} {change.lower()}" for change, count in counts.items()) + ".")
    if listed:
        output.table(console, _times(listed))
    if found.memory:
        rows = tuple(
            (change.variant, change.shape, way(change.direction), q.size(change.before), q.size(change.after), _factor(change))
            for change in found.memory
        )
        heads = columns("variant", "shape", "direction", ">first", ">second", ">ratio")
        output.table(console, Table("Peak memory", heads, rows, "Where it differs by more than one percent."))
    if found.statuses:
        rows = tuple(
            (change.variant, change.shape, way(change.direction), words(change.before), words(change.after), change.reason)
            for change in found.statuses
        )
        output.table(console, Table("Other statuses", OTHER, rows))
    if found.outcomes:
        rows = tuple(
            (change.criterion, *(words(status) if status else "not declared" for status in (change.before, change.after)))
            for change in found.outcomes
        )
        output.table(console, Table("Criteria", columns("criterion", "first", "second"), rows))
    for which, names in (("first", found.only_first), ("second", found.only_second)):
        if names:
            console.print(f"In the {which} alone: {'; '.join(names)}.")


def _identity(console: Console, a: Result, b: Result, found: Comparison) -> None:
    output.heading(console, f"{a.study.name} against {b.study.name}", f"{a.provenance.date} and {b.provenance.date}")
    for sentence in found.declarations:
        console.print(f"! {sentence}")
    if found.provenance:
        rows = tuple((name, *pair) for name, pair in found.provenance.items())
        output.table(console, Table("Made differently", columns("fact", "first", "second"), rows))
    before, after = (words(result.decision.kind) if result.decision else "not decided" for result in (a, b))
    console.print(f"Decision: {before}, as before." if before == after else f"Decision: {before}, then {after}.")


def _factor(change: MemoryChange) -> str:
    return q.ratio(change.after / change.before)


def _times(changes: list[TimeChange]) -> Table:
    rows = tuple(
        (
            change.variant,
            change.shape,
            way(change.direction),
            change.regime,
            change.change.lower(),
            q.time(change.before),
            q.time(change.after),
            q.ratio_interval(change.ratio),
        )
        for change in changes
    )
    note = "Ratio: time in the second over time in the first, with the interval that both intervals leave."
    heads = columns("variant", "shape", "direction", "regime", "change", ">first", ">second", ">ratio")
    return Table("", heads, rows, note)
