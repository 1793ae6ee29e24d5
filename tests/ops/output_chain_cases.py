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

OUTPUT_CHAIN = find_operation("output_chain")

SMALL = {"B": 2, "T": 9, "H": 3, "V": 20, "D": 40}

SHORT: dict[str, dict[str, Any]] = {
    "one_of_everything": {"dtype": "float32", "B": 1, "T": 1, "H": 1, "V": 1, "D": 1, "bias": True, "eps": 1.0},
    "gated": {"dtype": "float32", **SMALL},
    "gated_float16": {"dtype": "float16", **SMALL, "V": 24},
    "activated": {"dtype": "float32", **SMALL, "gate": "activated", "bias": True},
    "activated_float16": {"dtype": "float16", **SMALL, "gate": "activated", "norm_weight": "none"},
    "no_gate": {"dtype": "float16", **SMALL, "gate": "none"},
    "bare": {"dtype": "float32", **SMALL, "gate": "none", "norm_weight": "none"},
    "float32_weight_beside_float16": {"dtype": "float16", **SMALL, "norm_weight": "float32", "bias": True},
    "large_eps": {"dtype": "float32", **SMALL, "eps": 2.0},
    "no_eps": {"dtype": "float32", **SMALL, "eps": 0.0},
    "rows_that_no_tile_divides": {"dtype": "float16", "B": 3, "T": 47, "H": 2, "V": 64, "D": 150},
    "heads_of_two_channels": {"dtype": "float32", "B": 1, "T": 40, "H": 7, "V": 2, "D": 33},
    "long_heads": {"dtype": "float32", "B": 1, "T": 5, "H": 2, "V": 256, "D": 40},
    "long_uneven_heads": {"dtype": "float16", "B": 1, "T": 35, "H": 2, "V": 200, "D": 24},
}
"""Cases that are small enough for Triton's interpreter, with dtypes that it rounds as a GPU does."""

LONG: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": "bfloat16", "B": 2, "T": 65, "H": 2, "V": 40, "D": 72},
    "bfloat16_activated": {"dtype": "bfloat16", "B": 1, "T": 130, "H": 4, "V": 64, "D": 256, "gate": "activated", "bias": True},
    "many_rows": {"dtype": "bfloat16", "B": 4, "T": 250, "H": 4, "V": 128, "D": 256, "norm_weight": "float32"},
}
"""Cases for compiled code and PyTorch."""
CASES = SHORT | LONG

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
