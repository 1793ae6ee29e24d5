"""Edge cases of ``gla``, on which studies and tests judge its variants.

A case is written as arguments of ``gla.case``: dtype; sizes (B sequences of T steps, H heads of K key and V value channels); and
options. ``decay`` names the kind of random log-decays, see :data:`onelaunch.operation.inputs.DECAYS`; ``forget`` sets a quarter
of the steps to -inf. ``lengths`` packs sequences of these lengths into one row of T steps. ``initial_state`` and ``final_state``
say whether a call is given the one and returns the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from onelaunch.operation import Case, Probe
from onelaunch.operation.probe import elsewhere, mixed_magnitudes, named, transposed
from onelaunch.ops.gla.contract import gla

STATES: dict[str, Any] = {"initial_state": True, "final_state": True}
NO_STATES: dict[str, Any] = {"initial_state": False, "final_state": False}

CASES: dict[str, dict[str, Any]] = {
    "one_step": {"dtype": "float32", "B": 1, "T": 1, "H": 1, "K": 16, "V": 16, **STATES},
    "one_step_of_many": {"dtype": "float16", "B": 3, "T": 1, "H": 2, "K": 40, "V": 24, "log_decay_dtype": "float32", **STATES},
    "shorter_than_a_tile": {
        "dtype": "float16", "B": 2, "T": 7, "H": 2, "K": 24, "V": 20, "log_decay_dtype": "float32", **STATES,
    },
    "exactly_a_chunk": {"dtype": "float32", "B": 1, "T": 64, "H": 1, "K": 40, "V": 80, "decay": "mixed", **STATES},
    "one_step_over_a_chunk": {"dtype": "float16", "B": 2, "T": 65, "H": 3, "K": 16, "V": 33, "decay": "weak", **STATES},
    "three_chunks": {"dtype": "float32", "B": 1, "T": 150, "H": 2, "K": 24, "V": 20, "decay": "strong", **NO_STATES},
    "forgets_at_some_steps": {
        "dtype": "float16", "B": 1, "T": 65, "H": 2, "K": 32, "V": 20, "decay": "forget", "initial_state": True,
        "final_state": False,
    },
    "forgets_nothing": {
        "dtype": "float32", "B": 1, "T": 100, "H": 1, "K": 16, "V": 16, "decay": "zero", "initial_state": False,
        "final_state": True,
    },
    "values_first": {"dtype": "float32", "B": 2, "T": 40, "H": 2, "K": 16, "V": 24, "state_v_first": True, **STATES},
    "negative_scale": {"dtype": "float32", "B": 1, "T": 30, "H": 2, "K": 16, "V": 16, "scale": -0.7, **STATES},
    "decay_per_head": {"dtype": "float16", "B": 2, "T": 70, "H": 3, "K": 24, "V": 20, "decay_per": "head", **STATES},
    "mixed_decay_per_head": {
        "dtype": "float32", "B": 1, "T": 130, "H": 4, "K": 16, "V": 16, "decay_per": "head", "decay": "mixed", **STATES,
    },
    "value_gate": {
        "dtype": "float16", "B": 1, "T": 70, "H": 2, "K": 24, "V": 20, "value_gate": True, "decay": "mixed",
        "log_decay_dtype": "float32", **STATES,
    },
    "value_gate_and_decay_per_head": {
        "dtype": "float32", "B": 2, "T": 66, "H": 2, "K": 16, "V": 24, "value_gate": True, "decay_per": "head",
        "decay": "strong", **STATES,
    },
    "packed_with_empty_sequences": {
        "dtype": "float32", "B": 1, "T": 130, "H": 2, "K": 24, "V": 20, "decay": "mixed", "lengths": (0, 50, 0, 0, 79, 1, 0),
        **STATES,
    },
    "packed_one_sequence": {"dtype": "float16", "B": 1, "T": 40, "H": 2, "K": 24, "V": 20, "lengths": (40,), **NO_STATES},
    "packed_many_short": {
        "dtype": "float16", "B": 1, "T": 70, "H": 2, "K": 24, "V": 16, "decay": "weak", "lengths": (1,) * 30 + (2,) * 20,
        "initial_state": True, "final_state": False,
    },
    "packed_final_state_alone": {
        "dtype": "float32", "B": 1, "T": 66, "H": 2, "K": 16, "V": 20, "lengths": (0, 64, 2), "initial_state": False,
        "final_state": True,
    },
    "packed_decay_per_head_values_first": {
        "dtype": "float16", "B": 1, "T": 90, "H": 2, "K": 16, "V": 24, "decay_per": "head", "decay": "forget",
        "lengths": (3, 0, 65, 22), "state_v_first": True, **STATES,
    },
    "packed_value_gate": {
        "dtype": "float32", "B": 1, "T": 80, "H": 1, "K": 16, "V": 16, "value_gate": True, "lengths": (70, 0, 10), **STATES,
    },
    "bfloat16": {"dtype": "bfloat16", "B": 2, "T": 65, "H": 2, "K": 24, "V": 20, **STATES},
    "bfloat16_packed": {"dtype": "bfloat16", "B": 1, "T": 130, "H": 2, "K": 24, "V": 20, "lengths": (0, 0, 64, 65, 1), **STATES},
    "odd_heads_in_bfloat16": {
        "dtype": "bfloat16", "B": 1, "T": 67, "H": 1, "K": 33, "V": 17, "decay": "mixed", "log_decay_dtype": "float32", **STATES,
    },
    "padded_heads_in_bfloat16": {"dtype": "bfloat16", "B": 1, "T": 70, "H": 2, "K": 48, "V": 80, **STATES},
    "over_256_steps": {"dtype": "float32", "B": 1, "T": 260, "H": 1, "K": 16, "V": 16, "decay": "mixed", **STATES},
    "no_steps": {"dtype": "float32", "B": 2, "T": 0, "H": 2, "K": 16, "V": 20, **STATES},
    "no_sequences": {"dtype": "float16", "B": 0, "T": 7, "H": 2, "K": 16, "V": 20, **STATES},
}  # fmt: skip
"""Cases by name. A chunk of the kernels has 64 steps."""


@gla.probes
def probes() -> Iterator[Case | Probe]:
    """Yield the cases, and calls with transposed inputs, with heads of mixed magnitude, and with a tensor on another device."""
    yield from named(gla.case, CASES)
    small: dict[str, Any] = {"B": 2, "T": 70, "H": 2, "K": 16, "V": 20}
    yield Probe(
        gla.case("float32", name="transposed", initial_state=True, **small), transposed("q", "k", "v", "g", "initial_state")
    )
    yield Probe(gla.case("float16", name="mixed_magnitudes", **small), mixed_magnitudes("v", 1e-2, 1e2))
    yield Probe(gla.case("float32", name="v_elsewhere", **small), elsewhere("v"), refused=True)
