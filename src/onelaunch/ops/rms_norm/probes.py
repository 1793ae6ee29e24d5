"""Edge cases of ``rms_norm``, on which studies and tests judge its variants.

A case is written as arguments of ``rms_norm.case``: dtype; sizes (M rows of D channels); and options. ``residual`` and
``weight`` are of the case's dtype ("same", the default), "float32" or "none".
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from onelaunch.operation import Case, Probe
from onelaunch.operation.probe import elsewhere, mixed_magnitudes, named, transposed
from onelaunch.ops.rms_norm.contract import rms_norm

SMALL = {"M": 9, "D": 40}

CASES: dict[str, dict[str, Any]] = {
    "one_of_everything": {"dtype": "float32", "M": 1, "D": 1, "eps": 1.0},
    "added": {"dtype": "float32", **SMALL},
    "added_float16": {"dtype": "float16", **SMALL},
    "alone": {"dtype": "float32", **SMALL, "residual": "none"},
    "alone_float16": {"dtype": "float16", **SMALL, "residual": "none"},
    "without_weight": {"dtype": "float16", **SMALL, "weight": "none"},
    "bare": {"dtype": "float32", **SMALL, "residual": "none", "weight": "none"},
    "float32_residual": {"dtype": "float16", **SMALL, "residual": "float32"},
    "float32_weight": {"dtype": "float16", **SMALL, "weight": "float32"},
    "float32_beside_float16": {"dtype": "float16", **SMALL, "residual": "float32", "weight": "float32"},
    "large_eps": {"dtype": "float32", **SMALL, "eps": 2.0},
    "no_eps": {"dtype": "float32", **SMALL, "eps": 0.0},
    "one_row": {"dtype": "float16", "M": 1, "D": 1000},
    "rows_that_no_tile_divides": {"dtype": "float16", "M": 77, "D": 96},
    "two_channels": {"dtype": "float32", "M": 70, "D": 2, "eps": 0.1},
    "odd_channels": {"dtype": "float32", "M": 17, "D": 333},
    "long_rows": {"dtype": "float16", "M": 3, "D": 5000},
    "long_rows_of_float32": {"dtype": "float32", "M": 3, "D": 4100},
    "long_rows_and_a_long_residual": {"dtype": "float16", "M": 2, "D": 4100, "residual": "float32"},
    "bfloat16": {"dtype": "bfloat16", "M": 65, "D": 72},
    "bfloat16_float32_residual": {"dtype": "bfloat16", "M": 33, "D": 256, "residual": "float32"},
    "no_rows": {"dtype": "float32", **SMALL, "M": 0},
}
"""Cases by name."""


@rms_norm.probes
def probes() -> Iterator[Case | Probe]:
    """Yield the cases, and calls with transposed inputs, with rows of mixed magnitude, and with a tensor on another device."""
    yield from named(rms_norm.case, CASES)
    yield Probe(rms_norm.case("float32", name="transposed", **SMALL), transposed("x", "residual"))
    yield Probe(rms_norm.case("float16", name="mixed_magnitudes", **SMALL), mixed_magnitudes("x", 1e-2, 1e2))
    yield Probe(rms_norm.case("float32", name="residual_elsewhere", **SMALL), elsewhere("residual"), refused=True)
