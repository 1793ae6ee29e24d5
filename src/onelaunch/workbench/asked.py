"""Cases and variants at which the criteria of a study ask for counts, and cases at which they ask for times in a regime.

``running.py`` calls these functions before it times a case, counts DRAM bytes, launches and barriers, or takes host times.

A criterion reads a value of ``of``, or compares ``of`` with ``over`` (by default the baseline). Each is the name of a variant or
control, or tags that stand for the fastest variant with them. ``count`` is an option of a run: ``"all"`` counts at every case,
true where criteria ask for bytes, false nowhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from onelaunch.operation import Direction, Operation
from onelaunch.workbench.study import Regime, Study, measures


def cases_to_count(study: Study, count: bool | Literal["all"]) -> frozenset[tuple[str, Direction]]:
    """Return the cases at which DRAM bytes are counted."""
    if count == "all":
        return frozenset((shape.name, direction) for shape in study.shapes for direction in study.directions_at(shape))
    return cases_of(study, measures_of_bytes()) if count else frozenset()


def measures_of_bytes() -> list[str]:
    """Return the names of the measures that need DRAM bytes."""
    return [measure.name for measure in measures() if measure.needs_dram_bytes]


def cases_of(study: Study, names: Sequence[str]) -> frozenset[tuple[str, Direction]]:
    """Return the cases at which criteria ask for these measures."""
    asked = [criterion for criterion in study.criteria if criterion.measure in names]
    pairs = [pair for criterion in asked for pair in study.asked(criterion)]
    return frozenset((pair.shape.name, pair.criterion.direction) for pair in pairs)


def cases_in(study: Study, regime: Regime) -> frozenset[tuple[str, Direction]]:
    """Return the cases at which a criterion reads times in this regime, of ``of`` or of ``over``.

    Both sides count in either regime, because the noise of a comparison is the largest at its shapes and in its regimes. Criteria
    on other measures than times count too: theirs may select the variant that is the fastest in the regime.
    """
    pairs = [pair for criterion in study.criteria for pair in study.asked(criterion)]
    return frozenset(
        (shape.name, pair.criterion.direction)
        for pair in pairs
        if regime in (pair.criterion.regime, pair.criterion.over_regime)
        for _, shape in study.sides(pair.criterion, pair.shape)
    )


def named_for(study: Study, names: Sequence[str]) -> set[str]:
    """Return the variants and controls that criteria with these measures select."""
    asked = [criterion for criterion in study.criteria if criterion.measure in names]
    sides = [side for criterion in asked for shape in study.shapes_of(criterion) for side in study.sides(criterion, shape)]
    return {name for selector, where in sides for name in study.select(selector, where)}


def aa_variants(study: Study, operation: Operation[..., Any], device_type: str, variants: Sequence[str]) -> tuple[str, ...]:
    """Return the variants that may give the A/A noise of a case, in the order in which they are tried.

    The study's baseline comes first, then the dispatcher's defaults on this type of device, then the others of ``variants``.
    """
    preferred = (study.baseline, *operation.defaults.get(device_type, ()), *variants)
    return tuple(name for name in dict.fromkeys(preferred) if name in variants)
