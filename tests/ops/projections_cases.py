"""Cases of ``projections`` shared by its tests.

A case is written as arguments of ``PROJECTIONS.case``: dtype; sizes (B sequences of T tokens, D columns of x, H heads of K or V
channels); and options. ``segments`` is a known list ("normalized", the default, has q, k, v, a gate and a decay; "gla" has q,
k, v, a gate and log-decays) or their codes, HEADSxSIZE:ACTIVATION:bias. ``gate`` is the activation of the known lists' gate.
"""

from __future__ import annotations

from typing import Any

import torch

from onelaunch.operation import find_operation
from onelaunch.ops import Segment

PROJECTIONS = find_operation("projections")

SMALL = {"B": 2, "T": 9, "D": 40, "H": 3, "K": 20, "V": 12}

SHORT: dict[str, dict[str, Any]] = {
    "one_of_everything": {"dtype": "float32", "B": 1, "T": 1, "D": 1, "H": 1, "K": 1, "V": 1, "segments": "1x1:silu,1x1:sigmoid"},
    "normalized": {"dtype": "float32", **SMALL},
    "normalized_float16": {"dtype": "float16", **SMALL, "K": 24},
    "no_gate": {"dtype": "float16", **SMALL, "gate": "none"},
    "gla": {"dtype": "float32", **SMALL, "segments": "gla"},
    "gla_float16": {"dtype": "float16", **SMALL, "segments": "gla", "gate": "none"},
    "more_rows_than_a_tile": {"dtype": "float16", "B": 3, "T": 23, "D": 24, "H": 2, "K": 16, "V": 16},
    "widths_that_no_tile_divides": {"dtype": "float32", **SMALL, "segments": "5x33:l2norm,1x150:silu,3x77,1x131:logsigmoid:bias"},
    "long_heads": {"dtype": "float32", **SMALL, "T": 5, "segments": "2x300:l2norm,1x512:l2norm,1x512:sigmoid"},
    "heads_of_one_channel": {"dtype": "float32", **SMALL, "segments": "7x1:l2norm:bias,5x1:logsigmoid/0.5,3x1"},
    "biases_of_every_kind": {
        "dtype": "float32", **SMALL,
        "segments": "2x10:l2norm:bias,3x5:bias,4x3,2x7:silu:bias,3x3:sigmoid:bias,2x9:logsigmoid/16:bias",
    },
}  # fmt: skip
"""Cases that are small enough for Triton's interpreter, with dtypes that it rounds as a GPU does."""

LONG: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": "bfloat16", "B": 2, "T": 65, "D": 72, "H": 2, "K": 24, "V": 40},
    "bfloat16_gla": {"dtype": "bfloat16", "B": 1, "T": 130, "D": 128, "H": 2, "K": 32, "V": 64, "segments": "gla"},
    "many_rows": {"dtype": "bfloat16", "B": 4, "T": 250, "D": 256, "H": 4, "K": 64, "V": 64},
}
"""Cases for compiled code and PyTorch."""
CASES = SHORT | LONG


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
