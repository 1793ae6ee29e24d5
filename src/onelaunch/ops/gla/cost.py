"""FLOPs and bytes of ``gla``: the least that any implementation needs, and those of each variant."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onelaunch.operation import Case, Cost, Direction, Variant, launch_count
from onelaunch.ops.gla.contract import gla

INTERMEDIATES = ("cumulated", "states", "rounded_states", "scores", "partial_outputs")
"""Intermediates that launches may pass to each other through memory, each written and read once.

A variant's tag ``hands`` lists those of its forward pass, ``backward_hands`` those of its backward pass (by default the same).
Its tag ``chunk`` is the number of steps per chunk. Intermediates are float32 unless stated otherwise here.

- ``cumulated``: the log-decays summed within chunks, as large as ``g``;
- ``states``: a ``[K, V]`` state for every chunk;
- ``rounded_states``: the same in the inputs' dtype;
- ``scores``: a ``[chunk, chunk]`` matrix for every chunk;
- ``partial_outputs``: an ``o`` before the last addition (in the backward pass gradients of q or k, counted at the size of o).
"""


@gla.costs
def cost(case: Case, variant: Variant | None, direction: Direction) -> Cost:
    """Return the least cost: q, k, v, g in and o out; backward q, k, v, g, do in and four gradients out.

    That is 5 tensor passes forward, and 14 with the backward pass, which reads the inputs again. With a decay per head ``g`` is a
    K-th of a tensor; ``gv`` counts with g. Initial and final states, and their gradients, count if the call has them. A variant
    adds the intermediates between its launches, see :data:`INTERMEDIATES`.
    """
    tags: Mapping[str, Any] = {} if variant is None else variant.tags
    chunk = max(1, min(tags.get("chunk", 1), case.sizes["T"]))
    rows = case.sizes["B"] * case.sizes["T"] * case.sizes["H"]
    intermediates: tuple[str, ...] = tags.get("hands", ())
    if direction == "forward_backward":
        intermediates += tags.get("backward_hands", intermediates)
    intermediate_bytes = sum(_intermediate_bytes(what, case, rows, chunk) for what in intermediates)
    per_row, per_row_written = _bytes_per_row(case, direction)
    ends, ends_written = _end_bytes(case, direction)
    flops = rows * _flops_per_row(case.sizes["K"], case.sizes["V"], 0 if variant is None else chunk, direction)
    return Cost(
        flops,
        rows * per_row + ends + 2 * intermediate_bytes,
        launch_count(variant, direction),
        written=rows * per_row_written + ends_written + intermediate_bytes,
    )


def _bytes_per_row(case: Case, direction: Direction) -> tuple[int, int]:
    """Return the bytes of one step of one head, and those of them that are written."""
    keys, values, item = case.sizes["K"], case.sizes["V"], case.dtype.itemsize
    gate_item = 4 if gla.option(case, "log_decay_dtype") == "float32" else item
    gates = keys if gla.option(case, "decay_per") == "channel" else 1
    gates += values if gla.option(case, "value_gate") else 0
    forward = (2 * keys + 2 * values) * item + gates * gate_item
    if direction == "forward":
        return forward, values * item
    gradients = (2 * keys + values) * item + gates * gate_item
    return 2 * forward + gradients, values * item + gradients  # do is as large as o; then the gradients


def _end_bytes(case: Case, direction: Direction) -> tuple[int, int]:
    """Return the bytes of initial and final states, and those of them that are written.

    With their gradients the initial state moves three times, the final one twice; each is written once.
    """
    lengths = gla.option(case, "lengths")
    sequences = case.sizes["B"] if lengths is None else len(lengths)
    initial, final = bool(gla.option(case, "initial_state")), bool(gla.option(case, "final_state"))
    moves = initial + final if direction == "forward" else 3 * initial + 2 * final
    written = final if direction == "forward" else initial + final
    state = 4 * sequences * case.sizes["H"] * case.sizes["K"] * case.sizes["V"]
    return moves * state, written * state


def _intermediate_bytes(what: str, case: Case, rows: int, chunk: int) -> int:
    """Return the bytes of one intermediate of :data:`INTERMEDIATES`."""
    keys, values = case.sizes["K"], case.sizes["V"]
    state = -(-keys * values // chunk)
    per_row = {
        "cumulated": 4 * (keys if gla.option(case, "decay_per") == "channel" else 1),
        "states": 4 * state,
        "rounded_states": case.dtype.itemsize * state,
        "scores": 4 * chunk,
        "partial_outputs": 4 * values,
    }
    return rows * per_row[what]


def _flops_per_row(keys: int, values: int, chunk: int, direction: Direction) -> int:
    """Return the FLOPs of the matrix products for one step of one head.

    Forward: ``k^T v`` into the state, ``q S``, then scores and their product with v; within a chunk they are causal, so half
    counts. Backward: ``q^T do`` into the gradient of the state, products with both states for dq, dk and dv, four products
    within the chunk, and the states and scores once more. ``chunk`` is 0 for the least cost: one step at a time, nothing
    computed twice.
    """
    flops = 4 * keys * values + chunk * (keys + values)
    if direction == "forward_backward":
        again = 2 * keys * values + chunk * keys if chunk else 0
        flops += 8 * keys * values + chunk * (2 * keys + 2 * values) + again
    return flops
