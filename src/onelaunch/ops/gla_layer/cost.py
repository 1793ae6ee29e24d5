"""Cost model of ``gla_layer``: FLOPs and bytes, at least, and per variant as the sum of its parts.

The workbench plans studies with it and computes roofline bounds from it.
"""

from __future__ import annotations

import math
from dataclasses import replace

from onelaunch.dispatch import AUTO
from onelaunch.launch.recomputed import LEAST_BYTES
from onelaunch.operation import Case, Cost, Direction, Variant, launch_count
from onelaunch.ops.gla import gla
from onelaunch.ops.gla_layer.contract import gla_layer
from onelaunch.ops.gla_layer.reference import dtypes_of, options_of, shapes_of
from onelaunch.ops.output_chain import output_chain
from onelaunch.ops.projections import projections


def parts_of(case: Case) -> tuple[tuple[Case, int], ...]:
    """Return the cases of the operations that make up a layer, each with the place of its variant in the tag ``parts``.

    They are both projections, or one with one decay per head, then ``gla`` and ``output_chain``.
    """
    rank, norm_weight, _ = options_of(case)
    batch, length, width, heads, keys, values = (case.sizes[name] for name in gla_layer.dimensions)
    sizes = {"B": batch, "T": length, "H": heads, "K": keys, "V": values}
    ends = {name: gla_layer.option(case, name) for name in ("initial_state", "final_state")}
    # The option ``segments`` of ``projections``: heads x channels, then an activation and the word bias if there are any.
    packed = f"{heads}x{keys},{heads}x{keys},{heads}x{values},{heads}x{values}"
    activation = f"logsigmoid/{gla_layer.option(case, 'normalizer')}:bias"
    if rank is None:
        ways_in = [projections.case(case.dtype, **sizes, D=width, segments=f"{packed},{heads}x1:{activation}")]
    else:
        ways_in = [
            projections.case(case.dtype, **sizes, D=width, segments=f"{packed},{rank}x1"),
            projections.case(case.dtype, **sizes, D=rank, segments=f"{heads}x{keys}:{activation}"),
        ]
    return (
        *((each, 0) for each in ways_in),
        (gla.case(case.dtype, **sizes, **ends, decay_per="channel" if rank is not None else "head"), 1),
        (output_chain.case(case.dtype, B=batch, T=length, H=heads, V=values, D=width, norm_weight=norm_weight), 2),
    )


@gla_layer.costs
def cost(case: Case, variant: Variant | None, direction: Direction) -> Cost:
    """Return the least cost of a case, or with ``variant`` the cost of that variant.

    At least, forward reads all tensors and writes the results; backward reads all tensors and the results' gradients and writes
    the tensors' gradients. A variant moves what its parts move (tag ``parts``): all intermediates between them go through
    memory. A variant without that tag is one launch, and moves in addition what its CTAs pass to each other. For a part whose
    variant the dispatcher chooses, the least cost of that part is counted. Short convolutions read q, k and v and write them;
    their FLOPs are not those of a matrix product. ``packed`` and ``packed_states`` read the low-rank factor and write the
    log-decays once more in the backward pass, unless these are small; the FLOPs of that product, a thousandth, are left out.
    """
    named = (AUTO,) * 3 if variant is None else variant.tags.get("parts", (AUTO,) * 3)
    costs = []
    for each, place in parts_of(case):
        part, name = (projections, gla, output_chain)[place], named[place]
        costs.append(part.cost(each, None if name == AUTO else part.get(name), direction))
    total = sum(costs[1:], costs[0])
    if variant is not None and "parts" in variant.tags:
        written = _filtered_bytes(case) * (1 if direction == "forward" else 2)  # results, and gradients of what was filtered
        moved = total.bytes + _filtered_bytes(case) * (2 if direction == "forward" else 5)
        read, again = _decays_again(case, variant, direction)
        more = None if total.written is None else total.written + written + again
        return replace(total, bytes=moved + read + again, written=more, launches=launch_count(variant, direction))
    shapes, dtypes = shapes_of(case), dtypes_of(case)
    operands = sum(math.prod(extent) * dtypes.get(name, case.dtype).itemsize for name, extent in shapes.items())
    results = math.prod(shapes["x"]) * case.dtype.itemsize
    if gla_layer.option(case, "final_state"):
        results += 4 * case.sizes["B"] * case.sizes["H"] * case.sizes["K"] * case.sizes["V"]
    forward = direction == "forward"
    moved = operands + results if forward else 3 * operands + 2 * results
    written = results if forward else results + operands
    passed = 0 if variant is None else _passed_bytes(case)
    return Cost(total.flops, moved + 2 * passed, launch_count(variant, direction), written=written + passed)


def _filtered_bytes(case: Case) -> int:
    """Return the bytes of q, k and v together if they go through short convolutions, else 0."""
    batch, length, _, heads, keys, values = (case.sizes[name] for name in gla_layer.dimensions)
    return batch * length * heads * (2 * keys + values) * case.dtype.itemsize if options_of(case).conv_size else 0


def _decays_again(case: Case, variant: Variant, direction: Direction) -> tuple[int, int]:
    """Return the bytes that a variant reads and writes to compute the log-decays again for its backward pass."""
    batch, length, _, heads, keys, _ = (case.sizes[name] for name in gla_layer.dimensions)
    rows, value, rank = batch * length, case.dtype.itemsize, options_of(case).rank
    decays = rows * heads * keys * value
    if direction == "forward" or rank is None or "gradients" not in variant.tags["fuses"] or decays < LEAST_BYTES:
        return 0, 0
    return rows * rank * value, decays


def _passed_bytes(case: Case) -> int:
    """Return the bytes that CTAs of a layer in one launch pass to each other: q, k and the decays' factor in float32, then o.

    o is in the dtype of the case, with a float32 sum of squares per head.
    """
    batch, length, _, heads, keys, values = (case.sizes[name] for name in gla_layer.dimensions)
    return batch * length * heads * (4 * (2 * keys + (options_of(case).rank or 0) + 1) + values * case.dtype.itemsize)
