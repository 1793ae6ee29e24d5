"""Cost model of ``output_chain``: FLOPs and bytes, at least and per variant.

The workbench plans studies with it and computes roofline bounds from it, and ``gla_layer`` adds it to its own cost.
"""

from __future__ import annotations

from onelaunch.operation import Case, Cost, Direction, Variant, launch_count
from onelaunch.ops.output_chain.contract import output_chain
from onelaunch.ops.output_chain.reference import options_of

_PRODUCTS = {"forward": 1, "forward_backward": 3}
"""Number of matrix products of equal size: a W^T; with the backward pass also dout W and dout^T a."""


@output_chain.costs
def cost(case: Case, variant: Variant | None, direction: Direction) -> Cost:
    """Return the least cost of a case, or with ``variant`` the cost of that variant.

    At least, forward reads all tensors and writes the result; backward reads all tensors and dout and writes the gradients. A
    variant writes and reads the intermediates between its launches (tag ``hands``): ``norm``, the normalized heads; ``silu``,
    the activated gate; ``a``, their product, which without a gate is the normalized heads. Its backward pass writes and reads
    da, and reads what products and gradients need. A variant that saves rstd (tag ``keeps``) reads ``a``, and writes it before
    unless it saves it too. Another reads all intermediates, and writes and reads the gradients of those before ``a``.
    """
    gate, norm_weight, bias = options_of(case)
    batch, length, heads, values, columns = (case.sizes[name] for name in output_chain.dimensions)
    rows, inner, value = batch * length, heads * values, case.dtype.itemsize
    passed, result = rows * inner * value, rows * columns * value
    operands = passed * (1 if gate == "none" else 2) + (columns * inner + (columns if bias else 0)) * value
    operands += {"none": 0, "same": value, "float32": 4}[norm_weight] * values
    moved = operands + result
    steps = () if variant is None else variant.tags.get("hands", ())
    absent = {"silu": (), "activated": ("silu",), "none": ("silu", "norm") if "a" in steps else ()}[gate]
    hands = [step for step in steps if step not in absent]
    moved += 2 * passed * len(hands)
    written = result + passed * len(hands)
    if direction == "forward_backward":
        moved += 2 * operands + result
        written += operands
        if variant is not None:
            moved += 2 * passed  # da
            written += passed
            keeps = variant.tags.get("keeps", ())
            if "rstd" in keeps:
                recomputed = 0 if "a" in keeps else passed
                moved += passed + recomputed + 2 * 4 * rows * heads
                written += recomputed + 4 * rows * heads
            else:
                moved += passed * len(hands) + 2 * passed * (len(hands) - 1)
                written += passed * (len(hands) - 1)
    flops = _PRODUCTS[direction] * 2 * rows * inner * columns
    return Cost(flops, moved, launch_count(variant, direction), written=written)
