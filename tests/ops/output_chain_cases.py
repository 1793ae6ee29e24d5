"""Cases of ``output_chain`` shared by its tests.

A case is written as arguments of ``OUTPUT_CHAIN.case``: dtype; sizes (B sequences of T tokens, H heads of V channels, D columns
of the result); and options. ``gate`` is "silu" (the default: the call applies SiLU), "activated" (the caller did) or "none".
``norm_weight`` is of the case's dtype ("same"), "float32" or "none".
"""

from __future__ import annotations

from typing import Any

import torch

from onelaunch.operation import find_operation
from onelaunch.ops import Segment, projections
from onelaunch.ops.output_chain import probes
from onelaunch.ops.output_chain.probes import SMALL
from tests.ops.cases import interpretable, runnable

OUTPUT_CHAIN = find_operation("output_chain")

PROBES = runnable(OUTPUT_CHAIN, probes.CASES)
"""Probes of the operation without an empty dimension."""

SHORT = interpretable(PROBES)
"""Cases for Triton's interpreter."""

LONG: dict[str, dict[str, Any]] = {
    "many_rows": {"dtype": "bfloat16", "B": 4, "T": 250, "H": 4, "V": 128, "D": 256, "norm_weight": "float32"},
}
"""Cases that take too long for probes."""
CASES = PROBES | LONG

TENSORS = ("h", "gate", "norm_weight", "w_out", "bias")
"""Tensor arguments of the function, in their order."""


def case_of(name: str):
    """Return the case of a name in :data:`CASES`."""
    return OUTPUT_CHAIN.case(name=name, **CASES[name])


def made(grad: bool = False, seed: int = 0, **given: Any) -> dict[str, Any]:
    """Return random arguments on the CPU: of the small case in float32 with a bias, changed by ``given``."""
    chosen = {"dtype": "float32", **SMALL, "bias": True, **given}
    reading = OUTPUT_CHAIN.make_inputs(OUTPUT_CHAIN.case(**chosen), torch.device("cpu"), seed)
    for name in reading.differentiable if grad else ():
        reading.arguments[name].requires_grad_()
    return reading.arguments


def flat(given: dict[str, Any], lead: tuple[int, ...]) -> dict[str, Any]:
    """Return the arguments with ``h`` and the gate reshaped to the leading dimensions ``lead``, in place of B and T."""
    shape = (*lead, *given["h"].shape[-2:])
    return {**given, "h": given["h"].reshape(shape), "gate": given["gate"].reshape(shape)}


def packed_gate(dtype: torch.dtype = torch.float32, activated: bool = False, variant: str = "auto") -> torch.Tensor:
    """Return a gate ``[2, 9, 3, 20]`` made by ``projections``, which packs it between other segments in the rows of one result.

    ``variant`` is that of ``projections``.
    """
    activation = "silu" if activated else "none"
    segments = (Segment("v", 3, 7), Segment("gate", 3, 20, activation), Segment("decay", 3, 1, "sigmoid"))
    generator = torch.Generator().manual_seed(5)
    x, weight = (torch.randn(shape, generator=generator).to(dtype) for shape in ((2, 9, 12), (84, 12)))
    return projections(x, weight, segments, variant=variant)[1]
