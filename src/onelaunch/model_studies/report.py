"""Report on a result of a study of models, as tables for a terminal and as Markdown for the documentation."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator

from onelaunch.model_studies.declare import NORM_EPS, LanguageModel
from onelaunch.model_studies.judge import summary
from onelaunch.model_studies.result import SCHEMA, Alone, Gradients, Missing, ModelResult, Timed, Training, key_of
from onelaunch.model_studies.tasks import task_of
from onelaunch.workbench import quantities as q
from onelaunch.workbench import stats
from onelaunch.workbench.report.overview import Entry, Mark, run_marks, short_commit, versions
from onelaunch.workbench.report.tables import Table, columns, to_markdown, words
from onelaunch.workbench.report.text import markdown as escape


def tables(result: ModelResult) -> list[Table]:
    """Return the tables of a report; those without rows are left out."""
    found = [_criteria(result), _steps(result), _activities(result), _losses(result), _gradients(result), _missing(result)]
    return [table for table in [*found, _commits(result)] if table.rows]


def facts(result: ModelResult) -> str:
    """Return what it was measured on, in a line."""
    run = result.provenance
    software = ", ".join(f"{name} {version}" for name, version in run.versions.items())
    spent = f", {q.duration(result.spent.wall_seconds)}" if result.spent else ""
    return f"{run.device}, commit {run.commits or 'unknown'}, {run.date}{spent}; {software}"


def to_document(result: ModelResult, path: str, level: int = 3) -> str:
    """Return the report as a section of a Markdown page.

    Args:
        result: The result.
        path: Path of the result in the repository.
        level: Level of the heading.
    """
    state = " The run is not finished." if result.interrupted else ""
    head = f"{'#' * level} {escape(f'{result.study.name} on {result.provenance.device}')}"
    blocks = [head, escape(result.study.question), f"**{escape(summary(result))}.**{state}", *map(to_markdown, tables(result))]
    blocks += [escape(note) for note in result.notes]
    return "\n\n".join([*blocks, f"{escape(facts(result))}. Result: `{path}`."]) + "\n"


def overview_entry(result: ModelResult, file: str) -> Entry:
    """Return the entry of a result in the overview of all results.

    Args:
        result: The result.
        file: Path of its file, relative to the folder that was read.
    """
    facts = result.provenance
    unfinished = [Mark("interrupted", "The run is not finished: tasks are left to do.")] if result.interrupted else []
    return Entry(
        file=file,
        study=result.study.name,
        question=result.study.question,
        device=facts.device,
        decision="not decided",
        found=f"{summary(result)}.",
        date=facts.date,
        commit=short_commit(facts.commit),
        versions=versions(facts),
        marks=(*unfinished, *_several_commits(result), *run_marks(facts, result.schema_version, SCHEMA)),
        tables=tuple(tables(result)),
    )


def _several_commits(result: ModelResult) -> Iterator[Mark]:
    """Yield the mark of a result whose tasks were measured at several commits."""
    if earlier := result.provenance.earlier:
        commits = ", ".join(f"{short_commit(each.commit)} ({each.date[:10]})" for each in earlier)
        count = q.plural(sum(len(each.measured) for each in earlier), "task")
        yield Mark("several commits", f"{count} of {len(result.measurements)} were measured at other commits: {commits}.")


def _models(result: ModelResult) -> Iterable[LanguageModel]:
    named = {each.model for each in result.measurements}
    return (model for model in result.study.models if model.name in named)


def _criteria(result: ModelResult) -> Table:
    rows = tuple((each.criterion.name, words(each.status), each.evidence) for each in result.outcomes)
    return Table("Criteria", columns("criterion", "status", "evidence"), rows)


def _timed(result: ModelResult, model: LanguageModel, activity: str) -> Timed | None:
    found = result.find("timed", model.name, activity)
    return found if isinstance(found, Timed) else None


def _speed(timed: Timed, variant: str) -> str:
    """Return the speed of a variant over that of the first one, with its interval."""
    first = next(iter(timed.rounds))
    return q.ratio_interval(stats.ratio(timed.rounds[first], timed.rounds[variant])) if variant != first else "1x"


def _steps(result: ModelResult) -> Table:
    rows: list[tuple[str, ...]] = []
    for model in _models(result):
        timed = _timed(result, model, "training")
        for variant in model.names:
            alone = result.find("alone", model.name, variant)
            alone = alone if isinstance(alone, Alone) and not alone.missing else None
            time = timed.median(variant) if timed else None
            if alone is None and time is None:
                continue
            rows.append(
                (
                    model.name,
                    variant,
                    f"{alone.parameters / 1e6:.1f} M" if alone else q.NONE,
                    q.time(time) if time else q.NONE,
                    f"{1e6 * model.tokens / time:,.0f}" if time else q.NONE,
                    _speed(timed, variant) if timed and time else q.NONE,
                    q.size(alone.peak_bytes) if alone and alone.peak_bytes else q.NONE,
                    _first_step(alone),
                )
            )
    heads = columns("model", "variant", "?>parameters", ">step", ">tokens/s", ">speed", ">peak memory", ">first step")
    note = "Speed: over the first variant of the model, round by round, with its 95 % interval. First step: in a new process."
    return Table("Training steps", heads, tuple(rows), " ".join([note, *_not_accelerated(result)]))


def _not_accelerated(result: ModelResult) -> Iterator[str]:
    """Yield a sentence for each model of which ``accelerate`` left modules or calls to the library."""
    for each in result.measurements:
        if isinstance(each, Alone) and (each.refused or each.fallbacks):
            reasons = [f"{q.plural(count, 'call')}: {reason}" for reason, count in each.fallbacks.items()]
            yield f"Left to the library in {each.model}: {'; '.join([*each.refused, *reasons])}."


def _first_step(alone: Alone | None) -> str:
    if alone is None:
        return q.NONE
    return f"{q.duration(alone.first_step_seconds)}{'' if alone.empty_caches else ' (caches not emptied)'}"


def _activities(result: ModelResult) -> Table:
    rows = tuple(
        (model.name, activity, variant, q.time(timed.median(variant) or 0.0), _speed(timed, variant))
        for model in _models(result)
        for activity in model.activities
        if activity != "training" and (timed := _timed(result, model, activity)) is not None
        for variant in timed.rounds
    )
    heads = columns("model", "activity", "variant", ">time", ">speed")
    return Table("Inference", heads, rows, "Decoding: the time of one token at batch 1.")


def _losses(result: ModelResult) -> Table:
    runs = [each for each in result.measurements if isinstance(each, Training) and not each.missing]
    rows = tuple(
        (
            run.model,
            f"{run.variant}{_control(run)}",
            str(run.seed),
            *(f"{loss:.4f}" for loss in (*run.tenths[::4], run.tenths[-1], run.final)),
            *_apart(result, run),
        )
        for run in runs
    )
    ends = (">after 1/10", ">5/10", ">9/10", ">10/10", ">last 1/20", ">furthest apart", ">last 1/20 apart")
    said = [
        "In nats per token. Last 1/20: the mean over the last twentieth of the steps.",
        "Apart: from the run of the first variant with this seed, at the tenth where it is furthest, and in the last twentieth.",
    ]
    changes = dict.fromkeys(run.perturbation for run in runs if run.control)
    if changes:
        sizes = " or ".join(f"2^{math.log2(size):.0f}" for size in changes if size)
        said.append(
            "Control: the first variant once more, each initial weight changed by one rounding of the precision (a part of "
            f"{sizes}, up or down at random); so much does a rounding of the weights move the losses of one library."
        )
    return Table("Training losses", columns("model", "variant", ">seed", *ends), rows, " ".join(said))


def _control(run: Training) -> str:
    """Return the mark of a control run, with its number from the second one on."""
    return f", control{f' {run.index + 1}' if run.index else ''}" if run.control else ""


def _apart(result: ModelResult, run: Training) -> tuple[str, str]:
    """Return how far a run is from that of its model's first variant with the same seed, in percent."""
    first = result.training(run.model, result.study.model(run.model).names[0], run.seed)
    if first is None or first is run:
        return q.NONE, q.NONE
    return f"{100 * max(run.apart(first)):.2g} %", f"{100 * abs(run.final / first.final - 1):.2g} %"


def _gradients(result: ModelResult) -> Table:
    rows: list[tuple[str, ...]] = []
    for model in _models(result):
        measured = [each for each in result.measurements if isinstance(each, Gradients) and each.model == model.name]
        for variant in model.names:
            found = [each.errors[variant] for each in measured if variant in each.errors]
            if not found:
                continue
            errors, worst = [each.error for each in found], max(found, key=lambda each: each.worst_error)
            mean = math.sqrt(statistics.fmean(error**2 for error in errors))
            ends = f"{q.scientific(min(errors))} to {q.scientific(max(errors))}" if len(errors) > 1 else q.NONE
            said = f"{worst.worst} ({q.scientific(worst.worst_error)})"
            rows.append((model.name, variant, str(len(errors)), q.scientific(mean), ends, said))
    eps = {each.model: each.eps for each in result.measurements if isinstance(each, Gradients) and each.eps != NORM_EPS}
    heads = columns("model", "variant", ">seeds", ">error", "?>at each seed", "?parameter with the largest error")
    note = (
        "Norm-wise error of the gradient of all parameters against plain PyTorch in float32; over several seeds of weights and "
        "sequences their root mean square."
    )
    if eps:
        said = ", ".join(f"{value:g} ({name})" for name, value in eps.items())
        note += f" Epsilon of the norms of heads' outputs, in the reference too: {said}; {NORM_EPS:g} in all other measurements."
    return Table("Gradients", heads, tuple(rows), note)


def _missing(result: ModelResult) -> Table:
    rows: dict[tuple[str, ...], list[str]] = {}
    for each in result.measurements:
        task = each.activity if isinstance(each, Timed) else key_of(each)[0]
        found = each.missing if isinstance(each.missing, dict) else {each.variant: each.missing} if _has_one(each) else {}
        for variant, why in found.items():
            if isinstance(why, Missing):
                rows.setdefault((each.model, variant, words(why.status), why.reason), []).append(task)
    listed = tuple(
        (model, variant, status, ", ".join(dict.fromkeys(tasks)), reason)
        for (model, variant, status, reason), tasks in rows.items()
    )
    return Table("Not measured", columns("model", "variant", "status", "tasks", "reason"), listed)


def _commits(result: ModelResult) -> Table:
    """Return the table of the commits at which tasks were measured; it has no rows if there is one commit alone."""
    run = result.provenance
    if not run.earlier:
        return Table("Commits", (), ())
    older = {name for each in run.earlier for name in each.measured}
    own = tuple(words for each in result.measurements if (words := task_of(key_of(each)).words) not in older)
    runs = [*((each.commit, each.date, each.measured) for each in run.earlier), (run.commit or "unknown", run.date, own)]
    rows: list[tuple[str, ...]] = []
    for commit, date, names in runs:
        for model in result.study.models:
            start = f"{model.name}: "
            if tasks := [name.removeprefix(start) for name in names if name.startswith(start)]:
                rows.append((short_commit(commit), date, model.name, "; ".join(tasks)))
    note = "Tasks by the commit that ran, with the end of the run in which they were measured."
    return Table("Commits", columns("commit", "date", "model", "tasks"), tuple(rows), note)


def _has_one(each: object) -> bool:
    return isinstance(each, (Alone, Training))
