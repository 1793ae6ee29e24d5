"""Overview of many results as plain values: what each decided, how current it is, its speeds, and its predictions.

``onelaunch study report --all`` collects the results of a folder with :func:`collect`. ``overview_forms.py`` shows an
:class:`Overview` on a terminal, as Markdown and as one HTML page.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from onelaunch.errors import OneLaunchError, ResultMissing, ResultTooNew
from onelaunch.operation.sources import digest_of
from onelaunch.wording import escaped
from onelaunch.workbench import quantities as q
from onelaunch.workbench.decide.predictions import compared_predictions
from onelaunch.workbench.report.documents import speeds
from onelaunch.workbench.report.headline import headline
from onelaunch.workbench.report.predictions import predictions
from onelaunch.workbench.report.summary import first_tables, summarize
from onelaunch.workbench.report.tables import Table, columns
from onelaunch.workbench.result import Provenance, Result
from onelaunch.workbench.result.saved import Saved
from onelaunch.workbench.result.schema import SCHEMA


class Mark(NamedTuple):
    """Reservation about a result: a few words for a table, and a sentence."""

    short: str
    sentence: str


@dataclass(frozen=True)
class Entry:
    """One result of an overview."""

    file: str
    """Path of the result, relative to the folder that was read."""
    study: str
    question: str
    device: str
    decision: str
    """Kind of the decision, such as ``measure more``, or another short status."""
    found: str
    """Sentence with the headline figures."""
    date: str
    """End of the run, as stored: ISO 8601, UTC."""
    commit: str
    """First 12 digits of the commit that ran, or an empty string."""
    versions: str
    """Versions of the software, such as ``torch 2.11.0, triton 3.6.0``, and the driver."""
    marks: tuple[Mark, ...] = ()
    speeds: tuple[tuple[str, str, str], ...] = ()
    """Rows of direction, speed of our fastest variant over the fastest peer, and its speed over torch.compile, in words."""
    predicted: tuple[str, ...] = ()
    """Counts and errors of the predictions: the cells of their row after study and device; empty without predictions."""
    tables: tuple[Table, ...] = ()
    """Tables of the result's own section."""
    report: str = ""
    """Folder of the result's own report, relative to the page; empty if none was written."""


class Omitted(NamedTuple):
    """File that has no entry, and the reason as a sentence."""

    file: str
    reason: str


@dataclass(frozen=True)
class Overview:
    """Results of a folder, sorted by study and device, the newest run first."""

    folder: str
    entries: tuple[Entry, ...]
    omitted: tuple[Omitted, ...]
    """Files that cannot be read, are of a newer version, or repeat another file."""

    @property
    def title(self) -> str:
        """Title of the page."""
        return f"All results in {self.folder}/"

    @property
    def facts(self) -> tuple[str, ...]:
        """Numbers of results, studies, devices and omitted files, as short phrases."""
        studies, devices = ({getattr(entry, name) for entry in self.entries} for name in ("study", "device"))
        left_out = f"{q.plural(len(self.omitted), 'file')} left out"
        counts = (
            q.plural(len(self.entries), "result"),
            q.plural(len(studies), "study", "studies"),
            q.plural(len(devices), "device"),
        )
        return (*counts, *([left_out] if self.omitted else []))

    def results(self) -> Table:
        """Return the table of all results."""
        heads = columns("study", "device", "decision", "what was found", "date", "commit", "marks")
        rows = (
            (
                entry.study,
                entry.device,
                entry.decision,
                entry.found,
                entry.date[:10],
                entry.commit or q.NONE,
                "; ".join(mark.short for mark in entry.marks) or q.NONE,
            )
            for entry in self.entries
        )
        return Table("", heads, tuple(rows))

    def speeds(self) -> Table:
        """Return the table of speeds over other libraries and over torch.compile."""
        rows = tuple((entry.study, entry.device, *row) for entry in self.entries for row in entry.speeds)
        heads = columns("study", "device", "measured", "over the fastest peer", "over torch.compile")
        note = (
            "Speed of the fastest variant of onelaunch: geometric mean over the shapes at which both were timed, with the "
            "smallest and the largest value. Below 1x onelaunch is slower. Times are cold, or of consecutive steps where those "
            "were timed."
        )
        return Table("", heads, rows, note)

    def predictions(self) -> Table:
        """Return the table of how predictions came out, with a row for each result that declares some."""
        rows = tuple((entry.study, entry.device, *entry.predicted) for entry in self.entries if entry.predicted)
        heads = columns(
            "study", "device", ">predicted values", ">as predicted", ">better", ">worse", ">not measured", ">median error",
            ">largest error",
        )  # fmt: skip
        note = "An error is the factor, at least 1, between the measured and the predicted value."
        return Table("", heads, rows, note)

    def left_out(self) -> Table:
        """Return the table of the files without an entry."""
        return Table("", columns("file", "reason"), tuple(self.omitted))


Reader = Callable[[Path], tuple[Saved, Callable[[str], Entry]]]
"""Function that reads a result file, and returns it with a function that makes its entry for the name of the file."""


def read_result(path: Path) -> tuple[Result, Callable[[str], Entry]]:
    """Read the result of a study of variants."""
    result = Result.load(path)
    return result, lambda file: entry_of(result, file)


def collect(folder: Path, read: Reader = read_result) -> tuple[Overview, dict[str, Saved]]:
    """Read every result of a folder and of the folders below it.

    Args:
        folder: Folder to search for files ``*.json``.
        read: Function that reads a file. It raises a :class:`~onelaunch.errors.OneLaunchError` for a file that is no result.

    Returns:
        The overview, and the results by the names of their files. A file that cannot be read is named with the reason.
    """
    entries: list[Entry] = []
    omitted: list[Omitted] = []
    found: dict[str, Saved] = {}
    first: dict[str, str] = {}
    for path in sorted(path for path in folder.rglob("*.json") if not path.is_dir()):
        file = path.relative_to(folder).as_posix()
        try:
            result, make_entry = read(path)
        except OneLaunchError as problem:
            omitted.append(Omitted(file, _reason(problem, path)))
            continue
        content = result.stored()
        if content in first:
            omitted.append(Omitted(file, f"It holds the same result as {first[content]}."))
            continue
        first[content] = file
        found[file] = result
        entries.append(make_entry(file))
    entries.sort(key=lambda entry: entry.date, reverse=True)
    entries.sort(key=lambda entry: (entry.study, entry.device))
    return Overview(folder.name or str(folder), tuple(_superseded(entries)), tuple(omitted)), found


def _reason(problem: OneLaunchError, path: Path) -> str:
    """Return the message of an error as a sentence about the file, without its path, which stands beside it."""
    if isinstance(problem, ResultTooNew):
        return f"A newer onelaunch wrote it: its schema is {problem.schema}, and this one reads up to {problem.newest}."
    if isinstance(problem, ResultMissing):
        return "It is a link to a file that does not exist."
    return str(problem).replace(f"{escaped(str(path))} ", "It ", 1)


def _superseded(entries: Sequence[Entry]) -> Iterable[Entry]:
    """Mark the entries that a newer run of the same study on the same device follows; those come first among equals."""
    newest: dict[tuple[str, str], Entry] = {}
    for entry in entries:
        later = newest.setdefault((entry.study, entry.device), entry)
        if later is entry:
            yield entry
        else:
            mark = Mark("older run", f"A newer run of this study on this device is in {later.file} ({later.date[:10]}).")
            yield replace(entry, marks=(mark, *entry.marks))


def entry_of(result: Result, file: str) -> Entry:
    """Return the entry of a study of variants.

    Args:
        result: The result.
        file: Path of its file, relative to the folder that was read.
    """
    summary, facts = summarize(result), result.provenance
    first, _ = first_tables(summary.use)
    found = headline(result)
    criteria = [replace(summary.criteria, title="Criteria")] if summary.criteria else []
    said = [replace(table, title="Predictions") for table in predictions(result).tables]
    return Entry(
        file=file,
        study=summary.name,
        question=summary.question,
        device=facts.device,
        decision=summary.decision,
        found=" ".join((*found.found, found.sentence)),
        date=facts.date,
        commit=short_commit(facts.commit),
        versions=versions(facts),
        marks=(
            *(_alert(alert) for alert in summary.alerts),
            *_code_marks(result),
            *run_marks(facts, result.schema_version, SCHEMA),
        ),
        speeds=tuple(speeds(result)),
        predicted=_predicted(result),
        tables=(*first, *said, *criteria),
    )


def _alert(alert: str) -> Mark:
    """Return the mark of an alert of the result's own report, without its references to places in that report."""
    said = alert.replace("; see below.", ".").removesuffix(" The missing ones are listed below.")
    short = "interrupted" if alert.startswith("Interrupted") else "wrong variants" if alert.startswith("Do not use") else "alert"
    return Mark(short, said)


def short_commit(commit: str) -> str:
    """Return a commit with the first 12 digits of its hash, and with its mark ``-dirty``."""
    digits, dash, mark = commit.partition("-")
    return f"{digits[:12]}{dash}{mark}"


def versions(facts: Provenance) -> str:
    """Return the versions of the software that ran."""
    known = [f"{name} {version}" for name, version in facts.versions.items() if name not in ("python", "onelaunch")]
    return ", ".join([*known, *([f"driver {facts.driver}"] if facts.driver else [])])


def run_marks(facts: Provenance, schema: int, newest: int) -> Iterable[Mark]:
    """Return the marks of a result whose code is in no commit, or whose schema is older than that of this version."""
    if not facts.commit:
        yield Mark("commit unknown", "The result does not name the commit that ran.")
    elif facts.commit.endswith("-dirty"):
        yield Mark("uncommitted code", "The code that ran had changes that are in no commit.")
    if schema < newest:
        yield Mark(f"schema {schema}", f"The file has schema {schema}; this version writes schema {newest}, and reads both.")


def _code_marks(result: Result) -> Iterable[Mark]:
    """Return the mark of a result that is older than the code which it measured, or that does not hold that fact."""
    stored = {label: source.source for label, source in result.provenance.variants.items() if source.source}
    if not stored:
        yield Mark("code not recorded", "The result holds no digests of its variants' code, so it may be older than that code.")
        return
    try:
        here = {label: digest_of(variant) for label, variant in result.study.registered()}
    except OneLaunchError as problem:  # the operation is not installed here
        yield Mark("code not compared", f"The code that was measured cannot be compared with that of this version: {problem}")
        return
    changed = [label for label, source in stored.items() if here.get(label) != source]
    if changed:
        of = q.plural(len(stored), "variant")
        yield Mark("code changed", f"The code of {len(changed)} of {of} has changed since it was measured.")


def _predicted(result: Result) -> tuple[str, ...]:
    """Return the cells of the table of predictions after study and device, or nothing without predictions."""
    comparisons = compared_predictions(result)
    if not comparisons:
        return ()
    counts = Counter(each.came for each in comparisons)
    factors = [each.factor for each in comparisons if each.factor is not None]
    errors = [q.ratio(pick(factors)) if factors else q.NONE for pick in (statistics.median, max)]
    came = [str(counts[name]) for name in ("as predicted", "better", "worse", "not measured")]
    return (str(len(comparisons)), *came, *errors)
