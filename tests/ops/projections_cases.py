"""Cases of ``projections`` shared by its tests.

A case is written as arguments of ``PROJECTIONS.case``: dtype; sizes (B sequences of T tokens, D columns of x, H heads of K or V
channels); and options. ``segments`` is a known list ("normalized", the default, has q, k, v, a gate and a decay; "gla" has q,
k, v, a gate and log-decays) or the codes of segments, separated by commas: HEADSxSIZE, then :ACTIVATION (or
:logsigmoid/NORMALIZER), then :bias; only the sizes are required. ``gate`` is the activation of the known lists' gate.
"""

from __future__ import annotations

from typing import Any

import torch

from onelaunch.operation import find_operation
from onelaunch.ops import Segment
from onelaunch.ops.projections import probes
from onelaunch.ops.projections.probes import SMALL
from tests.ops.cases import interpretable, runnable

PROJECTIONS = find_operation("projections")

PROBES = runnable(PROJECTIONS, probes.CASES)
"""Probes of the operation without an empty dimension."""

SHORT = interpretable(PROBES)
"""Cases for Triton's interpreter."""

LONG: dict[str, dict[str, Any]] = {
    "many_rows": {"dtype": "bfloat16", "B": 4, "T": 250, "D": 256, "H": 4, "K": 64, "V": 64},
}
"""Cases that take too long for probes."""
CASES = PROBES | LONG


def case_of(name: str):
    """Return the case of a name in :data:`CASES`."""
    return PROJECTIONS.case(name=name, **CASES[name])


def made(grad: bool = False, seed: int = 0, **given: Any) -> dict[str, Any]:
    """Return random arguments on the CPU: of the small case in float32, changed by ``given``."""
    reading = PROJECTIONS.make_inputs(PROJECTIONS.case(**{"dtype": "float32", **SMALL, **given}), torch.device("cpu"), seed)
    for name in reading.differentiable if grad else ():
        reading.arguments[name].requires_grad_()
    return reading.arguments


EVERY = (
    Segment("q", 2, 10, "l2norm"),
    Segment("k", 3, 5, bias=True),
    Segment("gate", 2, 7, "silu", bias=True),
    Segment("decay", 3, 1, "sigmoid"),
    Segment("gk", 2, 9, "logsigmoid", normalizer=16.0, bias=True),
)
"""One segment with every activation, none with a width that is a multiple of 8. Their widths are 20, 15, 14, 3 and 18."""


def of_every_kind(inner: int = 12, lead: tuple[int, ...] = (2, 5), grad: bool = False) -> dict[str, Any]:
    """Return arguments with the segments :data:`EVERY`: float32 on the CPU, with ``x`` of shape ``[*lead, inner]``."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"x": (*lead, inner), "weight": (sum(each.width for each in EVERY), inner), "bias": (15 + 14 + 18,)}  # k, gate, gk
    tensors = {name: torch.randn(shape, generator=generator).requires_grad_(grad) for name, shape in shapes.items()}
    return {**tensors, "segments": EVERY}
