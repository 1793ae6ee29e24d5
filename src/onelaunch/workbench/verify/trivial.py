"""Trivial outputs, judged like a variant's: a case at which one of them passes tells nothing about a variant.

``measure/timing.py`` calls :func:`trivial_passes` for each case, and tests of cases call :func:`passing_trivially` through
``tests/trivial.py``.
"""

from __future__ import annotations

import torch

from onelaunch.workbench.verify.bounds import time_axis
from onelaunch.workbench.verify.reference import Reference


def trivial_passes(reference: Reference) -> tuple[str, ...]:
    """Return a sentence for each output or gradient of a case that a trivial result passes; none if the case tells something.

    No variant runs. The sentences are notes of the case: a variant that passes it may have computed nothing.

    Args:
        reference: Reference outputs of the case, in one direction, with their tolerances.
    """
    return tuple(
        f"This case tells nothing about {name}: {' and '.join(_WORDS.get(said, f'the {said}') for said in passed)} would pass."
        for name, passed in passing_trivially(reference).items()
    )


_WORDS = {"zeros": "zeros", "shifted": "the correct values shifted by one step"}


def passing_trivially(reference: Reference) -> dict[str, tuple[str, ...]]:
    """Return the trivial results that would pass, by output or gradient.

    ``zeros``, the correct values ``shifted`` by one step (by one element without a sequence), and every input of the right shape
    (``input NAME``) are tried.
    """
    passing: dict[str, tuple[str, ...]] = {}
    for name, expected in reference.expected.items():
        if expected is None or not expected.numel():
            continue
        axis = time_axis(expected, reference.case.sizes.get("T", 0))
        tries = {"zeros": torch.zeros_like(expected), "shifted": expected.roll(1) if axis is None else expected.roll(1, axis)}
        for argument, value in reference.inputs.arguments.items():
            if isinstance(value, torch.Tensor) and value.shape == expected.shape:
                tries[f"input {argument}"] = value.detach()
        dtype = reference.dtypes.get(name, reference.case.dtype)
        # Only this component is compared, so that no other can fail.
        alone = reference.only(name)
        if passed := tuple(said for said, value in tries.items() if not alone.compare({name: value.to(dtype)})[1]):
            passing[name] = passed
    return passing
