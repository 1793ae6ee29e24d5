"""Cost model of ``linear_rnn``: FLOPs and bytes, at least and per variant.

The workbench plans studies with it and computes roofline bounds from it.
"""

from __future__ import annotations

from onelaunch.device.architectures import HOPPER_SHARED_BYTES, HOPPER_SMS
from onelaunch.operation import Case, Cost, Direction, Variant
from onelaunch.ops.gated_scan.cost import scan_bytes, scan_launches
from onelaunch.ops.linear_rnn.configure_few_rows import MOST_ROWS, config_of
from onelaunch.ops.linear_rnn.contract import linear_rnn

_GEMMS = {"forward": 1, "forward_backward": 3}
"""Number of matrix products of equal size: x W; with the backward pass also dv W^T and x^T dv."""


@linear_rnn.costs
def cost(case: Case, variant: Variant | None, direction: Direction) -> Cost:
    """Return the least cost of a case, or with ``variant`` the cost of that variant.

    At least, forward reads x, weight, log_decay and gate and writes y; backward reads those and dy and writes four gradients. A
    variant adds the intermediates that its launches pass through memory (its tag ``fuses`` names the fused steps): ``v`` unless
    the projection is fused, the states unless scan and gate are fused, and in the backward pass ``v`` and its gradient ``dv`` for
    the matrix products. Partial sums of ``v`` are those of a GPU with as many SMs as an H200 (tag ``partial_sums``).
    """
    batch, length, width, channels = (case.sizes[name] for name in linear_rnn.dimensions)
    rows, value = batch * length, case.dtype.itemsize
    fuses = ("projection", "scan", "gate") if variant is None else variant.tags.get("fuses", ())
    operands = rows * width + width * channels
    gradients = 0
    intermediates = 0 if "projection" in fuses else 2  # v, written and read
    intermediates_written = intermediates // 2  # the written part of these
    if direction == "forward_backward":
        gradients = operands
        operands *= 3  # x and weight are read again, their gradients written
        if variant is not None:
            intermediates += 1 + ("projection" in fuses)  # v is read, and a fused forward must also write it
            intermediates += 3  # dv is written, and read by each product
            intermediates_written += ("projection" in fuses) + 1
    fused_gate = "gate" in fuses or not linear_rnn.option(case, "gate")
    scanned, scan_written = scan_bytes(case, linear_rnn.options, direction, fused_gate)
    moved = value * (operands + intermediates * rows * channels) + scanned
    written = value * (gradients + intermediates_written * rows * channels) + scan_written
    if variant is not None and "partial_sums" in variant.tags:
        terms = _partial_sum_bytes(rows, width, channels, value)
        moved, written = moved + 2 * terms, written + terms
    flops = _GEMMS[direction] * 2 * rows * width * channels
    return Cost(flops, moved, scan_launches(case, linear_rnn.options, variant, direction), written=written)


def _partial_sum_bytes(rows: int, width: int, channels: int, value: int) -> int:
    """Return the bytes of the partial sums that the kernel for few rows writes, and reads; 0 for calls that it cannot run.

    ``value`` is the bytes of an element of x and the weight.
    """
    if not 0 < rows <= MOST_ROWS or 0 in (width, channels):
        return 0
    return 4 * config_of(rows, width, channels, value, HOPPER_SMS, HOPPER_SHARED_BYTES).term_elements
