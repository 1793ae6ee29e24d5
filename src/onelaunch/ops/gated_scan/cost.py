"""What ``gated_scan`` must move: it has no matrix product, bytes are all."""

from __future__ import annotations

from typing import Any

from onelaunch.operation import Case, Cost, Direction, Variant
from onelaunch.ops.gated_scan.contract import gated_scan


@gated_scan.costs
def cost(case: Case, variant: Variant | None, direction: Direction) -> Cost:
    """Forward: v, log_decay and gate in, y out; backward: those and dy in, three gradients out.

    A variant that does not fuse scan and gate writes the states and reads them again, in both directions.
    """
    elements = case.sizes["B"] * case.sizes["T"] * case.sizes["V"]
    passes = scan_passes(variant, direction)
    launches = launch_count(variant, direction)
    return Cost(flops=0, bytes=scan_bytes(case, gated_scan.options, passes, elements), launches=launches)


def scan_passes(variant: Variant | None, direction: Direction) -> tuple[int, int]:
    """Tensor passes of the scan and gate: over tensors of the call's dtype, and over the log-decay and its gradient."""
    fused = variant is None or "gate" in variant.tags.get("fuses", ())
    values, decays = (3, 1) if fused else (5, 1)  # v, gate, y; unfused also s out and in
    if direction == "forward_backward":
        values += 5 if fused else 8  # v, gate, dy in, dv, dgate out; unfused also s in, ds out and in
        decays += 2
    return values, decays


def scan_bytes(case: Case, defaults: dict[str, Any], passes: tuple[int, int], elements: int) -> int:
    """Bytes of so many passes over tensors of ``elements``."""
    options = {**defaults, **case.options}
    decay_bytes = 4 if options["log_decay_dtype"] == "float32" else case.dtype.itemsize
    states = 4 * case.sizes["V"] * (case.sizes["B"] if options["lengths"] is None else len(options["lengths"]))
    ends = states * (bool(options["initial_state"]) + bool(options["final_state"]))
    return passes[0] * elements * case.dtype.itemsize + passes[1] * elements * decay_bytes + ends


def launch_count(variant: Variant | None, direction: Direction) -> int | None:
    """Launches that a variant declares: ``launches`` forward, plus ``backward_launches``."""
    if variant is None:
        return 1 if direction == "forward" else 2
    forward, backward = variant.tags.get("launches"), variant.tags.get("backward_launches")
    if direction == "forward":
        return forward
    return None if forward is None or backward is None else forward + backward
