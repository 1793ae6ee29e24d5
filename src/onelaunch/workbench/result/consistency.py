"""Checks that the parts of a stored result agree, made whenever a result is read from a file.

A result is edited by hand more easily than it is measured again. These checks find an edit that leaves the rest of the file as it
was: moved criteria, a median that is not that of its rounds, a time below its roofline bound, a deleted criterion. A file whose
parts were all changed alike passes; nothing in a file can show that. ``schema.py`` calls :func:`inconsistency`. Measurements and
``workbench/adopt.py`` compare times with bounds by :data:`BELOW_BOUND`, as the checks do.

A peer outside the gate (``outside``) is another project's variant that fails the verification gate, but whose errors are within
``own_tolerance``, which its own project's tests allow. ``floor_microseconds`` is a roofline bound.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Hashable, Iterable
from typing import TYPE_CHECKING, TypeVar

from onelaunch.wording import listing
from onelaunch.workbench.study import Study, case_name, members

if TYPE_CHECKING:
    from onelaunch.workbench.result.schema import Cell, Result, Timing

BELOW_BOUND = 0.95
"""Fraction of its roofline bound below which a cold time is invalid. The 5 % allow for errors of the measured peaks."""

H = TypeVar("H", bound=Hashable)

AGAIN = " again"
"""Suffix that older versions gave to the name of the baseline's second copy in an A/A run, which is refused beside that name."""

BOTH = case_name("", "forward_backward")
"""End of the name of a value at a shape in the direction ``forward_backward``, where a criterion looks at several directions."""

ROUNDING = 1e-9
"""Relative difference by which two stored numbers that must be equal may differ, because sums can be taken in another order."""


def inconsistency(result: Result) -> str | None:
    """Return what does not fit together in a result, as a clause, or ``None``."""
    checks = (_undeclared, _digest_differs, _names_shared, repeated, _wrong_times, _wrong_verdicts, _wrong_noise, _wrong_outcomes)
    return next((problem for check in checks if (problem := check(result)) is not None), None)


def _undeclared(result: Result) -> str | None:
    """Return the problem if a result names a shape that its study does not declare, or declares twice; else ``None``."""
    declared, groups = {shape.name for shape in result.study.shapes}, set(result.study.groups())
    named = [measured.shape for measured in (*result.cells, *result.noise)]
    named += [name.removesuffix(BOTH) for outcome in result.outcomes for name in outcome.values]
    named += [saving.shape for saving in (result.decision.savings if result.decision else ())]
    for criterion in (*result.study.criteria, *(outcome.criterion for outcome in result.outcomes)):
        named += [] if criterion.at is None else [name for name in members(criterion.at) if name not in groups]
        named += [] if criterion.over_at is None else [criterion.over_at]
    for prediction in result.study.predictions:
        named += [] if prediction.at is None else [name for name in members(prediction.at) if name not in groups]
    if unknown := sorted(set(named) - declared):
        return f"its study has no shape {unknown[0]!r}"
    return "two shapes of its study have one name" if len(declared) < len(result.study.shapes) else None


def _digest_differs(result: Result) -> str | None:
    """Return the problem if the declaration in a result is not the one that ran; else ``None``."""
    if (found := result.study.digest()) == result.study_digest:
        return None
    return (
        f"its study is not the one that ran: study_digest is {result.study_digest[:12]!r}, and the declaration in the file has "
        f"the digest {found[:12]!r}, so a criterion, a shape or another key of it was changed after the run"
    )


def _names_shared(result: Result) -> str | None:
    """Return the problem if one name stands for two variants, controls or criteria of a result; else ``None``."""
    study = result.study
    for key, names in (("variants", study.variants), ("controls", study.controls), ("criteria", _names(study))):
        if (name := _twice(names)) is not None:
            return f"{key} of its study has {name!r} twice"
    variants = {study.baseline, *study.variants, *(cell.variant for cell in result.cells if not cell.control)}
    controls = {*study.controls, *(cell.variant for cell in result.cells if cell.control)}
    if both := sorted(variants & controls):
        return f"{both[0]!r} is the name of a variant and of a control"
    if hidden := sorted(name for name in variants | controls if name.removesuffix(AGAIN) in (variants | controls) - {name}):
        return f"{hidden[0]!r} is the older name of the second copy of {hidden[0].removesuffix(AGAIN)!r} in an A/A run"
    return None


def repeated(result: Result) -> str | None:
    """Return the problem if a result holds a measurement twice, so that it would be unclear which one counts; else ``None``."""
    twice = _twice((cell.shape, cell.direction, cell.variant, cell.control) for cell in result.cells)
    if twice is not None:
        shape, direction, variant, control = twice
        return f"cells: {'the control ' if control else ''}{variant!r} stands twice at {shape!r}, {direction}"
    for cell in result.cells:
        if len({timing.regime for timing in cell.timings}) < len(cell.timings):
            return f"cells: {cell.variant!r} has two times of one regime at {cell.shape!r}, {cell.direction}"
    again = _twice((noise.shape, noise.direction, noise.regime) for noise in result.noise)
    return None if again is None else f"noise: there are two A/A runs at {again[0]!r}, {again[1]}, {again[2]}"


def _wrong_times(result: Result) -> str | None:
    """Return the problem if a time contradicts its rounds or its roofline bound; else ``None``."""
    for cell in result.cells:
        for timing in cell.timings:
            if (problem := _not_of_its_rounds(timing)) is not None:
                return f"cells: the {timing.regime} time of {_where(cell)} {problem}"
        cold, plan = cell.timing("cold"), cell.plan
        if cell.measured and cold is not None and plan is not None:
            bound = plan.floor_microseconds
            if cold.microseconds.median < BELOW_BOUND * bound * (1 - ROUNDING):
                return (
                    f"cells: {_where(cell)} takes {cold.microseconds.median:.3g} µs, which is below its roofline bound of "
                    f"{bound:.3g} µs, and yet its status is {cell.status}"
                )
    return None


def _wrong_verdicts(result: Result) -> str | None:
    """Return the problem if a measurement counts as correct without a verdict that says so; else ``None``."""
    for cell in result.cells:
        verdict = cell.verdict
        if verdict is not None and verdict.ok and verdict.problems:
            return f"cells: the verdict on {_where(cell)} is ok, and yet it lists problems"
        if verdict is not None and verdict.ok and (verdict.own_tolerance is not None or verdict.timed_up_to is not None):
            return f"cells: the verdict on {_where(cell)} is ok, and yet it names a tolerance for a peer outside the gate"
        if cell.outside and (problem := _outside_its_own_tests(cell, result.study)) is not None:
            return f"cells: {_where(cell)} is a peer outside the gate, and {problem}"
        if cell.status != "ok":
            continue
        if verdict is None or not verdict.ok or not verdict.components:
            return f"cells: the status of {_where(cell)} is ok without a verdict that compares its outputs"
        if wrong := [part for part in verdict.components if not part.error <= part.allowed]:
            part = wrong[0]
            limit = f"the error of {part.name} is {part.error:.1e} where {part.allowed:.1e} is allowed"
            return f"cells: the status of {_where(cell)} is ok, and {limit}"
    return None


def _wrong_noise(result: Result) -> str | None:
    """Return the problem if a noise floor is smaller than its A/A run allows; else ``None``."""
    for noise in result.noise:
        least = max(noise.ratio.high, 1 / noise.ratio.low)
        if noise.floor < least * (1 - ROUNDING):
            return (
                f"noise: the floor at {noise.shape!r}, {noise.direction}, {noise.regime} is {noise.floor:.4g}, and its A/A run "
                f"varies by a factor of {least:.4g}"
            )
    return None


def _wrong_outcomes(result: Result) -> str | None:
    """Return the problem if the outcomes are not those of the study's criteria, one for each in order; else ``None``."""
    declared, judged = result.study.criteria, tuple(outcome.criterion for outcome in result.outcomes)
    if judged == declared or (not judged and result.decision is None):
        return None
    known, named = {criterion.name for criterion in declared}, {criterion.name for criterion in judged}
    if missing := [name for name in _names(result.study) if name not in named]:
        return f"outcomes: {listing(map(repr, missing[:3]))} of the declared criteria {_has(missing)} no outcome"
    if unknown := sorted(named - known):
        return f"outcomes: its study has no criterion {unknown[0]!r}"
    moved = next((one.name for one, other in zip(judged, declared, strict=False) if one != other), judged[-1].name)
    return f"outcomes: the criterion of {moved!r} is not the one that its study declares"


def _not_of_its_rounds(timing: Timing) -> str | None:
    """Return what contradicts the rounds of a time, as a predicate, or ``None``."""
    stored, rounds = timing.microseconds, timing.rounds
    if stored.samples != len(rounds):
        return f"is of {stored.samples} samples and has {len(rounds)} rounds"
    if not math.isclose(stored.median, median := statistics.median(rounds), rel_tol=ROUNDING):
        return f"has the median {stored.median:.6g} µs, and that of its rounds is {median:.6g} µs"
    least, most = min(rounds) * (1 - ROUNDING), max(rounds) * (1 + ROUNDING)
    if not least <= stored.low <= stored.high <= most:
        return f"has an interval, {stored.low:.6g} to {stored.high:.6g} µs, that reaches beyond all of its rounds"
    return None


def _outside_its_own_tests(cell: Cell, study: Study) -> str | None:
    """Return why a measurement cannot be one of a peer outside the gate, as a clause, or ``None``."""
    verdict = cell.verdict
    if cell.control:
        return "a control has no tests of its own"
    if verdict is None or verdict.ok or not verdict.problems or not verdict.components:
        return "it has no verdict that compares its outputs and fails"
    tolerance, who = verdict.own_tolerance, "its own tests allow"
    if tolerance is None:
        if (tolerance := verdict.timed_up_to) is None:
            return "its verdict names no tolerance of its own tests"
        if study.timed_up_to.get(cell.variant) != tolerance:
            return f"the study does not time it up to an error of {tolerance:.1e}"
        who = "the study times it up to"
    for part in verdict.components:
        if not part.error <= (most := max(part.allowed, tolerance)):
            return f"the error of {part.name} is {part.error:.1e}, where {who} {most:.1e}"
    return None


def _where(cell: Cell) -> str:
    return f"{cell.variant!r} at {cell.shape!r}, {cell.direction}"


def _names(study: Study) -> tuple[str, ...]:
    return tuple(criterion.name for criterion in study.criteria)


def _twice(values: Iterable[H]) -> H | None:
    """Return the first value that occurs more than once, or ``None``."""
    return next((value for value, count in Counter(values).items() if count > 1), None)


def _has(names: list[str]) -> str:
    return "has" if len(names) == 1 else "have"
