"""Command ``onelaunch inspect``: registers, spills and matrix instructions of compiled kernels, without a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from onelaunch.cli import output
from onelaunch.cli.arguments import OperationName
from onelaunch.operation import find_operation
from onelaunch.wording import listing
from onelaunch.workbench import quantities as q
from onelaunch.workbench.files import write_text
from onelaunch.workbench.inspection import Inspection, inspect_operation
from onelaunch.workbench.report.tables import Table, columns


def inspect(
    operation: OperationName,
    architecture: Annotated[
        str, typer.Option("--arch", help="Architecture, such as sm_80, sm_90a, sm_100a or gfx942.")
    ] = "sm_90a",
    variant: Annotated[
        list[str] | None, typer.Option("--variant", help="Inspect only this variant. May be repeated.", show_default=False)
    ] = None,
    assembly: Annotated[
        Path | None,
        typer.Option(
            "--assembly", metavar="FOLDER", help="Write the code of each kernel's compiler stages there.", show_default=False
        ),
    ] = None,
) -> None:
    """Compile and disassemble an operation's kernels for an architecture; no GPU is needed.

    The exit code is 1 if a kernel has a problem, such as spilled registers or missing matrix instructions.

    Example: onelaunch inspect linear_rnn --arch sm_90a --variant fused_chunked
    """
    contract = find_operation(operation)
    with output.busy(f"Compiling the kernels of {contract.name} for {architecture}"):
        found = inspect_operation(contract, architecture, variant)
    console = output.stdout()
    if found:
        output.table(console, _table(contract.name, architecture, found))
    looked_at = variant or contract.variants
    if without := [name for name in looked_at if name not in {inspection.variant for inspection in found}]:
        console.print(f"Variants without kernels of their own: {listing(without)}.")
    for inspection in found:
        for problem in inspection.problems:
            console.print(f"{inspection.variant}, {inspection.kernel}: {problem}.")
    if assembly:
        console.print(f"{q.plural(_write(found, assembly), 'file')} written to {assembly}")
    if any(not inspection.ok for inspection in found):
        raise typer.Exit(1)


def _table(operation: str, architecture: str, found: list[Inspection]) -> Table:
    # > aligns a column to the right, ? leaves it out on a narrow terminal.
    heads = columns("variant", "kernel", ">registers", ">spills", "?>stack", ">shared", "matrix", "?>instructions", "?verdict")
    rows = tuple(
        (
            inspection.variant,
            inspection.kernel,
            str(inspection.registers),
            str(inspection.spills),
            q.size(inspection.stack_bytes),
            q.size(inspection.shared_bytes),
            ", ".join(f"{count} {name}" for name, count in inspection.matrix.items()) or "none",
            str(inspection.instructions),
            "ok" if inspection.ok else q.plural(len(inspection.problems), "problem"),
        )
        for inspection in found
    )
    note = (
        "Registers and stack are per thread, shared memory is per block. Spills are instructions that access local memory, "
        "on AMD GPUs spilled vector registers. Matrix instructions are counted by name."
    )
    return Table(f"{operation} on {architecture}", heads, rows, note)


def _write(found: list[Inspection], folder: Path) -> int:
    """Write the code of all compiler stages, one file each, and return the number of files."""
    folder.mkdir(parents=True, exist_ok=True)
    written = 0
    for inspection in found:
        for stage, text in inspection.assembly.items():
            path = folder / f"{inspection.variant}.{inspection.kernel}.{inspection.architecture}.{stage}"
            write_text(path, text)
            written += 1
    return written
