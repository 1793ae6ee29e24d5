"""Cost model of ``rms_norm``: bytes, at least and per variant. It has no matrix products, so that bytes alone set a bound.

The workbench plans studies with it and computes roofline bounds from it.
"""

from __future__ import annotations

from dataclasses import replace

from onelaunch.operation import Case, Cost, Direction, Variant, launch_count
from onelaunch.ops.rms_norm.contract import rms_norm
from onelaunch.ops.rms_norm.reference import options_of


@rms_norm.costs
def cost(case: Case, variant: Variant | None, direction: Direction) -> Cost:
    """Return the least cost of a case, or with ``variant`` the cost of that variant.

    At least, forward reads all tensors and writes the results; backward reads the sum (x if there is no residual), the weight
    and the gradients of the results, and writes the gradients. Those of x and of the residual are equal, and are one tensor if
    both have the same dtype. A variant writes and reads the intermediates between its launches (tag ``hands``):
    ``normalized``, the rows before the weight; ``sum`` is a result, which it only reads again. A variant that saves rstd (tag
    ``keeps``) writes and reads it. Partial sums of the weight's gradient are left out: their number depends on the device.
    """
    residual, weight = options_of(case)
    rows, channels = (case.sizes[name] for name in rms_norm.dimensions)
    passed, wide = rows * channels * case.dtype.itemsize, rows * channels * 4
    added = {"none": 0, "same": passed, "float32": wide}[residual]
    weights = {"none": 0, "same": channels * case.dtype.itemsize, "float32": channels * 4}[weight]
    written = passed + added
    moved = passed + added + weights + written
    hands = () if variant is None else variant.tags.get("hands", ())
    again = added if "sum" in hands else 0
    between = passed if "normalized" in hands and weight != "none" else 0
    moved += again + 2 * between
    written += between
    launches = launch_count(variant, direction)
    if direction == "forward_backward":
        one_gradient = residual != "none" and added == passed
        gradients = passed + (0 if one_gradient else added) + weights
        moved += passed + added + (added or passed) + weights + gradients + 2 * between
        written += gradients + between
        if variant is not None and "rstd" in variant.tags.get("keeps", ()):
            moved += 2 * 4 * rows
            written += 4 * rows
        if launches is not None and weight == "none" and variant is not None:
            launches -= 1  # the one that adds up the partial sums of the weight's gradient
    return replace(Cost(0, moved, written=written), launches=launches)
