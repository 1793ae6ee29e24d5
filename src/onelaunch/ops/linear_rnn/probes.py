"""Edge cases of ``linear_rnn``, on which studies and tests judge its variants.

They are those of ``gated_scan`` with D columns of x, two more about D, and two of steps of decoding.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from onelaunch.operation import Case, Probe
from onelaunch.operation.probe import elsewhere, mixed_magnitudes, named, transposed
from onelaunch.ops.gated_scan import probes as scan
from onelaunch.ops.linear_rnn.contract import linear_rnn

COLUMNS = {
    "one_step_one_channel": 1,
    "exactly_a_tile": 200,
    "forgets_everything": 200,
    "forgets_nothing": 1,
    "bfloat16_float32_decay": 200,
}
"""Number of columns D of x by the name of a case; 24 for the others."""

CASES: dict[str, dict[str, Any]] = {
    **{name: {**case, "D": COLUMNS.get(name, 24)} for name, case in scan.CASES.items()},
    "no_columns": {"dtype": "float32", "B": 2, "T": 9, "D": 0, "V": 6, **scan.STATES},
    "odd_columns": {"dtype": "bfloat16", "B": 1, "T": 33, "D": 101, "V": 19, **scan.STATES},
    "a_step_of_16_sequences": {"dtype": "bfloat16", "B": 16, "T": 1, "D": 200, "V": 80, **scan.STATES},
    # fused_few_rows divides the product of 32 rows and 2048 columns into two parts.
    "a_step_of_32_sequences": {"dtype": "float16", "B": 32, "T": 1, "D": 2048, "V": 40, **scan.STATES},
}
"""Cases by name, as arguments of ``linear_rnn.case``."""


@linear_rnn.probes
def probes() -> Iterator[Case | Probe]:
    """Yield the cases, and calls with transposed inputs, with rows of mixed magnitude, and with a tensor on another device."""
    yield from named(linear_rnn.case, CASES)
    small: dict[str, Any] = {"B": 2, "T": 70, "D": 24, "V": 20}
    yield Probe(linear_rnn.case("float32", name="transposed", **small), transposed("x", "weight", "log_decay", "gate"))
    yield Probe(linear_rnn.case("float16", name="mixed_magnitudes", **small), mixed_magnitudes("x", 1e-2, 1e2))
    yield Probe(linear_rnn.case("float32", name="weight_elsewhere", **small), elsewhere("weight"), refused=True)
