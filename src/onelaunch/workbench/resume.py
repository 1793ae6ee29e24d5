"""Rules of resumed runs: facts that must be equal to those of an earlier result, and measurements that are taken over from it.

``running.py`` calls :func:`refuse_others`, :func:`changed_shapes` and :func:`is_counted` before it takes over the measurements of
an interrupted run, or of a finished one of which some shapes are measured anew. ``merging.py`` compares the parts of one run by
:func:`differences`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from onelaunch.errors import ResultMismatch, StudyError
from onelaunch.wording import listing
from onelaunch.workbench.result import Cell, Provenance, Result
from onelaunch.workbench.study import Study


def differences(earlier: Result, now: Result, *, across_commits: bool = False) -> list[str]:
    """Return a clause for each fact that influences all measurements and differs between two results.

    Criteria, predictions and texts of a study influence none, and a shape only its own: :func:`changed_shapes`.

    Args:
        earlier: Earlier result.
        now: Result of this run.
        across_commits: Whether the commits may differ, and with them the sources of onelaunch's own variants. Both commits must
            be known and without changes, since a result names them.
    """
    then, here = earlier.provenance, now.provenance
    across = across_commits and all(_names_its_files(each) for each in (then, here))
    facts = {"study": tuple(_how_it_measures(each.study)[:12] for each in (earlier, now))}
    same = ("device", "driver", "scale", "rounds") if across else ("device", "driver", "commit", "scale", "rounds")
    facts |= {name: (getattr(then, name), getattr(here, name)) for name in same}
    # The digest of the files is stored only where the commit does not determine them: it is empty, or ends in "-dirty".
    facts |= {"files of onelaunch": (then.package[:12], here.package[:12])} if then.package and then.commit == here.commit else {}
    facts |= {package: (then.versions.get(package), here.versions.get(package)) for package in {**then.versions, **here.versions}}
    for name in then.variants.keys() & here.variants.keys():
        one, other = then.variants[name], here.variants[name]
        if not (across and one.distribution.startswith("onelaunch ")):
            facts[f"source of the variant {name}"] = one.source[:12], other.source[:12]
        facts[f"distribution of the variant {name}"] = one.distribution, other.distribution
    found = [
        f"{what} {before or 'none'} then, {after or 'none'} now" for what, (before, after) in facts.items() if before != after
    ]
    # A commit with changes does not say which changes. Results of older versions hold no digests that would.
    if then.commit == here.commit and then.commit.endswith("-dirty") and not (then.package and then.variants):
        found.append(f"commit {then.commit} both times, with changes that may differ, because the earlier run stored no digests")
    return found


def _how_it_measures(study: Study) -> str:
    """Return the SHA-256 of what a study declares for the measurements of all its shapes."""
    declared = study.model_dump_json(exclude={"question", "shapes", "criteria", "predictions", "notes"})
    return hashlib.sha256(f"{declared} {study.operation_names()}".encode()).hexdigest()


def changed_shapes(earlier: Study, now: Study) -> set[str]:
    """Return the names of the shapes that a study declares otherwise than an earlier form of it did, or that are new."""
    before = {shape.name: shape for shape in earlier.shapes}
    return {shape.name for shape in now.shapes if shape != before.get(shape.name)}


def refuse_others(earlier: Result, now: Result, path: Path, *, across_commits: bool) -> str:
    """Refuse to resume an earlier result if facts that influence measurements differ; return the commit of this run.

    Args:
        earlier: Earlier result.
        now: Result of this run.
        path: File of the earlier result, for messages.
        across_commits: Whether the commits may differ, as in :func:`differences`.

    Raises:
        ResultMismatch: A fact differs.
    """
    if found := differences(earlier, now, across_commits=across_commits):
        advice = "Restore the earlier state, or pass {force} instead of {resume} to begin again."
        if not differences(earlier, now, across_commits=True):
            advice = "Pass {across_commits} to keep what that commit measured, or {force} instead of {resume} to begin again."
        raise ResultMismatch(f"{path} cannot be resumed: {'; '.join(found)}.", advice=advice)
    return now.provenance.commit


def _names_its_files(facts: Provenance) -> bool:
    """Return whether the commit of a result says which files ran: it is known, and had no changes."""
    return bool(facts.commit) and not facts.commit.endswith("-dirty")


def refuse_unknown(study: Study, anew: Collection[str]) -> None:
    """Refuse to measure shapes anew that a study does not have.

    Raises:
        StudyError: The study declares no shape of that name.
    """
    declared = [shape.name for shape in study.shapes]
    if unknown := [name for name in anew if name not in declared]:
        known = listing([repr(name) for name in declared])
        raise StudyError(study.name, f"has no shape {unknown[0]!r} to measure anew.", advice=f"Its shapes are {known}.")


def is_counted(
    name: tuple[str, str],
    cells: Sequence[Cell],
    bytes_at: Collection[tuple[str, str]],
    measures: Mapping[str, tuple[Any, Collection[tuple[str, str]]]],
) -> bool:
    """Return whether a measured case has all that its run counts. What is missing is counted without new times.

    Args:
        name: Shape and direction of the case.
        cells: Its measurements.
        bytes_at: Cases at which DRAM bytes are counted.
        measures: Measures that a step of its own takes, each with the cases at which it is asked for.
    """
    counted = name not in bytes_at or any(cell.traffic and cell.traffic.source == "ncu" for cell in cells)
    return counted and all(name not in asked or any(cell.has(what) for cell in cells) for what, (_, asked) in measures.items())
