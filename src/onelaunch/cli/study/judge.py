"""``onelaunch study judge``: hold stored measurements against their criteria again."""

from __future__ import annotations

from onelaunch.cli import output
from onelaunch.cli.study.report import ResultPath
from onelaunch.workbench.decide.decision import concluded
from onelaunch.workbench.report.terminal import show
from onelaunch.workbench.result import Result
from onelaunch.workbench.result.provenance import commit


def judge(result: ResultPath) -> None:
    """Evaluate a stored result's criteria again, as this version of onelaunch does, and decide again.

    Nothing is measured, and neither measurements nor criteria change: they are the file's own. A note in it says so.

    Example: onelaunch study judge results/nvidia-h200/decode-megakernel.json
    """
    stored = Result.load(result)
    here = commit()
    note = f"Measured at {stored.provenance.commit or 'an unknown commit'}, judged again at {here or 'an unknown one'}."
    kept = tuple(each for each in stored.notes if ", judged again at " not in each)
    again = concluded(stored.model_copy(update={"notes": (*kept, note)}))
    again.save(result, force=True)
    show(again, output.stdout())
