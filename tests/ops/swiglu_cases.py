"""Cases of ``swiglu`` shared by its tests.

A case is written as arguments of ``SWIGLU.case``: dtype of the result and of plain operands; sizes (M rows of x with K
channels, N columns of the result); and options. ``format`` is that of the operands, by default plain tensors ("dense");
"nvfp4_weights" has plain x. ``codes`` "full" draws from all codes and scales of NVFP4 but NaN.
"""

from __future__ import annotations

from typing import Any

import torch

from onelaunch.operation import find_operation

SWIGLU = find_operation("swiglu")

DENSE: dict[str, dict[str, Any]] = {  # plain tensors, which alone take gradients
    "one_row": {"dtype": "bfloat16", "M": 1, "N": 48, "K": 64},
    "one_of_everything": {"dtype": "float32", "M": 1, "N": 1, "K": 1},
    "odd_sizes": {"dtype": "float16", "M": 37, "N": 19, "K": 101},
    "float32": {"dtype": "float32", "M": 70, "N": 33, "K": 130},
    "stacked": {"dtype": "bfloat16", "M": 65, "N": 24, "K": 72, "stacked": True},
    "long_sums": {"dtype": "bfloat16", "M": 4, "N": 8, "K": 4096},
}
QUANTIZED: dict[str, dict[str, Any]] = {
    "fp8": {"dtype": "bfloat16", "M": 20, "N": 48, "K": 64, "format": "fp8"},
    "fp8_rows": {"dtype": "float16", "M": 33, "N": 16, "K": 80, "format": "fp8", "row_scales": True},
    "fp8_rows_bfloat16": {"dtype": "bfloat16", "M": 33, "N": 16, "K": 80, "format": "fp8", "row_scales": True},
    "fp8_stacked_to_float32": {
        "dtype": "float32", "M": 3, "N": 32, "K": 48, "format": "fp8", "stacked": True, "row_scales": True,
    },
    "nvfp4_weights": {"dtype": "bfloat16", "M": 17, "N": 40, "K": 128, "format": "nvfp4_weights"},
    "nvfp4_weights_float16": {"dtype": "float16", "M": 1, "N": 40, "K": 64, "format": "nvfp4_weights", "stacked": True},
    "every_code_in_weights": {"dtype": "bfloat16", "M": 9, "N": 64, "K": 256, "format": "nvfp4_weights", "codes": "full"},
    "nvfp4": {"dtype": "float16", "M": 20, "N": 48, "K": 96, "format": "nvfp4"},
    "nvfp4_swizzled": {"dtype": "float16", "M": 130, "N": 24, "K": 80, "format": "nvfp4", "swizzled_scales": True},
    "every_code": {"dtype": "float16", "M": 40, "N": 64, "K": 256, "format": "nvfp4", "codes": "full", "swizzled_scales": True},
    "nvfp4_to_float32": {"dtype": "float32", "M": 5, "N": 16, "K": 512, "format": "nvfp4"},
}  # fmt: skip
CASES = DENSE | QUANTIZED

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
