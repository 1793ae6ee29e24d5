"""Cost model of ``gla_layer``: FLOPs and bytes, at least, and per variant as the sum of its parts.

The workbench plans studies with it and computes roofline bounds from it.
"""

from __future__ import annotations

import math
from dataclasses import replace

from onelaunch.dispatch import AUTO
from onelaunch.operation import Case, Cost, Direction, Variant, launch_count
from onelaunch.ops.gla import gla
from onelaunch.ops.gla_layer.contract import gla_layer
from onelaunch.ops.gla_layer.reference import dtypes_of, options_of, shapes_of
from onelaunch.ops.output_chain import output_chain
from onelaunch.ops.projections import projections


def parts_of(case: Case) -> tuple[Case, Case, Case, Case]:
    """Return the cases of the operations that make up a layer: both projections, ``gla`` and ``output_chain``."""
    rank, norm_weight = options_of(case)
    batch, length, width, heads, keys, values = (case.sizes[name] for name in gla_layer.dimensions)
    sizes = {"B": batch, "T": length, "H": heads, "K": keys, "V": values}
    ends = {name: gla_layer.option(case, name) for name in ("initial_state", "final_state")}
    # The option ``segments`` of ``projections``: heads x channels, then an activation and the word bias if there are any.
    packed = f"{heads}x{keys},{heads}x{keys},{heads}x{values},{heads}x{values},{rank}x1"
    decay = f"{heads}x{keys}:logsigmoid/{gla_layer.option(case, 'normalizer')}:bias"
    return (
        projections.case(case.dtype, **sizes, D=width, segments=packed),
        projections.case(case.dtype, **sizes, D=rank, segments=decay),
        gla.case(case.dtype, **sizes, **ends),
        output_chain.case(case.dtype, B=batch, T=length, H=heads, V=values, D=width, norm_weight=norm_weight),
    )


@gla_layer.costs
def cost(case: Case, variant: Variant | None, direction: Direction) -> Cost:
    """Return the least cost of a case, or with ``variant`` the cost of that variant.

    At least, forward reads all tensors and writes the results; backward reads all tensors and the results' gradients and writes
    the tensors' gradients. A variant moves what its parts move (tag ``parts``): all intermediates between them go through
    memory. For a part whose variant the dispatcher chooses, the least cost of that part is counted.
    """
    named = (AUTO,) * 3 if variant is None else variant.tags.get("parts", (AUTO,) * 3)
    ways = zip((projections, projections, gla, output_chain), parts_of(case), (named[0], *named), strict=True)
    costs = [part.cost(each, None if name == AUTO else part.get(name), direction) for part, each, name in ways]
    total = sum(costs[1:], costs[0])
    if variant is not None:
        return replace(total, launches=launch_count(variant, direction))
    shapes, dtypes = shapes_of(case), dtypes_of(case)
    operands = sum(math.prod(extent) * dtypes.get(name, case.dtype).itemsize for name, extent in shapes.items())
    results = math.prod(shapes["x"]) * case.dtype.itemsize
    if gla_layer.option(case, "final_state"):
        results += 4 * case.sizes["B"] * case.sizes["H"] * case.sizes["K"] * case.sizes["V"]
    forward = direction == "forward"
    moved = operands + results if forward else 3 * operands + 2 * results
    written = results if forward else results + operands
    return Cost(total.flops, moved, launch_count(None, direction), written=written)
