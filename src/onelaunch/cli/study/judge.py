"""Command ``onelaunch study judge``: judge the criteria of a stored result again."""

from __future__ import annotations

from onelaunch.cli import output
from onelaunch.cli.study.report import ResultPath
from onelaunch.workbench.decide.decision import concluded
from onelaunch.workbench.report.terminal import show
from onelaunch.workbench.result import Result
from onelaunch.workbench.result.provenance import commit


def judge(result: ResultPath) -> None:
    """Judge a stored result's criteria again with this version of onelaunch, and decide again.

    Nothing is measured. The measurements and criteria in the file do not change. A note in it says that it was judged again.

    Example: onelaunch study judge results/nvidia-h200/decode-megakernel.json
    """
    stored = Result.load(result)
    here = commit()
    note = f"Measured at {stored.provenance.commit or 'an unknown commit'}, judged again at {here or 'an unknown one'}."
    other_notes = tuple(each for each in stored.notes if ", judged again at " not in each)
    again = concluded(stored.model_copy(update={"notes": (*other_notes, note)}))
    again.save(result, force=True)
    show(again, output.stdout())
