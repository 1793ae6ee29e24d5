"""Edge cases of ``gla_layer``, on which studies and tests judge its variants.

A case is written as arguments of ``gla_layer.case``: dtype; sizes (B sequences of T steps, D columns of x, H heads of K key and
V value channels); and options, such as ``rank``, the inner width of the low-rank projection that makes the log-decays,
``decay_per``, and ``conv_size``, the steps of the short convolutions.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from onelaunch.operation import Case, Probe
from onelaunch.operation.probe import elsewhere, named, transposed
from onelaunch.ops.gla_layer.contract import gla_layer

SMALL = {"B": 2, "T": 9, "D": 40, "H": 2, "K": 16, "V": 20}
STATES = {"initial_state": True, "final_state": True}

CASES: dict[str, dict[str, Any]] = {
    "small": {"dtype": "float32", **SMALL},
    "a_step": {"dtype": "float32", **SMALL, "T": 1, **STATES},
    "chunks_and_states": {"dtype": "float32", **SMALL, "T": 70, **STATES},
    "final_state_alone": {"dtype": "float16", **SMALL, "K": 24, "final_state": True, "norm_weight": "float32"},
    "other_numbers": {"dtype": "float32", **SMALL, "rank": 5, "normalizer": 3.0, "eps": 0.5, "initial_state": True},
    "bfloat16": {"dtype": "bfloat16", "B": 1, "T": 130, "D": 128, "H": 2, "K": 64, "V": 64, **STATES},
    "over_256_steps": {"dtype": "float32", **SMALL, "B": 1, "T": 300, **STATES},
    "one_decay_per_head": {"dtype": "float32", **SMALL, "T": 70, "decay_per": "head", "normalizer": 3.0, **STATES},
    # 16 heads here and in convolutions_bfloat16, since the gradient of the bias has one number per head: two would have errors by
    # chance, in PyTorch's form too.
    "one_decay_per_head_float16": {
        "dtype": "float16",
        **SMALL,
        "T": 33,
        "H": 16,
        "decay_per": "head",
        "norm_weight": "float32",
    },
    "convolutions": {"dtype": "float32", **SMALL, "T": 70, "decay_per": "head", "conv_size": 4},
    "convolutions_longer_than_a_sequence": {"dtype": "float16", **SMALL, "T": 3, "conv_size": 5},
    "convolutions_bfloat16": {
        "dtype": "bfloat16",
        "B": 1,
        "T": 130,
        "D": 128,
        "H": 16,
        "K": 64,
        "V": 64,
        "decay_per": "head",
        "conv_size": 4,
    },
    # Rows B T as in decoding, at sizes that the variant of one launch has kernels for.
    "a_row_bfloat16": {"dtype": "bfloat16", "B": 1, "T": 1, "D": 64, "H": 1, "K": 32, "V": 32},
    "steps_bfloat16": {"dtype": "bfloat16", "B": 3, "T": 1, "D": 128, "H": 2, "K": 64, "V": 64, "rank": 5, **STATES},
    "few_steps_bfloat16": {"dtype": "bfloat16", "B": 2, "T": 5, "D": 192, "H": 3, "K": 128, "V": 64, "final_state": True},
    "rows_per_head_bfloat16": {
        "dtype": "bfloat16",
        "B": 9,
        "T": 1,
        "D": 128,
        "H": 16,
        "K": 64,
        "V": 64,
        "decay_per": "head",
        "norm_weight": "float32",
        **STATES,
    },
    "odd_sizes": {"dtype": "float32", "B": 1, "T": 33, "D": 37, "H": 3, "K": 17, "V": 19, **STATES},
    "no_steps": {"dtype": "float32", **SMALL, "T": 0, **STATES},
}
"""Cases by name."""


@gla_layer.probes
def probes() -> Iterator[Case | Probe]:
    """Yield the cases, and calls with transposed inputs and with a tensor on another device."""
    yield from named(gla_layer.case, CASES)
    yield Probe(gla_layer.case("float32", name="transposed", **SMALL), transposed("x", "in_proj_weight", "gk_weight", "w_out"))
    yield Probe(gla_layer.case("float32", name="w_out_elsewhere", **SMALL), elsewhere("w_out"), refused=True)
