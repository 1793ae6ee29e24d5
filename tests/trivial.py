"""Trivial outputs, judged by the verification gate: a case at which one of them passes proves nothing about a variant.

Tests of operations and of the gate call :func:`trivial_answers`.
"""

from __future__ import annotations

from onelaunch.workbench.verify.reference import Reference
from onelaunch.workbench.verify.trivial import passing_trivially


def trivial_answers(reference: Reference) -> dict[str, tuple[str, ...]]:
    """Return the trivial outputs that would pass the gate, by component: a test of the case, not of a variant.

    A component is an output or a gradient. Zeros, the correct values shifted by one step, and every input of the right shape are
    tried. A case proves nothing about a component with an entry, so tests of operations assert that the dictionary is empty.

    Args:
        reference: Reference outputs of the case, in one direction, with their tolerances.
    """
    return passing_trivially(reference)
