"""What ``gated_scan`` must move: it has no matrix product, bytes are all."""

from __future__ import annotations

from typing import Any

from onelaunch.operation import Case, Cost, Direction, Variant, launch_count
from onelaunch.ops.gated_scan.contract import gated_scan


@gated_scan.costs
def cost(case: Case, variant: Variant | None, direction: Direction) -> Cost:
    """Forward: v, log_decay, gate in, y out; backward: those and dy in, three gradients out. See :func:`scan_bytes`."""
    fused = variant is None or "gate" in variant.tags.get("fuses", ())
    values = 1 if direction == "forward" else 3  # v in; backward v in, dv out
    elements = case.sizes["B"] * case.sizes["T"] * case.sizes["V"]
    gradient = elements * case.dtype.itemsize if direction == "forward_backward" else 0  # dv
    moved, written = scan_bytes(case, gated_scan.options, direction, fused)
    return Cost(
        flops=0,
        bytes=values * elements * case.dtype.itemsize + moved,
        launches=launch_count(variant, direction),
        written=gradient + written,
    )


def scan_bytes(case: Case, defaults: dict[str, Any], direction: Direction, fused: bool) -> tuple[int, int]:
    """Return the bytes of the scan and gate beside v and its gradient, and those of them that are written.

    They are log_decay, gate, y, the end states, and their gradients.

    Where scan and gate are launches of their own, the states go to memory and back, and so does their gradient, in float32.
    """
    options = {**defaults, **case.options}
    value = case.dtype.itemsize
    decay = 4 if options["log_decay_dtype"] == "float32" else value
    per_element = 2 * value + decay  # gate, y, log_decay
    written = value  # y
    if not fused:
        per_element += 2 * value  # states out, in
        written += value
    if direction == "forward_backward":
        per_element += 3 * value + 2 * decay  # gate, dy, dgate; log_decay and its gradient
        written += value + decay
        if not fused:
            per_element += value + 2 * 4  # states in, their gradient out and in
            written += 4
    sequences = case.sizes["B"] if options["lengths"] is None else len(options["lengths"])
    state, elements = 4 * sequences * case.sizes["V"], case.sizes["B"] * case.sizes["T"] * case.sizes["V"]
    initial, final = bool(options["initial_state"]), bool(options["final_state"])
    return elements * per_element + state * (initial + final), elements * written + state * final
