"""Measurements that a run takes over from earlier results: what must be alike, and which tasks the results have finished.

``run.py`` calls this module for the result that it continues and for the parts of other machines. A measurement depends on the
declaration of its model, on the rounds, and on device, software and commit; criteria and other models change none. A measurement
of gradients depends on the epsilon of heads' norms too, which it stores.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from onelaunch.errors import ArgumentError, ResultMismatch
from onelaunch.model_studies.declare import LanguageModel, ModelStudy
from onelaunch.model_studies.result import Gradients, Key, Measurement, ModelResult, key_of
from onelaunch.model_studies.tasks import KINDS, Task
from onelaunch.workbench import quantities as q
from onelaunch.workbench.result import EarlierCommit, Provenance
from onelaunch.workbench.result.provenance import taken_over


class Source(NamedTuple):
    """Earlier result, and the tasks whose measurements are taken over from it."""

    provenance: Provenance
    keys: set[Key]
    """Keys of the tasks. A task that is carried out again is removed."""


def select(tasks: Iterable[Task], study: ModelStudy, names: Collection[str], argument: str) -> list[Task]:
    """Return the tasks that are named, in order; all of them without names.

    Args:
        tasks: The tasks.
        study: Their study.
        names: Kinds of tasks (:data:`~onelaunch.model_studies.tasks.KINDS`), names of models, and pairs ``MODEL/KIND``. With
            kinds and models, the tasks of these kinds of these models are meant, and those of the pairs beside them.
        argument: Name of the argument, for the error.

    Raises:
        ArgumentError: A name is none of them.
    """
    models = {model.name for model in study.models}
    pairs = {f"{model}/{kind}" for model in models for kind in KINDS}
    if unknown := set(names) - models - pairs - set(KINDS):
        said = (
            f"it takes kinds of tasks ({', '.join(KINDS)}), names of models ({', '.join(sorted(models))}), and pairs MODEL/KIND"
        )
        raise ArgumentError(f"{argument} is {min(unknown)!r}; {said}.")
    kinds, wanted, given = set(names) & set(KINDS), set(names) & models, set(names) & pairs

    def named(task: Task) -> bool:
        own = {task.task, task.key[0]}
        if given & {f"{task.model}/{kind}" for kind in own}:
            return True
        if not kinds and not wanted:
            return not given
        return (not kinds or bool(kinds & own)) and (not wanted or task.model in wanted)

    return [task for task in tasks if named(task)]


def unfinished(measurement: Measurement) -> bool:
    """Return whether a task has to be carried out again."""
    missing = measurement.missing
    found = missing.values() if isinstance(missing, dict) else [missing] if missing else []
    return any(each.status == "interrupted" for each in found)


def check_alike(earlier: ModelResult, study: ModelStudy, now: Provenance, *, across_commits: bool) -> None:
    """Check that a run can take over measurements of an earlier result.

    Args:
        earlier: The earlier result.
        study: Study of the run.
        now: Provenance of the run.
        across_commits: Whether the commits may differ. Both must then be known and without changes.

    Raises:
        ResultMismatch: A fact that influences measurements differs, or the study declares every measured model otherwise.
    """
    then = earlier.provenance
    facts = {name: (getattr(then, name), getattr(now, name)) for name in ("device", "driver", "scale")}
    facts["study"] = earlier.study.name, study.name
    facts["rounds"] = str(then.rounds), str(now.rounds)
    software = {**then.versions, **now.versions}
    facts |= {name: (then.versions.get(name, ""), now.versions.get(name, "")) for name in software}
    changed = _differences(facts)
    code = _differences({name: (getattr(then, name), getattr(now, name)) for name in ("commit", "package")})
    clean = all(each.commit and not each.commit.endswith("-dirty") for each in (then, now))
    advice = "Restore the earlier state, or pass {force} instead of {resume} to begin again."
    if not changed and code and clean and not across_commits:
        advice = f"Pass {{across_commits}} to keep what was measured at the earlier commit. {advice}"
    elif across_commits and code and not clean:
        code.append("only commits without changes can be told apart later")
    elif across_commits:
        code = []
    if changed or code:
        raise ResultMismatch(f"The earlier run cannot be continued: {'; '.join([*changed, *code])}.", advice=advice)
    measured = {each.model for each in earlier.measurements}
    if measured and not any(declared_alike(earlier.study, study, name) for name in measured):
        advice = "Restore the declaration, or pass {force} instead of {resume} to begin again."
        raise ResultMismatch("The earlier run cannot be continued: the study declares no model as it did then.", advice=advice)


def _differences(facts: dict[str, tuple[str, str]]) -> list[str]:
    """Return a clause for each fact, given by its name with its values then and now, that differs."""
    return [f"{name} was {then or 'none'}, is {now or 'none'}" for name, (then, now) in facts.items() if then != now]


def declared_alike(then: ModelStudy, now: ModelStudy, name: str) -> bool:
    """Return whether two studies declare a model alike, but for the fields that select tasks and change no measurement."""
    pair: list[LanguageModel] = [each.model(name) for each in (then, now) if any(model.name == name for model in each.models)]
    return len(pair) == 2 and pair[0].as_measured() == pair[1].as_measured()


def _other_eps(measurement: Measurement, study: ModelStudy) -> bool:
    """Return whether a measurement of gradients was taken with another epsilon than a study declares for the model."""
    return isinstance(measurement, Gradients) and measurement.eps != study.model(measurement.model).eps_of_gradients


def taken(
    earlier: ModelResult, study: ModelStudy, tasks: Sequence[Task], anew: Collection[Key] = ()
) -> tuple[dict[Key, Measurement], list[str]]:
    """Return the measurements of a result that a run takes over, and notes about the result.

    Args:
        earlier: The earlier result, which :func:`check_alike` has accepted.
        study: Study of the run.
        tasks: Tasks of the run.
        anew: Keys of tasks that are carried out again.
    """
    finished = {key_of(each): each for each in earlier.measurements if not unfinished(each)}
    models = dict.fromkeys(each.model for each in finished.values())
    changed = [name for name in models if not declared_alike(earlier.study, study, name)]
    wanted = {task.key for task in tasks} - set(anew)
    alike = {key: each for key, each in finished.items() if key in wanted and each.model not in changed}
    kept = {key: each for key, each in alike.items() if not _other_eps(each, study)}
    ended = f"a run that ended on {earlier.provenance.date}"
    notes = [*earlier.notes]
    if kept:
        notes.append(f"Taken over from {ended}: {q.plural(len(kept), 'task')}.")
    if changed:
        notes.append(f"Measurements of {', '.join(changed)} by {ended} are left out, since the study declares it otherwise now.")
    if others := dict.fromkeys(each.model for key, each in alike.items() if key not in kept):
        notes.append(
            f"Gradients of {', '.join(others)} by {ended} are left out, since they were taken with another gradient_eps."
        )
    return kept, notes


def earlier_commits(sources: Iterable[Source], tasks: Sequence[Task], commit: str) -> tuple[EarlierCommit, ...]:
    """Return which tasks were measured at which other commit than that of the run, and when.

    Args:
        sources: Earlier results with the tasks that are taken over from each.
        tasks: Tasks of the run.
        commit: Commit of the run.
    """
    found: dict[tuple[str, str], EarlierCommit] = {}
    for source in sources:
        names = [task.words for task in tasks if task.key in source.keys]
        for each in taken_over(source.provenance, names, commit):
            known = found.get((each.commit, each.date))
            found[each.commit, each.date] = each if known is None else _joined(known, each)
    return tuple(found.values())


def _joined(one: EarlierCommit, other: EarlierCommit) -> EarlierCommit:
    """Return what two results took over from one run."""
    return one.model_copy(update={"measured": tuple(dict.fromkeys([*one.measured, *other.measured]))})
