"""What ``projections`` must compute and move, per variant."""

from __future__ import annotations

from onelaunch.operation import Case, Cost, Direction, Variant, launch_count
from onelaunch.ops.projections.contract import projections
from onelaunch.ops.projections.layout import layout_of
from onelaunch.ops.projections.reference import segments_of

PRODUCTS = {"forward": 1, "forward_backward": 3}
"""Matrix products of equal size: x W^T; backward also dz W and dz^T x."""


@projections.costs
def cost(case: Case, variant: Variant | None, direction: Direction) -> Cost:
    """The least: x, the weight and the bias in, all results out; backward x, the weight and all dy in, their gradients out.

    A variant adds x again for every further product, where segments have their own (no ``products`` in tag ``fuses``), and
    products that activations are not applied to in registers, out and in (tag ``hands``): ``all``, or those ``activated``. Its
    backward pass adds what is kept and read again: rstd, z of SiLU, and results of the other activations; and dz, out, and in for
    each product. Where segments have their own products, dx is a sum of as many, and x is read for each.
    """
    layout = layout_of(segments_of(case))
    rows, inner, value = case.sizes["B"] * case.sizes["T"], case.sizes["D"], case.dtype.itemsize
    x, result = rows * inner * value, rows * layout.rows * value
    operands = x + (layout.rows * inner + layout.biases) * value
    by_kind: dict[str, int] = {}
    for place in layout.places:
        by_kind[place.segment.activation] = by_kind.get(place.segment.activation, 0) + rows * place.segment.width * value
    activated = result - by_kind.get("none", 0)
    apart = 0 if variant is None or "products" in variant.tags.get("fuses", ()) else len(layout.places) - 1
    moved, written = operands + result, result
    if variant is not None:
        through_memory = {"all": result, "activated": activated}
        handed = sum(through_memory[each] for each in variant.tags.get("hands", ()))
        moved += apart * x + 2 * handed
        written += handed
    if direction == "forward_backward":
        moved += 2 * operands + result
        written += operands
        if variant is not None:
            kept = by_kind.get("silu", 0)
            moved += 2 * (kept + 4 * rows * layout.norms) + activated - kept + 3 * result + 4 * apart * x
            written += kept + 4 * rows * layout.norms + result + apart * x  # each further product adds its part to dx
    flops = PRODUCTS[direction] * 2 * rows * inner * layout.rows
    return Cost(flops, moved, launch_count(variant, direction), written=written)
