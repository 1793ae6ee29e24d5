"""Edge cases of ``gated_scan``, on which studies and tests judge its variants.

Those of ``linear_rnn`` add its columns of x.

A case is written as arguments of ``gated_scan.case``: dtype; sizes (B sequences of T steps, V channels); and options. ``decay``
names the kind of random log-decays, see :data:`onelaunch.operation.inputs.DECAYS`. ``lengths`` packs sequences of these lengths
into one row of T steps. ``initial_state`` and ``final_state`` say whether a call is given the one and returns the other;
``gate`` whether it has a gate.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from onelaunch.operation import Case, Probe
from onelaunch.operation.probe import elsewhere, mixed_magnitudes, named, transposed
from onelaunch.ops.gated_scan.contract import gated_scan

STATES: dict[str, Any] = {"initial_state": True, "final_state": True}
NO_STATES: dict[str, Any] = {"initial_state": False, "final_state": False}

CASES: dict[str, dict[str, Any]] = {
    "one_step_one_channel": {"dtype": "float32", "B": 1, "T": 1, "V": 1, **STATES},
    "shorter_than_a_tile": {"dtype": "float16", "B": 2, "T": 7, "V": 20, "log_decay_dtype": "float32", **STATES},
    "exactly_a_tile": {"dtype": "float32", "B": 1, "T": 64, "V": 80, "decay": "mixed", **STATES},
    "one_step_over_a_tile": {"dtype": "float16", "B": 3, "T": 65, "V": 20, "decay": "weak", **STATES},
    "three_tiles": {"dtype": "float32", "B": 1, "T": 150, "V": 20, "decay": "strong", **NO_STATES},
    "forgets_everything": {
        "dtype": "float16", "B": 1, "T": 65, "V": 20, "decay": "forget", "initial_state": True, "final_state": False,
    },
    "forgets_nothing": {
        "dtype": "float32", "B": 1, "T": 100, "V": 1, "decay": "zero", "initial_state": False, "final_state": True,
    },
    "float32_decay_beside_float16": {
        "dtype": "float16", "B": 1, "T": 70, "V": 20, "decay": "mixed", "log_decay_dtype": "float32", **STATES,
    },
    "packed_with_empty_sequences": {
        "dtype": "float32", "B": 1, "T": 130, "V": 20, "decay": "mixed", "lengths": (0, 50, 0, 0, 79, 1, 0), **STATES,
    },
    "packed_one_sequence": {"dtype": "float16", "B": 1, "T": 40, "V": 20, "lengths": (40,), **NO_STATES},
    "packed_many_short": {
        "dtype": "float16", "B": 1, "T": 70, "V": 16, "decay": "weak", "lengths": (1,) * 30 + (2,) * 20,
        "initial_state": True, "final_state": False,
    },
    "packed_final_state_alone": {
        "dtype": "float32", "B": 1, "T": 66, "V": 20, "lengths": (0, 64, 2), "initial_state": False, "final_state": True,
    },
    "bfloat16": {"dtype": "bfloat16", "B": 3, "T": 65, "V": 20, **STATES},
    "bfloat16_float32_decay": {
        "dtype": "bfloat16", "B": 1, "T": 300, "V": 80, "decay": "mixed", "log_decay_dtype": "float32", **STATES,
    },
    "bfloat16_packed": {"dtype": "bfloat16", "B": 1, "T": 130, "V": 20, "lengths": (0, 0, 64, 65, 1), **STATES},
    "over_256_steps": {"dtype": "float32", "B": 1, "T": 300, "V": 20, "decay": "mixed", **STATES},
    "no_gate": {"dtype": "float16", "B": 2, "T": 70, "V": 20, "gate": False, "log_decay_dtype": "float32", **STATES},
    "no_gate_float32": {"dtype": "float32", "B": 1, "T": 65, "V": 24, "gate": False, "decay": "mixed", **STATES},
    "no_gate_packed": {
        "dtype": "float32", "B": 1, "T": 130, "V": 20, "gate": False, "decay": "mixed", "lengths": (0, 50, 0, 79, 1), **STATES,
    },
    "no_gate_bfloat16": {"dtype": "bfloat16", "B": 2, "T": 64, "V": 32, "gate": False, **NO_STATES},
    "no_steps": {"dtype": "float32", "B": 2, "T": 0, "V": 20, **STATES},
    "no_sequences": {"dtype": "float16", "B": 0, "T": 7, "V": 20, **STATES},
}  # fmt: skip
"""Cases by name. A tile has at most 64 steps here, and 256 in ``linear_rnn``, which takes them too."""


@gated_scan.probes
def probes() -> Iterator[Case | Probe]:
    """Yield the cases, and calls with transposed inputs, with steps of mixed magnitude, and with a tensor on another device."""
    yield from named(gated_scan.case, CASES)
    small: dict[str, Any] = {"B": 2, "T": 70, "V": 20}
    yield Probe(gated_scan.case("float32", name="transposed", **small), transposed("v", "log_decay", "gate", "initial_state"))
    yield Probe(gated_scan.case("float16", name="mixed_magnitudes", **small), mixed_magnitudes("v", 1e-2, 1e2))
    yield Probe(gated_scan.case("float32", name="gate_elsewhere", **small), elsewhere("gate"), refused=True)
