"""Edge cases of ``swiglu``, on which studies and tests judge its variants.

A case is written as arguments of ``swiglu.case``: dtype of the result and of plain operands; sizes (M rows of x with K channels,
N columns of the result); and options. ``format`` is that of the operands, by default plain tensors ("dense"); "nvfp4_weights"
has plain x. ``codes`` "full" draws from all codes and scales of NVFP4 but NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from onelaunch.operation import Case, Probe
from onelaunch.operation.probe import elsewhere, mixed_magnitudes, named, transposed
from onelaunch.ops.swiglu.contract import swiglu

DENSE: dict[str, dict[str, Any]] = {
    "one_row": {"dtype": "bfloat16", "M": 1, "N": 48, "K": 64},
    "one_of_everything": {"dtype": "float32", "M": 1, "N": 1, "K": 1},
    "odd_sizes": {"dtype": "float16", "M": 37, "N": 19, "K": 101},
    "float32": {"dtype": "float32", "M": 70, "N": 33, "K": 130},
    "stacked": {"dtype": "bfloat16", "M": 65, "N": 24, "K": 72, "stacked": True},
    "long_sums": {"dtype": "bfloat16", "M": 4, "N": 8, "K": 4096},
    "no_rows": {"dtype": "float32", "M": 0, "N": 33, "K": 64},
    "no_channels": {"dtype": "float32", "M": 5, "N": 8, "K": 0},
}
"""Cases of plain tensors by name. They take gradients, which those of :data:`QUANTIZED` do not."""

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
"""Cases of quantized operands by name."""

CASES = DENSE | QUANTIZED


@swiglu.probes
def probes() -> Iterator[Case | Probe]:
    """Yield the cases, and calls with transposed inputs, with rows of mixed magnitude, and with a tensor on another device."""
    yield from named(swiglu.case, CASES)
    small = {"M": 6, "N": 16, "K": 32}
    yield Probe(swiglu.case("float32", name="transposed", **small), transposed("x", "w_gate", "w_up"))
    yield Probe(swiglu.case("float16", name="mixed_magnitudes", **small), mixed_magnitudes("x", 1e-2, 1e1))
    yield Probe(swiglu.case("float32", name="w_up_elsewhere", **small), elsewhere("w_up"), refused=True)
