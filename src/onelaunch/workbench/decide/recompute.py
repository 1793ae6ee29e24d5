"""Recompute a stored decision from the criteria and the measurements of its result, and say where the stored one differs.

Only what decides is compared: the kind of the decision, and the statuses and values of the criteria. The sentences of older
results have other words for the same numbers. ``report/summary.py`` calls :func:`recompute` and :func:`differences`, and a report
warns of what they find. :func:`declared_again` serves the command ``onelaunch study judge``.
"""

from __future__ import annotations

import math

from onelaunch.errors import OneLaunchError, ResultMismatch
from onelaunch.workbench import quantities as q
from onelaunch.workbench.decide.decision import concluded
from onelaunch.workbench.result import Estimate, Outcome, Result
from onelaunch.workbench.study import Study, members

FEW = 3
"""Largest number of criteria that are named."""

CLOSE = 1e-3
"""Relative difference up to which a stored value is that of the measurements, since versions of NumPy may round differently."""


def recompute(result: Result) -> Result | str:
    """Return the result judged and decided again, or the reason why that is not possible here.

    The operation and the variants of the study are needed for it; they may belong to a package that is not installed.
    """
    try:
        return concluded(result)
    except OneLaunchError as error:
        return str(error)


def declared_again(stored: Result, study: Study) -> Result:
    """Return a result with the criteria, predictions, question and notes that its study declares now, not judged yet.

    Shapes, variants and all else that was measured stay as they were declared when the run began.

    Args:
        stored: Result of an earlier form of the study.
        study: Its present form.

    Raises:
        ResultMismatch: It is another study, or a criterion asks for a shape or a group that the result does not have.
    """
    if study.name != stored.study.name:
        raise ResultMismatch(f"The result is one of {stored.study.name}, and the study is {study.name}.")
    known = {shape.name for shape in stored.study.shapes} | set(stored.study.groups())
    for criterion in study.criteria:
        places = [*members(criterion.at or ()), *members(criterion.over_at or ())]
        if missing := [name for name in places if name not in known]:
            raise ResultMismatch(
                f"The criterion {criterion.name!r} asks for {missing[0]!r}, which the result does not have.",
                advice="Measure it first with onelaunch study run and {resume}.",
            )
    taken = {name: getattr(study, name) for name in ("question", "criteria", "predictions", "notes")}
    declared = stored.study.model_copy(update=taken)
    return stored.model_copy(update={"study": declared, "study_digest": declared.digest(), "outcomes": (), "decision": None})


def differences(stored: Result, again: Result) -> tuple[str, ...]:
    """Return what differs between a stored decision and the recomputed one, in sentences; empty if they agree.

    Args:
        stored: Result as it was stored.
        again: The same result, judged and decided again.
    """
    if stored.decision is None and not stored.outcomes:
        return ()
    sentences = []
    kinds = [found.decision.kind.replace("_", " ") if found.decision else "not decided" for found in (stored, again)]
    if kinds[0] != kinds[1]:
        sentences.append(
            f"The stored decision is {kinds[0]!r}, but the criteria and measurements of this result give {kinds[1]!r}. Do not "
            "rely on the stored one."
        )
    earlier = {outcome.criterion.name: outcome for outcome in stored.outcomes}
    if dropped := [repr(outcome.criterion.name) for outcome in again.outcomes if outcome.criterion.name not in earlier]:
        more = f" and {len(dropped) - FEW} more" if len(dropped) > FEW else ""
        have = q.plural(len(dropped), "criterion has", "criteria have")
        sentences.append(f"{have} no stored outcome: {', '.join(dropped[:FEW])}{more}.")
    pairs = [(earlier[name], outcome) for outcome in again.outcomes if (name := outcome.criterion.name) in earlier]
    moved = [said for before, outcome in pairs if (said := _moved(before, outcome)) is not None]
    sentences += moved[:FEW]
    if len(moved) > FEW:
        others = q.plural(len(moved) - FEW, "other criterion differs", "other criteria differ")
        sentences.append(f"{others} from the measurements too.")
    return tuple(sentences)


def _moved(stored: Outcome, again: Outcome) -> str | None:
    """Return a sentence on a criterion whose stored status or value is not that of the measurements, or ``None``."""
    name, status = again.criterion.name, again.status.replace("_", " ")
    if stored.status != again.status:
        before = stored.status.replace("_", " ")
        return f"{name!r} is stored as {before!r}; its measurements give {status!r}: {again.evidence}"
    for shape, value in again.values.items():
        if not _same(stored.values.get(shape), value):
            return f"{name!r} is stored with another value at {shape} than its measurements give: {again.evidence}"
    return None


def _same(stored: Estimate | None, again: Estimate) -> bool:
    if stored is None:
        return False
    sides = ("median", "low", "high")
    return all(math.isclose(getattr(stored, side), getattr(again, side), rel_tol=CLOSE, abs_tol=1e-12) for side in sides)
