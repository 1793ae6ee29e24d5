"""Cases of ``swiglu`` shared by its tests.

A case is written as arguments of ``SWIGLU.case``: dtype of the result and of plain operands; sizes (M rows of x with K
channels, N columns of the result); and options. ``format`` is that of the operands, by default plain tensors ("dense");
"nvfp4_weights" has plain x. ``codes`` "full" draws from all codes and scales of NVFP4 but NaN.
"""

from __future__ import annotations

from typing import Any

import torch

from onelaunch.operation import find_operation
from onelaunch.ops.swiglu import probes
from tests.ops.cases import runnable

SWIGLU = find_operation("swiglu")

DENSE = runnable(SWIGLU, probes.DENSE)
QUANTIZED = runnable(SWIGLU, probes.QUANTIZED)
CASES = DENSE | QUANTIZED
"""Cases of ``probes.py`` without an empty dimension."""

LARGE: dict[str, dict[str, Any]] = {
    "many_rows": {"dtype": "bfloat16", "M": 500, "N": 1000, "K": 1032},
    "many_rows_float16": {"dtype": "float16", "M": 384, "N": 512, "K": 1024, "stacked": True},
    "many_rows_float32": {"dtype": "float32", "M": 300, "N": 200, "K": 500},
    "many_rows_fp8": {"dtype": "bfloat16", "M": 500, "N": 1008, "K": 1040, "format": "fp8"},
    "many_rows_nvfp4_weights": {"dtype": "bfloat16", "M": 200, "N": 1000, "K": 1040, "format": "nvfp4_weights"},
    "many_rows_nvfp4": {"dtype": "float16", "M": 200, "N": 1000, "K": 1040, "format": "nvfp4", "swizzled_scales": True},
}
"""Additional cases for a GPU, with more rows, so that tiles of every size are used."""


def case_of(name: str):
    """Return the case of a name in :data:`CASES`."""
    return SWIGLU.case(name=name, **CASES[name])


def made(grad: bool = False, **given: Any) -> dict[str, Any]:
    """Return random arguments on the CPU: of a small case in float32, changed by ``given``."""
    chosen = {"dtype": "float32", "M": 6, "N": 16, "K": 32, **given}
    reading = SWIGLU.make_inputs(SWIGLU.case(**chosen), torch.device("cpu"), 0)
    for name in reading.differentiable if grad else ():
        reading.arguments[name].requires_grad_()
    return reading.arguments
