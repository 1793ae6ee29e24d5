"""What ``linear_rnn`` must compute and move, per variant."""

from __future__ import annotations

from onelaunch.operation import Case, Cost, Direction, Variant
from onelaunch.ops.gated_scan.cost import launch_count, scan_bytes
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
    rows, size = batch * length, case.dtype.itemsize
    fuses = ("projection", "scan", "gate") if variant is None else variant.tags.get("fuses", ())
    values, decays = 2, 1  # gate, y; log_decay
    wide, weights = 1, 1  # passes over x and weight
    if "projection" not in fuses:
        values += 2  # v out and in
    if "gate" not in fuses:
        values += 2  # s out and in
    if direction == "forward_backward":
        values += 3  # gate, dy in, dgate out
        decays += 2
        wide, weights = wide + 2, weights + 2  # x in, dx out; weight in, dweight out
        if variant is not None:
            values += 4 if "projection" not in fuses else 5  # v in (and out, when fused), dv out, in and in
        if "gate" not in fuses:
            values += 3  # s in, ds out and in
    elements = rows * channels
    moved = size * (wide * rows * width + weights * width * channels)
    moved += scan_bytes(case, linear_rnn.options, (values, decays), elements)
    return Cost(GEMMS[direction] * 2 * rows * width * channels, moved, launch_count(variant, direction))
