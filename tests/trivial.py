"""Trivial outputs, judged by the verification gate: a case at which one of them passes proves nothing about a variant."""

from __future__ import annotations

import torch

from onelaunch.workbench.verify.reference import Reference


def trivial_answers(reference: Reference) -> dict[str, tuple[str, ...]]:
    """Return the trivial outputs that would pass the gate, by component: a test of the case, not of a variant.

    A component is an output or a gradient. Zeros, the correct values shifted by one, and every input of the right shape are
    tried. A case proves nothing about a component with an entry, so callers assert that the dictionary is empty.

    Args:
        reference: Reference outputs of the case, in one direction, with their tolerances.
    """
    passing: dict[str, tuple[str, ...]] = {}
    for name, expected in reference.expected.items():
        if expected is None:
            continue
        tries = {"zeros": torch.zeros_like(expected), "shifted": expected.roll(1)}
        for argument, value in reference.inputs.arguments.items():
            if isinstance(value, torch.Tensor) and value.shape == expected.shape:
                tries[f"input {argument}"] = value.detach()
        dtype = reference.dtypes.get(name, reference.case.dtype)
        # All other components are correct, so that only this one can fail.
        outputs = {said: reference.expected | {name: value.to(dtype)} for said, value in tries.items()}
        all_errors = (reference.compare(each)[0] for each in outputs.values())
        verdicts = [next(error for error in errors if error.name == name) for errors in all_errors]
        if passed := tuple(said for said, error in zip(outputs, verdicts, strict=True) if error.error <= error.allowed):
            passing[name] = passed
    return passing
