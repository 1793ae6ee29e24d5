"""Command ``onelaunch study judge``: judge the criteria of a stored result again."""

from __future__ import annotations

from typing import Annotated

import typer

from onelaunch.cli import output
from onelaunch.cli.study.report import ResultPath
from onelaunch.workbench.decide.decision import concluded
from onelaunch.workbench.decide.recompute import declared_again
from onelaunch.workbench.report.terminal import show
from onelaunch.workbench.result import Result
from onelaunch.workbench.result.provenance import commit
from onelaunch.workbench.study.read import find_study


def judge(
    result: ResultPath,
    declared: Annotated[
        bool, typer.Option("--declared", help="Judge by the criteria that the study declares now, not by those in the file.")
    ] = False,
) -> None:
    """Judge a stored result's criteria again with this version of onelaunch, and decide again.

    Nothing is measured, and the measurements in the file do not change. Nor do its criteria, unless --declared takes those of the
    study's file of today. A note in the result says that it was judged again, and by which criteria.

    Example: onelaunch study judge results/nvidia-h200/decode-megakernel.json
    """
    stored = Result.load(result)
    here = commit() or "an unknown one"
    note = f"Measured at {stored.provenance.commit or 'an unknown commit'}, judged again at {here}"
    note += " by the criteria that the study declares there." if declared else "."
    other_notes = tuple(each for each in stored.notes if ", judged again at " not in each)
    kept = declared_again(stored, find_study(stored.study.name)[1]) if declared else stored
    again = concluded(kept.model_copy(update={"notes": (*other_notes, note)}))
    again.save(result, force=True)
    show(again, output.stdout())
