"""``onelaunch inspect``: what the compiler makes of each kernel, without a GPU."""

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
    architecture: Annotated[str, typer.Option("--arch", help="sm_80, sm_90a, sm_100a, gfx942...")] = "sm_90a",
    variant: Annotated[
        list[str] | None, typer.Option("--variant", help="Only this variant; may be repeated.", show_default=False)
    ] = None,
    assembly: Annotated[
        Path | None, typer.Option("--assembly", metavar="FOLDER", help="Write each kernel's stages there.", show_default=False)
    ] = None,
) -> None:
    """Compile an operation's kernels for an architecture and take them apart: no GPU is needed.

    Exits with 1 when a kernel has a problem, such as spilled registers or matrix instructions that are not there.

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
        console.print(f"Without kernels of their own: {listing(without)}.")
    for inspection in found:
        for problem in inspection.problems:
            console.print(f"{inspection.variant}, {inspection.kernel}: {problem}.")
    if assembly:
        console.print(f"{q.plural(_write(found, assembly), 'file')} written to {assembly}")
    if any(not inspection.ok for inspection in found):
        raise typer.Exit(1)


def _table(operation: str, architecture: str, found: list[Inspection]) -> Table:
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
        "Registers and stack per thread, shared memory per block, matrix instructions by name; spills are accesses to local "
        "memory in the machine code."
    )
    return Table(f"{operation} on {architecture}", heads, rows, note)


def _write(found: list[Inspection], folder: Path) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    written = 0
    for inspection in found:
        for stage, text in inspection.assembly.items():
            path = folder / f"{inspection.variant}.{inspection.kernel}.{inspection.architecture}.{stage}"
            write_text(path, text)
            written += 1
    return written
