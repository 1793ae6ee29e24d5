"""Entry of a study of ranks in the overview of all results (``onelaunch report --all``)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from onelaunch.rank_studies.result import SCHEMA, Measured, RankResult
from onelaunch.workbench import quantities as q
from onelaunch.workbench.report.overview import Entry, Mark, run_marks, short_commit, versions
from onelaunch.workbench.report.tables import Table, columns


def overview_entry(result: RankResult, file: str) -> Entry:
    """Return the entry of a result in the overview of all results.

    Date, commit and versions are those of the latest run; other numbers of ranks may be of earlier ones.

    Args:
        result: The result, judged.
        file: Path of its file, relative to the folder that was read.
    """
    runs = [each.provenance for each in result.measurements]
    latest = max(runs, key=lambda run: run.date, default=None)
    counts = Counter(outcome.status for outcome in result.outcomes)
    found = ", ".join(
        f"{q.plural(number, 'criterion', 'criteria')} {status.replace('_', ' ')}" for status, number in counts.items()
    )
    several = len({run.commit for run in runs}) > 1
    mixed = [Mark("several commits", "The numbers of ranks were measured at different commits.")] if several else []
    return Entry(
        file=file,
        study=result.study.name,
        question=result.study.question,
        device="" if latest is None else latest.device,
        decision="not decided",
        found=f"{found or 'Nothing is judged yet'}.",
        date="" if latest is None else latest.date,
        commit="" if latest is None else short_commit(latest.commit),
        versions="" if latest is None else versions(latest),
        marks=() if latest is None else (*mixed, *run_marks(latest, result.schema_version, SCHEMA)),
        tables=(table(result),),
    )


def table(result: RankResult) -> Table:
    """Return the table of all measurements."""
    titles = columns("shape", "direction", "?regime", ">ranks", ">one GPU", ">all ranks", ">speedup", "?>largest difference")
    return Table("Times on several GPUs", titles, tuple(_row(each) for each in result.measurements))


def _row(measured: Measured) -> tuple[str, ...]:
    """Return the cells of a measurement."""
    return measured.shape, measured.direction, measured.regime, str(measured.ranks), *_figures(measured)


def _figures(measured: Measured) -> Iterator[str]:
    """Yield the cells with figures; the first holds the reason where nothing was measured."""
    if measured.missing:
        yield from (measured.missing, "", "", "")
        return
    one, sliced = measured.medians()
    yield from (q.time(one), q.time(sliced), f"{one / sliced:.3g}x")
    yield f"{max(measured.differences.values(), default=0.0):.1e}"
