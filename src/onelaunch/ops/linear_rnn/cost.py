"""What ``linear_rnn`` must compute and move, per variant."""

from __future__ import annotations

from onelaunch.operation import Case, Cost, Direction, Variant, launch_count
from onelaunch.ops.gated_scan.cost import scan_bytes
from onelaunch.ops.linear_rnn.contract import linear_rnn

GEMMS = {"forward": 1, "forward_backward": 3}
"""Matrix products of equal size: x W; backward also dv W^T and x^T dv."""


@linear_rnn.costs
def cost(case: Case, variant: Variant | None, direction: Direction) -> Cost:
    """The least: x, weight, log_decay, gate in, y out, and backward x, weight, log_decay, gate, dy in, four gradients out.

    A variant adds what its launches hand to each other through memory: ``v`` unless the projection is fused, the states unless
    scan and gate are fused, and in the backward pass ``v`` and its gradient ``dv`` for the matrix products.
    """
    batch, length, width, channels = (case.sizes[name] for name in linear_rnn.dimensions)
    rows, value = batch * length, case.dtype.itemsize
    fuses = ("projection", "scan", "gate") if variant is None else variant.tags.get("fuses", ())
    operands = rows * width + width * channels
    gradients = 0
    handed = 0 if "projection" in fuses else 2  # v out and in
    put = handed // 2  # of them, those that are written
    if direction == "forward_backward":
        gradients = operands
        operands *= 3  # x and weight in again, their gradients out
        if variant is not None:
            handed += 1 + ("projection" in fuses)  # v in, which a fused forward must also write
            handed += 3  # dv out, and in for each product
            put += ("projection" in fuses) + 1
    scanned, scan_written = scan_bytes(case, linear_rnn.options, direction, "gate" in fuses)
    moved = value * (operands + handed * rows * channels) + scanned
    written = value * (gradients + put * rows * channels) + scan_written
    flops = GEMMS[direction] * 2 * rows * width * channels
    return Cost(flops, moved, launch_count(variant, direction), written=written)
