"""Edge cases of ``projections``, on which studies and tests judge its variants.

A case is written as arguments of ``projections.case``: dtype; sizes (B sequences of T tokens, D columns of x, H heads of K or V
channels); and options. ``segments`` is a known list ("normalized", the default, has q, k, v, a gate and a decay; "gla" has q,
k, v, a gate and log-decays) or the codes of segments, separated by commas: HEADSxSIZE, then :ACTIVATION (or
:logsigmoid/NORMALIZER), then :bias; only the sizes are required. ``gate`` is the activation of the known lists' gate.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from onelaunch.operation import Case, Probe
from onelaunch.operation.probe import elsewhere, mixed_magnitudes, named, transposed
from onelaunch.ops.projections.contract import projections

SMALL = {"B": 2, "T": 9, "D": 40, "H": 3, "K": 20, "V": 12}

CASES: dict[str, dict[str, Any]] = {
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
    "bfloat16": {"dtype": "bfloat16", "B": 2, "T": 65, "D": 72, "H": 2, "K": 24, "V": 40},
    "bfloat16_gla": {"dtype": "bfloat16", "B": 1, "T": 130, "D": 128, "H": 2, "K": 32, "V": 64, "segments": "gla"},
    "odd_columns": {"dtype": "float16", **SMALL, "T": 17, "D": 101},
    "no_tokens": {"dtype": "float32", **SMALL, "T": 0},
    "no_columns": {"dtype": "float32", **SMALL, "D": 0, "segments": "gla"},
}  # fmt: skip
"""Cases by name."""


@projections.probes
def probes() -> Iterator[Case | Probe]:
    """Yield the cases, and calls with transposed inputs, with rows of mixed magnitude, and with a tensor on another device."""
    yield from named(projections.case, CASES)
    yield Probe(projections.case("float32", name="transposed", **SMALL), transposed("x", "weight"))
    yield Probe(projections.case("float16", name="mixed_magnitudes", **SMALL, segments="gla"), mixed_magnitudes("x", 1e-2, 1e1))
    yield Probe(projections.case("float32", name="weight_elsewhere", **SMALL), elsewhere("weight"), refused=True)
