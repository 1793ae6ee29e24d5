"""Command ``onelaunch explain``: the variant that would run a call here, and why the others would not."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from onelaunch import dispatch
from onelaunch.cli import output
from onelaunch.cli.arguments import DeviceName, OperationName, parse_case, spell_case
from onelaunch.device.hardware import resolve
from onelaunch.dispatch import Explanation, Standing
from onelaunch.errors import ArgumentError
from onelaunch.operation import Case, Operation, find_operation
from onelaunch.workbench import quantities as q
from onelaunch.workbench.report.tables import Table, columns


def explain(
    operation: OperationName,
    shape: Annotated[
        str | None,
        typer.Option(
            "--shape",
            metavar="B=4,T=2048,...",
            help="Sizes and options of the call.",
            show_default="the operation's first typical call",
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype", help="float16, bfloat16 or float32.", show_default="float16, or without --shape that of the typical call"
        ),
    ] = None,
    device: DeviceName = "auto",
    grad: Annotated[bool, typer.Option("--grad", help="Explain a call whose backward pass will be needed.")] = False,
) -> None:
    """Show which variant would run a call here, and why.

    Nothing is run. The answer follows from what each variant supports and from times measured on this device before. Without
    --shape it explains a typical call of the operation, and lists the others.

    Example: onelaunch explain linear_rnn --shape B=4,T=2048,D=256,V=64 --dtype float16 --grad
    """
    contract = find_operation(operation)
    where = resolve(device)
    typical = [] if shape is not None else _typical(contract, where.type)
    case = parse_case(contract, shape, dtype or "float16") if shape is not None else _with_dtype(contract, typical[0], dtype)
    query = contract.query(case, str(where), grad=grad)
    answer = dispatch.explain(query)
    console = output.stdout()
    if typical:
        console.print(
            f"Without --shape, this is a typical call of {contract.name}, the first of those that onelaunch tune measures."
        )
    direction = "forward and backward" if grad else "forward"
    output.heading(console, contract.name, f"{case}, {direction}, on {query.device}")
    console.print(f"{answer.chosen} runs: {answer.because}.")
    for each in answer.faster:
        console.print(f"Slower than {each.variant}: {each.reason}.")
    output.table(console, _table(answer, {name: variant.summary for name, variant in contract.variants.items()}))
    if typical:
        console.print("To explain another call, give its sizes and options by --shape. These are the typical calls:")
        for each in typical:
            console.print(f"  onelaunch explain {contract.name} {spell_case(each)}", soft_wrap=True, markup=False)


def _typical(operation: Operation[..., Any], device_type: str) -> list[Case]:
    """Return an operation's typical calls on a type of device, or those on a GPU if it lists none on a CPU.

    Raises:
        ArgumentError: The operation lists no typical calls.
    """
    cases = operation.typical_cases(device_type) or operation.typical_cases("cuda")
    if not cases:
        example = ",".join(f"{name}=64" for name in operation.dimensions)
        raise ArgumentError(f"{operation.name} lists no typical calls. Name one, as in --shape {example}.")
    return cases


def _with_dtype(operation: Operation[..., Any], case: Case, dtype: str | None) -> Case:
    """Return a case with another dtype, or as it is if none is given."""
    given: dict[str, Any] = {**case.sizes, **case.options}
    return case if dtype is None else operation.case(dtype, **given)


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
