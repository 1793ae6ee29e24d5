"""Checks of the criteria and predictions of a study file, whose errors name the key and the remedy.

The keys of a criterion are fields of :class:`~onelaunch.workbench.study.declare.Criterion`, which explains each. Attributes of
its measure (``alone``, ``better``, ``timed``) are explained at :class:`~onelaunch.workbench.study.measure.Measure`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NoReturn

from onelaunch.errors import StudyError
from onelaunch.wording import did_you_mean, listing
from onelaunch.workbench.stored import NAME
from onelaunch.workbench.study.declare import Criterion, Selector, Study, members
from onelaunch.workbench.study.measure import NO_MEAN_OF_COUNTS, Alone, measures


class CriterionChecks:
    """Checks of criteria against their study; :class:`onelaunch.workbench.study.read._Reader` makes them."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def fail(self, problem: str) -> NoReturn:
        raise StudyError(self.path, problem)

    def _distinct(self, key: str, names: Iterable[str]) -> None:
        if twice := [name for name, times in Counter(names).items() if times > 1]:
            self.fail(f"{key} has {listing(map(repr, twice))} more than once; each name must be its own.")

    def _check_criterion(self, where: str, study: Study, criterion: Criterion) -> None:
        """Check a criterion against the study: its shapes, direction, regimes, measure and selectors."""
        known, named = (
            [*study.groups(), *(shape.name for shape in study.shapes)],
            () if criterion.at is None else members(criterion.at),
        )
        for name in named:
            if name not in known:
                self.fail(f"{where}: at names the unknown shape {name!r}.{did_you_mean(name, known)} Known: {listing(known)}.")
        if not study.shapes_of(criterion):
            self.fail(f"{where}: at is empty; name one shape or more, or leave it out for all full-scale shapes.")
        self._distinct(f"{where}: at", named)
        self._check_direction(where, study, criterion)
        shapes = [asked.name for asked in study.asked(criterion)]
        if criterion.in_at_least is not None and not 1 <= criterion.in_at_least <= len(shapes):
            self.fail(f"{where}: in_at_least is {criterion.in_at_least}; it must lie between 1 and its {len(shapes)} shapes.")
        if criterion.leave_out and criterion.quantity.alone is not None:
            self.fail(f"{where}: leave_out asks whether over can run, and {criterion.measure} has no over; leave it out.")
        if criterion.most_noise is not None:
            self._check_noise(where, criterion, criterion.most_noise)
        if criterion.regime not in study.regimes and not _needs_no_time(criterion):
            self.fail(f"{where}: regime is {criterion.regime!r}, which is not among the study's regimes; add it there.")
        if criterion.over_regime is not None:
            self._check_other_regime(where, study, criterion)
        if criterion.quantity.alone is not None:
            self._check_alone(where, criterion, criterion.quantity.alone)
        if (problem := criterion.quantity.problem(criterion)) is not None:
            self.fail(f"{where}: {problem}.")
        self._check_mean(where, criterion, shapes)
        self._check_other_shape(where, study, criterion)
        self._check_selector(f"{where}: of", study, criterion, criterion.of)
        if criterion.over is not None:
            self._check_selector(f"{where}: over", study, criterion, criterion.over)

    def _check_alone(self, where: str, criterion: Criterion, words: Alone) -> None:
        """Check a criterion whose measure is of ``of`` alone."""
        if criterion.over is not None:
            self.fail(f"{where}: {words.held}; leave over out.")
        if criterion.quantity.better == "lower" and criterion.at_least is not None:
            self.fail(f"{where}: {words.bounded} bounded from above; use at_most.")
        if criterion.quantity.better == "higher" and criterion.at_most is not None:
            self.fail(f"{where}: {words.bounded} bounded from below; use at_least.")

    def _check_direction(self, where: str, study: Study, criterion: Criterion) -> None:
        """Check that the criterion's direction runs at all of its shapes, or each of several at one of them."""
        if criterion.directions:
            self._check_directions(where, study, criterion)
            return
        if criterion.direction not in study.directions:
            self.fail(f"{where}: direction is {criterion.direction!r}, which is not among the study's directions; add it there.")
        held = [*study.shapes_of(criterion), *(shape for shape in study.shapes if shape.name == criterion.over_at)]
        if missing := [shape.name for shape in held if criterion.direction not in study.directions_at(shape)]:
            self.fail(f"{where}: direction is {criterion.direction!r}, which does not run at {listing(missing)}; add it there.")

    def _check_directions(self, where: str, study: Study, criterion: Criterion) -> None:
        """Check ``directions``: each must run at a shape of the criterion, and each value needs a name."""
        self._distinct(f"{where}: directions", criterion.directions)
        if criterion.over_at is not None:
            self.fail(f"{where}: over_at is for one direction; use direction instead of directions.")
        for direction in criterion.directions:
            if direction not in study.directions:
                self.fail(f"{where}: directions has {direction!r}, which is not among the study's directions; add it there.")
            if all(direction not in study.directions_at(shape) for shape in study.shapes_of(criterion)):
                self.fail(f"{where}: directions has {direction!r}, which runs at none of its shapes; leave it out.")
        for _, shape, name in study.asked(criterion):
            if not NAME.fullmatch(name):
                most = 80 - (len(name) - len(shape.name))
                self.fail(f"{where}: the shape's name {shape.name!r} is too long for several directions; {most} characters fit.")

    def _check_noise(self, where: str, criterion: Criterion, most: float) -> None:
        """Check ``most_noise``."""
        if not criterion.quantity.timed:
            self.fail(f"{where}: most_noise is for times, and {criterion.measure} has no noise; leave it out.")
        if most < 1:
            self.fail(f"{where}: most_noise is {most:g}; it is a factor of times, such as 1.05, and so at least 1.")

    def _check_mean(self, where: str, criterion: Criterion, shapes: Sequence[str]) -> None:
        """Check a criterion on the geometric mean."""
        if criterion.combine == "each":
            return
        if criterion.in_at_least is not None:
            self.fail(f"{where}: a geometric mean is taken over all shapes; leave in_at_least or combine out.")
        if no_mean := criterion.quantity.no_mean or (NO_MEAN_OF_COUNTS if criterion.equals is not None else ""):
            self.fail(f"{where}: {no_mean}; leave combine out.")
        if len(shapes) < 2:
            self.fail(f"{where}: a geometric mean needs two shapes or more; leave combine out.")

    def _check_other_shape(self, where: str, study: Study, criterion: Criterion) -> None:
        """Check ``over_at`` and ``per``."""
        if criterion.over_at is None:
            if criterion.per:
                self.fail(f"{where}: per is for times at two shapes; name the other one by over_at, or leave per out.")
            return
        if criterion.measure not in (paired := _measures_of_two_times()):
            self.fail(f"{where}: over_at is for times; leave it out, or use one of {listing(paired)} as the measure.")
        names = [shape.name for shape in study.shapes]
        if criterion.over_at not in names:
            hint = did_you_mean(criterion.over_at, names)
            self.fail(f"{where}: over_at names the unknown shape {criterion.over_at!r}.{hint} Known: {listing(names)}.")
        if any(shape.scale != study.shape(criterion.over_at).scale for shape in study.shapes_of(criterion)):
            self.fail(f"{where}: over_at = {criterion.over_at!r} is of another scale than at, so they never run together.")
        for name in criterion.per:
            for shape in (*study.shapes_of(criterion), study.shape(criterion.over_at)):
                if name not in (known := study.operation_at(shape).dimensions):
                    self.fail(f"{where}: per names no size {name!r}.{did_you_mean(name, known)} Known: {listing(known)}.")

    def _check_other_regime(self, where: str, study: Study, criterion: Criterion) -> None:
        """Check ``over_regime``."""
        if criterion.measure not in (paired := _measures_of_two_times()):
            self.fail(f"{where}: over_regime is for times; leave it out, or use one of {listing(paired)} as the measure.")
        if criterion.over_regime not in study.regimes:
            self.fail(f"{where}: over_regime is {criterion.over_regime!r}, which is not among the study's regimes; add it there.")

    def _check_selector(self, where: str, study: Study, criterion: Criterion, selector: Selector) -> None:
        """Check that a selector stands for a variant or control of the study."""
        taking_part = study.variant_names()
        owners = study.operations()
        if isinstance(selector, str):
            if any(selector in owner.controls for owner in owners) and selector not in taking_part:
                if selector not in study.controls:
                    self.fail(f"{where} is the control {selector!r}, which is not among the study's controls; add it there.")
                if criterion.all_directions != ("forward",):
                    self.fail(f"{where} is the control {selector!r}; controls are timed forward only.")
            elif selector not in taking_part:
                if any(selector in owner.variants for owner in owners):
                    self.fail(f"{where} is {selector!r}, which is not among the study's variants; add it there.")
                known = (*taking_part, *study.controls)
                hint = did_you_mean(selector, known)
                self.fail(f"{where} is {selector!r}, no variant or control.{hint} Known: {listing(known)}.")
            return
        tags = [owner.variants[name].tags for owner in owners for name in taking_part if name in owner.variants]
        known = sorted({key for entry in tags for key in entry})
        for key in selector:
            if key not in known:
                hint = did_you_mean(key, known)
                self.fail(f"{where} asks for the tag {key!r}, which no variant has.{hint} Known: {listing(known)}.")
        if not study.select(selector):
            there = {key: sorted({str(value) for entry in tags for value in members(entry.get(key))}) for key in selector}
            seen = "; ".join(f"{key} is {listing(values)}" for key, values in there.items())
            self.fail(f"{where} = {selector} matches no variant of the study; in their tags {seen}.")


def _needs_no_time(criterion: Criterion) -> bool:
    """Return whether a criterion neither judges times nor chooses variants by them, and names no regime."""
    by_name = all(isinstance(side, str) for side in (criterion.of, criterion.over) if side is not None)
    return by_name and not criterion.quantity.timed and criterion.regime == Criterion.model_fields["regime"].default


def _measures_of_two_times() -> list[str]:
    return [measure.name for measure in measures() if measure.timed and measure.alone is None]
