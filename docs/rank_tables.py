"""Tables of the page ``parallel``: measured times on several GPUs beside what was predicted, and the criteria of their study."""

from __future__ import annotations

from pathlib import Path

from onelaunch.rank_studies.result import Measured, RankResult
from onelaunch.workbench import quantities as q
from onelaunch.workbench.report.documents import NONE, markdown_table
from onelaunch.workbench.report.text import markdown

NOTHING = "Nothing has been measured on several GPUs yet: there is no result under `results/DEVICE/ranks/`."


def parts(results: Path) -> dict[str, str]:
    """Return the written part of the page by its name, from the results of studies of ranks in a folder."""
    paths = sorted(results.glob("*/ranks/context-parallel.json"))
    sections = [_section(RankResult.load(path), path.relative_to(results.parent).as_posix()) for path in paths]
    return {"context-parallel": "\n\n".join(sections) or NOTHING}


def _section(result: RankResult, file: str) -> str:
    """Return the times of a result in all its shapes, and every criterion with its evidence."""
    measured = [each for each in result.measurements if not each.missing]
    ordered = sorted(measured, key=lambda each: (each.shape, each.direction, each.ranks))
    rows = [_row(result, each) for each in ordered]
    heads = ["shape", "measured", "ranks", "regime", "one GPU", "all ranks", "speedup", "predicted", "largest difference"]
    if any(each.exchange for each in ordered):
        heads.append("exchange")
        rows = [[*row, markdown(each.exchange) or NONE] for row, each in zip(rows, ordered, strict=True)]
    latest = max((each.provenance for each in measured), key=lambda run: run.date)
    where = f"{latest.device}, {latest.date[:10]}, {_commits(measured)}, {file}"
    judged = [
        f"- {each.criterion.name}: **{each.status.replace('_', ' ')}**. {markdown(each.evidence)}." for each in result.outcomes
    ]
    return "\n\n".join([f"Medians ({markdown(where)}):", markdown_table(heads, rows, right=range(4, 9)), "\n".join(judged)])


def _commits(measured: list[Measured]) -> str:
    """Return the commits at which calls were measured, each with its numbers of ranks if there are several commits."""
    ranks: dict[str, set[int]] = {}
    for each in sorted(measured, key=lambda each: each.provenance.date):
        ranks.setdefault(each.provenance.commit[:12], set()).add(each.ranks)
    if len(ranks) == 1:
        return f"commit {next(iter(ranks))}"
    parts = [f"{commit} for {' and '.join(map(str, sorted(numbers)))} ranks" for commit, numbers in ranks.items()]
    return f"commits {' and '.join(parts)}"


def _row(result: RankResult, measured: Measured) -> list[str]:
    """Return the cells of a measurement."""
    one, sliced = measured.medians()
    key = (measured.shape, measured.direction, measured.regime, measured.ranks)
    predicted = next(
        (each.value for each in result.study.predictions if (each.shape, each.direction, each.regime, each.ranks) == key), None
    )
    return [
        markdown(measured.shape),
        measured.direction.replace("_", " and "),
        str(measured.ranks),
        measured.regime,
        q.time(one),
        q.time(sliced),
        f"{one / sliced:.2f}x",
        NONE if predicted is None else f"{predicted:.2f}x",
        f"{max(measured.differences.values(), default=0.0):.1e}",
    ]
