"""Command ``onelaunch explain``: the variant that would run a call here, and why the others would not."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated

import typer

from onelaunch import dispatch
from onelaunch.cli import output
from onelaunch.cli.arguments import DeviceName, OperationName, parse_case
from onelaunch.device.hardware import resolve
from onelaunch.dispatch import Explanation, Standing
from onelaunch.operation import find_operation
from onelaunch.workbench import quantities as q
from onelaunch.workbench.report.tables import Table, columns


def explain(
    operation: OperationName,
    shape: Annotated[
        str, typer.Option("--shape", metavar="B=4,T=2048,...", help="Sizes and options of the call.", show_default=False)
    ],
    dtype: Annotated[str, typer.Option("--dtype", help="float16, bfloat16 or float32.")] = "float16",
    device: DeviceName = "auto",
    grad: Annotated[bool, typer.Option("--grad", help="Explain a call whose backward pass will be needed.")] = False,
) -> None:
    """Show which variant would run a call here, and why.

    Nothing is run. The answer follows from what each variant supports and from times measured on this device before.

    Example: onelaunch explain linear_rnn --shape B=4,T=2048,D=256,V=64 --dtype float16 --grad
    """
    contract = find_operation(operation)
    case = parse_case(contract, shape, dtype)
    query = contract.query(case, str(resolve(device)), grad=grad)
    answer = dispatch.explain(query)
    console = output.stdout()
    direction = "forward and backward" if grad else "forward"
    output.heading(console, contract.name, f"{case}, {direction}, on {query.device}")
    console.print(f"{answer.chosen} runs: {answer.because}.")
    for each in answer.faster:
        console.print(f"Slower than {each.variant}: {each.reason}.")
    output.table(console, _table(answer, {name: variant.summary for name, variant in contract.variants.items()}))


def _table(answer: Explanation, summaries: Mapping[str, str]) -> Table:
    """Return the table of variants: first the one that runs, then those that could, the fastest first, then the others."""
    standings = sorted(answer.standings, key=lambda at: (not at.chosen, bool(at.reason_against), at.microseconds or math.inf))
    rows = [_row(standing, summaries[standing.variant]) for standing in standings]  # below, > aligns a column to the right
    if any(standing.microseconds is not None for standing in standings):
        table = f"{answer.whose}, {answer.table}" if answer.whose else answer.table or "a table of this device"
        note = f"Measured: cold median at the measured size nearest to this call, from {table}."
        return Table("", columns("variant", "here", ">measured", ">times slower", "why"), tuple(rows), note)
    return Table("", columns("variant", "here", "why"), tuple((*row[:2], row[-1]) for row in rows))


def _row(standing: Standing, summary: str) -> tuple[str, ...]:
    here = "runs" if standing.chosen else "cannot run" if standing.reason_against else "could run"
    measured = q.time(standing.microseconds) if standing.microseconds is not None else q.NONE
    slower = q.ratio(standing.times_slower) if standing.times_slower is not None else q.NONE
    return (standing.variant, here, measured, slower, standing.reason_against or standing.held_back or summary)
