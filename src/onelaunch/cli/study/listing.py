"""Command ``onelaunch study list``: the studies that can be run by name."""

from __future__ import annotations

from onelaunch.cli import output
from onelaunch.wording import escaped
from onelaunch.workbench import quantities as q
from onelaunch.workbench.report.tables import Table, columns
from onelaunch.workbench.study.read import StudyFile, list_studies


def list_all() -> None:
    """List the studies that can be run by name.

    The folder ./studies is searched first, then the built-in studies, then the folders in $ONELAUNCH_STUDIES. Of two studies with
    one name, the first is taken.
    """
    found = list_studies()
    console = output.stdout()
    if not found:
        console.print("No studies were found. Declare one in studies/NAME.toml.")
        return
    # > aligns a column to the right, ? leaves it out on a narrow terminal.
    heads = columns("name", "operation", ">shapes", ">criteria", "question", "?file")
    output.table(console, Table("", heads, tuple(map(_row, found))))
    console.print(
        f"{q.plural(len(found), 'study', 'studies')}. Next: onelaunch study show {escaped(found[0].name)}", markup=False
    )


def _row(entry: StudyFile) -> tuple[str, ...]:
    """Return the row of a study; for a file that is not valid, whose study is ``None``, the problem in place of the question."""
    if entry.study is None:
        return (escaped(entry.name), "error", q.NONE, q.NONE, entry.problem, escaped(str(entry.path)))
    study, path = entry.study, escaped(str(entry.path))
    return (escaped(entry.name), study.operation, str(len(study.shapes)), str(len(study.criteria)), study.question, path)
