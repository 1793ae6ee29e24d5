"""Cases of ``rms_norm`` shared by its tests.

A case is written as arguments of ``RMS_NORM.case``: dtype; sizes (M rows of D channels); and options. ``residual`` and ``weight``
are of the case's dtype ("same"), "float32" or "none".
"""

from __future__ import annotations

from typing import Any

import torch

from onelaunch.operation import find_operation
from onelaunch.ops.rms_norm import probes
from onelaunch.ops.rms_norm.probes import SMALL
from tests.ops.cases import interpretable, runnable

RMS_NORM = find_operation("rms_norm")

CASES = runnable(RMS_NORM, probes.CASES)
"""Probes of the operation without an empty dimension."""

SHORT = interpretable(CASES)
"""Cases for Triton's interpreter."""

TENSORS = ("x", "weight", "residual")
"""Tensor arguments of the function, in their order."""


def case_of(name: str):
    """Return the case of a name in :data:`CASES`."""
    return RMS_NORM.case(name=name, **CASES[name])


def made(grad: bool = False, seed: int = 0, **given: Any) -> dict[str, Any]:
    """Return random arguments on the CPU: of the small case in float32, changed by ``given``."""
    chosen = {"dtype": "float32", **SMALL, **given}
    reading = RMS_NORM.make_inputs(RMS_NORM.case(**chosen), torch.device("cpu"), seed)
    for name in reading.differentiable if grad else ():
        reading.arguments[name].requires_grad_()
    return reading.arguments
