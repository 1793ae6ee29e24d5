"""Edge cases of ``output_chain``, on which studies and tests judge its variants.

A case is written as arguments of ``output_chain.case``: dtype; sizes (B sequences of T tokens, H heads of V channels, D columns
of the result); and options. ``gate`` is "silu" (the default: the call applies SiLU), "activated" (the caller did) or "none".
``norm_weight`` is of the case's dtype ("same"), "float32" or "none".
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from onelaunch.operation import Case, Probe
from onelaunch.operation.probe import elsewhere, mixed_magnitudes, named, transposed
from onelaunch.ops.output_chain.contract import output_chain

SMALL = {"B": 2, "T": 9, "H": 3, "V": 20, "D": 40}

CASES: dict[str, dict[str, Any]] = {
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
    "bfloat16": {"dtype": "bfloat16", "B": 2, "T": 65, "H": 2, "V": 40, "D": 72},
    "bfloat16_activated": {"dtype": "bfloat16", "B": 1, "T": 130, "H": 4, "V": 64, "D": 256, "gate": "activated", "bias": True},
    "odd_sizes": {"dtype": "float16", "B": 1, "T": 17, "H": 3, "V": 33, "D": 101, "bias": True},
    "no_tokens": {"dtype": "float32", **SMALL, "T": 0},
}
"""Cases by name."""


@output_chain.probes
def probes() -> Iterator[Case | Probe]:
    """Yield the cases, and calls with transposed inputs, with heads of mixed magnitude, and with a tensor on another device."""
    yield from named(output_chain.case, CASES)
    yield Probe(output_chain.case("float32", name="transposed", **SMALL), transposed("h", "gate", "w_out"))
    yield Probe(output_chain.case("float16", name="mixed_magnitudes", **SMALL), mixed_magnitudes("h", 1e-2, 1e2))
    yield Probe(output_chain.case("float32", name="w_out_elsewhere", **SMALL), elsewhere("w_out"), refused=True)
