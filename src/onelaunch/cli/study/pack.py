"""Command ``onelaunch study pack``: write one file that runs a study on a machine without a network."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from onelaunch.cli import output
from onelaunch.cli.study.arguments import StudyName
from onelaunch.errors import OutputUnwritable
from onelaunch.workbench import quantities as q
from onelaunch.workbench.files import probe_file
from onelaunch.workbench.pack.build import pack as write
from onelaunch.workbench.pack.wheels import Machine
from onelaunch.workbench.study.read import find_study


def pack(
    name: StudyName,
    python: Annotated[
        str, typer.Option("--python", help="Version of Python there.", show_default="that of this process")
    ] = f"{sys.version_info.major}.{sys.version_info.minor}",
    platform: Annotated[
        str, typer.Option("--platform", help="Platform there, as wheels are tagged: oldest glibc, and processor.")
    ] = "manylinux_2_28_x86_64",
    peers: Annotated[
        bool, typer.Option("--peers", help="Also pack the extra peers: variants of other projects to compare with.")
    ] = False,
    out: Annotated[Path | None, typer.Option("--out", help="File to write.", show_default="NAME.pyz")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
) -> None:
    """Pack a study into one file that runs on a machine with PyTorch and no network.

    The file holds the study, the wheel of this onelaunch and the wheels of its extra workbench, which pip downloads. PyTorch and
    Triton are not packed. On the other machine, python NAME.pyz installs the wheels into a folder beside the file and runs the
    study; all arguments are passed on to onelaunch study run. Take NAME-result.json back with onelaunch study import.

    Example: onelaunch study pack 039-overlap --python 3.12 --platform manylinux_2_28_x86_64
    """
    path, study = find_study(name)
    machine = Machine(python, platform)
    out = out or Path(f"{study.name}.pyz")
    probe_file(out)
    if out.exists() and not force:
        raise OutputUnwritable(out, "it exists already", remedy="Choose another file with --out, or pass --force to replace it.")
    with output.busy(f"Gathering wheels for Python {python} on {platform}"):
        wheels = write(path, study, out, machine, peers=peers)
    console = output.stdout()
    facts = f"{q.plural(len(wheels), 'wheel')}, {q.size(out.stat().st_size)}"
    console.print(f"Written: {out} ({facts})", soft_wrap=True, markup=False)
    console.print(f"Run it there: python{python} {shlex.quote(out.name)}", soft_wrap=True, markup=False)
    console.print(f"Then here: onelaunch study import {study.name}-result.json", soft_wrap=True, markup=False)
