"""Command ``onelaunch study import``: store a result that was measured on another machine, such as by a packed study."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from onelaunch.cli import output
from onelaunch.cli.study.report import ResultPath
from onelaunch.errors import ResultExists
from onelaunch.workbench.pack.bring import load, place, remarks
from onelaunch.workbench.report.tables import words


def import_result(
    result: ResultPath,
    out: Annotated[
        Path | None, typer.Option("--out", help="JSON file to write.", show_default="results/DEVICE/NAME.json")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing result.")] = False,
) -> None:
    """Store a result that was measured on another machine.

    The result is checked as a whole, and stored where a run on that device would have stored it. Its declaration is compared with
    that of the study of this name here.

    Example: onelaunch study import 039-overlap-result.json
    """
    found = load(result)
    path = out or place(found)
    if path.exists() and not force:
        raise ResultExists(path, argument="save_to")
    found.save(path, force=force)
    facts, console = found.provenance, output.stdout()
    decision = words(found.decision.kind) if found.decision else "not decided"
    console.print(f"{found.study.name}: {decision}", soft_wrap=True, markup=False)
    software = ", ".join(f"{name} {version}" for name, version in facts.versions.items())
    console.print(
        f"Measured on {facts.device} at {facts.date}, commit {facts.commit or 'unknown'}, {software}",
        soft_wrap=True,
        markup=False,
    )
    for sentence in remarks(found):
        console.print(f"! {sentence}", soft_wrap=True, markup=False)
    console.print(f"Result: {path}", soft_wrap=True, markup=False)
