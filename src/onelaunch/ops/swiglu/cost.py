"""Minimum FLOPs, memory traffic and launches of ``swiglu``, per variant.

The workbench plans studies with it and computes roofline bounds from it.
"""

from __future__ import annotations

from onelaunch.formats import BLOCK
from onelaunch.operation import Case, Cost, Direction, Variant, launch_count
from onelaunch.ops.swiglu.contract import swiglu
from onelaunch.ops.swiglu.reference import format_of

_UNITS = {"fp8": "float8_e4m3fn", "nvfp4": "float4_e2m1fn_x2"}
"""Dtype by format whose tensor-core peak bounds a quantized product; other formats use the case's dtype."""

_PRODUCTS = {"forward": 1, "forward_backward": 3}
"""Number of pairs of equally large matrix products by direction: x W^T; backward also d W and d^T x."""


def _matrix_bytes(kind: str, rows: int, inner: int, itemsize: int, per_row: bool) -> int:
    """Return the bytes of a matrix ``[rows, inner]`` in memory, scales included."""
    if kind == "fp8":
        return rows * inner + 4 * (rows if per_row else 1)
    if kind == "nvfp4":
        return rows * inner // 2 + rows * inner // BLOCK + 4
    return rows * inner * itemsize


@swiglu.costs
def cost(case: Case, variant: Variant | None, direction: Direction) -> Cost:
    """Return the minimum cost of a case, or the cost of a variant.

    The minimum traffic reads x and both weights and writes h; the backward pass reads x, the weights and dh and writes three
    gradients. A variant reads x again if its two products are separate launches (no ``products`` in tag ``fuses``). It also
    writes and reads intermediates in HBM: the products to which the gate is not applied in registers (tag ``hands``), and for its
    backward pass both products and their gradients, which two matrix products read. Operands that plain PyTorch dequantizes are
    not counted.
    """
    rows, columns, inner = (case.sizes[name] for name in swiglu.dimensions)
    value, form = case.dtype.itemsize, format_of(case)
    x_kind = form if form in ("fp8", "nvfp4") else "dense"
    w_kind = "nvfp4" if "nvfp4" in form else x_kind
    per_row = swiglu.option(case, "row_scales")
    x = _matrix_bytes(x_kind, rows, inner, value, per_row)
    operands = x + 2 * _matrix_bytes(w_kind, columns, inner, value, per_row)
    result = rows * columns * value
    moved = operands + result
    if variant is not None and "products" not in variant.tags.get("fuses", ()):
        moved += x
    handed = () if variant is None else variant.tags.get("hands", ())
    moved += 2 * len(handed) * result  # written and read
    written = result + len(handed) * result  # the part of ``moved`` that is written
    if direction == "forward_backward":
        moved += 2 * operands + result  # read x and weights again, write their gradients, read dh
        written += operands
        if variant is not None:
            moved += (2 - len(handed)) * result  # products that only a backward pass needs
            moved += 2 * result + 2 * result + 2 * 2 * result  # read them; write their gradients, read those twice
            written += (2 - len(handed)) * result + 2 * result
    flops = _PRODUCTS[direction] * 4 * rows * columns * inner
    return Cost(flops, moved, launch_count(variant, direction), _UNITS.get(form), written)
