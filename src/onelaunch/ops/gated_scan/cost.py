"""Cost model of ``gated_scan``: bytes moved. Its FLOPs are 0, since only those of matrix products count.

The workbench plans studies with it and computes roofline bounds from it. ``linear_rnn`` adds its product to :func:`scan_bytes`,
and counts its launches by :func:`scan_launches`.
"""

from __future__ import annotations

from typing import Any

from onelaunch.operation import Case, Cost, Direction, Variant, launch_count
from onelaunch.operation.inputs import packed_lengths
from onelaunch.ops.gated_scan.contract import gated_scan


@gated_scan.costs
def cost(case: Case, variant: Variant | None, direction: Direction) -> Cost:
    """Return the least cost of a case, or with ``variant`` the cost of that variant; see :func:`scan_bytes`.

    Forward reads v, log_decay and gate, and writes y. Backward reads these and dy, not y, and writes three gradients. A case
    without a gate has none of the gate's bytes. A variant fuses scan and gate if its tag ``fuses`` names ``gate``.
    """
    fused = variant is None or not gated_scan.option(case, "gate") or "gate" in variant.tags.get("fuses", ())
    values = 1 if direction == "forward" else 3  # forward reads v; backward also reads v and writes dv
    elements = case.sizes["B"] * case.sizes["T"] * case.sizes["V"]
    gradient = elements * case.dtype.itemsize if direction == "forward_backward" else 0  # dv
    moved, written = scan_bytes(case, gated_scan.options, direction, fused)
    return Cost(
        flops=0,
        bytes=values * elements * case.dtype.itemsize + moved,
        launches=scan_launches(case, gated_scan.options, variant, direction),
        written=gradient + written,
    )


def scan_bytes(case: Case, defaults: dict[str, Any], direction: Direction, fused: bool) -> tuple[int, int]:
    """Return the bytes that scan and gate move, without v and its gradient, and the number of them that are written.

    They are those of log_decay, gate, y and their gradients, and of the initial and final states, whose gradients are neglected.
    If scan and gate are separate launches (``fused`` is false), the states s of all steps are also written and read in the
    case's dtype, and backward reads them again; their gradient is written and read in float32. ``linear_rnn`` counts its scan by
    this function, with its own options as ``defaults``.
    """
    options = {**defaults, **case.options}
    value = case.dtype.itemsize
    gate = value if options["gate"] else 0
    decay = 4 if options["log_decay_dtype"] == "float32" else value
    per_element = gate + value + decay  # gate, y, log_decay
    written = value  # y
    if not fused:
        per_element += 2 * value  # states out, in
        written += value
    if direction == "forward_backward":
        per_element += 2 * gate + value + 2 * decay  # gate, dgate; dy; log_decay and its gradient
        written += gate + decay
        if not fused:
            per_element += value + 2 * 4  # states in, their gradient out and in
            written += 4
    sequences = case.sizes["B"] if options["lengths"] is None else len(packed_lengths(case, options["lengths"]))
    state, elements = 4 * sequences * case.sizes["V"], case.sizes["B"] * case.sizes["T"] * case.sizes["V"]
    initial, final = bool(options["initial_state"]), bool(options["final_state"])
    return elements * per_element + state * (initial + final), elements * written + state * final


def scan_launches(case: Case, defaults: dict[str, Any], variant: Variant | None, direction: Direction) -> int | None:
    """Return the number of launches of a variant, or the least one; without a gate, a variant has no launch for the gate.

    A variant that launches scan and gate apart, in each pass, has ``gate`` among its tags' ``separates``.
    """
    count = launch_count(variant, direction)
    gated = {**defaults, **case.options}["gate"]
    if count is None or gated or variant is None or "gate" not in variant.tags.get("separates", ()):
        return count
    return count - (1 if direction == "forward" else 2)
