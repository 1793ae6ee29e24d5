"""Cost model of ``projections``: FLOPs and bytes, at least and per variant.

The workbench plans studies with it and computes roofline bounds from it, and ``gla_layer`` adds it to its own cost.
"""

from __future__ import annotations

import torch

from onelaunch.operation import Case, Cost, Direction, Variant, launch_count
from onelaunch.ops.projections.configure_low_rank import low_rank_tiles, takes_low_rank
from onelaunch.ops.projections.contract import projections
from onelaunch.ops.projections.layout import Layout, layout_of
from onelaunch.ops.projections.reference import segments_of

_LAUNCHES_SAVED = 1
"""Launches of a backward pass that are saved where one launch computes all gradients from dz: there are two products else."""

_PRODUCTS = {"forward": 1, "forward_backward": 3}
"""Number of matrix products of equal size: x W^T; with the backward pass also dz W and dz^T x."""


@projections.costs
def cost(case: Case, variant: Variant | None, direction: Direction) -> Cost:
    """Return the least cost of a case, or with ``variant`` the cost of that variant.

    At least, forward reads x, the weight and the bias and writes all results. Backward reads these three again and the gradients
    dy of all results, and writes the gradients of x, the weight and the bias.

    A variant reads x again for every further product, if segments have products of their own (no ``products`` in tag ``fuses``).
    It writes and reads the products that activations are not applied to in registers (tag ``hands``): ``all`` of them, or only
    those ``activated``. Its backward pass adds what is saved and read again (``rstd``, 1 / norm of normalized heads; z, the
    pre-activations, of SiLU; and results of the other activations), and dz, written once and read by each product. If segments
    have products of their own, dx is a sum of as many products: each further one reads x again, writes its term, and adds it to
    the sum (two reads and one write). That is five times the bytes of x, of which two are written.

    If x has few columns, the kernels of ours read dz once for all gradients, in one launch, and write and read float32 terms of
    them (``configure_low_rank.py``).
    """
    layout = layout_of(segments_of(case))
    rows, inner, value = case.sizes["B"] * case.sizes["T"], case.sizes["D"], case.dtype.itemsize
    x, result = rows * inner * value, rows * layout.rows * value
    operands = x + (layout.rows * inner + layout.biases) * value
    by_kind: dict[str, int] = {}
    for span in layout.spans:
        by_kind[span.segment.activation] = by_kind.get(span.segment.activation, 0) + rows * span.segment.width * value
    activated = result - by_kind.get("none", 0)
    apart = 0 if variant is None or "products" in variant.tags.get("fuses", ()) else len(layout.spans) - 1
    moved, written = operands + result, result  # bytes to and from memory, and the part of them that is written
    if variant is not None:
        through_memory = {"all": result, "activated": activated}
        passed = sum(through_memory[each] for each in variant.tags.get("hands", ()))
        moved += apart * x + 2 * passed
        written += passed
    if direction == "forward_backward":
        moved += 2 * operands + result
        written += operands
        if variant is not None:
            kept = by_kind.get("silu", 0)
            moved += 2 * (kept + 4 * rows * layout.norms) + activated - kept + 3 * result + 5 * apart * x
            written += kept + 4 * rows * layout.norms + result + 2 * apart * x  # a term and the sum
    flops, launches = _PRODUCTS[direction] * 2 * rows * inner * layout.rows, launch_count(variant, direction)
    if variant is not None and direction == "forward_backward" and _is_low_rank(case, variant, layout):
        terms = 4 * low_rank_tiles(rows, layout.rows, inner, case.dtype).term_elements(rows, layout.rows, bias=layout.biases > 0)
        moved, written = moved - result + 2 * terms, written + terms
        launches = None if launches is None else launches - _LAUNCHES_SAVED
    return Cost(flops, moved, launches, written=written)


def _is_low_rank(case: Case, variant: Variant, layout: Layout) -> bool:
    """Return whether one launch computes all gradients from dz: of our kernels' variants, which declare their launches."""
    ours = variant.is_own and variant.launches is not None
    return ours and takes_low_rank(torch.device("cuda"), case.dtype, case.sizes["D"], layout.rows)
